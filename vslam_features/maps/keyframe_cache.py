"""Keyframes that were used lately."""

from __future__ import annotations

import threading
from collections import OrderedDict

from ..types import Keyframe


class KeyframeCache:
    """Least recently used ones leave first; safe between threads. ``nbytes`` never exceeds ``capacity``.

    ``beside``: bytes that its owner holds elsewhere, which the capacity is shared with.
    """

    def __init__(self, capacity: int):
        self.nbytes, self._capacity = 0, capacity
        self._lock = threading.Lock()
        self._keyframes: OrderedDict[int, Keyframe] = OrderedDict()

    def get(self, kf_id: int) -> Keyframe | None:
        """The keyframe, where it is here."""
        with self._lock:
            found = self._keyframes.get(kf_id)
            if found is not None:
                self._keyframes.move_to_end(kf_id)
            return found

    def put(self, keyframe: Keyframe, beside: int = 0) -> None:
        """Keep a keyframe. One that is larger than all of the cache is not kept."""
        size = nbytes_of(keyframe)
        with self._lock:
            if keyframe.id in self._keyframes or size + beside > self._capacity:
                return
            self._shrink(self._capacity - beside - size)
            self._keyframes[keyframe.id] = keyframe
            self.nbytes += size

    def make_room(self, beside: int) -> None:
        """Let keyframes go until the rest fits beside so many bytes."""
        with self._lock:
            self._shrink(self._capacity - beside)

    def _shrink(self, nbytes: int) -> None:
        while self._keyframes and self.nbytes > nbytes:
            self.nbytes -= nbytes_of(self._keyframes.popitem(last=False)[1])


def nbytes_of(keyframe: Keyframe) -> int:
    """Bytes of a keyframe's arrays."""
    f = keyframe.features
    arrays = (f.keypoints, f.scores, f.descriptors, keyframe.thumbnail, keyframe.global_descriptor)
    return sum(a.nbytes for a in arrays if a is not None)
