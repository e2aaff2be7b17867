"""Small ONNX graphs, their half-precision twins and what ONNX Runtime makes of them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from vslam_features.graph import fp16, rules

LEVELS = ("ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL")
FLOAT, HALF = TensorProto.FLOAT, TensorProto.FLOAT16


def graph(text: str, initializers: dict[str, np.ndarray] | None = None, opset: int = 18) -> onnx.ModelProto:
    """A model of ``onnx.parser`` text (signature and nodes), each node named by its first output."""
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}, "com.microsoft" : 1]> g {text}')
    model.graph.initializer.extend(numpy_helper.from_array(a, name) for name, a in (initializers or {}).items())
    for node in all_nodes(model.graph):
        node.name = node.output[0]
    return model


def half_of(model: onnx.ModelProto, keep=None, **options) -> tuple[onnx.ModelProto, fp16.Half]:
    """The twin, proved to be standard, with the types of all its values inferred."""
    half = fp16.to_half(ir.from_proto(model), keep or rules.union(), **options)
    proto = ir.to_proto(half.model)
    onnx.checker.check_model(proto, full_check=True)
    return onnx.shape_inference.infer_shapes(proto, check_type=True, strict_mode=True, data_prop=True), half


def run(model: onnx.ModelProto, inputs: dict, level: str = "ORT_ENABLE_ALL") -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, inputs)


def bodies(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    return [a.g for a in node.attribute if a.type == onnx.AttributeProto.GRAPH]


def all_nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for body in bodies(node):
            yield from all_nodes(body)


def types(graph: onnx.GraphProto) -> dict[str, int]:
    """Element type of each value by name, those of bodies too."""
    found = {v.name: v.type.tensor_type.elem_type for v in (*graph.input, *graph.output, *graph.value_info)}
    found |= {t.name: t.data_type for t in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant":
            found[node.output[0]] = node.attribute[0].t.data_type
        for body in bodies(node):
            found |= types(body)
    return found


def types_of(model: onnx.ModelProto, name: str) -> list[int]:
    """Element types of the inputs and outputs of the node that has this name."""
    node, known = next(n for n in all_nodes(model.graph) if n.name == name), types(model.graph)
    return [known[value] for value in (*node.input, *node.output) if value]


def constants(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}


def count(model: onnx.ModelProto, op_type: str) -> int:
    return sum(node.op_type == op_type for node in all_nodes(model.graph))


class Builder:
    """Grows a graph of (3, 4) float32 values, every kind of node from what is there; values stay within 4."""

    KINDS = (
        *("tanh", "add", "mul", "matmul", "norm", "softmax", "concat", "where", "cast", "double", "resize", "if"),
        *("range", "masked", "topk", "shape", "clip", "loop"),
    )

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[TensorProto] = []
        self.values = ["x", "y"]

    def constant(self, value, dtype=np.float32) -> str:
        name = f"c{len(self.initializers)}"
        self.initializers.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def node(self, op: str, *inputs: str, outputs: int = 1, **attributes) -> str:
        names = [f"v{len(self.nodes)}_{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(op, inputs, names, f"n{len(self.nodes)}", **attributes))
        return names[0]

    def add(self, kind: str, i: int, j: int) -> None:
        a, b = self.values[i % len(self.values)], self.values[j % len(self.values)]
        self.values.append(getattr(self, "_" + kind)(a, b))

    def model(self) -> onnx.ModelProto:
        """Outputs: the last value, and one in the middle that others may read."""
        outputs = list(dict.fromkeys([self.values[-1], self.values[len(self.values) // 2]]))
        outputs = [self.node("Identity", v) if v in "xy" else v for v in outputs]
        inputs = [helper.make_tensor_value_info(n, FLOAT, [3, 4]) for n in "xy"]
        inputs.append(helper.make_tensor_value_info("flag", TensorProto.BOOL, []))
        infos = [helper.make_tensor_value_info(n, FLOAT, [3, 4]) for n in outputs]
        made = helper.make_graph(self.nodes, "random", inputs, infos, self.initializers)
        return helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)

    def _limited(self, value: str) -> str:
        return self.node("Clip", value, self.constant(-4), self.constant(4))

    def _tanh(self, a, b):
        return self.node("Tanh", a)

    def _add(self, a, b):
        return self._limited(self.node("Add", a, b))

    def _mul(self, a, b):
        return self._limited(self.node("Mul", self.node("Tanh", a), b))

    def _matmul(self, a, b):
        return self._limited(self.node("MatMul", a, self.constant(self.rng.normal(0, 0.4, (4, 4)))))

    def _norm(self, a, b):
        scale, bias = (self.constant(self.rng.uniform(0.5, 1, 4)) for _ in range(2))
        return self.node("LayerNormalization", a, scale, bias, epsilon=0.1)  # large: no magnified rounding

    def _softmax(self, a, b):
        return self.node("Softmax", a, axis=-1)

    def _concat(self, a, b):
        both = self.node("Concat", a, b, axis=0)
        return self.node("Slice", both, self.constant([1], np.int64), self.constant([4], np.int64))

    def _where(self, a, b):
        return self.node("Where", self.node("Greater", a, b), a, b)

    def _cast(self, a, b):
        rows = self.node("Cast", self.node("Shape", a), to=FLOAT)  # [3, 4]
        rows = self.node("ReduceMax", rows, keepdims=0)
        return self.node("Div", a, rows)

    def _double(self, a, b):
        # Not two Casts in a row: ONNX Runtime 1.32 drops the first, though a branch of If reads it.
        return self.node("Cast", self.node("Tanh", self.node("Cast", a, to=TensorProto.DOUBLE)), to=FLOAT)

    def _resize(self, a, b):
        image = self.node("Reshape", a, self.constant([1, 1, 3, 4], np.int64))
        image = self.node("Resize", image, "", self.constant([1, 1, 2, 2]), mode="linear")
        image = self.node("Resize", image, "", "", self.constant([1, 1, 3, 4], np.int64), mode="linear")
        return self.node("Reshape", image, self.constant([3, 4], np.int64))

    def _if(self, a, b):
        """One branch reads values from outside, the other also a constant of its own."""
        n = len(self.nodes)

        def branch(name, *nodes):
            out = helper.make_tensor_value_info(nodes[-1].output[0], FLOAT, [3, 4])
            own = [numpy_helper.from_array(np.full(4, 0.3, np.float32), f"{name}{n}_c")] if name == "else" else []
            return helper.make_graph(nodes, f"{name}{n}", [], [out], own)

        then = branch("then", helper.make_node("Tanh", [a], [f"t{n}"], f"then{n}_0"))
        other = branch(
            "else",
            helper.make_node("Sigmoid", [b], [f"e{n}"], f"else{n}_0"),
            helper.make_node("Sub", [f"e{n}", f"else{n}_c"], [f"f{n}"], f"else{n}_1"),
        )
        return self.node("If", "flag", then_branch=then, else_branch=other)

    def _loop(self, a, b):
        """Twice: carried = (carried + b) / 2."""
        n = len(self.nodes)
        i, on = (
            helper.make_tensor_value_info(f"{k}{n}", t, [])
            for k, t in (("i", TensorProto.INT64), ("on", TensorProto.BOOL))
        )
        carried, result = (helper.make_tensor_value_info(f"{k}{n}", FLOAT, [3, 4]) for k in ("in", "out"))
        on_out = helper.make_tensor_value_info(f"stay{n}", TensorProto.BOOL, [])
        body = helper.make_graph(
            [
                helper.make_node("Identity", [f"on{n}"], [f"stay{n}"], f"body{n}_0"),
                helper.make_node("Mean", [f"in{n}", b], [f"out{n}"], f"body{n}_1"),
            ],
            *(f"body{n}", [i, on, carried], [on_out, result]),
        )
        return self.node("Loop", self.constant(2, np.int64), "", a, body=body)

    def _range(self, a, b):
        steps = self.node("Range", self.constant(0), self.constant(1), self.constant(0.25))
        return self._limited(self.node("Add", a, steps))

    def _masked(self, a, b):
        """As attention masks: all but what is larger than -3, which one column always is."""
        mask = self.node("Less", self.constant([-9.0, 9, 9, -9]), a)
        return self.node("Softmax", self.node("Where", mask, a, self.constant(-1e9)), axis=-1)

    def _topk(self, a, b):
        return self.node("TopK", a, self.constant([4], np.int64), outputs=2, axis=-1)

    def _shape(self, a, b):
        filled = self.node("ConstantOfShape", self.node("Shape", a), value=helper.make_tensor("", FLOAT, [1], [0.25]))
        return self._limited(self.node("Sub", a, filled))

    def _clip(self, a, b):
        return self.node("Clip", a, self.constant(0), self.constant(np.finfo(np.float32).max))
