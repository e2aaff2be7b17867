"""What a matcher plug-in is, and the check that keeps models apart."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from ..errors import DataError, IdentityError, PluginError
from ..models import Models
from ..types import Features, ModelIdentity, Status


@dataclass(frozen=True)
class Correspondences:
    """What a matcher finds, before geometry.

    Args:
        pairs: (M, 2) int32, indices into the keypoints of image 0 and 1.
        scores: (M,) f32 in [0, 1], higher is better.
        covisibility: in [0, 1], None where the matcher has none.
        stopped_after_layer: of an early-stopped matcher, else 0.
        layer_scores: layer and covisibility score of each checked layer that ran, in order; empty where the matcher
            does not tell.
        status: None to go on to geometry, else why the matcher gave up.
        runtime: what computed it, where it is not the matcher's own ``runtime``.
        recovered: the fault after which the fallback computed it, else empty.
    """

    pairs: np.ndarray
    scores: np.ndarray
    covisibility: float | None = None
    stopped_after_layer: int = 0
    layer_scores: tuple[tuple[int, float], ...] = ()
    status: Status | None = None
    runtime: str = ""
    recovered: str = ""


class Matcher(ABC):
    """Finds correspondences between two sets of features of one model identity."""

    runtime = "numpy"
    dense = False
    """True where it takes a map (C, h, w) of each image in place of a descriptor a keypoint."""
    loop_inliers, loop_share = 20, 0.0
    """What look-alike places do not reach: fewer inliers verify no loop; without poses, nor do those on a smaller share
    of the keypoints."""

    @dataclass(frozen=True)
    class Options:
        """Parameters of the plug-in."""

    def __init__(self, options, models: Models | None = None):
        """``models`` opens learned models; classical plug-ins need none."""
        self.options = options
        self.models = models

    def require(self, features_model: ModelIdentity, descriptor_length: int | None = None) -> None:
        """Raises PluginError where this matcher cannot match these features. The default takes all.

        ``descriptor_length``: of them, None where it is not known yet.
        """
        return None

    @property
    def suspect(self) -> bool:
        """True while its empty results are not to be believed, so that ``match_again`` is asked about each."""
        return False

    @property
    def has_covisibility(self) -> bool:
        """Whether results have a covisibility score."""
        return False

    @property
    def stop_limits(self) -> tuple[tuple[int, float], ...]:
        """Layer and limit of each checked layer: a covisibility score below it stops the matcher. Empty: it cannot."""
        return ()

    @abstractmethod
    def match(self, features0: Features, features1: Features) -> Correspondences:
        """Correspondences, best score first. Both feature sets have keypoints."""

    def match_overlapping(self, features0: Features, features1: Features) -> Correspondences:
        """The same of images that are known to see one place, such as neighbours of a video: not rejected beforehand.

        The default is ``match``.
        """
        return self.match(features0, features1)

    def match_again(
        self, features0: Features, features1: Features, doubt: str, overlapping: bool = False
    ) -> Correspondences | None:
        """The same by other means, where nothing was found and that is in doubt; None where there are none.

        ``overlapping``: it was ``match_overlapping`` that found nothing.
        """
        return None


def require_same_model(features0: Features, features1: Features) -> None:
    """Raises IdentityError, naming both, where the descriptors cannot be compared."""
    if features0.model != features1.model:
        raise IdentityError(
            f"features of different models cannot be matched: {features0.model} and {features1.model}; "
            "extract both images with the same model"
        )


def require_kind(matcher: Matcher, matcher_name: str, dense: bool, features_name: str) -> None:
    """Raises PluginError where the features are maps and the matcher takes none, or the other way round.

    Args:
        dense: whether the features are maps. matcher_name, features_name: of the plug-ins.
    """
    if matcher.dense == dense:
        return
    have, takes = ("a dense map", "a descriptor a keypoint") if dense else ("a descriptor a keypoint", "a dense map")
    raise PluginError(
        f"features '{features_name}' have {have}, matcher '{matcher_name}' takes {takes}: set matcher.name or "
        f"features.name to one that suits the other{', e.g. matcher.name to flexglue' if dense else ''}"
    )


def as_map(features: Features) -> np.ndarray:
    """The dense map (C, h, w) f32; stored fp16 is widened. Raises DataError where there is none."""
    d = features.descriptors
    if d.ndim != 3:
        raise DataError(f"{features.model} has descriptors {d.shape}; this method needs a dense map (C, h, w)")
    return d.astype(np.float32, copy=False)


def as_vectors(features: Features) -> np.ndarray:
    """Descriptors as (N, D) f32, ready for dot products.

    Stored fp16 is widened; packed bits become -1 and +1, so that squared
    Euclidean distance is four times the Hamming distance. Raises DataError on
    a dense map.
    """
    d = features.descriptors
    if d.ndim != 2:
        raise DataError(
            f"{features.model} has a dense map {d.shape}; this method needs one descriptor a keypoint (N, D)"
        )
    if d.dtype == np.uint8:
        return np.unpackbits(d, axis=1).astype(np.float32) * 2 - 1
    return d.astype(np.float32, copy=False)
