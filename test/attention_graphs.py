"""Attention in small graphs: of several shapes, with what lies between its products, and in our LightGlue."""

from __future__ import annotations

import re

import numpy as np
import onnx
import onnx_ir as ir
from graph_helpers import graph
from onnx import TensorProto, helper

from vslam_features.graph.bf16_attention import Bf16Attention, attention_in_bf16
from vslam_features.networks import lightglue
from vslam_features.networks.lightglue import LightGlueSizes

BF16 = TensorProto.BFLOAT16
BETWEEN = {
    "nothing": "",
    "mul": "s = Mul(l, c)",
    "div, other side": "i = Identity(l) s = Div(i, c)",
    "mask": "a = Mul(l, c) s = Add(a, m)",
    "mask first": "a = Div(l, c) s = Add(m, a)",
    "floor": "h = ReduceMax(l, axes) f = Add(h, low) s = Max(l, f)",
    "reshapes": "u = Unsqueeze(l, axes) s = Squeeze(u, axes)",
}


def patched(model: onnx.ModelProto, **options) -> tuple[onnx.ModelProto, Bf16Attention]:
    """The copy, proved to be standard."""
    done = attention_in_bf16(ir.from_proto(model), **options)
    proto = ir.to_proto(done.model)
    onnx.checker.check_model(proto, full_check=True)
    return onnx.shape_inference.infer_shapes(proto, check_type=True, strict_mode=True, data_prop=True), done


def plain(rank: int, between: str = "", tokens=(5, 7), width: int = 16, kind: str = "float") -> onnx.ModelProto:
    """``between``: nodes from ``l``, the product, to ``s``, what the softmax takes; constants c (scalar), m (mask)."""
    lead = {2: (), 3: (3,), 4: (2, 3)}[rank]
    shape = {n: ",".join(map(str, (*lead, t, width))) for n, t in zip("qkv", (tokens[0], tokens[1], tokens[1]))}
    perm = [*range(rank - 2), rank - 1, rank - 2]
    signature = ", ".join(f"{kind}[{shape[n]}] {n}" for n in "qkv")
    text = f"""({signature}) => ({kind}[{shape["q"]}] y) {{
        t = Transpose<perm={perm}>(k)  l = MatMul(q, t)  {between or "s = Identity(l)"}
        w = Softmax<axis=-1>(s)  y = MatMul(w, v) }}"""
    dtype = {"float": np.float32, "float16": np.float16, "double": np.float64}[kind]
    mask = np.where(np.random.default_rng(1).uniform(size=tokens) < 0.3, np.finfo(dtype).min, 0)
    mask[:, 0] = 0
    made = {"c": np.array(0.3), "m": mask, "low": np.array(-75.0)}
    used = {name: value.astype(dtype) for name, value in made.items() if re.search(rf"[( ]{name}[,)]", between)}
    return graph(text, used | ({"axes": np.array([-1])} if "axes" in text else {}))


def feed(model: onnx.ModelProto, seed=0, size=1.0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    found = {}
    for value in model.graph.input:
        shape = [d.dim_value for d in value.type.tensor_type.shape.dim]
        dtype = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        found[value.name] = rng.normal(0, size, shape).astype(dtype)
    return found


def small_lightglue(heads: int, precision: str = "fp32", scores: bool = False) -> tuple[onnx.ModelProto, int]:
    sizes = LightGlueSizes(input_dim=8, dim=16 * heads, heads=heads, layers=2)
    rng = np.random.default_rng(heads)
    shapes = lightglue.shapes(sizes, scores)
    weights = {name: rng.normal(0, 0.2, shape).astype(np.float32) for name, shape in shapes.items()}
    return lightglue.build(weights, sizes, precision, scores), sizes.layers
