"""What a feature plug-in is, and what all of them share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import numpy as np

from ..errors import DataError
from ..half import exact_half
from ..images import resize_long_side, to_grey
from ..models import Models
from ..types import Features, Frame, ModelIdentity


class FeatureExtractor(ABC):
    """Computes local features of one image.

    Args:
        max_keypoints: most keypoints kept, best score first.
        long_side: images are shrunk to this long side in pixels before the
            search (0: native size); keypoints come back in input pixels.
        options: an instance of the plug-in's nested ``Options``.
        models: opens learned models; classical plug-ins need none.

    Attributes:
        runtime: what computes it, for people.
        default_matcher: the matcher plug-in that suits these features.
        dense: descriptors are a map (C, h, w) of the image, at whatever place its keypoints lie.
        descriptor_length: D (or C) of the descriptors that a matcher gets, None where nobody knows before the first
            image.
    """

    runtime = "opencv"
    default_matcher = "nearest"
    descriptor_length: int | None = None
    dense = False

    @dataclass(frozen=True)
    class Options:
        """Parameters of the plug-in."""

    def __init__(self, max_keypoints: int, long_side: int, options, models: Models | None = None):
        self.max_keypoints = max_keypoints
        self.long_side = long_side
        self.options = options
        self.models = models

    @property
    @abstractmethod
    def identity(self) -> ModelIdentity:
        """What makes these descriptors comparable with others."""

    @abstractmethod
    def extract(self, frame: Frame) -> Features:
        """Features of the image, at most ``max_keypoints``, best score first."""

    def extract_again(self, frame: Frame, doubt: str) -> Features | None:
        """The same by other means, where ``extract`` found no keypoint and that is in doubt; None where there are none.

        ``doubt``: why, which ``Features.recovered`` then says.
        """
        return None


class OpenCvExtractor(FeatureExtractor):
    """Shared by OpenCV detectors: shrink, search, order, map back to input pixels."""

    def extract(self, frame: Frame) -> Features:
        """See :meth:`FeatureExtractor.extract`. N may be 0; raises nothing on blank images."""
        grey = to_grey(frame.image)
        if self.long_side:
            grey, _ = resize_long_side(grey, self.long_side)
        mask = None
        if frame.mask is not None:
            rows = ((np.arange(grey.shape[0]) + 0.5) / grey.shape[0] * frame.mask.shape[0]).astype(int)
            cols = ((np.arange(grey.shape[1]) + 0.5) / grey.shape[1] * frame.mask.shape[1]).astype(int)
            mask = frame.mask[rows][:, cols].astype(np.uint8) * 255
        found, descriptors = self._detect(grey, mask)
        keypoints = self._locate(found, grey.shape[::-1])
        scores = np.array([k.response for k in found], np.float32)
        # Detectors order ties as they like; here place, size and angle do, so that a replay repeats exactly.
        ties = [(k.angle, k.size, k.pt[0], k.pt[1]) for k in found]
        best = np.lexsort((*np.array(ties, np.float64).reshape(-1, 4).T, -scores))[: self.max_keypoints]
        factor = np.array(frame.image_size, np.float64) / np.array(grey.shape[::-1], np.float64)
        keypoints = (keypoints[best] + 0.5) * factor - 0.5
        return Features(
            keypoints.astype(np.float32),
            scores[best],
            descriptors[best],
            frame.image_size,
            self.identity,
            pixel_scale=float(factor.max()),
        )

    @abstractmethod
    def _detect(self, grey: np.ndarray, mask) -> tuple[list, np.ndarray]:
        """OpenCV keypoints and their (N, D) descriptors; an (0, D) array where there are none."""

    @abstractmethod
    def _locate(self, found: list, size: tuple[int, int]) -> np.ndarray:
        """(N, 2) f64 true places of OpenCV keypoints in the searched image, whose (width, height) is ``size``."""


def raw_points(found: list) -> np.ndarray:
    """(N, 2) f64 places of OpenCV keypoints as OpenCV gives them."""
    return np.array([k.pt for k in found], np.float64).reshape(-1, 2)


def store_descriptors(features: Features, policy: str) -> Features:
    """The same features with descriptors as a keyframe keeps them.

    ``lossless`` casts f32 to f16 only if the round trip is exact, ``always``
    whenever all values stay finite, ``never`` not at all. Keypoints are never
    cast. u8 descriptors stay as they are. Raises DataError for ``always``
    where a value leaves the fp16 range.
    """
    d = features.descriptors
    if policy == "never" or d.dtype != np.float32:
        return features
    if policy == "lossless":
        return replace(features, descriptors=exact_half(d))
    with np.errstate(over="ignore"):  # an overflow is looked for right below
        half = d.astype(np.float16)
    if not np.isfinite(half).all():
        raise DataError(
            f"descriptors of {features.model} do not fit fp16 (largest magnitude {np.abs(d).max():g}, "
            "limit 65504): set features.fp16 to 'lossless'"
        )
    return replace(features, descriptors=half)
