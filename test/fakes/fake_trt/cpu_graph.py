"""The graph as ONNX Runtime can run it on a CPU: BF16 becomes float that is rounded to BF16 after every operator."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper, shape_inference


def for_cpu(model: onnx.ModelProto) -> bytes:
    """A serialized model with the same names of inputs and outputs, none of them BF16."""
    types = _types(model)
    if TensorProto.BFLOAT16 not in types.values():
        return model.SerializeToString()
    made = onnx.ModelProto()
    made.CopyFrom(model)
    _convert(made.graph, types)
    return made.SerializeToString()


def _convert(graph: onnx.GraphProto, types: dict[str, int]) -> None:
    """A graph and the bodies of its If and Loop nodes."""
    del graph.value_info[:]
    for i, each in enumerate(graph.initializer):
        if each.data_type == TensorProto.BFLOAT16:
            graph.initializer[i].CopyFrom(_as_float(each))
    for each in [*graph.input, *graph.output]:
        if each.type.tensor_type.elem_type == TensorProto.BFLOAT16:
            each.type.tensor_type.elem_type = TensorProto.FLOAT
    nodes = []
    for node in graph.node:
        for body in _bodies(node):
            _convert(body, types)
        nodes += _rounded(node, types)
    del graph.node[:]
    graph.node.extend(nodes)


def _bodies(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    return [body for a in node.attribute for body in ([a.g] if a.HasField("g") else a.graphs)]


def _types(model: onnx.ModelProto) -> dict[str, int]:
    """By the names of tensors, which are unique over all bodies."""
    found: dict[str, int] = {}
    graphs = [shape_inference.infer_shapes(model).graph]
    while graphs:
        graph = graphs.pop()
        ends = [*graph.input, *graph.value_info, *graph.output]
        found |= {each.name: each.type.tensor_type.elem_type for each in ends}
        found |= {each.name: each.data_type for each in graph.initializer}
        graphs += [body for node in graph.node for body in _bodies(node)]
    return found


def _rounded(node: onnx.NodeProto, types: dict[str, int]) -> list[onnx.NodeProto]:
    wide = [name for name in node.output if types.get(name) == TensorProto.BFLOAT16]
    if node.op_type == "Constant":
        for attribute in node.attribute:
            if attribute.name == "value" and attribute.t.data_type == TensorProto.BFLOAT16:
                attribute.t.CopyFrom(_as_float(attribute.t))
        return [node]
    if not wide:
        return [node]
    for attribute in node.attribute:
        if attribute.name == "to" and node.op_type == "Cast":
            attribute.i = TensorProto.FLOAT
    added = []
    for i, name in enumerate(node.output):
        if name in wide:
            node.output[i] = f"{name}__wide"
            cast = helper.make_node("Cast", [f"{name}__wide"], [f"{name}__bf16"], to=TensorProto.BFLOAT16)
            back = helper.make_node("Cast", [f"{name}__bf16"], [name], to=TensorProto.FLOAT)
            added += [cast, back]
    return [node, *added]


def _as_float(tensor: onnx.TensorProto) -> onnx.TensorProto:
    return numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float32), tensor.name)
