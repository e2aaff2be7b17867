"""A graph in half precision, but for the nodes that a rule keeps in float32.

The type of each input and output follows from the operator's ONNX schema: what its type variables do not allow to be
float16 (scales of Resize, Range), and what an attribute decides (Cast, RandomNormal), stays as it is. So do operators
without a schema in ``onnx`` (those of a runtime), inputs and outputs of the graph, and those of the bodies of If, Loop
and Scan. Each value is cast once, where it is made.

Numbers that half precision has not:

- Constants other than 0 below 2^-24, the smallest half number, become 2^-24 with their sign: what guards a division
  against 0 still does. They are counted, and told in one line of the log.
- Constants above 65504 do not become infinite. The node that reads one stays in float32, and so does what its result
  goes through up to an operator whose results are small whatever comes in, such as Softmax after a mask of -1e9.

Whether the values between nodes fit is for the rule to see to: they depend on the input.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass

from .half_constants import HalfConstants, is_wide
from .rules import Rule, bodies

_log = logging.getLogger(__name__)
_FLOAT, _HALF = ir.DataType.FLOAT, ir.DataType.FLOAT16
# Schemas allow half precision here, and it would do harm: scales of quantised values, regions in parts of the image,
# indices and their number.
_SINGLE = {"QuantizeLinear", "DequantizeLinear"}
_SINGLE_INPUTS = {("Resize", "T2"), ("OneHot", "T1"), ("OneHot", "T2")}
# Whatever comes in, their results fit.
_BOUNDED = {"Softmax", "Hardmax", "Sigmoid", "HardSigmoid", "Tanh", "Softsign", "Erf", "Sign", "Sin", "Cos"}
# Elements from which a float32 node's constant is stored in half precision: below, a Cast takes as much room.
_WORTH_A_CAST = 1024


@dataclass(frozen=True)
class Half:
    """The graph in half precision, and what was done.

    Attributes:
        blocked: nodes that the rule kept in float32.
        wide: nodes that constants above 65504 kept there.
        casts: Cast nodes of the graph, those that it had among them.
        below_range: values of constants that became 2^-24, in ``below_range_constants`` constants, the smallest of size
            ``smallest`` (0 where there are none).
    """

    model: ir.Model
    blocked: int
    wide: int
    casts: int
    below_range: int
    below_range_constants: int
    smallest: float


def to_half(model: ir.Model, keep: Rule, half_weights: bool = True) -> Half:
    """A copy of the model that computes in half precision; metadata, names, inputs and outputs stay.

    Constants that are not changed are shared with ``model``.

    Args:
        keep: the nodes that compute in float32 (``rules.py``).
        half_weights: large constants of these nodes are stored in half precision, too, with a Cast after them. The file
            halves, while sums and products are those of float32. Without it they stay exact.

    Raises:
        ConfigError: the rule finds nothing.
    """
    model = model.clone()
    ShapeInferencePass()(model)
    conversion = _Conversion(model, keep(model.graph), half_weights)
    conversion.run()
    constants = conversion.constants
    if constants.below:
        _log.warning(
            "fp16: %d values of %d constants are below the range of half precision (smallest %.3g) and became 2^-24",
            *(constants.below, constants.below_in, constants.smallest),
        )
    casts = sum(node.op_type == "Cast" for node in model.graph.all_nodes())
    return Half(
        *(model, len(conversion.kept), conversion.wide_nodes, casts),
        *(constants.below, constants.below_in, constants.smallest),
    )


class _Conversion:
    """One pass over a model, in the order of its nodes, so that the types of a node's inputs are known."""

    def __init__(self, model: ir.Model, kept: set[ir.Node], half_weights: bool):
        self.graph, self.opsets, self.half_weights = model.graph, model.opset_imports, half_weights
        self.kept = kept | {inner for node in kept for body in bodies(node) for inner in body.all_nodes()}
        self.constants = HalfConstants(model.graph)
        self.halved: set[ir.Value] = set()  # were float32
        self.wide: set[ir.Value] = set()  # may be above 65504
        self.wide_nodes = 0
        self._made: dict[tuple, ir.Value] = {}  # (value, type) -> the same in another type
        self._replaced: set[ir.Node] = set()  # Cast nodes that others may stand for

    def run(self) -> None:
        self._convert(self.graph)
        self.constants.drop_unread()
        for cast in self._replaced:
            if not cast.outputs[0].uses() and not cast.outputs[0].is_graph_output():
                cast.graph.remove(cast, safe=True)

    def _convert(self, graph: ir.Graph) -> None:
        for node in list(graph):
            self._settle(node)
            for body in bodies(node):
                self._convert(body)
            self._retype(node)
        for i, value in enumerate(graph.outputs):
            if value in self.halved:
                graph.outputs[i] = self._output(value)

    def _retype(self, node: ir.Node) -> None:
        schema, kept = self._schema(node), node in self.kept
        wide = self._spread(node)
        half = set() if kept or wide or schema is None else self._half_variables(node, schema)
        if half and any(self.constants.wide(v) for name, v in _typed(schema.inputs, node.inputs) if name in half):
            half = set()
            self.wide_nodes += 1
        self.wide_nodes += wide and not kept
        names = [name for name, _ in _typed(schema.inputs, node.inputs)] if schema else [None] * len(node.inputs)
        for i, (name, value) in enumerate(zip(names, node.inputs)):
            if not self._was_float(value):
                continue
            if name in half:
                node.replace_input_with(i, self._as(value, _HALF))
            elif kept and self.half_weights and node.op_type not in _SINGLE and self._is_large(value):
                node.replace_input_with(i, self._widened(value))
            else:
                node.replace_input_with(i, self._as(value, _FLOAT))
        for name, value in _typed(schema.outputs, node.outputs) if half else ():
            if name in half and value.dtype == _FLOAT:
                value.type = ir.TensorType(_HALF)  # a new type: clones share the old one with their model
                self.halved.add(value)

    def _half_variables(self, node: ir.Node, schema: onnx.defs.OpSchema) -> set[str]:
        """The type variables of a node's schema that become float16."""
        values = [v for v in (*node.inputs, *node.outputs) if v is not None and v.name]
        if node.op_type in _SINGLE or bodies(node) or not all(isinstance(v.type, ir.TensorType) for v in values):
            return set()
        able = {c.type_param_str for c in schema.type_constraints if "tensor(float16)" in c.allowed_type_strs}
        able -= {name for op, name in _SINGLE_INPUTS if op == node.op_type}
        inputs: dict[str, list[ir.Value]] = {}
        for name, value in _typed(schema.inputs, node.inputs):
            if self._was_float(value):
                inputs.setdefault(name, []).append(value)
        outputs = {name for name, value in _typed(schema.outputs, node.outputs) if value.dtype == _FLOAT}
        both = able & set(inputs) & outputs
        if both:
            return both | (able & set(inputs) - outputs)  # the others, such as an exponent, go along
        if outputs and node.op_type != "Cast":
            return set()  # an attribute decides, or the input where it is missing
        # Comparisons, Shape, Cast: take what comes.
        moving = {name: [v for v in group if not self.constants.is_constant(v)] for name, group in inputs.items()}
        return {name for name in able & set(inputs) if moving[name] and set(moving[name]) <= self.halved}

    def _settle(self, node: ir.Node) -> None:
        """Spreads in the bodies of a node; what a loop gives it takes again, so until nothing is added."""
        graphs = bodies(node)
        for body in graphs:
            if any(value in self.wide for value in node.inputs):
                self.wide.update(body.inputs)
        before = None
        while graphs and before != len(self.wide):
            before = len(self.wide)
            for body in graphs:
                for inner in body:
                    self._settle(inner)
                    self._spread(inner)
                if any(value in self.wide for value in body.outputs):
                    self.wide.update(body.inputs)  # none but those of Loop and Scan have any

    def _spread(self, node: ir.Node) -> bool:
        """Whether what comes into a node may be above 65504; then what comes out may be, too."""
        results = [value for body in bodies(node) for value in body.outputs]
        comes_in = any(value in self.wide for value in (*node.inputs, *results))
        constants = [i for i, value in enumerate(node.inputs) if self.constants.wide(value)]
        if node.op_type == "Clip":  # limits that no half number reaches
            signs = {i: np.sign(self.constants.array(node.inputs[i])) for i in constants}
            constants = [i for i in constants if i == 0 or signs[i] != (0, -1, 1)[i]]
        if node.op_type == "Cast":
            constants += [i for i, value in enumerate(node.inputs) if self.constants.wide_in_any_type(value)]
        filled = node.op_type == "ConstantOfShape" and "value" in node.attributes
        filled = filled and is_wide(node.attributes["value"].as_tensor().numpy())
        if (comes_in or constants or filled) and node.op_type not in _BOUNDED:
            self.wide.update(value for value in node.outputs if value.dtype == _FLOAT)
        return comes_in

    def _schema(self, node: ir.Node) -> onnx.defs.OpSchema | None:
        domain = "" if node.domain == "ai.onnx" else node.domain
        try:
            return onnx.defs.get_schema(node.op_type, self.opsets.get(domain, 1), domain)
        except onnx.defs.SchemaError:
            return None

    def _was_float(self, value: ir.Value | None) -> bool:
        return (
            value is not None
            and isinstance(value.type, ir.TensorType)
            and (value.dtype == _FLOAT or value in self.halved)
        )

    def _is_large(self, value: ir.Value) -> bool:
        array = self.constants.array(value)
        return array is not None and array.size >= _WORTH_A_CAST and not self.constants.wide(value)

    def _as(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        """The value in a type, cast where it is made unless that was done."""
        if value.dtype == dtype:
            return value
        if (value, dtype) not in self._made:
            self._made[value, dtype] = self._remade(value, dtype)
        return self._made[value, dtype]

    def _remade(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        if self.constants.is_constant(value):
            return self.constants.half(value)
        maker = value.producer()
        if dtype == _HALF and maker is not None and maker.op_type == "Cast" and maker not in self.kept:
            source = maker.inputs[0]
            if source.dtype is not None and source.dtype not in (_FLOAT, ir.DataType.DOUBLE):
                self._replaced.add(maker)
                return self._as(source, _HALF)
        return self._cast(value, dtype)

    def _widened(self, value: ir.Value) -> ir.Value:
        """A constant that is stored in half precision, as float32."""
        key = value, None
        if key not in self._made:
            self._made[key] = self._cast(self.constants.half(value), _FLOAT)
        return self._made[key]

    def _cast(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        name = self.constants.names.new(f"{value.name}_{'fp16' if dtype == _HALF else 'fp32'}")
        result = ir.Value(name=name, type=ir.TensorType(dtype), shape=value.shape)
        node = ir.node("Cast", [value], {"to": int(dtype)}, outputs=[result], name=name)
        maker = value.producer()
        if maker is not None:
            maker.append(node)
        else:  # an input or a constant
            value.graph[0].prepend(node)
        return result

    def _output(self, value: ir.Value) -> ir.Value:
        """An output of a graph in its old type, under its old name."""
        result = self._as(value, _FLOAT)
        if not result.is_graph_output():
            value.name, result.name = self.constants.names.new(f"{value.name}_fp16"), value.name
        return result


def _typed(formal, actual) -> list[tuple[str | None, ir.Value | None]]:
    """The values of a node with their type variables; None for those that may differ from one another."""
    pairs = []
    for i, value in enumerate(actual):
        parameter = formal[min(i, len(formal) - 1)]
        pairs.append((parameter.type_str if parameter.is_homogeneous else None, value))
    return pairs
