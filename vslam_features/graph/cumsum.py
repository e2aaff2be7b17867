"""CumSum as a product with a constant triangular matrix.

TensorRT 10.3 on Jetson miscomputes a CumSum that it fuses with what feeds it, so that some pairs have no match
(tinynav, pull request 261). Over n values it is x @ T with T[i, j] = 1 where value i counts for the sum j: the upper
triangle, without its diagonal where the sum is exclusive, the lower one where it is reverse.

What differs: sums are added in another order, and one value of a row that is infinite or NaN makes the whole row NaN,
for 0 times it is; CumSum leaves what it has not reached.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import InlinePass, ShapeInferencePass

from ..errors import ConfigError, ModelFileError
from .constants import constant_tensor, drop_unread
from .names import Names

PATCH = "cumsum"
MAX_SIZE = 1024  # 4 MiB in float32
_DOMAINS = ("", "ai.onnx")


@dataclass(frozen=True)
class Sum:
    """A CumSum that was replaced: name of its output, its axis, from 0, and how many values lie along it."""

    name: str
    axis: int
    size: int
    exclusive: bool
    reverse: bool


@dataclass(frozen=True)
class MatMulSums:
    """The graph without CumSum, what was replaced, and how many bytes of constants are new."""

    model: ir.Model
    sums: tuple[Sum, ...]
    constant_bytes: int


def cumsum_to_matmul(model: ir.Model, max_size: int = MAX_SIZE) -> MatMulSums:
    """A copy in which each CumSum is a MatMul, in the bodies of If and Loop too; ``model`` stays as it is.

    Types are kept: the matrix has that of the values. Equal matrices are one initialiser of the main graph. Where the
    graph has no CumSum, nothing changes.

    Args:
        max_size: the most values along an axis. The matrix has their square: 4096 take 64 MiB in float32 and 15 times
            the time of CumSum.

    Raises:
        ConfigError: an axis is longer than ``max_size``.
        ModelFileError: a CumSum is of integers, or its axis or the length of it is not fixed in the graph.
    """
    model = model.clone()
    if model.functions:
        InlinePass()(model)
    ShapeInferencePass()(model)
    nodes = [n for n in model.graph.all_nodes() if n.op_type == "CumSum" and n.domain in _DOMAINS]
    found = [(node, _checked(node, max_size)) for node in nodes]
    matrices = _Matrices(model.graph)
    axes = dict.fromkeys(node.inputs[1] for node in nodes)
    for node, summed in found:
        _replace(node, summed, matrices)
    drop_unread(axes)
    return MatMulSums(model, tuple(summed for _, summed in found), matrices.nbytes)


def triangle(size: int, exclusive: bool, reverse: bool) -> np.ndarray:
    """The matrix (size, size) bool: whether value i (row) counts for the sum j (column)."""
    ones = np.ones((size, size), bool)
    return np.tril(ones, -1 if exclusive else 0) if reverse else np.triu(ones, 1 if exclusive else 0)


def _checked(node: ir.Node, max_size: int) -> Sum:
    value, name = node.inputs[0], node.outputs[0].name
    what = f"CumSum '{node.name or name}' cannot be a MatMul"
    if value.dtype is None or not value.dtype.is_floating_point():
        raise ModelFileError(
            f"{what}: it sums {value.dtype}; TensorRT has no product of integers, floats are not exact"
        )
    if value.shape is None or not len(value.shape):
        raise ModelFileError(f"{what}: '{value.name}' has shape {value.shape}; export it with shapes")
    axis = _axis(node, what, len(value.shape))
    size = value.shape[axis]
    if not isinstance(size, int):
        raise ModelFileError(
            f"{what}: axis {axis} of '{value.name}', {value.shape}, has no fixed length, and the matrix is a constant: "
            "export the model with a fixed one"
        )
    if size > max_size:
        raise ConfigError(
            f"{what}: it sums along {size} values, at most {max_size}; the matrix would take "
            f"{size * size * value.dtype.itemsize / 2**20:.0f} MiB, and the time grows with its size: for 4096 values "
            "it is 15 times that of CumSum. Raise --max-size where that is worth it"
        )
    return Sum(name, axis, size, _flag(node, "exclusive"), _flag(node, "reverse"))


def _axis(node: ir.Node, what: str, rank: int) -> int:
    tensor = constant_tensor(node.inputs[1])
    if tensor is None:
        raise ModelFileError(f"{what}: its axis '{node.inputs[1].name}' is computed while it runs, not a constant")
    array = tensor.numpy()
    if array.size != 1 or not -rank <= int(array.flat[0]) < rank:
        raise ModelFileError(f"{what}: its axis is {array.tolist()}, expected one from {-rank} to {rank - 1}")
    return int(array.flat[0]) % rank


def _flag(node: ir.Node, name: str) -> bool:
    return name in node.attributes and node.attributes[name].as_int() != 0


class _Matrices:
    """Each matrix once, as an initialiser of the main graph."""

    def __init__(self, graph: ir.Graph):
        self.graph, self.names = graph, Names(graph)
        self.nbytes = 0
        self._made: dict[tuple, ir.Value] = {}

    def get(self, summed: Sum, dtype: ir.DataType) -> ir.Value:
        key = summed.size, summed.exclusive, summed.reverse, dtype
        if key not in self._made:
            flags = f"{'_exclusive' * summed.exclusive}{'_reverse' * summed.reverse}"
            name = self.names.new(f"cumsum_{summed.size}{flags}")
            array = triangle(summed.size, summed.exclusive, summed.reverse).astype(dtype.numpy())
            tensor = ir.tensor(array, dtype=dtype, name=name)
            value = ir.Value(name=name, type=ir.TensorType(dtype), shape=tensor.shape, const_value=tensor)
            self.graph.register_initializer(value)
            self.nbytes += tensor.nbytes
            self._made[key] = value
        return self._made[key]


def _replace(node: ir.Node, summed: Sum, matrices: _Matrices) -> None:
    x = node.inputs[0]
    rank = len(x.shape)
    perm = [*range(rank)]
    perm[summed.axis], perm[-1] = perm[-1], perm[summed.axis]  # its own inverse
    turned = summed.axis != rank - 1
    new = []

    def add(op: str, inputs: list[ir.Value], end: str, shape: list, **attributes) -> ir.Value:
        name = matrices.names.new(f"{node.name or summed.name}_{end}")
        result = ir.Value(name=name, type=ir.TensorType(x.dtype), shape=ir.Shape(shape))
        new.append(ir.node(op, inputs, attributes, outputs=[result], name=name))
        return result

    last = [x.shape[i] for i in perm]
    rows = add("Transpose", [x], "last", last, perm=perm) if turned else x
    sums = add("MatMul", [rows, matrices.get(summed, x.dtype)], "matmul", last)
    if turned:
        sums = add("Transpose", [sums], "back", list(x.shape), perm=perm)
    ir.convenience.replace_nodes_and_values(node.graph, node, [node], new, node.outputs, [sums])
