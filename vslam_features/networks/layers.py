"""What the networks share: layers over a dictionary of weights, as spox expressions, and the finished ONNX model."""

from __future__ import annotations

import numpy as np
import onnx
import spox.opset.ai.onnx.v18 as op
from spox import Var, build

from ..errors import ConfigError, WeightsError

OPSET = 18
PRECISIONS = ("fp32", "fp16")
_BN_EPS = 1e-5


def computing_type(network: str, precision: str):
    """The NumPy type of ``fp32`` or ``fp16``. Raises ConfigError for another precision."""
    if precision not in PRECISIONS:
        raise ConfigError(f"{network}: precision is {precision!r}, expected 'fp32' or 'fp16'")
    return np.float16 if precision == "fp16" else np.float32


def checked(network: str, weights: dict[str, np.ndarray], shapes: dict[str, tuple], hint: str) -> dict[str, np.ndarray]:
    """The weights, which may hold more than ``shapes`` (tensor name -> shape).

    Raises WeightsError where a tensor is missing, of another shape, or not finite; ``hint``: what may be wrong.
    """
    for name, shape in shapes.items():
        if name not in weights:
            raise WeightsError(f"{network} weights: no tensor {name!r}, expected one of shape {shape}; {hint}")
        tensor = weights[name]
        if tensor.shape != shape:
            raise WeightsError(f"{network} weights: tensor {name!r} has shape {tensor.shape}, expected {shape}; {hint}")
        if not np.isfinite(tensor).all():
            raise WeightsError(f"{network} weights: tensor {name!r} holds NaN or infinity; fetch them again")
    return weights


class Layers:
    """Layers named as in a torch state dict.

    Args:
        weights: state dict, name -> array.
        dtype: float32 or float16, the type that the layers compute in.
    """

    def __init__(self, weights: dict[str, np.ndarray], dtype=np.float32):
        self.weights = weights
        self.dtype = np.dtype(dtype)

    def const(self, value, dtype=None) -> Var:
        """A constant of the computing type (or another)."""
        return op.const(np.asarray(value, dtype or self.dtype))

    def conv(self, x: Var, name: str, *, stride=1, padding=0, groups=1, norm: str | None = None, eps=_BN_EPS) -> Var:
        """2-D convolution ``name.weight``/``name.bias``; ``norm`` names a batch normalisation folded into it.

        ``padding``: pixels on each side, (top, left, bottom, right), or "same" as in TensorFlow: the output has
        ceil(size/stride) pixels, and of an odd number of zeros the extra one is below and on the right.
        """
        w = self.weights[name + ".weight"].astype(np.float64)
        b = self.weights.get(name + ".bias")
        b = np.zeros(len(w)) if b is None else b.astype(np.float64)
        if norm is not None:
            mean, var = (self.weights[f"{norm}.running_{s}"].astype(np.float64) for s in ("mean", "var"))
            scale = 1.0 / np.sqrt(var + eps)
            if norm + ".weight" in self.weights:  # else not affine
                scale = scale * self.weights[norm + ".weight"]
            w, b = w * scale[:, None, None, None], (b - mean) * scale
            if norm + ".bias" in self.weights:
                b = b + self.weights[norm + ".bias"]
        if padding == "same":
            pads = {"auto_pad": "SAME_UPPER"}
        else:
            pads = {"pads": [padding] * 4 if isinstance(padding, int) else list(padding)}
        return op.conv(x, self.const(w), self.const(b), strides=[stride, stride], group=groups, **pads)

    def linear(self, x: Var, name: str, rows=slice(None)) -> Var:
        """``x @ W^T + b`` over the last axis; ``rows`` takes a part of the outputs."""
        y = op.matmul(x, self.const(self.weights[name + ".weight"][rows].T))
        bias = self.weights.get(name + ".bias")
        return y if bias is None else op.add(y, self.const(bias[rows]))

    def layer_norm(self, x: Var, name: str, eps=1e-5) -> Var:
        """Layer normalisation over the last axis."""
        scale, bias = (self.const(self.weights[f"{name}.{s}"]) for s in ("weight", "bias"))
        return op.layer_normalization(x, scale, bias, epsilon=eps)[0]

    def cast(self, x: Var) -> Var:
        """To the computing type."""
        return op.cast(x, to=self.dtype)


def finish(name: str, inputs: dict[str, Var], outputs: dict[str, Var]) -> onnx.ModelProto:
    """The ONNX model: constants as initialisers, checked in full, types and shapes inferred strictly.

    Raises onnx.checker.ValidationError or onnx.shape_inference.InferenceError
    where the graph breaks the standard, which a stricter runtime would refuse.
    """
    model = build(inputs, outputs)
    graph, nodes = model.graph, []
    for node in model.graph.node:
        if node.op_type == "Constant" and node.attribute[0].name == "value":
            tensor = onnx.TensorProto()
            tensor.CopyFrom(node.attribute[0].t)
            tensor.name = node.output[0]
            graph.initializer.append(tensor)
        else:
            nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)
    _drop_unread_outputs(graph)
    graph.name = name
    model.producer_name = "vslam_features"
    # Declared in full, so that every runtime sees one operator set.
    for opset in model.opset_import:
        if opset.domain in ("", "ai.onnx"):
            opset.version = max(opset.version, OPSET)
    model.ir_version = 8  # of opset 18: libraries of 2023 read it
    onnx.checker.check_model(model, full_check=True)
    return onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)


def _drop_unread_outputs(graph: onnx.GraphProto) -> None:
    """spox names every optional output, and a MaxPool that also gives indices takes ONNX Runtime 100 times as long."""
    read = {name for node in graph.node for name in node.input} | {output.name for output in graph.output}
    for node in graph.node:
        declared = onnx.defs.get_schema(node.op_type, OPSET).outputs
        optional = onnx.defs.OpSchema.FormalParameterOption.Optional
        while node.output and node.output[-1] not in read and declared[len(node.output) - 1].option == optional:
            del node.output[-1]
