"""The constants of a graph in half precision: initialisers, and what Constant nodes hold."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from .constants import constant_tensor
from .names import Names

SMALLEST = 2.0**-24  # half number above 0
LARGEST = 65504.0  # finite one


def is_wide(array: np.ndarray) -> bool:
    """Whether there is a finite number above 65504 in size."""
    ends = np.array([array.min(), array.max()])
    if not np.isfinite(ends).all():
        ends = array[np.isfinite(array)]
    return bool((np.abs(ends) > LARGEST).any())


class HalfConstants:
    """Makes each constant's half twin once, as an initialiser, and counts what the range does not hold.

    Attributes:
        below, below_in: values below the range, and the constants that hold them. smallest: of them, in size.
    """

    def __init__(self, graph: ir.Graph):
        self.names = Names(graph)
        self._wide: dict[ir.Value, bool] = {}
        self._half: dict[ir.Value, ir.Value] = {}
        self.below, self.below_in, self.smallest = 0, 0, 0.0

    def array(self, value: ir.Value | None) -> np.ndarray | None:
        """Values of a float32 constant; None for what is none, such as an initialiser that an input may replace."""
        tensor = constant_tensor(value)
        return None if tensor is None or tensor.dtype != ir.DataType.FLOAT else tensor.numpy()

    def is_constant(self, value: ir.Value) -> bool:
        """Whether :meth:`array` has values."""
        return self.array(value) is not None

    def wide(self, value: ir.Value | None) -> bool:
        """Whether a constant holds a finite number above 65504."""
        if value not in self._wide:
            array = self.array(value)
            if array is None or not array.size:
                return False
            self._wide[value] = is_wide(array)
        return self._wide[value]

    def wide_in_any_type(self, value: ir.Value | None) -> bool:
        """Whether a constant of whole or of double numbers, as a Cast takes it, holds a finite one above 65504."""
        tensor = constant_tensor(value)
        kinds = (ir.DataType.DOUBLE, ir.DataType.INT32, ir.DataType.INT64, ir.DataType.UINT32, ir.DataType.UINT64)
        return tensor is not None and tensor.dtype in kinds and tensor.size > 0 and is_wide(tensor.numpy())

    def half(self, value: ir.Value) -> ir.Value:
        """The initialiser that holds a constant's values as float16."""
        if value not in self._half:
            name = self.names.new(f"{value.name}_fp16")
            tensor = ir.tensor(self._rounded(self.array(value)), name=name)
            twin = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=tensor.shape, const_value=tensor)
            maker = value.producer()
            (value.graph if maker is None else maker.graph).register_initializer(twin)
            self._half[value] = twin
        return self._half[value]

    def _rounded(self, array: np.ndarray) -> np.ndarray:
        half = array.astype(np.float16)
        below = (np.abs(array) < SMALLEST) & (array != 0)
        if below.any():
            half[below] = np.copysign(SMALLEST, array[below])
            smallest = float(np.abs(array[below]).min())
            self.smallest = min(self.smallest, smallest) if self.below else smallest
            self.below += int(below.sum())
            self.below_in += 1
        return half

    def drop_unread(self) -> None:
        """Removes constants that only their twins are read of; the twin gets the name."""
        for value, twin in self._half.items():
            if value.uses() or value.is_graph_output():
                continue
            maker = value.producer()
            if maker is None:
                del value.graph.initializers[value.name]
            else:
                maker.graph.remove(maker, safe=True)
            graph, name = twin.graph, value.name
            del graph.initializers[twin.name]
            twin.name = twin.const_value.name = name
            graph.register_initializer(twin)
