"""What a homography between two calibrated images tells about the pose: a rotation, or the two poses of a plane."""

from __future__ import annotations

import cv2
import numpy as np

from .two_view import bearings, fundamental_of, homography_error, sampson_error
from .types import Pose

_ROTATION_SHARE = 0.9  # of the homography's inliers must fit a rotation to call it one
_LEAST_OFF_PLANE, _LEAD = 8, 2  # points off the plane that choose between its poses, and times those of the other


def rotation_pose(p0: np.ndarray, p1: np.ndarray, K0: np.ndarray, K1: np.ndarray, threshold_px: float) -> Pose | None:
    """Pose of a pure rotation (zero ``t``) where one explains a homography's inliers (Kabsch on bearings), or None."""
    b0, b1 = bearings(p0, K0), bearings(p1, K1)
    U, _, Vt = np.linalg.svd(b1.T @ b0)
    R = U @ np.diag([1, 1, np.sign(np.linalg.det(U @ Vt))]) @ Vt
    error = homography_error(K1 @ R @ np.linalg.inv(K0), p0, p1)
    if (error <= threshold_px**2 / 2).mean() < _ROTATION_SHARE:
        return None
    return Pose(R, np.zeros(3), scale_known=False)


def plane_poses(p0: np.ndarray, K0: np.ndarray, K1: np.ndarray, H: np.ndarray) -> tuple[Pose, ...]:
    """The poses, two as a rule, that a plane seen in both images allows (Malis and Vargas, INRIA RR-6303)."""
    normalised = np.linalg.inv(K1) @ H @ K0
    _, rotations, translations, normals = cv2.decomposeHomographyMat(normalised, np.eye(3))
    rays, out = bearings(p0, K0), []
    for R, t, n in zip(rotations, translations, normals):
        in_front, length = (rays @ n > 0).mean() > 0.5, np.linalg.norm(t)
        if in_front and length > 0:
            out.append(Pose(R, t / length, scale_known=False))
    return tuple(out)


def resolved_pose(
    poses: tuple[Pose, ...], p0: np.ndarray, p1: np.ndarray, K0: np.ndarray, K1: np.ndarray, threshold_px: float
) -> Pose | None:
    """The one of a plane's poses that points off the plane clearly speak for, else None.

    A wrong pose agrees with some outliers by chance, the right one also with all that stands out of the plane.
    """
    support = [int((sampson_error(fundamental_of(p, K0, K1), p0, p1) <= threshold_px**2).sum()) for p in poses]
    order = sorted(range(len(poses)), key=lambda i: -support[i])
    if len(poses) < 2 or support[order[0]] < max(_LEAST_OFF_PLANE, _LEAD * support[order[1]]):
        return None
    return poses[order[0]]
