"""The graph as ONNX Runtime can run it on a CPU: BF16 becomes float that is rounded to BF16 after every operator."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper, shape_inference

_BF16, _FLOAT = TensorProto.BFLOAT16, TensorProto.FLOAT


def for_cpu(model: onnx.ModelProto, ks: list[str]) -> bytes:
    """A serialized model with the same names of inputs and outputs, none of them BF16.

    Args:
        ks: tensors that become outputs too.
    """
    made = onnx.ModelProto()
    made.CopyFrom(model)
    types: dict[str, int] = {}
    _collect(shape_inference.infer_shapes(model).graph, types)
    _change(made.graph, {name for name, kind in types.items() if kind == _BF16})
    named = {each.name for each in [*made.graph.output, *made.graph.input]}
    made.graph.output.extend(helper.make_tensor_value_info(k, TensorProto.INT64, None) for k in ks if k not in named)
    return made.SerializeToString()


def _collect(graph: onnx.GraphProto, types: dict[str, int]) -> None:
    for each in [*graph.input, *graph.value_info, *graph.output]:
        types[each.name] = each.type.tensor_type.elem_type
    types.update({each.name: each.data_type for each in graph.initializer})
    for node in graph.node:
        for inner in _subgraphs(node):
            _collect(inner, types)


def _change(graph: onnx.GraphProto, wide: set[str]) -> None:
    del graph.value_info[:]
    for each in [*graph.input, *graph.output]:
        if each.type.tensor_type.elem_type == _BF16:
            each.type.tensor_type.elem_type = _FLOAT
    for each in graph.initializer:
        if each.data_type == _BF16:
            each.CopyFrom(_as_float(each))
    nodes = []
    for node in graph.node:
        for inner in _subgraphs(node):
            _change(inner, wide)
        nodes += _rounded(node, wide)
    del graph.node[:]
    graph.node.extend(nodes)


def _rounded(node: onnx.NodeProto, wide: set[str]) -> list[onnx.NodeProto]:
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.TENSOR and attribute.t.data_type == _BF16:
            attribute.t.CopyFrom(_as_float(attribute.t))
        if attribute.name == "to" and attribute.i == _BF16:
            attribute.i = _FLOAT
    added = []
    for i, name in enumerate(node.output):
        if name in wide:
            node.output[i] = f"{name}__wide"
            added.append(helper.make_node("Cast", [f"{name}__wide"], [f"{name}__bf16"], to=_BF16))
            added.append(helper.make_node("Cast", [f"{name}__bf16"], [name], to=_FLOAT))
    return [node, *added]


def _subgraphs(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    return [a.g for a in node.attribute if a.type == onnx.AttributeProto.GRAPH]


def _as_float(tensor: onnx.TensorProto) -> onnx.TensorProto:
    return numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float32), tensor.name)
