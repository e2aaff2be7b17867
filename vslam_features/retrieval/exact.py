"""Exact search: what indexes that scan all descriptors have in common."""

from __future__ import annotations

import operator
from abc import abstractmethod
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ..errors import DataError
from ..runtimes.hardware import usable_cpus
from .base import UNIT_TOLERANCE, Index, check_descriptors

BLOCK_BYTES = 24 * 2**20
_FIRST_ROWS = 16
_QUERIES = 64  # that are scanned for at once
_RANKED = 64  # rows in f64 at once
_MOST_THREADS = 8  # beyond, memory is not faster


class ExactIndex(Index):
    """The k largest inner products with the stored vectors, as exact as f64 makes them.

    Vectors are stored in blocks, which never move: an add copies its own vector only, and no more than the last block
    is room in waiting. The first blocks are small, so that a small map takes little.

    A subclass scans the blocks in f32 and names all rows that may be among the best; those are ranked here by their
    inner products in f64. So rounding in the scan, which depends on the library, the number of threads and the place in
    a block, changes no result, equal vectors are equally similar, and equal similarities rank the older keyframe first.

    Args:
        block_bytes: size of a block.
        dtype: of the stored vectors.
        prepare: called once in each of the threads that scan.
    """

    def __init__(self, block_bytes: int, dtype: type, prepare: Callable[[], None] | None = None):
        self._block_bytes, self._dtype = block_bytes, np.dtype(dtype)
        # Threads of our own: those of numpy's BLAS and of faiss wait for each other at the end of each block, several
        # times as long as a search takes where other work has the cores, as on a robot.
        self._pool = ThreadPoolExecutor(min(usable_cpus(), _MOST_THREADS), "index", prepare)
        self._ids = array("q")
        self._blocks: list[np.ndarray] = []
        self._starts: list[int] = []  # the first row of each block
        self._room = 0
        self._dimension: int | None = None

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def nbytes(self) -> int:
        """See :attr:`Index.nbytes`."""
        return sum(block.nbytes for block in self._blocks) + len(self._ids) * self._ids.itemsize

    def add_batch(self, ids: Sequence[int], descriptors: np.ndarray | Sequence[np.ndarray]) -> None:
        """See :meth:`Index.add_batch`."""
        ids = self._checked_ids(ids)
        d = check_descriptors(descriptors, self._dimension, [f" of keyframe {i}" for i in ids])
        if not ids:
            return
        self._dimension, done = d.shape[1], 0
        while done < len(d):
            row = len(self) + done
            if row == self._room:
                self._grow()
            b = bisect_right(self._starts, row) - 1
            at = row - self._starts[b]
            count = min(len(d) - done, len(self._blocks[b]) - at)
            self._blocks[b][at : at + count] = d[done : done + count]
            done += count
        self._ids.extend(ids)  # only now are the rows there

    def search_batch(
        self, descriptors: np.ndarray | Sequence[np.ndarray], k: int, newest_ids: Sequence[int]
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """See :meth:`Index.search_batch`."""
        k, newest = _whole("k", k), [_whole("newest id", i) for i in newest_ids]
        if k < 1:
            raise DataError(f"index: k must be at least 1, got {k}")
        d = check_descriptors(descriptors, self._dimension, [f" of query {i}" for i in range(len(newest))])
        limits = [bisect_right(self._ids, n) for n in newest]
        found = [(np.empty(0, np.int64), np.empty(0, np.float32))] * len(d)
        some = [i for i, limit in enumerate(limits) if limit]
        for first in range(0, len(some), _QUERIES):
            chosen = some[first : first + _QUERIES]
            # What is asked for takes memory, what is not there does not.
            rows = self._scan(d[chosen], [limits[i] for i in chosen], min(k, len(self)), _margin(d.shape[1]))
            for i, candidates in zip(chosen, rows):
                found[i] = self._rank(d[i], candidates, k)
        return found

    @abstractmethod
    def _allocate(self, rows: int, dimension: int) -> np.ndarray:
        """A new block: (rows, dimension) of the index's dtype."""

    @abstractmethod
    def _scan(self, queries: np.ndarray, limits: list[int], k: int, margin: float) -> list[np.ndarray]:
        """For each of (q, D) queries the rows, ascending, among its first ``limit`` > 0 that may be one of the best k.

        Those are all whose similarity in f32 is at most ``margin`` below the k-th largest.
        """

    def _each(self, work: Callable, blocks: list) -> list:
        """``work`` of each, in the threads of this index."""
        try:
            done = self._pool.map(work, blocks)
        except RuntimeError:  # none is to be had, as where the main thread has ended and others go on
            done = map(work, blocks)
        return list(done)

    def _grow(self) -> None:
        """Append a block: as many rows as there are, up to the size of a block."""
        most = max(1, self._block_bytes // (self._dimension * self._dtype.itemsize))
        block = self._allocate(min(max(self._room, _FIRST_ROWS), most), self._dimension)
        self._starts.append(self._room)
        self._blocks.append(block)
        self._room += len(block)

    def _rank(self, query: np.ndarray, rows: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids and similarities of the best k of these rows, which ascend."""
        wide, similarity = query.astype(np.float64), np.empty(len(rows))
        for i in range(0, len(rows), _RANKED):
            # numpy's own sum: the result of a row does not depend on its place, as in a matrix product.
            similarity[i : i + _RANKED] = (self._vectors(rows[i : i + _RANKED]) * wide).sum(axis=1)
        order = np.argsort(-similarity, kind="stable")[:k]
        return np.array([self._ids[r] for r in rows[order]], np.int64), similarity[order].astype(np.float32)

    def _vectors(self, rows: np.ndarray) -> np.ndarray:
        """(n, D) f64 of these rows."""
        out = np.empty((len(rows), self._dimension))
        for i, row in enumerate(rows):
            b = bisect_right(self._starts, row) - 1
            out[i] = self._blocks[b][row - self._starts[b]]
        return out

    def _checked_ids(self, ids: Sequence[int]) -> list[int]:
        last, out = self._ids[-1] if self._ids else -1, []
        for kf_id in ids:
            kf_id = _whole("keyframe id", kf_id)
            if not last < kf_id < 2**63:
                after = f"after {last}" if last >= 0 else "as the first"
                raise DataError(f"index: keyframe ids must increase, from 0 on, got {kf_id} {after}")
            out.append(last := kf_id)
        return out


def _whole(name: str, value) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise DataError(f"index: {name} must be a whole number, got {value!r}") from None


def _margin(dimension: int) -> float:
    """Twice the most by which an inner product in f32, summed in any order, can be wrong.

    Higham, Accuracy and Stability of Numerical Algorithms (2002), eq. 3.5: the error is at most n u / (1 - n u) times
    the inner product of the absolute values, which is at most the product of the lengths.
    """
    nu = dimension * 2.0**-24
    return 2 * nu / (1 - nu) * (1 + 2 * UNIT_TOLERANCE) ** 2  # twice the tolerance: rounding to f16 lengthens, too
