"""ORB (Rublee et al., ICCV 2011)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import cv2
import numpy as np

from ..options import option
from ..types import ModelIdentity
from .base import OpenCvExtractor, raw_points

_STEP = 1.2
"""Ratio of the sizes of neighbouring pyramid levels (OpenCV's scaleFactor)."""

_BORDER = 31
"""Pixels at each edge where OpenCV's ORB keeps no keypoint (its edgeThreshold)."""


class Orb(OpenCvExtractor):
    """ORB: descriptors (N, 32) u8, 256 bits, compared by Hamming distance."""

    @dataclass(frozen=True)
    class Options:
        """Parameters of ORB."""

        fast_threshold: int = option(12, "FAST threshold in grey levels.", low=1, high=255)
        levels: int = option(8, "Pyramid levels, 1.2 apart.", low=1, high=16)

    @cached_property
    def identity(self) -> ModelIdentity:
        """Detector thresholds do not alter a descriptor, so they are not part of it."""
        return ModelIdentity.of_algorithm("features", "orb", "grey8")

    @cached_property
    def _orb(self):
        return cv2.ORB_create(
            nfeatures=self.max_keypoints,
            scaleFactor=_STEP,
            nlevels=self.options.levels,
            fastThreshold=self.options.fast_threshold,
        )

    def _detect(self, grey, mask):
        if min(grey.shape) <= 2 * _BORDER:  # OpenCV finds nothing there, and fails where a pyramid level has no pixel
            return [], np.empty((0, 32), np.uint8)
        keypoints, d = self._orb.detectAndCompute(grey, mask)
        if d is None or not len(keypoints):
            return [], np.empty((0, 32), np.uint8)
        return keypoints, d

    def _locate(self, found, size):
        # OpenCV multiplies by the nominal scale of the level, whose whole pixels and half-pixel shift it leaves out.
        scale = _STEP ** np.array([k.octave for k in found], np.float64)[:, None]
        level_size = np.maximum(np.round(np.array(size) / scale), 1)
        return (raw_points(found) / scale + 0.5) * (size / level_size) - 0.5
