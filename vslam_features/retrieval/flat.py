"""Exact search over all descriptors in one growing buffer."""

from __future__ import annotations

import numpy as np

from ..errors import DataError
from .base import Index, check_descriptor


class Flat(Index):
    """Brute-force inner products in fp32: exact, and fast to tens of thousands of keyframes."""

    def __init__(self):
        self._ids = np.empty(16, np.int64)
        self._rows = np.empty((0, 0), np.float32)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, kf_id: int, descriptor: np.ndarray) -> None:
        """See :meth:`Index.add`."""
        d = check_descriptor(descriptor, self._rows.shape[1] or None)
        if self._count and kf_id <= self._ids[self._count - 1]:
            raise DataError(f"index: keyframe ids must increase, got {kf_id} after {self._ids[self._count - 1]}")
        if self._count == len(self._rows):  # doubling keeps adds cheap on average
            size = max(16, 2 * self._count)
            rows, ids = np.empty((size, len(d)), np.float32), np.empty(size, np.int64)
            if self._count:
                rows[: self._count], ids[: self._count] = self._rows[: self._count], self._ids[: self._count]
            self._rows, self._ids = rows, ids
        self._rows[self._count], self._ids[self._count] = d, kf_id
        self._count += 1

    def search(self, descriptor: np.ndarray, k: int, newest_id: int) -> tuple[np.ndarray, np.ndarray]:
        """See :meth:`Index.search`. Equal similarities rank the older keyframe first."""
        n = int(np.searchsorted(self._ids[: self._count], newest_id, side="right"))
        if n == 0:
            return np.empty(0, np.int64), np.empty(0, np.float32)
        d = check_descriptor(descriptor, self._rows.shape[1])
        similarity = self._rows[:n] @ d
        order = np.argsort(-similarity, kind="stable")[:k]
        return self._ids[order], similarity[order]
