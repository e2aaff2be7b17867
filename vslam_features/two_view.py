"""Formulas of two-view geometry. Points are (M, 2) f64 pixels of ideal pinhole images."""

from __future__ import annotations

import numpy as np

from .types import Pose


def fundamental_of(pose: Pose, K0: np.ndarray, K1: np.ndarray) -> np.ndarray:
    """F = K1^-T [t]x R K0^-1 (Hartley and Zisserman, 2nd ed., eq. 9.12)."""
    x, y, z = pose.t
    skew = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
    return np.linalg.inv(K1).T @ skew @ pose.R @ np.linalg.inv(K0)


def sampson_error(F: np.ndarray, p0: np.ndarray, p1: np.ndarray) -> np.ndarray:
    """Squared Sampson distances (M,) in px^2 (Hartley and Zisserman, eq. 11.9)."""
    h0, h1 = _homogeneous(p0), _homogeneous(p1)
    line1, line0 = h0 @ F.T, h1 @ F
    weight = (line1[:, :2] ** 2).sum(axis=1) + (line0[:, :2] ** 2).sum(axis=1)
    return (h1 * line1).sum(axis=1) ** 2 / np.maximum(weight, 1e-12)


def homography_error(H: np.ndarray, p0: np.ndarray, p1: np.ndarray) -> np.ndarray:
    """Squared distances (M,) in px^2 of the pair to the nearest one that fits H, first order.

    A quarter of the symmetric transfer error: half of the correction falls to
    each image, so that the value compares with :func:`sampson_error`.
    """
    try:
        inverse = np.linalg.inv(H)
    except np.linalg.LinAlgError:
        return np.full(len(p0), np.inf)
    forward = ((_apply(H, p0) - p1) ** 2).sum(axis=1)
    backward = ((_apply(inverse, p1) - p0) ** 2).sum(axis=1)
    return (forward + backward) / 4


def gric(squared_error: np.ndarray, sigma2: float, dimension: int, parameters: int) -> float:
    """GRIC of a two-view model, lower is better (Torr, IJCV 2002, with r = 4 and lambda3 = 2).

    ``dimension``: of the manifold, 2 for a homography, 3 for epipolar geometry.
    """
    n, r = len(squared_error), 4
    robust = np.minimum(squared_error / sigma2, 2.0 * (r - dimension)).sum()
    return float(robust + n * dimension * np.log(r) + parameters * np.log(r * max(n, 1)))


def pose_difference_deg(a: Pose, b: Pose) -> tuple[float, float]:
    """Angles in degrees between the rotations and between the translation directions of two poses."""
    lengths = np.linalg.norm(a.t) * np.linalg.norm(b.t)
    direction = np.degrees(np.arccos(np.clip(a.t @ b.t / lengths, -1, 1))) if lengths > 0 else np.nan
    return rotation_angle_deg(a.R.T @ b.R), float(direction)


def rotation_angle_deg(R: np.ndarray) -> float:
    """Angle of a rotation (3, 3) about its axis, in degrees, 0 to 180."""
    return float(np.degrees(np.arccos(np.clip((np.trace(R) - 1) / 2, -1, 1))))


def bearings(points: np.ndarray, K: np.ndarray) -> np.ndarray:
    """Unit rays (M, 3) of pixels of an ideal pinhole camera."""
    rays = _homogeneous(points) @ np.linalg.inv(K).T
    return rays / np.linalg.norm(rays, axis=1, keepdims=True)


def _homogeneous(points: np.ndarray) -> np.ndarray:
    return np.hstack([points, np.ones((len(points), 1))])


def _apply(H: np.ndarray, points: np.ndarray) -> np.ndarray:
    q = _homogeneous(points) @ H.T
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(np.abs(q[:, 2:]) > 1e-12, q[:, :2] / q[:, 2:], np.inf)
