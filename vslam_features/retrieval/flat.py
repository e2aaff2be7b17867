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
        similarity = np.empty((len(queries), max(limits)), np.float32)
        parts = [
            (start, block[: max(0, similarity.shape[1] - start)]) for start, block in zip(self._starts, self._blocks)
        ]
        parts = [(start, rows) for start, rows in parts if len(rows)]

        def scan(part):
            start, rows = part
            # A product for each row: a single one of matrix and vector would start threads of its own.
            np.matmul(rows[:, None, :], queries[0, :, None], out=similarity[0, start : start + len(rows), None, None])

        if len(queries) == 1:
            # Whole blocks: threads that share one take half as long again.
            self._each(scan, parts)
        else:
            for start, rows in parts:
                np.matmul(queries, rows.T, out=similarity[:, start : start + len(rows)])
        return [best(row[:limit], k, margin) for row, limit in zip(similarity, limits)]


def best(similarity: np.ndarray, k: int, margin: float) -> np.ndarray:
    """Where (n,) similarities are at most ``margin`` below the k-th largest; ascending."""
    if len(similarity) <= k:
        return np.arange(len(similarity))
    return np.flatnonzero(similarity >= np.partition(similarity, -k)[-k] - margin)
