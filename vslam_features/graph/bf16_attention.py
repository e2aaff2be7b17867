"""The cores of attention in BF16 or float32, for engines whose types are those of the graph.

TensorRT fuses attention over 4096 tokens into one FP16 kernel that now and then overflows (tinynav, pull request 261).
BF16 has the range of float32, and float32 its digits too. TensorRT 10 can be told so a layer at a time; 11 builds
strongly typed only: there the casts must be in the ONNX.

A CPU has no such kernels in ONNX Runtime. The emulated twin computes the same nodes in float32 and rounds to BF16 what
goes into each and what comes out: it predicts how far the results of a device may be off.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes.common import InlinePass, ShapeInferencePass

from ..errors import ConfigError, ModelFileError
from .attention_cores import BF16, LOOKED_FOR, MOVES, Core, find_cores
from .centred_keys import centre_keys as centred_keys
from .constants import constant_tensor, drop_unread
from .names import Names

PATCH = "bf16-attention"
PATCH_FLOAT = "fp32-attention"
_FLOAT = ir.DataType.FLOAT
_OTHERS = (_FLOAT, ir.DataType.FLOAT16, ir.DataType.DOUBLE)
_EXACT = MOVES | {"Max", "Min", "ReduceMax", "Where"}  # of rounded values they give rounded ones
_LARGEST = float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)


@dataclass(frozen=True)
class Bf16Attention:
    """The graph with attention in BF16.

    Args:
        cores: that were changed. spared: cores with fewer tokens than asked for. done: cores that were so before.
        centred: of ``cores``, those whose keys are centred; None: it was not asked for.
    """

    model: ir.Model
    cores: tuple[Core, ...]
    spared: int
    done: int
    emulated: bool
    min_tokens: int
    centred: int | None

    @property
    def patch(self) -> str:
        """How cards record it."""
        words = f"{PATCH}{' emulated' * self.emulated}{' centred' * bool(self.centred)}"
        return f"{words}{f' from {self.min_tokens} tokens' * bool(self.min_tokens)}"


def attention_in_bf16(
    model: ir.Model, *, emulate: bool = False, min_tokens: int = 0, centre_keys: bool = False
) -> Bf16Attention:
    """A copy whose cores of attention compute in BF16; ``model`` stays as it is and shares its constants.

    Each float that goes into a core is cast to BF16, each that other nodes read is cast back to the type it had. Mask,
    scale and floor go along, so that runtimes can fuse all of it. Constants beyond the range of BF16, such as the least
    float32 of a mask, become its largest numbers and not infinite.

    Args:
        emulate: the twin for a CPU, in float32 with rounding; never to be built from.
        min_tokens: cores that attend to fewer stay as they are; where the graph does not fix the number they do not.
        centre_keys: take their mean from the keys first (:mod:`~.centred_keys`).

    Raises:
        ConfigError: all cores have fewer tokens.
        ModelFileError: there is no core; the graph is emulated, or is to be emulated and computes in BF16 already; an
            operator does not take BF16 in its opset.
    """
    model = model.clone()
    if model.functions:
        InlinePass()(model)
    ShapeInferencePass()(model)
    found, others = find_cores(model)
    name = model.graph.name
    if not found:
        reasons = "".join(f"; '{node}': {reason}" for node, reason in list(others.items())[:4])
        more = f"; and {len(others) - 4} more" if len(others) > 4 else ""
        raise ModelFileError(
            f"graph '{name}' has no core of attention. Looked for: {LOOKED_FOR}. It has {len(others)} other Softmax "
            f"nodes{reasons}{more}"
        )
    real = [core for core in found if core.dtype == BF16]
    twin = [core for core in found if core.dtype != BF16 and core.emulated]
    if wrong := real if emulate else twin:
        what = "computes in BF16 already" if emulate else "emulates BF16 for a CPU, and is not to be built from"
        raise ModelFileError(f"graph '{name}' {what} in {len(wrong)} cores; take the file that it was made from")
    plain = [core for core in found if core not in real and core not in twin]
    chosen = [core for core in plain if not isinstance(core.keys, int) or core.keys >= min_tokens]
    done = len(real) + len(twin)
    if not chosen and not done:
        most = max(core.keys for core in plain)
        raise ConfigError(f"the {len(plain)} cores of graph '{name}' attend to {most} tokens at most, not {min_tokens}")
    _check_operators(model, chosen)
    centred = centred_keys(model.graph, chosen) if centre_keys else None
    _Conversion(model.graph, chosen, _FLOAT if emulate else BF16, emulate).run()
    return Bf16Attention(model, tuple(chosen), len(plain) - len(chosen), done, emulate, min_tokens, centred)


def attention_in_float32(model: ir.Model) -> tuple[ir.Model, int]:
    """A copy whose half-precision cores of attention compute in float32, and how many; ``model`` stays as it is.

    Casts as of :func:`attention_in_bf16`. Cores that compute in float32 or BF16 already stay.
    """
    model = model.clone()
    if model.functions:
        InlinePass()(model)
    ShapeInferencePass()(model)
    chosen = [core for core in find_cores(model)[0] if core.dtype == ir.DataType.FLOAT16]
    _Conversion(model.graph, chosen, _FLOAT, emulate=False).run()
    return model, len(chosen)


def _check_operators(model: ir.Model, cores: Iterable[Core]) -> None:
    opset = model.opset_imports.get("", model.opset_imports.get("ai.onnx", 0))
    for op in sorted({node.op_type for core in cores for node in core.nodes}):
        schema = onnx.defs.get_schema(op, opset)
        allowed = {c.type_param_str: c.allowed_type_strs for c in schema.type_constraints}
        if "tensor(bfloat16)" not in allowed[schema.outputs[0].type_str]:
            raise ModelFileError(
                f"{op} of opset {opset} does not take BF16; convert the model to opset 18 or newer first"
            )


class _Conversion:
    """Nodes compute in ``dtype``: BF16 or float32; ``emulate``: in float32 with rounding to BF16."""

    def __init__(self, graph: ir.Graph, cores: Iterable[Core], dtype: ir.DataType, emulate: bool):
        self.nodes = {node for core in cores for node in core.nodes}
        self.graph, self.emulate, self.names, self.dtype = graph, emulate, Names(graph), dtype
        self._suffix = "bf16" if emulate or dtype == BF16 else "fp32"
        self._own = {value for node in self.nodes for value in node.outputs}
        self._made: dict[tuple, ir.Value] = {}
        self._constants: dict[ir.Value, ir.Value] = {}

    def run(self) -> None:
        for node in [node for node in self.graph.all_nodes() if node in self.nodes]:
            for i, value in enumerate(node.inputs):
                if value is not None and value.dtype in _OTHERS and value not in self._own:
                    node.replace_input_with(i, self._entering(value, node))
            if node.op_type == "Cast":
                node.attributes["to"] = ir.AttrInt64("to", int(self.dtype))
            for value in node.outputs:
                if value.dtype in _OTHERS and (value.uses() or value.is_graph_output()):
                    self._leaving(value, node)
        drop_unread(self._constants)

    def _entering(self, value: ir.Value, node: ir.Node) -> ir.Value:
        """A value from outside in the type of the core, made once in each graph."""
        if constant_tensor(value) is not None:
            if value not in self._constants:
                self._constants[value] = self._constant(value)
            return self._constants[value]
        key = value, node.graph
        if key not in self._made:
            casts = self._casts(value, [BF16, _FLOAT] if self.emulate else [self.dtype])
            node.graph.insert_before(node, casts)
            self._made[key] = casts[-1].outputs[0]
        return self._made[key]

    def _leaving(self, value: ir.Value, node: ir.Node) -> None:
        """What the core's own nodes read of a value, and what the others do, which keeps the name."""
        before, name = value.dtype, value.name
        users = [(user, i) for user, i in value.uses()]
        inner = [(user, i) for user, i in users if user in self.nodes]
        outer = [(user, i) for user, i in users if user not in self.nodes]
        value.type = ir.TensorType(self.dtype)
        value.name = self.names.new(f"{name}_{self._suffix}")
        casts: list[ir.Node] = []
        result = value
        if self.emulate and node.op_type not in _EXACT:
            casts += self._casts(value, [BF16, _FLOAT])
            result = casts[-1].outputs[0]
        for user, i in inner:
            user.replace_input_with(i, result)
        if outer or value.is_graph_output():
            if result.dtype != before:
                casts += self._casts(result, [before])
                result = casts[-1].outputs[0]
            for user, i in outer:
                user.replace_input_with(i, result)
            for i, output in enumerate(node.graph.outputs):
                if output is value:
                    node.graph.outputs[i] = result
            result.name = name
        self._own |= {cast.outputs[0] for cast in casts}
        position = node
        for cast in casts:
            node.graph.insert_after(position, cast)
            position = cast

    def _casts(self, value: ir.Value, dtypes: Iterable[ir.DataType]) -> list[ir.Node]:
        nodes = []
        for dtype in dtypes:
            name = self.names.new(f"{value.name}_{dtype.name.lower()}")
            result = ir.Value(name=name, type=ir.TensorType(dtype), shape=value.shape)
            nodes.append(ir.node("Cast", [value], {"to": int(dtype)}, outputs=[result], name=name))
            value = result
        return nodes

    def _constant(self, value: ir.Value) -> ir.Value:
        array = constant_tensor(value).numpy()
        if self._suffix == "bf16":
            with np.errstate(over="ignore"):
                clipped = np.where(np.isfinite(array), np.clip(array, -_LARGEST, _LARGEST), array)
            array = clipped.astype(ml_dtypes.bfloat16)
        name = self.names.new(f"{value.name}_{self._suffix}")
        tensor = ir.tensor(array.astype(self.dtype.numpy()), dtype=self.dtype, name=name)
        result = ir.Value(name=name, type=ir.TensorType(self.dtype), shape=tensor.shape, const_value=tensor)
        maker = value.producer()
        (value.graph if maker is None else maker.graph).register_initializer(result)
        return result
