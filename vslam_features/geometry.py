"""Geometric verification: do two images see the same scene, and what pose follows?

Calibrated pairs are explained by an essential matrix, others by a fundamental
matrix; a homography competes with it by the geometric robust information
criterion (GRIC, Torr, IJCV 2002), so that planes, pure rotations and identical
images count as verified without a pose that the data does not determine.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .camera import Camera
from .config import GeometryConfig
from .plane_pose import plane_poses, resolved_pose, rotation_pose
from .solvers import make_solver
from .two_view import fundamental_of, gric, homography_error, pose_difference_deg, sampson_error
from .types import Pose, Status

_HOMOGRAPHY_SLACK = 1.5  # a point's error has two components there, the distance to a line has one
_OFF_PLANE_SHARE = 0.05  # of the inliers, off the plane, determine the pose
_SECOND_SHARE = 0.92  # of the best pose's inliers make a second pose as good
_LINE_WIDTH = 1.5  # thresholds: narrower inliers are on a line, which determines no model
_HALVES = 4  # of the data are searched for a second pose
_SAME_ROTATION_DEG, _SAME_DIRECTION_DEG = 3.0, 20.0  # closer poses are one pose


@dataclass(frozen=True)
class Verification:
    """Result of verifying correspondences.

    Args:
        inliers: (M,) bool.
        model: ``essential``, ``fundamental``, ``homography``, or None.
        status: ``ok``, ``no_matches``, ``too_few_inliers`` or ``degenerate``.
        pose: image 0's camera in image 1's where the data determines it, else None.
        best_pose: the solver's best pose, also where it is not to be trusted
            (for measurements); None where uncalibrated.
        hypotheses: every pose that the data allows (see ``Matches.hypotheses``).
    """

    inliers: np.ndarray
    model: str | None
    status: Status
    pose: Pose | None = None
    best_pose: Pose | None = None
    hypotheses: tuple[Pose, ...] = ()


class Verifier:
    """Verifies correspondences by robust two-view geometry."""

    def __init__(self, config: GeometryConfig):
        self.config = config
        self.solver = make_solver(config)

    def verify(
        self,
        points0: np.ndarray,
        points1: np.ndarray,
        camera0: Camera | None,
        camera1: Camera | None,
        scale: float = 1.0,
    ) -> Verification:
        """Verify correspondences.

        Args:
            points0, points1: (M, 2) pixels of the input images.
            camera0, camera1: None for an uncalibrated image; then F is used.
            scale: input pixels per searched pixel (``Features.pixel_scale``).
        """
        m, none = len(points0), np.zeros(len(points0), bool)
        if m == 0:
            return Verification(none, None, Status.NO_MATCHES)
        p0, p1 = np.asarray(points0, np.float64), np.asarray(points1, np.float64)
        calibrated = camera0 is not None and camera1 is not None
        if calibrated:
            p0, p1 = camera0.undistort(p0), camera1.undistort(p1)
        valid = np.isfinite(p0).all(axis=1) & np.isfinite(p1).all(axis=1)
        p0, p1 = p0[valid], p1[valid]
        threshold = self.config.threshold_px * scale
        kind, pose, F, inliers = self._epipolar(p0, p1, camera0, camera1, threshold, calibrated)
        plane = self.solver.homography(p0, p1, _HOMOGRAPHY_SLACK * threshold, self.config.seed)
        best_pose = pose
        hypotheses = (pose,) if pose is not None else ()
        if plane is not None and self._plane_explains(p0, p1, F, inliers, *plane, threshold, calibrated):
            kind, inliers = "homography", plane[1]
            if calibrated:
                K0, K1, limit = camera0.K, camera1.K, _HOMOGRAPHY_SLACK * threshold
                pose = rotation_pose(p0[inliers], p1[inliers], K0, K1, limit)
                if pose is None:
                    hypotheses = plane_poses(p0[inliers], K0, K1, plane[0])
                    pose = resolved_pose(hypotheses, p0[~inliers], p1[~inliers], K0, K1, threshold)
                hypotheses = (pose,) if pose is not None else hypotheses
        full = none.copy()
        if inliers is not None:
            full[valid] = inliers
        n = int(full.sum())
        kept0, kept1 = p0[full[valid]], p1[full[valid]]
        distinct = min(_distinct(kept0, threshold), _distinct(kept1, threshold))
        if distinct < self.config.min_inliers or n < self.config.min_inlier_ratio * m:
            return Verification(full, kind if n else None, Status.TOO_FEW_INLIERS, None, best_pose)
        if min(_width(kept0), _width(kept1)) < _LINE_WIDTH * threshold:
            return Verification(full, kind, Status.DEGENERATE, None, best_pose)
        if kind == "essential" and self.config.check_degenerate:
            second = self._second_pose(p0, p1, camera0, camera1, threshold, pose, n)
            if second is not None:
                return Verification(full, kind, Status.DEGENERATE, None, best_pose, (pose, second))
        return Verification(full, kind, Status.OK, pose, best_pose, hypotheses)

    def _epipolar(self, p0, p1, camera0, camera1, threshold, calibrated):
        if calibrated:
            found = self.solver.essential(p0, p1, camera0.K, camera1.K, threshold, self.config.seed)
            if found is None:
                return None, None, None, None
            pose, inliers = found
            return "essential", pose, fundamental_of(pose, camera0.K, camera1.K), inliers
        found = self.solver.fundamental(p0, p1, threshold, self.config.seed)
        return ("fundamental", None, *found) if found is not None else (None, None, None, None)

    def _plane_explains(self, p0, p1, F, inliers, H, plane_inliers, threshold, calibrated) -> bool:
        """True where GRIC prefers the homography, and too little lies off the plane to determine more."""
        if F is None:
            return True
        error = homography_error(H, p0, p1)
        off_plane = inliers & (error > (_HOMOGRAPHY_SLACK * threshold) ** 2)
        if off_plane.sum() >= max(self.config.min_inliers, _OFF_PLANE_SHARE * inliers.sum()):
            return False
        either = inliers | plane_inliers
        sigma2 = (threshold / 1.96) ** 2  # the threshold holds 95 % of a distance to a line
        with_plane = gric(error[either], sigma2, dimension=2, parameters=8)
        parameters = 5 if calibrated else 7
        without = gric(sampson_error(F, p0[either], p1[either]), sigma2, dimension=3, parameters=parameters)
        return with_plane < without

    def _second_pose(self, p0, p1, camera0, camera1, threshold, pose: Pose, best: int) -> Pose | None:
        """A different pose that explains the data as well, or None.

        Solvers return the best pose however small its lead is, whatever the
        seed. Half of the data at random shifts the lead: where it was one of
        chance, some half prefers the other pose.
        """
        for offset in range(1, _HALVES + 1):
            half = np.random.default_rng([self.config.seed, offset]).permutation(len(p0))[: len(p0) // 2]
            found = self.solver.essential(p0[half], p1[half], camera0.K, camera1.K, threshold, self.config.seed)
            if found is None:
                continue
            rotation, direction = pose_difference_deg(pose, found[0])
            if rotation > _SAME_ROTATION_DEG or direction > _SAME_DIRECTION_DEG:
                error = sampson_error(fundamental_of(found[0], camera0.K, camera1.K), p0, p1)
                if (error <= threshold**2).sum() >= _SECOND_SHARE * best:
                    return found[0]
        return None


def _distinct(points: np.ndarray, threshold: float) -> int:
    """How many of the (N, 2) points differ: one place that is matched many times is evidence of one."""
    return len(np.unique(np.round(points / threshold), axis=0))


def _width(points: np.ndarray) -> float:
    """Standard deviation of (N, 2) points across the line that fits them best."""
    return float(np.sqrt(max(np.linalg.eigvalsh(np.cov(points.T))[0], 0)))
