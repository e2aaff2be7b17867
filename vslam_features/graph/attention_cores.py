"""The cores of attention in a graph, softmax(Q K^T) V, found by structure: names differ from exporter to exporter.

A core is a Softmax over the last axis; what lies between it and one MatMul before it (scale, mask, floor, moves of
axes); and a MatMul of the weights after it. Both products are of computed values: a MatMul with constant weights is a
layer, and one with a constant grid reads a position, which needs its digits. The Attention of opset 23 is a core as a
whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from .rules import bodies

MOVES = {"Cast", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"}
# Between the first product and Softmax: scale, mask and bias, floor and ceiling.
_BETWEEN = MOVES | {"Add", "Clip", "Div", "Max", "Min", "Mul", "ReduceMax", "Sub", "Tanh", "Where"}
_SHAPES = {"Shape", "Size"}  # what follows from them alone is no feature
_LEAST_WIDTH = 8  # of values: positions, which are averaged by the same operators, have 2 or 3
LOOKED_FOR = (
    "Softmax over the last of 2 to 4 axes, before it a MatMul of two computed values, between them scale, mask, floor "
    f"and moves of axes only, after it a MatMul with computed values, {_LEAST_WIDTH} wide at least; or Attention"
)
BF16 = ir.DataType.BFLOAT16


@dataclass(frozen=True)
class Core:
    """``nodes``: in the order of the computation, the first is the one that is named.

    Args:
        softmax: the Softmax or Attention.
        logits: their shape (..., queries, keys), as far as the graph says.
    """

    nodes: tuple[ir.Node, ...]
    softmax: ir.Node
    logits: tuple[int | str | None, ...]

    @property
    def queries(self) -> int | str | None:
        """Tokens that attend: their number, its name, or None."""
        return self.logits[-2]

    @property
    def keys(self) -> int | str | None:
        """Tokens that are attended to."""
        return self.logits[-1]

    @property
    def heads(self) -> int | str | None:
        """Of three axes the first may be that of a batch, too."""
        return self.logits[-3] if len(self.logits) > 2 else 1

    @property
    def dtype(self) -> ir.DataType | None:
        """That the Softmax takes."""
        return self.softmax.inputs[0].dtype

    @property
    def emulated(self) -> bool:
        """Whether its inputs are rounded to BF16 and cast back."""
        return all(_rounded(value) for value in self.nodes[0].inputs[:2])


def find_cores(model: ir.Model) -> tuple[list[Core], dict[str, str]]:
    """Cores in the order of the graph, those in bodies of If and Loop among them; types and shapes must be inferred.

    Also why other Softmax nodes are none: name -> reason.
    """
    computed: set[ir.Value] = set()
    _mark(model.graph, computed)
    cores, others = [], {}
    for node in model.graph.all_nodes():
        if node.domain not in ("", "ai.onnx"):
            continue
        if node.op_type == "Attention":
            cores.append(Core((node,), node, _logits(node)))
        elif node.op_type == "Softmax":
            found = _core(node, computed)
            if isinstance(found, Core):
                cores.append(found)
            else:
                others[node.name or node.outputs[0].name] = found
    return cores, others


def _mark(graph: ir.Graph, computed: set[ir.Value]) -> None:
    """Adds the values that depend on what is in the inputs."""
    computed.update(value for value in graph.inputs if value.const_value is None)
    for node in graph:
        for body in bodies(node):
            _mark(body, computed)
        inner = (value for body in bodies(node) for value in body.outputs)
        if node.op_type not in _SHAPES and any(value in computed for value in (*node.inputs, *inner)):
            computed.update(node.outputs)


def _core(softmax: ir.Node, computed: set[ir.Value]) -> Core | str:
    """Or the reason why it is none."""
    shape = softmax.inputs[0].shape
    if shape is None or not 2 <= len(shape) <= 4:
        return "its rank is not known" if shape is None else f"it has {len(shape)} axes"
    axis = softmax.attributes["axis"].as_int() if "axis" in softmax.attributes else -1
    if axis not in (-1, len(shape) - 1):
        return f"it is over axis {axis}, not the last"
    first, between = _before(softmax.inputs[0], computed)
    if len(first) != 1:
        return f"{len(first) or 'no'} MatMul{'s' * bool(first)} of computed values before it"
    second, moves = _after(softmax.outputs[0], computed)
    if not second:
        return f"no MatMul with computed values, at least {_LEAST_WIDTH} wide, after it"
    return Core((*first, *between, softmax, *moves, *second), softmax, _sizes(shape))


def _logits(attention: ir.Node) -> tuple[int | str | None, ...]:
    """Shape of the logits of an Attention: its heads are an axis of the queries, or an attribute."""
    queries, keys = (_sizes(value.shape or (None, None)) for value in attention.inputs[:2])
    number = attention.attributes.get("q_num_heads")
    heads = queries[1] if len(queries) == 4 else None if number is None else number.as_int()
    more = any(value is not None for value in attention.inputs[4:6])  # keys and values of before
    return (heads, queries[-2], None if more else keys[-2])


def _sizes(shape) -> tuple[int | str | None, ...]:
    return tuple(size.value if isinstance(size, ir.SymbolicDim) else size for size in shape)


def _before(logits: ir.Value, computed: set[ir.Value]) -> tuple[list[ir.Node], list[ir.Node]]:
    """MatMuls of computed values that lead to the logits, and the nodes on the ways.

    What else is read on the ways, such as a mask, is not among them.
    """
    products: list[ir.Node] = []
    readers: dict[ir.Node, list[ir.Node]] = {}  # on possible ways
    waiting: list[tuple[ir.Value | None, ir.Node | None]] = [(logits, None)]
    while waiting:
        value, reader = waiting.pop()
        node = None if value is None else value.producer()
        product = node is not None and node.op_type == "MatMul" and all(v in computed for v in node.inputs)
        if node is None or not (product or node.op_type in _BETWEEN):
            continue
        if node in readers:
            readers[node].append(reader)
            continue
        readers[node] = [reader]
        if product:
            products.append(node)
        else:
            waiting += [(v, node) for v in (node.inputs[:1] if node.op_type in MOVES else node.inputs)]
    between: dict[ir.Node, None] = {}
    leading = list(products)
    while leading:
        for reader in readers[leading.pop()]:
            if reader is not None and reader not in between:
                between[reader] = None
                leading.append(reader)
    return products, list(between)


def _after(weights: ir.Value, computed: set[ir.Value]) -> tuple[list[ir.Node], list[ir.Node]]:
    """MatMuls of the weights with values, and the nodes on the ways to them."""
    products, moves = [], {}
    waiting: list[tuple[ir.Value, tuple[ir.Node, ...]]] = [(weights, ())]
    while waiting:
        value, way = waiting.pop()
        for node, i in value.uses():
            if node.op_type == "MatMul" and _averages(node.inputs[1 - i], i, computed):
                products.append(node)
                moves |= dict.fromkeys(way)
            elif node not in way and (i == 0 if node.op_type in MOVES else node.op_type == "Where" and i > 0):
                waiting.append((node.outputs[0], (*way, node)))
    return products, list(moves)


def _averages(values: ir.Value, weights: int, computed: set[ir.Value]) -> bool:
    """Whether a MatMul, whose input ``weights`` the weights are, averages what can be features."""
    axis = -1 if weights == 0 else -2
    width = values.shape[axis] if values.shape is not None and len(values.shape) >= -axis else None
    return values in computed and (not isinstance(width, int) or width >= _LEAST_WIDTH)


def _rounded(value: ir.Value | None) -> bool:
    """Whether it is cast from BF16, to which it was cast before."""
    casts = []
    for _ in range(2):
        maker = None if value is None else value.producer()
        if maker is None or maker.op_type != "Cast":
            return False
        value = maker.inputs[0]
        casts.append(value.dtype)
    return casts[0] == BF16 and casts[1] != BF16
