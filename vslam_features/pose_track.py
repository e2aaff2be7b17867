"""Poses over time, interpolated to image stamps (ROS-free: bag replay and node use the same)."""

from __future__ import annotations

import threading
from bisect import bisect_left

import cv2
import numpy as np

from .errors import DataError
from .types import Pose


class PoseTrack:
    """The newest poses of one moving frame, safe between threads.

    Between two poses: linear in position, slerp in rotation. Outside them a
    pose is held for ``hold_s`` at most, then there is none. A pose in another
    frame, or older than the newest by more than ``jump_s`` (bag loop, reset of
    simulated time), starts the track anew; a little disorder is sorted.

    Args:
        max_gap_s: neighbours further apart than this are not interpolated.
        hold_s: how far outside the known poses the nearest one still counts.
        jump_s: how much older a pose may be than the newest before it is a jump.
        max_poses: most poses kept; the oldest go first.
    """

    def __init__(self, max_gap_s: float = 0.5, hold_s: float = 0.01, jump_s: float = 1.0, max_poses: int = 4096):
        self.max_gap_ns, self.hold_ns, self.jump_ns = (round(s * 1e9) for s in (max_gap_s, hold_s, jump_s))
        self.max_poses = max_poses
        self.resets = 0
        self._lock = threading.Lock()
        self._stamps: list[int] = []
        self._poses: list[Pose] = []

    def __len__(self) -> int:
        return len(self._stamps)

    @property
    def newest_ns(self) -> int | None:
        """Stamp of the newest pose; None where there is none. ``at`` is final for stamps up to it."""
        with self._lock:
            return self._stamps[-1] if self._stamps else None

    def add(self, stamp_ns: int, pose: Pose) -> None:
        """Add a pose. One with a known stamp replaces the older one."""
        with self._lock:
            if self._stamps and (
                stamp_ns < self._stamps[-1] - self.jump_ns or pose.frame_id != self._poses[-1].frame_id
            ):
                self._stamps, self._poses = [], []
                self.resets += 1
            i = bisect_left(self._stamps, stamp_ns)
            if i < len(self._stamps) and self._stamps[i] == stamp_ns:
                self._poses[i] = pose
                return
            self._stamps.insert(i, stamp_ns)
            self._poses.insert(i, pose)
            if len(self._stamps) > self.max_poses:
                # A quarter at once keeps the cost of deleting at the front small.
                drop = max(1, self.max_poses // 4)
                del self._stamps[:drop], self._poses[:drop]

    def at(self, stamp_ns: int) -> Pose | None:
        """The pose at a stamp, None where the known poses do not reach (see the class)."""
        with self._lock:
            i = bisect_left(self._stamps, stamp_ns)
            after = (self._stamps[i], self._poses[i]) if i < len(self._stamps) else None
            before = (self._stamps[i - 1], self._poses[i - 1]) if i > 0 else None
        if after is not None and after[0] == stamp_ns:
            return after[1]
        if before is not None and after is not None and after[0] - before[0] <= self.max_gap_ns:
            return interpolate(before[1], after[1], (stamp_ns - before[0]) / (after[0] - before[0]))
        near = [n for n in (before, after) if n is not None and abs(n[0] - stamp_ns) <= self.hold_ns]
        return min(near, key=lambda n: abs(n[0] - stamp_ns))[1] if near else None

    def clear(self) -> None:
        """Forget all poses."""
        with self._lock:
            self._stamps, self._poses = [], []


def interpolate(a: Pose, b: Pose, share: float) -> Pose:
    """The pose at ``share`` in [0, 1] of the way from a to b: linear position, slerp (shortest arc)."""
    turn, _ = cv2.Rodrigues(a.R.T @ b.R)
    step, _ = cv2.Rodrigues(share * turn)
    return Pose(a.R @ step, (1 - share) * a.t + share * b.t, a.frame_id, a.scale_known and b.scale_known)


def pose_from_quaternion(x: float, y: float, z: float, w: float, t, frame_id: str = "") -> Pose:
    """A metric pose from a quaternion (ROS order, normalised here) and a translation (3,) in metres.

    Raises DataError for a zero or non-finite quaternion, as of an uninitialised message.
    """
    q = np.array([x, y, z, w], np.float64)
    norm = float(np.linalg.norm(q))
    if not np.isfinite(norm) or norm < 1e-6:
        raise DataError(f"pose: expected a rotation quaternion of length 1, got ({x:g}, {y:g}, {z:g}, {w:g})")
    x, y, z, w = q / norm
    R = np.array(
        [
            [1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)],
            [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)],
            [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)],
        ]
    )
    return Pose(R, np.asarray(t, np.float64), frame_id)
