"""Keyframes of the running session, in memory, safe between threads."""

from __future__ import annotations

import dataclasses
import threading

import numpy as np

from ..types import Keyframe, Pose


class MemoryMap:
    """Append-only list of keyframes; a keyframe's id is its position.

    One thread adds, others read. ``travelled`` is the length of the pose track
    in metres up to a keyframe (steps without a pose, or to another frame, count as zero).
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._keyframes: list[Keyframe] = []
        self._travelled: list[float] = []
        self._nbytes = 0

    def __len__(self) -> int:
        return len(self._keyframes)

    def __getitem__(self, kf_id: int) -> Keyframe:
        """Raises IndexError for an id that is not there."""
        if kf_id < 0:
            raise IndexError(f"keyframe id {kf_id}: ids count from 0")
        return self._keyframes[kf_id]

    def add(self, keyframe: Keyframe) -> Keyframe:
        """Store a keyframe under the next id and return it with that id."""
        with self._lock:
            step = 0.0
            if self._keyframes:
                last = self._keyframes[-1].pose
                if Pose.comparable(last, keyframe.pose):
                    step = float(np.linalg.norm(keyframe.pose.t - last.t))
            self._travelled.append((self._travelled[-1] if self._travelled else 0.0) + step)
            keyframe = dataclasses.replace(keyframe, id=len(self._keyframes))
            self._keyframes.append(keyframe)
            f = keyframe.features
            arrays = (f.keypoints, f.scores, f.descriptors, keyframe.thumbnail)
            self._nbytes += sum(a.nbytes for a in arrays if a is not None)
            return keyframe

    @property
    def nbytes(self) -> int:
        """Bytes of all keyframes' features, thumbnails and global descriptors."""
        return self._nbytes

    def last(self, count: int) -> list[Keyframe]:
        """The newest ``count`` keyframes, newest first."""
        return self._keyframes[: -count - 1 : -1]

    def describe(self, kf_id: int, descriptor: np.ndarray) -> Keyframe:
        """Attach the (D,) global descriptor, which is computed after the keyframe is stored."""
        with self._lock:
            keyframe = dataclasses.replace(self._keyframes[kf_id], global_descriptor=descriptor)
            self._keyframes[kf_id] = keyframe
            self._nbytes += descriptor.nbytes
            return keyframe

    def travelled(self, from_id: int, to_id: int) -> float:
        """Metres along the pose track between two keyframes."""
        return abs(self._travelled[to_id] - self._travelled[from_id])

    def newest_older_than(self, keyframe: Keyframe, seconds: float, count: int) -> int:
        """Largest id at least ``seconds`` and ``count`` keyframes older than ``keyframe``; -1 if none."""
        limit_ns = keyframe.stamp_ns - round(seconds * 1e9)
        kf_id = keyframe.id - max(count, 1)
        while kf_id >= 0 and self._keyframes[kf_id].stamp_ns > limit_ns:
            kf_id -= 1
        return max(kf_id, -1)
