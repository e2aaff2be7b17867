"""SIFT (Lowe, IJCV 2004) with the RootSIFT norm (Arandjelovic and Zisserman, CVPR 2012)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import cv2
import numpy as np

from ..options import option
from ..types import ModelIdentity
from .base import OpenCvExtractor, raw_points

_BIAS_PX = 0.25
"""OpenCV takes pixel x of the doubled image for x / 2; it is (x - 0.5) / 2."""


class Sift(OpenCvExtractor):
    """RootSIFT: descriptors (N, 128) f32 of unit length; their dot product is the Hellinger kernel."""

    @dataclass(frozen=True)
    class Options:
        """Parameters of SIFT."""

        contrast_threshold: float = option(0.04, "Weaker extrema are left out (OpenCV's scale).", low=0.0, high=1.0)
        edge_threshold: float = option(10.0, "Largest ratio of principal curvatures.", low=1.0, high=1e3)

    @cached_property
    def identity(self) -> ModelIdentity:
        """Detector thresholds do not alter a descriptor, so they are not part of it."""
        return ModelIdentity.of_algorithm("features", "sift", "grey8", norm="root")

    @cached_property
    def _sift(self):
        return cv2.SIFT_create(
            nfeatures=self.max_keypoints,  # ties with the last one are kept
            contrastThreshold=self.options.contrast_threshold,
            edgeThreshold=self.options.edge_threshold,
        )

    def _detect(self, grey, mask):
        keypoints, d = self._sift.detectAndCompute(grey, mask)
        if d is None or not len(keypoints):
            return [], np.empty((0, 128), np.float32)
        d = d / np.maximum(d.sum(axis=1, keepdims=True), 1e-12)
        return keypoints, np.sqrt(d).astype(np.float32)

    def _locate(self, found, size):
        return raw_points(found) - _BIAS_PX
