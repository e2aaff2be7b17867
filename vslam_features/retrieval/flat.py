"""Exact search over all descriptors in f32."""

from __future__ import annotations

import numpy as np

from .exact import BLOCK_BYTES, ExactIndex


class Flat(ExactIndex):
    """Inner products in f32 by numpy: fast to tens of thousands of keyframes, and nothing to install."""

    def __init__(self, block_bytes: int = BLOCK_BYTES):
        super().__init__(block_bytes, np.float32)

    def _allocate(self, rows: int, dimension: int) -> np.ndarray:
        return np.empty((rows, dimension), np.float32)  # the system gives a page when it is first written to

    def _scan(self, queries: np.ndarray, limits: list[int], k: int, margin: float) -> list[np.ndarray]:
        count = max(limits)
        similarity = np.empty((len(queries), count), np.float32)
        for start, block in zip(self._starts, self._blocks):
            out = similarity[:, start : start + len(block)]
            np.matmul(queries, block[: out.shape[1]].T, out=out)
        return [best(row[:limit], k, margin) for row, limit in zip(similarity, limits)]


def best(similarity: np.ndarray, k: int, margin: float) -> np.ndarray:
    """Where (n,) similarities are at most ``margin`` below the k-th largest; ascending."""
    if len(similarity) <= k:
        return np.arange(len(similarity))
    return np.flatnonzero(similarity >= np.partition(similarity, -k)[-k] - margin)
