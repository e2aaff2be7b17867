"""Which shapes the outputs have, before a run."""

from __future__ import annotations

import numpy as np

from .dims import NUMPY
from .graph_facts import Tensor

K_LIMIT = 3840  # of a TopK, says NVIDIA's documentation of ITopKLayer


class Prediction:
    """Runs the graph once on ones: shapes that depend on no data are the same at every data.

    Args:
        ks: names of tensors that say how many a TopK takes.
    """

    def __init__(self, session, inputs: list[Tensor], outputs: list[Tensor], ks: list[str]):
        self._session, self._inputs, self._outputs = session, inputs, outputs
        given = {each.name for each in inputs}
        self._ks, self._given_ks = [k for k in ks if k not in given], [k for k in ks if k in given]
        self._known: dict[tuple, tuple[dict[str, tuple[int, ...]], int]] = {}
        self._dims = {dim for each in inputs for dim in each.dims if dim}

    def shapes(self, shapes: dict[str, tuple[int, ...]], values: dict[str, list[int]]) -> dict[str, tuple[int, ...]]:
        """Of all outputs, as if all data were ones. Raises RuntimeError where the inputs' shapes do not go together."""
        return self._run(shapes, values)[0]

    def largest_k(self, shapes, values) -> int:
        """The most that a TopK takes; 0 without one."""
        return self._run(shapes, values)[1]

    def told(self, output: Tensor, shapes, values) -> tuple[int, ...]:
        """Shape of one output, -1 where it depends on data."""
        real = self.shapes(shapes, values)[output.name]
        if not output.data_dependent:
            return real
        sizes = zip(real, output.shape, output.dims)
        return tuple(size if declared >= 0 or dim in self._dims else -1 for size, declared, dim in sizes)

    def _run(self, shapes, values):
        key = (tuple(sorted(shapes.items())), tuple((name, tuple(value)) for name, value in sorted(values.items())))
        if key not in self._known:
            feed = {}
            for each in self._inputs:
                shape, kind = shapes.get(each.name, tuple(each.shape)), NUMPY[each.dtype]
                feed[each.name] = np.array(values[each.name], kind).reshape(shape) if each.is_shape else None
                if not each.is_shape:
                    feed[each.name] = np.ones(shape, kind)
            names = [each.name for each in self._outputs]
            try:
                results = self._session.run([*names, *self._ks], feed)
            except Exception as failure:  # onnxruntime raises kinds of its own
                raise RuntimeError(str(failure)) from failure
            computed = [int(k.max()) for k in results[len(names) :]]
            most = max([*computed, *(max(values[k]) for k in self._given_ks)], default=0)
            self._known[key] = ({name: result.shape for name, result in zip(names, results)}, most)
        return self._known[key]
