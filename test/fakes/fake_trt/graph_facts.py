"""What TensorRT would find out of an ONNX graph: types, which inputs are shapes, which outputs depend on data."""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx
from onnx import TensorProto, shape_inference

_TYPES = {
    TensorProto.FLOAT: "FLOAT",
    TensorProto.FLOAT16: "HALF",
    TensorProto.BFLOAT16: "BF16",
    TensorProto.INT8: "INT8",
    TensorProto.INT32: "INT32",
    TensorProto.INT64: "INT64",
    TensorProto.BOOL: "BOOL",
    TensorProto.UINT8: "UINT8",
}
_DATA_DEPENDENT = {"NonZero", "NonMaxSuppression", "Compress", "Unique"}
# Operator -> its operands that say a shape.
_SHAPE_OPERANDS = {
    "Reshape": (1,),
    "Expand": (1,),
    "Slice": (1, 2, 4),
    "ConstantOfShape": (0,),
    "Range": (0, 1, 2),
    "Tile": (1,),
    "TopK": (1,),
    "Resize": (3,),
    "Pad": (1,),
    "OneHot": (1,),
    "Split": (1,),
}


@dataclass
class Tensor:
    """An input or output of the network: ``shape`` has -1 where dynamic, ``dims`` the names of those sizes."""

    name: str
    dtype: str
    shape: list[int]
    dims: list[str]
    is_shape: bool = False
    data_dependent: bool = False


@dataclass
class Layer:
    """A layer, by the name of its ONNX node."""

    name: str
    op: str
    inputs: list[str]
    outputs: list[str]


@dataclass
class Facts:
    """All of a network.

    ``unequal_branches``: nodes If whose branches give other shapes. ``shapes_of_data``: nodes that take a shape from
    data, which TensorRT refuses. ``ks``: tensors that say how many a TopK takes.
    """

    inputs: list[Tensor]
    outputs: list[Tensor]
    layers: list[Layer]
    types: dict[str, str] = field(default_factory=dict)
    has_if: bool = False
    unequal_branches: list[str] = field(default_factory=list)
    shapes_of_data: list[str] = field(default_factory=list)
    ks: list[str] = field(default_factory=list)


def facts(model: onnx.ModelProto) -> Facts:
    """Of a model that the checker of onnx has passed."""
    inferred = shape_inference.infer_shapes(model, data_prop=True)
    graph = inferred.graph
    fixed = {each.name for each in graph.initializer}
    inputs = [_tensor(each) for each in graph.input if each.name not in fixed]
    outputs = [_tensor(each) for each in graph.output]
    known = {each.name: _type(each) for each in [*graph.input, *graph.output, *graph.value_info]}
    known |= {each.name: _TYPES.get(each.data_type, "FLOAT") for each in graph.initializer}
    shapes = _shape_inputs(graph.node, {each.name for each in inputs})
    for each in inputs:
        each.is_shape = each.name in shapes and each.dtype in ("INT32", "INT64") and len(each.shape) < 2
    taint = _Taint({each.name for each in inputs if not each.is_shape})
    tainted = taint.outputs(graph.node)
    dims = {name for each in inputs for name in each.dims if name}
    for each in outputs:
        free = [size for size, dim in zip(each.shape, each.dims) if size < 0 and dim not in dims]
        each.data_dependent = each.name in tainted and bool(free)
    nodes = list(all_nodes(graph.node))
    outside = {name for node in graph.node for name in node.output} | fixed | {each.name for each in inputs}
    return Facts(
        inputs,
        outputs,
        _unique([*_constants(graph), *(_layer(node) for node in nodes)]),
        known,
        any(node.op_type in ("If", "Loop", "Scan") for node in nodes),
        [node.name or node.output[0] for node in nodes if node.op_type == "If" and _unequal(node)],
        taint.illegal,
        list(dict.fromkeys(node.input[1] for node in nodes if node.op_type == "TopK" and node.input[1] in outside)),
    )


def _unique(layers: list[Layer]) -> list[Layer]:
    """A name that was taken before gets a number, as in the parser."""
    seen: dict[str, int] = {}
    for layer in layers:
        seen[layer.name] = seen.get(layer.name, -1) + 1
        if seen[layer.name]:
            layer.name = f"{layer.name}_{seen[layer.name]}"
    return layers


def _constants(graph) -> list[Layer]:
    return [Layer(each.name, "Constant", [], [each.name]) for each in graph.initializer]


def _layer(node) -> Layer:
    return Layer(node.name or f"node_of_{node.output[0]}", node.op_type, list(node.input), list(node.output))


def _tensor(info) -> Tensor:
    sizes = info.type.tensor_type.shape.dim
    shape = [size.dim_value if size.HasField("dim_value") else -1 for size in sizes]
    return Tensor(info.name, _type(info), shape, [size.dim_param for size in sizes])


def _type(info) -> str:
    return _TYPES.get(info.type.tensor_type.elem_type, "FLOAT")


def _shape_inputs(nodes, inputs: set[str]) -> set[str]:
    """Inputs from which a shape is computed."""
    makers = {name: node for node in nodes for name in node.output}
    waiting, seen = [], set()
    for node in all_nodes(nodes):
        waiting += _operands(node)
    while waiting:
        name = waiting.pop()
        if name in seen or not name:
            continue
        seen.add(name)
        node = makers.get(name)
        if node is not None and node.op_type not in ("Shape", "Size") and node.op_type not in _DATA_DEPENDENT:
            waiting += node.input
    return seen & inputs


class _Taint:
    """Follows through the graph which values come of data, and which shapes are known only when data are."""

    def __init__(self, data: set[str]):
        self.values, self.late, self.shapes = set(data), set(), set()
        self.illegal: list[str] = []  # nodes that take a shape from data, which the library refuses

    def outputs(self, nodes) -> set[str]:
        """Names of tensors whose shape depends on data."""
        for node in nodes:
            self._node(node)
        return self.shapes

    def _node(self, node) -> None:
        for graph in _subgraphs(node):
            self.outputs(graph.node)
        inside = [each.name for graph in _subgraphs(node) for each in graph.output]
        used = [*node.input, *inside]
        operands = _operands(node)
        if any(name in self.values for name in operands):
            self.illegal.append(node.name or node.output[0])
        if (
            node.op_type in _DATA_DEPENDENT
            or any(name in self.late for name in operands)
            or any(name in self.shapes for name in used)
            or (node.op_type == "If" and node.input[0] in self.values and _unequal(node))
        ):
            self.shapes.update(node.output)
        if node.op_type in ("Shape", "Size"):
            if any(name in self.shapes for name in used):
                self.late.update(node.output)
            return
        for kind in (self.values, self.late):
            if any(name in kind for name in used):
                kind.update(node.output)


def _operands(node) -> list[str]:
    return [node.input[i] for i in _SHAPE_OPERANDS.get(node.op_type, ()) if i < len(node.input) and node.input[i]]


def _subgraphs(node) -> list:
    return [a.g for a in node.attribute if a.type == onnx.AttributeProto.GRAPH]


def all_nodes(nodes):
    """Of a graph and the graphs in it."""
    for node in nodes:
        yield node
        for graph in _subgraphs(node):
            yield from all_nodes(graph.node)


def _unequal(node) -> bool:
    """True where the branches of an If give another shape; what is not known counts as equal."""
    branches = [[_tensor(each) for each in graph.output] for graph in _subgraphs(node)]
    for one, other in zip(*branches):
        if len(one.shape) != len(other.shape):
            return True
        if any(a != b for a, b in zip(zip(one.shape, one.dims), zip(other.shape, other.dims))):
            return True
    return False
