"""Exact search over descriptors in half precision, by faiss: half the memory, for large maps."""

from __future__ import annotations

import numpy as np

from ..errors import PluginError
from .exact import BLOCK_BYTES, ExactIndex

_SPARE = 8
"""Neighbours that a block is asked for beyond k: mostly enough to see all that rounding might have put behind."""


class Faiss(ExactIndex):
    """Vectors are rounded to f16 when they are added; queries are not.

    A block is a faiss ``IndexScalarQuantizer`` of fixed size whose codes are written in place: faiss itself would
    double and copy them as they grow.

    Raises:
        PluginError: faiss is not installed.
    """

    runtime = "faiss"

    def __init__(self, block_bytes: int = BLOCK_BYTES):
        self._faiss = faiss = _library()
        # One thread of faiss in each of ours: else each starts as many as there are cores. Threads keep what they are
        # given, so no reference to this index.
        super().__init__(block_bytes, np.float16, lambda: faiss.omp_set_num_threads(1))
        self._quantizers: list = []

    def _allocate(self, rows: int, dimension: int) -> np.ndarray:
        f = self._faiss
        quantizer = f.IndexScalarQuantizer(dimension, f.ScalarQuantizer.QT_fp16, f.METRIC_INNER_PRODUCT)
        nbytes = rows * quantizer.sa_code_size()
        quantizer.codes.resize(nbytes)
        quantizer.ntotal = rows
        self._quantizers.append(quantizer)  # owns the memory of the block
        return f.rev_swig_ptr(quantizer.codes.data(), nbytes).view(np.float16).reshape(rows, dimension)

    def _scan(self, queries: np.ndarray, limits: list[int], k: int, margin: float) -> list[np.ndarray]:
        blocks = [b for b, start in enumerate(self._starts) if start < max(limits)]
        found = self._each(lambda b: self._search_block(b, queries, limits, k + _SPARE), blocks)
        out = []
        for i, (query, limit) in enumerate(zip(queries, limits)):
            rows, similarity = (np.concatenate([f[part][i] for f in found]) for part in (0, 1))
            rows, similarity = rows[rows >= 0], similarity[rows >= 0]
            floor = np.partition(similarity, -k)[-k] - margin if len(rows) > k else -np.inf
            parts = [rows[similarity >= floor]]
            for b, (of_block, values) in zip(blocks, found):
                old_enough = self._blocks[b][: max(0, limit - self._starts[b])]
                if len(of_block[i]) < len(old_enough) and values[i, -1] >= floor:  # those it was not asked for as well
                    more = np.flatnonzero(old_enough.astype(np.float32) @ query >= floor)
                    parts.append(more + self._starts[b])
            out.append(np.unique(np.concatenate(parts)))
        return out

    def _search_block(self, b: int, queries: np.ndarray, limits: list[int], k: int) -> tuple[np.ndarray, np.ndarray]:
        """(q, <= k) rows and similarities, best first; row -1 where there are no more."""
        start, size = self._starts[b], len(self._blocks[b])
        rows = np.full((len(queries), min(k, size)), -1, np.int64)
        similarity = np.empty(rows.shape, np.float32)
        counts = np.clip(np.array(limits) - start, 0, size)  # so many rows of the block are old enough
        for count in np.unique(counts[counts > 0]):
            chosen, within = np.flatnonzero(counts == count), None
            if count < size:
                within = self._faiss.SearchParameters(sel=self._faiss.IDSelectorRange(0, int(count)))
            similarity[chosen], found = self._quantizers[b].search(queries[chosen], rows.shape[1], params=within)
            rows[chosen] = np.where(found >= 0, found + start, -1)
        return rows, similarity


def _library():
    try:
        import faiss
    except ImportError as error:
        raise PluginError(
            f"index plug-in 'faiss': its library is not there ({error}); pip install 'vslam_features[faiss]', "
            "or set retrieval.index to flat"
        ) from error
    return faiss
