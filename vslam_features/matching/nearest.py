"""Nearest neighbours, mutual, with Lowe's ratio test (IJCV 2004)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..config import option
from ..types import Features, Status
from .base import Correspondences, Matcher, as_vectors


class Nearest(Matcher):
    """Exact nearest neighbours in chunks, so that memory stays bounded for any N.

    Float descriptors are compared by Euclidean distance, u8 ones by Hamming.
    The score is 1 - d1/d2 (0 at equal distances; 1 for an exact match).
    """

    @dataclass(frozen=True)
    class Options:
        """Parameters of nearest-neighbour matching."""

        ratio: float = option(0.8, "Largest distance ratio of best to second best; 1: no test.", low=0.1, high=1.0)
        mutual: bool = option(True, "Keep only pairs that are each other's nearest.")
        max_distance: float = option(0.0, "Largest distance (Euclidean or bits); 0: no limit.", low=0.0, high=1e6)
        chunk: int = option(1024, "Rows compared at once: memory is chunk x N floats.", low=16, high=1_000_000)

    def match(self, features0: Features, features1: Features) -> Correspondences:
        """See :meth:`Matcher.match`. Raises DataError on dense descriptors; ``non_finite`` is a status."""
        d0, d1 = as_vectors(features0), as_vectors(features1)
        if not (np.isfinite(d0).all() and np.isfinite(d1).all()):
            return Correspondences(np.empty((0, 2), np.int32), np.empty(0, np.float32), status=Status.NON_FINITE)
        best, first, second, best1 = self._search(d0, d1)
        if features0.descriptors.dtype == np.uint8:  # |a - b|^2 of +-1 vectors is 4 times the Hamming distance
            first, second = first / 4, second / 4
        else:
            first, second = np.sqrt(first), np.sqrt(second)
        keep = first <= self.options.ratio * second if self.options.ratio < 1 else np.ones(len(best), bool)
        if self.options.mutual:
            keep &= best1[best] == np.arange(len(best))
        if self.options.max_distance > 0:
            keep &= first <= self.options.max_distance
        rows = np.flatnonzero(keep)
        scores = 1.0 - first[rows] / np.maximum(second[rows], 1e-9)
        scores[first[rows] >= second[rows]] = 0.0
        order = np.argsort(-scores, kind="stable")
        pairs = np.stack([rows, best[rows]], axis=1).astype(np.int32)[order]
        return Correspondences(pairs, np.clip(scores[order], 0, 1).astype(np.float32))

    def _search(self, d0, d1):
        """Nearest row of d1 for each of d0 with squared distances (first, second), and nearest of d0 for each of d1."""
        n0, n1 = len(d0), len(d1)
        best, first = np.empty(n0, np.int64), np.empty(n0, np.float32)
        second = np.full(n0, np.inf, np.float32)
        best1, least1 = np.zeros(n1, np.int64), np.full(n1, np.inf, np.float32)
        norm1 = np.einsum("nd,nd->n", d1, d1)
        for start in range(0, n0, self.options.chunk):
            rows = slice(start, start + self.options.chunk)
            block = d0[rows]
            distance = np.einsum("nd,nd->n", block, block)[:, None] + norm1[None] - 2 * (block @ d1.T)
            np.maximum(distance, 0, out=distance)
            columns = distance.argmin(axis=0)
            lower = distance[columns, np.arange(n1)]
            closer = lower < least1
            best1[closer], least1[closer] = columns[closer] + start, lower[closer]
            index = np.arange(len(block))
            best[rows] = distance.argmin(axis=1)
            first[rows] = distance[index, best[rows]]
            if n1 > 1:
                distance[index, best[rows]] = np.inf
                second[rows] = distance.min(axis=1)
        return best, first, second, best1
