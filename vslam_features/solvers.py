"""Robust estimators of two-view geometry: poselib where it is installed, else OpenCV's USAC.

All take points (M, 2) f64 in pixels of ideal pinhole images and return
inlier masks (M,) bool. The same seed gives the same result.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from importlib.util import find_spec

import cv2
import numpy as np

from .config import GeometryConfig
from .errors import PluginError
from .types import Pose

Estimate = tuple[np.ndarray, np.ndarray]  # model (3, 3), inliers (M,)
_FAR = 1e6  # baselines


class Solver(ABC):
    """One way to estimate the three two-view models. Too few points or a failed fit give None."""

    name: str

    def __init__(self, config: GeometryConfig):
        self.config = config

    @abstractmethod
    def essential(self, p0, p1, K0, K1, threshold_px: float, seed: int) -> tuple[Pose, np.ndarray] | None:
        """Pose of camera 0 in camera 1 (x1 = R x0 + t, unit t) and its inliers."""

    @abstractmethod
    def fundamental(self, p0, p1, threshold_px: float, seed: int) -> Estimate | None:
        """F with x1^T F x0 = 0 and its inliers."""

    @abstractmethod
    def homography(self, p0, p1, threshold_px: float, seed: int) -> Estimate | None:
        """H with x1 ~ H x0 and its inliers."""


class PoseLib(Solver):
    """LO-RANSAC with non-linear refinement (github.com/PoseLib/PoseLib)."""

    name = "poselib"

    def __init__(self, config: GeometryConfig):
        super().__init__(config)
        try:
            import poselib
        except ImportError as error:
            raise PluginError(
                f"geometry.solver 'poselib' cannot be loaded: {error}; install it with "
                "'pip install vslam_features[poselib]' or set geometry.solver to 'opencv'"
            ) from error
        self._poselib = poselib

    def _options(self, seed: int, **thresholds) -> dict:
        c = self.config
        return {
            "max_iterations": c.max_iterations,
            "min_iterations": min(100, c.max_iterations),
            "success_prob": c.confidence,
            "seed": seed,
            **thresholds,
        }

    def essential(self, p0, p1, K0, K1, threshold_px, seed):
        if len(p0) < 5:
            return None
        pose, info = self._poselib.estimate_relative_pose(
            p0, p1, _pinhole(K0, p0), _pinhole(K1, p1), self._options(seed, max_epipolar_error=threshold_px), {}
        )
        inliers, t = np.asarray(info["inliers"], bool), np.asarray(pose.t)
        norm = np.linalg.norm(t)
        if not inliers.any() or not norm > 0 or not np.isfinite(norm):
            return None
        return Pose(pose.R, t / norm, scale_known=False), inliers

    def fundamental(self, p0, p1, threshold_px, seed):
        if len(p0) < 7:
            return None
        F, info = self._poselib.estimate_fundamental(p0, p1, self._options(seed, max_epipolar_error=threshold_px), {})
        return _estimate(F, info["inliers"])

    def homography(self, p0, p1, threshold_px, seed):
        if len(p0) < 4:
            return None
        H, info = self._poselib.estimate_homography(p0, p1, self._options(seed, max_reproj_error=threshold_px), {})
        return _estimate(H, info["inliers"])


class OpenCv(Solver):
    """USAC with graph-cut local optimisation (what OpenCV calls USAC_ACCURATE), seeded.

    Threshold and variant are those that measured best on wide-baseline pairs:
    0.7 of the epipolar threshold; MAGSAC scoring does worse there.
    """

    name = "opencv"
    _EPIPOLAR = 0.7

    def _params(self, threshold: float, seed: int):
        p = cv2.UsacParams()
        p.threshold = threshold
        p.confidence = self.config.confidence
        p.maxIterations = self.config.max_iterations
        p.sampler = cv2.SAMPLING_UNIFORM
        p.score = cv2.SCORE_METHOD_MSAC
        p.loMethod = cv2.LOCAL_OPTIM_GC
        p.loIterations, p.loSampleSize = 10, 20
        p.neighborsSearch = cv2.NEIGH_GRID
        p.randomGeneratorState = seed
        return p

    def essential(self, p0, p1, K0, K1, threshold_px, seed):
        if len(p0) < 5:
            return None
        focal = np.mean([K0[0, 0], K0[1, 1], K1[0, 0], K1[1, 1]])
        n0, n1 = _normalise(p0, K0), _normalise(p1, K1)
        eye, none = np.eye(3), np.zeros(0)
        params = self._params(self._EPIPOLAR * threshold_px / focal, seed)
        E, mask = _usac(cv2.findEssentialMat, n0, n1, eye, eye, none, none, params)
        if E is None or E.shape != (3, 3):
            return None
        # The default drops points further than 50 baselines, which are as good for the rotation.
        R, t, mask = cv2.recoverPose(E, n0, n1, cameraMatrix=eye, distanceThresh=_FAR, mask=mask.copy())[1:4]
        inliers = mask.ravel() > 0
        return (Pose(R, t, scale_known=False), inliers) if inliers.any() else None

    def fundamental(self, p0, p1, threshold_px, seed):
        if len(p0) < 8:
            return None
        return _estimate(*_usac(cv2.findFundamentalMat, p0, p1, self._params(self._EPIPOLAR * threshold_px, seed)))

    def homography(self, p0, p1, threshold_px, seed):
        if len(p0) < 4:
            return None
        return _estimate(*_usac(cv2.findHomography, p0, p1, self._params(threshold_px, seed)))


def make_solver(config: GeometryConfig) -> Solver:
    """The configured solver; ``auto`` is poselib where it is installed. Raises PluginError."""
    if config.solver == "opencv" or (config.solver == "auto" and find_spec("poselib") is None):
        return OpenCv(config)
    return PoseLib(config)


def _usac(function, *args):
    """OpenCV signals some degenerate inputs by an exception, others by None."""
    try:
        model, mask = function(*args)
    except cv2.error:
        return None, None
    return model, mask


def _estimate(model, mask) -> Estimate | None:
    if model is None or mask is None:
        return None
    model, inliers = np.asarray(model, np.float64), np.asarray(mask).ravel() > 0
    if model.shape != (3, 3) or not np.isfinite(model).all() or not inliers.any():
        return None
    return model, inliers


def _pinhole(K: np.ndarray, points: np.ndarray) -> dict:
    # poselib never looks at width and height of a PINHOLE camera, but wants them, as C integers.
    size = np.clip(np.ceil(points.max(axis=0)) + 1, 1, 1e9).astype(int)
    return {
        "model": "PINHOLE",
        "width": int(size[0]),
        "height": int(size[1]),
        "params": [K[0, 0], K[1, 1], K[0, 2], K[1, 2]],
    }


def _normalise(points: np.ndarray, K: np.ndarray) -> np.ndarray:
    return (points - K[:2, 2]) / np.array([K[0, 0], K[1, 1]])
