"""A pair of keyframes as COLMAP's two-view geometry: direction, configuration and matrices.

COLMAP's pair has the image with the smaller id first, and relates x2 to x1: x2^T F x1 = 0, x2 = R x1 + t. Ours has the
current image first and its pose in the reference.
"""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import numpy as np

from ..camera import Camera
from ..types import Matches, PairResult, Pose
from .colmap_cameras import HALF_PX

CALIBRATED, UNCALIBRATED, PLANAR, PANORAMIC, PLANAR_OR_PANORAMIC = 2, 3, 4, 5, 6


@dataclass(frozen=True)
class TwoViewGeometry:
    """Columns of a row of ``two_view_geometries``; None where unknown.

    Args:
        inliers: (M, 2) u32, indices in image 1 and 2.
        config: what explains them, COLMAP's number.
        F, E, H: (3, 3) f64, x2^T F x1 = 0 and x2 ~ H x1 in COLMAP's pixels, E in normalised coordinates.
        qvec, tvec: rotation (w, x, y, z) and translation of camera 2 from camera 1.
    """

    inliers: np.ndarray
    config: int
    F: np.ndarray | None = None
    E: np.ndarray | None = None
    H: np.ndarray | None = None
    qvec: np.ndarray | None = None
    tvec: np.ndarray | None = None


def ordered(pair: PairResult) -> tuple[int, int, np.ndarray]:
    """(smaller keyframe id, larger one, (M, 2) u32 indices in this order)."""
    indices = pair.matches.pairs
    if pair.kf_id < pair.ref_kf_id:
        return pair.kf_id, pair.ref_kf_id, indices.astype(np.uint32)
    return pair.ref_kf_id, pair.kf_id, indices[:, ::-1].astype(np.uint32)


def two_view_geometry(
    pair: PairResult, points1: np.ndarray, points2: np.ndarray, camera1: Camera | None, camera2: Camera | None
) -> TwoViewGeometry:
    """The geometry of a verified pair.

    ``points1``, ``points2``: (N, 2) keypoints in our pixels of the images with the smaller and the larger id.
    """
    matches = pair.matches
    _, _, indices = ordered(pair)
    inliers = np.ascontiguousarray(indices[matches.inliers])
    p1, p2 = (p[i].astype(np.float64) + HALF_PX for p, i in ((points1, inliers[:, 0]), (points2, inliers[:, 1])))
    pose = matches.pose
    if pose is not None:  # ours is of the current camera in the reference; COLMAP's takes points of camera 1 to 2
        R, t = (pose.R, pose.t) if pair.kf_id < pair.ref_kf_id else (pose.R.T, -pose.R.T @ pose.t)
        pose = Pose(R, t)
    E = F = H = None
    config = _config(matches, pose)
    if config in (PLANAR, PANORAMIC, PLANAR_OR_PANORAMIC):
        H = _homography(p1, p2)
    elif config == CALIBRATED and pose is not None:
        E = _skew(pose.t) @ pose.R
        if _undistorted(camera1) and _undistorted(camera2):
            F = np.linalg.inv(_colmap_K(camera2)).T @ E @ np.linalg.inv(_colmap_K(camera1))
    else:
        F = _fundamental(p1, p2)
    q, t = (None, None) if pose is None else (_quaternion_wxyz(pose.R), pose.t)
    return TwoViewGeometry(inliers, config, F, E, H, q, t)


def _config(matches: Matches, pose: Pose | None) -> int:
    if matches.model == "homography":
        if pose is None:
            return PLANAR_OR_PANORAMIC
        return PLANAR if pose.t.any() else PANORAMIC
    return CALIBRATED if matches.model == "essential" or pose is not None else UNCALIBRATED


def _undistorted(camera: Camera | None) -> bool:
    return camera is not None and camera.model != "equidistant" and not camera.D.any()


def _colmap_K(camera: Camera) -> np.ndarray:
    K = camera.K.copy()
    K[:2, 2] += HALF_PX
    return K


def _skew(v: np.ndarray) -> np.ndarray:
    x, y, z = v
    return np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])


def _homography(p1: np.ndarray, p2: np.ndarray) -> np.ndarray | None:
    return cv2.findHomography(p1, p2, 0)[0] if len(p1) >= 4 else None


def _fundamental(p1: np.ndarray, p2: np.ndarray) -> np.ndarray | None:
    F = cv2.findFundamentalMat(p1, p2, cv2.FM_8POINT)[0] if len(p1) >= 8 else None
    return F if F is not None and F.shape == (3, 3) else None


def _quaternion_wxyz(R: np.ndarray) -> np.ndarray:
    """Unit quaternion of a rotation: the eigenvector of Bar-Itzhack's symmetric matrix, exact for every angle."""
    (a, b, c), (d, e, f), (g, h, i) = R
    N = np.array(
        [
            [a + e + i, h - f, c - g, d - b],
            [h - f, a - e - i, b + d, c + g],
            [c - g, b + d, e - a - i, f + h],
            [d - b, c + g, f + h, i - a - e],
        ]
    )
    q = np.linalg.eigh(N)[1][:, -1]
    return q if q[0] >= 0 else -q
