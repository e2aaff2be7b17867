"""Keys of attention less their mean, which changes nothing but rounding.

softmax(q (k_j - c)) is softmax(q k_j) for any c: the logits of a query move together. Where the keys have much in
common, their logits are large and differ little, and BF16, with steps of 4 at 1000, loses the difference. The mean is
taken before the keys are rounded, of half precision in float32.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np
import onnx_ir as ir

from .attention_cores import Core
from .names import Names

# Logits that are moved by one number a row are moved by one number a row after these.
_COMMUTE = {"Add", "Cast", "Identity", "ReduceMax", "Squeeze", "Unsqueeze"}
_AXES_ARE_AN_INPUT = 18  # of ReduceMean, from this opset on


def centre_keys(graph: ir.Graph, cores: Collection[Core]) -> int:
    """Centres the keys of all cores where it is sure to change nothing; their number.

    It is not where the logits are turned, shared by several cores, or read by others; where a scale differs from key
    to key; where a ceiling or a floor is not relative to the logits.
    """
    names, done = Names(graph), 0
    products = [core.nodes[0] for core in cores]
    for core in cores:
        if products.count(core.nodes[0]) == 1 and _commutes(core):
            _centre(graph, core.nodes[0], names)
            done += 1
    return done


def _commutes(core: Core) -> bool:
    own = set(core.nodes)
    before = core.nodes[: core.nodes.index(core.softmax)]
    if core.softmax.op_type != "Softmax":
        return False
    for node in before:
        read = any(value.is_graph_output() or any(u.node not in own for u in value.uses()) for value in node.outputs)
        if read or (node is not before[0] and not _moves_along(node, own)):
            return False
    return True


def _moves_along(node: ir.Node, own: Collection[ir.Node]) -> bool:
    others = [value for value in node.inputs if value is not None and value.producer() not in own]
    if node.op_type in ("Mul", "Div"):
        return all(value.shape is not None and all(size == 1 for size in value.shape) for value in others)
    if node.op_type == "Max":  # a floor below the largest, that moves as far
        return len({_base(value, own) for value in node.inputs}) == 1
    if node.op_type == "Sub":
        return node.inputs[0] not in others
    if node.op_type == "Where":
        return node.inputs[0] in others
    return node.op_type in _COMMUTE


def _base(value: ir.Value, own: Collection[ir.Node]) -> ir.Value:
    """What a value is the largest of, or that plus a number."""
    while (node := value.producer()) in own and node.op_type in ("Add", "ReduceMax"):
        value = next(v for v in node.inputs if v is not None and v.producer() in own)
    return value


def _centre(graph: ir.Graph, product: ir.Node, names: Names) -> None:
    keys = product.inputs[1]  # (..., width, keys)
    opset = graph.opset_imports.get("", graph.opset_imports.get("ai.onnx", 0))
    new: list[ir.Node] = []

    def add(op: str, inputs: Iterable[ir.Value], dtype: ir.DataType, shape, **attributes) -> ir.Value:
        name = names.new(f"{keys.name}_{op.lower()}")
        result = ir.Value(name=name, type=ir.TensorType(dtype), shape=shape)
        new.append(ir.node(op, list(inputs), attributes, outputs=[result], name=name))
        return result

    single, value, axes = ir.DataType.FLOAT, keys, [-1]
    shape = None if keys.shape is None else ir.Shape([*keys.shape[:-1], 1])
    if keys.dtype == ir.DataType.FLOAT16:
        value = add("Cast", [keys], single, keys.shape, to=int(single))
    if opset >= _AXES_ARE_AN_INPUT:
        axes_value = add("Constant", [], ir.DataType.INT64, ir.Shape([1]), value=ir.tensor(np.array(axes)))
        mean = add("ReduceMean", [value, axes_value], value.dtype, shape, keepdims=1)
    else:
        mean = add("ReduceMean", [value], value.dtype, shape, axes=axes, keepdims=1)
    if mean.dtype != keys.dtype:
        mean = add("Cast", [mean], keys.dtype, shape, to=int(keys.dtype))
    centred = add("Sub", [keys, mean], keys.dtype, keys.shape)
    product.graph.insert_before(product, new)
    product.replace_input_with(1, centred)
