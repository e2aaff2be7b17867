"""Nearest neighbours, mutual, with Lowe's ratio test (IJCV 2004)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..options import option
from ..types import Features, Status
from .base import Correspondences, Matcher, as_vectors

_LARGEST = 8e37
"""Squared distances of descriptors with a larger squared length leave f32: they are not finite in effect."""


class Nearest(Matcher):
    """Exact nearest neighbours in chunks, so that memory stays bounded for any N.

    Float descriptors are compared by Euclidean distance, u8 ones by Hamming.
    The score is 1 - d1/d2 (0 at equal distances; 1 for an exact match). The
    chunk alters no result, except which of several equal descriptors is taken
    where there is no ratio test.
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
        pairs, scores = np.empty((0, 2), np.int32), np.empty(0, np.float32)
        if not len(d0) or not len(d1):
            return Correspondences(pairs, scores)
        with np.errstate(all="ignore"):  # what overflows is looked for right below
            norm0, norm1 = np.einsum("nd,nd->n", d0, d0), np.einsum("nd,nd->n", d1, d1)
        largest = np.maximum(norm0.max(), norm1.max())
        if not largest <= _LARGEST:  # NaN too
            return Correspondences(pairs, scores, status=Status.NON_FINITE)
        best, first, second, least1 = self._search(d0, d1, norm0, norm1)
        keep = np.ones(len(best), bool)
        if self.options.mutual:
            # The tolerance covers the rounding of the expanded form, so that chunks do not alter the result.
            keep &= first <= least1[best] + 2e-6 * largest
            keep &= _first_of_each(best, first)
        if features0.descriptors.dtype == np.uint8:  # |a - b|^2 of +-1 vectors is 4 times the Hamming distance
            first, second = first / 4, second / 4
        else:
            first, second = np.sqrt(first), np.sqrt(second)
        if self.options.ratio < 1:  # two at distance zero are as alike as two at any other
            keep &= (first <= self.options.ratio * second) & (first < second)
        if self.options.max_distance > 0:
            keep &= first <= self.options.max_distance
        rows = np.flatnonzero(keep)
        scores = 1.0 - first[rows] / np.maximum(second[rows], 1e-9)
        scores[first[rows] >= second[rows]] = 0.0
        order = np.argsort(-scores, kind="stable")
        pairs = np.stack([rows, best[rows]], axis=1).astype(np.int32)[order]
        return Correspondences(pairs, np.clip(scores[order], 0, 1).astype(np.float32))

    def _search(self, d0, d1, norm0, norm1):
        """Nearest row of d1 for each of d0, squared distances to it and to the next, and from each of d1 to d0."""
        n0, n1 = len(d0), len(d1)
        best, first = np.empty(n0, np.int64), np.empty(n0, np.float32)
        second, least1 = np.full(n0, np.inf, np.float32), np.full(n1, np.inf, np.float32)
        for start in range(0, n0, self.options.chunk):
            rows = slice(start, start + self.options.chunk)
            block = d0[rows]
            distance = block @ d1.T
            distance *= -2
            distance += norm0[rows, None]
            distance += norm1
            np.minimum(least1, distance.min(axis=0), out=least1)
            nearest = distance.argmin(axis=1)
            near = _squared(block, d1[nearest])
            if n1 > 1:
                distance[np.arange(len(block)), nearest] = np.inf
                other = distance.argmin(axis=1)
                far = _squared(block, d1[other])
                swap = (far < near) | ((far == near) & (other < nearest))
                nearest[swap] = other[swap]
                near, second[rows] = np.minimum(near, far), np.maximum(near, far)
            best[rows], first[rows] = nearest, near
        return best, first, second, least1


def _first_of_each(best: np.ndarray, first: np.ndarray) -> np.ndarray:
    """True for the row that is nearest to its ``best``, the first of several."""
    order = np.lexsort((np.arange(len(best)), first, best))
    winner = np.zeros(len(best), bool)
    winner[order[np.unique(best[order], return_index=True)[1]]] = True
    return winner


def _squared(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Squared distances of rows: exact for equal ones, where the expanded form leaves the rounding of the norms."""
    difference = a - b
    return np.einsum("nd,nd->n", difference, difference)
