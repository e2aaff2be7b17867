"""LightGlue (Lindenberger et al., ICCV 2023, https://arxiv.org/abs/2306.13643) as one ONNX graph.

The same network in two sizes: for ALIKED (https://github.com/cvg/LightGlue) and, as LighterGlue, for XFeat
(https://github.com/verlab/accelerated_features). All layers run, and no points are pruned. For a graph that stops
early (:mod:`~vslam_features.graph.early_stop`) it is built with a covisibility score a layer (:func:`_covisibility`).

What differs from these is how, not what:

- The points of both images are one array wherever each point is treated alone.
- Rows of the projections are reordered at build time, so that queries, keys and values, and within them the two
  coordinates that a rotation turns, are contiguous.
- The scale of the attention is part of the projections, the output projection part of the first layer that follows.
- Logits have a floor far below what matters, so that softmax leaves no denormals (:data:`_FLOOR`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
import spox.opset.ai.onnx.v18 as op
from spox import Tensor, Var, argument

from .layers import Layers, checked, computing_type, finish

# Logits further below the largest of their row are raised to it, in float32: even exp(-75)/2048 is no denormal number.
# Without it a tenth of the weights of attention are, the logits spanning hundreds in both published models, and softmax
# and the product with the values take a CPU several times as long. Half precision, for a GPU, needs and has no floor:
# the attention is what fused kernels match.
_FLOOR = -75.0
_END = np.iinfo(np.int64).max  # of a slice
# Keypoints of either image that a covisible pair has a match for. Two-view geometry with as many inliers is to be
# believed; loops need 20 or more. Of 1, 4 and 5 % of the keypoints, or 8 to 24 of them, 16 told true pairs from others
# after the fewest layers (all pairs of corridor images, and of two other scenes).
_COVISIBLE = 16


@dataclass(frozen=True)
class LightGlueSizes:
    """Length of a descriptor, width of the transformer, its heads, its layers."""

    input_dim: int
    dim: int
    heads: int
    layers: int

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.dim // self.heads


LIGHTERGLUE = LightGlueSizes(input_dim=64, dim=96, heads=1, layers=6)
LIGHTGLUE_ALIKED = LightGlueSizes(input_dim=128, dim=256, heads=4, layers=9)


def shapes(sizes: LightGlueSizes, scores: bool = False) -> dict[str, tuple[int, ...]]:
    """Tensors of the state dict that :func:`build` reads, name -> shape (others are ignored)."""
    d = sizes.dim
    linear = {"input_proj": (d, sizes.input_dim)}
    expected: dict[str, tuple[int, ...]] = {"posenc.Wr.weight": (sizes.head_dim // 2, 2)}
    for i in range(sizes.layers):
        attention = {"self_attn": {"Wqkv": 3 * d, "out_proj": d}, "cross_attn": {"to_qk": d, "to_v": d, "to_out": d}}
        for block, projections in attention.items():
            name = f"transformers.{i}.{block}"
            linear |= {f"{name}.{projection}": (rows, d) for projection, rows in projections.items()}
            linear |= {f"{name}.ffn.0": (2 * d, 2 * d), f"{name}.ffn.3": (d, 2 * d)}
            expected |= {f"{name}.ffn.1.weight": (2 * d,), f"{name}.ffn.1.bias": (2 * d,)}
    linear[f"{_head(sizes.layers)}.final_proj"] = (d, d)
    linear |= {f"{_head(k)}.matchability": (1, d) for k in range(1 if scores else sizes.layers, sizes.layers + 1)}
    for name, shape in linear.items():
        expected |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return expected


def build(
    weights: dict[str, np.ndarray], sizes: LightGlueSizes, precision: str = "fp32", scores: bool = False
) -> onnx.ModelProto:
    """The graph, of opset 18; M and N, both >= 1 (ONNX Runtime's ArgMax refuses 0), are dynamic and independent.

    Inputs, i in 0, 1: ``keypoints{i}`` float32 (M or N, 2), x and y in pixels, (0, 0) the centre of the top-left pixel;
    ``descriptors{i}`` float32 (M or N, input_dim); ``image_size{i}`` float32 (2,), width and height in pixels.

    Outputs: ``matches0`` int64 (M,), index of the best match in image 1 where the two are each other's best, else -1;
    ``mscores0`` float32 (M,), the probability of the match, else 0. No threshold is applied; upstream's is 0.1. With
    ``scores`` also ``score_1``, ``score_2``, ... float32 (), the covisibility after each layer in [0, 1], and the last
    one once more as ``covisibility_score``.

    Args:
        weights: state dict of the published model, see :func:`shapes`; names may have the prefix ``matcher.``.
        sizes: of this model, such as :data:`LIGHTERGLUE`.
        precision: "fp32", or "fp16" for the transformer; positions, assignment, inputs and outputs stay float32.

    Raises:
        ConfigError: unknown precision.
        WeightsError: a tensor is missing or has another shape.
    """
    dtype = computing_type("LightGlue", precision)
    weights = {name.removeprefix("matcher."): value for name, value in weights.items()}
    checked("LightGlue", weights, shapes(sizes, scores), f"are they of a model of {sizes}?")
    exact, net = Layers(weights), Layers(weights, dtype)
    count = {"0": "M", "1": "N"}
    inputs = {f"keypoints{i}": argument(Tensor(np.float32, (n, 2))) for i, n in count.items()}
    inputs |= {f"descriptors{i}": argument(Tensor(np.float32, (n, sizes.input_dim))) for i, n in count.items()}
    inputs |= {f"image_size{i}": argument(Tensor(np.float32, (2,))) for i in count}

    pair = _Pair(op.shape(inputs["keypoints0"], end=1))
    keypoints = op.concat([_position(exact, inputs[f"keypoints{i}"], inputs[f"image_size{i}"]) for i in count], axis=0)
    descriptors = op.concat([inputs[f"descriptors{i}"] for i in count], axis=0)
    rotation = _rotation(net, exact, sizes, keypoints)
    x = _linear(net, net.cast(descriptors), *_parameters(net, "input_proj"))
    covisibility = {}
    for k in range(1, sizes.layers + 1):
        x = _layer(net, sizes, f"transformers.{k - 1}", x, rotation, pair)
        if scores:
            covisibility[f"score_{k}"] = _covisibility(exact, _head(k), exact.cast(x), pair)
    matches, probabilities = _assign(exact, _head(sizes.layers), exact.cast(x), pair)
    outputs = {"matches0": matches, "mscores0": probabilities}
    if scores:
        outputs["covisibility_score"] = op.identity(covisibility[f"score_{sizes.layers}"])
    return finish("lightglue", inputs, outputs | covisibility)


def _head(layer: int) -> str:
    """The assignment head of a layer, from 1: the published weights have one after each, for they are trained so."""
    return f"log_assignment.{layer - 1}"


def _parameters(net: Layers, *names: str) -> tuple[np.ndarray, np.ndarray]:
    """Weight and bias of linear layers, one below the other, in float64 for folding."""
    weight, bias = (
        np.concatenate([net.weights[f"{name}.{kind}"].astype(np.float64) for name in names])
        for kind in ("weight", "bias")
    )
    return weight, bias


def _linear(net: Layers, x: Var, weight: np.ndarray, bias: np.ndarray) -> Var:
    return op.gemm(x, net.const(weight.T), net.const(bias))


def _ints(*values: int) -> Var:
    return op.const(np.array(values, np.int64))


def _columns(x: Var, *widths: int) -> tuple[Var, ...]:
    return tuple(op.split(x, _ints(*widths), axis=-1))


def _transposed(x: Var, axes: int = 2) -> Var:
    return op.transpose(x, perm=[1, 0] if axes == 2 else [0, 2, 1])


class _Pair:
    """The points of both images, one below the other: (..., M + N, channels), M of image 0 and N of image 1."""

    def __init__(self, m: Var):
        self.m = m  # int64 (1,)

    def split(self, x: Var) -> tuple[Var, Var]:
        """Those of image 0 and those of image 1."""
        return op.slice(x, _ints(0), self.m, _ints(-2)), op.slice(x, self.m, _ints(_END), _ints(-2))


def _position(net: Layers, keypoints: Var, size: Var) -> Var:
    """Keypoints from the centre of the image, in halves of its longer side."""
    centre = op.mul(size, net.const(0.5))
    return op.div(op.sub(keypoints, centre), op.reduce_max(centre))


def _rotation(net: Layers, exact: Layers, sizes: LightGlueSizes, position: Var) -> tuple[Var, Var]:
    """Cosines and signed sines (n, 2*dim) by which :func:`_self_attention` turns queries and keys."""
    angle = op.matmul(position, exact.const(net.weights["posenc.Wr.weight"].T))
    cos, sin = net.cast(op.cos(angle)), net.cast(op.sin(angle))
    pairs = 2 * sizes.heads  # of halves: queries and keys of each head
    return op.concat([cos, cos] * pairs, axis=1), op.concat([op.neg(sin), sin] * pairs, axis=1)


def _layer(net: Layers, sizes: LightGlueSizes, name: str, x: Var, rotation: tuple[Var, Var], pair: _Pair) -> Var:
    """One layer: attention within each image, then between the two; state (M + N, dim) in and out."""
    x = _self_attention(net, sizes, f"{name}.self_attn", x, rotation, pair)
    return _cross_attention(net, sizes, f"{name}.cross_attn", x, pair)


def _self_attention(
    net: Layers, sizes: LightGlueSizes, name: str, x: Var, rotation: tuple[Var, Var], pair: _Pair
) -> Var:
    heads, width, dim = sizes.heads, sizes.head_dim, sizes.dim
    weight, bias = _parameters(net, f"{name}.Wqkv")
    # Upstream's rows: (head, coordinate, query/key/value), the coordinates in pairs (even, odd) that are turned
    # together. Ours: (query/key/value, head, even/odd, pair), so that a turn swaps halves.
    rows = np.arange(3 * dim).reshape(heads, width // 2, 2, 3).transpose(3, 0, 2, 1)
    rows = np.concatenate([rows[:2].ravel(), rows[2].swapaxes(1, 2).ravel()])  # values keep their order
    weight, bias = weight[rows], bias[rows]
    weight[:dim] *= width**-0.5
    bias[:dim] *= width**-0.5
    qk, v = _columns(_linear(net, x, weight, bias), 2 * dim, dim)
    halves = op.reshape(qk, _ints(0, 4 * heads, width // 2))
    swapped = op.reshape(op.gather(halves, _ints(*(np.arange(4 * heads) ^ 1)), axis=1), _ints(0, 2 * dim))
    cos, sin = rotation
    q, k = _columns(op.add(op.mul(qk, cos), op.mul(swapped, sin)), dim, dim)
    (q0, q1), (k0, k1), (v0, v1) = (pair.split(_by_head(sizes, each)) for each in (q, k, v))
    message = op.concat([_attend(net, sizes, q0, k0, v0), _attend(net, sizes, q1, k1, v1)], axis=0)
    return _feed_forward(net, name, "out_proj", x, message)


def _cross_attention(net: Layers, sizes: LightGlueSizes, name: str, x: Var, pair: _Pair) -> Var:
    weight, bias = _parameters(net, f"{name}.to_qk", f"{name}.to_v")
    weight[: sizes.dim] *= sizes.head_dim**-0.25  # on either side of the product
    bias[: sizes.dim] *= sizes.head_dim**-0.25
    qk, v = _columns(_linear(net, x, weight, bias), sizes.dim, sizes.dim)
    (qk0, qk1), (v0, v1) = (pair.split(_by_head(sizes, each)) for each in (qk, v))
    # The logits of the two directions are transposes of one another. Computing them twice is as fast as transposing
    # them on a CPU, and what fused attention wants on a GPU.
    message = op.concat([_attend(net, sizes, qk0, qk1, v1), _attend(net, sizes, qk1, qk0, v0)], axis=0)
    return _feed_forward(net, name, "to_out", x, message)


def _by_head(sizes: LightGlueSizes, x: Var) -> Var:
    """(n, dim) to (heads, n, head_dim); one head stays (n, dim)."""
    if sizes.heads == 1:
        return x
    return op.transpose(op.reshape(x, _ints(0, sizes.heads, sizes.head_dim)), perm=[1, 0, 2])


def _attend(net: Layers, sizes: LightGlueSizes, q: Var, k: Var, v: Var) -> Var:
    """Values (n, dim) averaged by softmax(q k^T)."""
    axes = 2 if sizes.heads == 1 else 3
    if net.dtype == np.float16:
        # Changes nothing but rounding: logits near 1000 that all queries share would leave steps of 0.5.
        k = op.sub(k, op.reduce_mean(k, _ints(-2)))
    logits = op.matmul(q, _transposed(k, axes))
    if net.dtype == np.float32:
        logits = op.max([logits, op.add(op.reduce_max(logits, _ints(-1)), net.const(_FLOOR))])
    message = op.matmul(op.softmax(logits, axis=-1), v)
    return message if axes == 2 else op.reshape(op.transpose(message, perm=[1, 0, 2]), _ints(0, sizes.dim))


def _feed_forward(net: Layers, name: str, projection: str, x: Var, message: Var) -> Var:
    """x + MLP of x beside the projected message; the projection is folded into the first layer."""
    dim = len(net.weights[f"{name}.{projection}.bias"])
    weight, bias = _parameters(net, f"{name}.ffn.0")
    out_weight, out_bias = _parameters(net, f"{name}.{projection}")
    bias += weight[:, dim:] @ out_bias
    weight[:, dim:] = weight[:, dim:] @ out_weight
    h = net.layer_norm(_linear(net, op.concat([x, message], axis=1), weight, bias), f"{name}.ffn.1")
    gate = op.add(op.erf(op.div(h, net.const(np.sqrt(2)))), net.const(1))
    gelu = op.mul(op.mul(h, gate), net.const(0.5))  # written as runtimes recognise it
    return op.add(x, _linear(net, gelu, *_parameters(net, f"{name}.ffn.3")))


def _covisibility(net: Layers, head: str, x: Var, pair: _Pair) -> Var:
    """Probability () that the ``_COVISIBLE`` most matchable keypoints of an image all match; of the poorer image.

    The product of their matchabilities (section 3.2 of the paper) by the layer's own head, as if they were independent.
    Of an image with fewer keypoints, all count. NaN where the matchability of any keypoint is: TopK need not see it.
    """
    logs = []
    for z in pair.split(_log_matchability(net, head, x)):
        z = op.squeeze(z, _ints(1))
        count = op.min([op.shape(z), _ints(_COVISIBLE)])
        best, _ = op.top_k(z, count)
        nan = op.mul(op.reduce_sum(z, _ints(0), keepdims=0), net.const(0))
        logs.append(op.add(op.reduce_sum(best, _ints(0), keepdims=0), nan))
    return op.exp(op.min(logs))


def _log_matchability(net: Layers, head: str, x: Var) -> Var:
    """Logarithm (M + N, 1) of each keypoint's probability of having a match."""
    weight, bias = _parameters(net, f"{head}.matchability")
    return op.neg(op.softplus(_linear(net, x, -weight, -bias)))  # log sigmoid(z) = -softplus(-z)


def _assign(net: Layers, head: str, x: Var, pair: _Pair) -> tuple[Var, Var]:
    """Mutual best matches (M,) under the log assignment of section 3.2 of the paper, and their probabilities (M,)."""
    weight, bias = _parameters(net, f"{head}.final_proj")
    scale = len(bias) ** -0.25
    p0, p1 = pair.split(_linear(net, x, weight * scale, bias * scale))
    z0, z1 = pair.split(_log_matchability(net, head, x))
    forward = op.add(op.log_softmax(op.matmul(p0, _transposed(p1)), axis=-1), z0)
    backward = op.add(op.log_softmax(op.matmul(p1, _transposed(p0)), axis=-1), z1)
    scores = op.add(forward, _transposed(backward))
    best0 = op.arg_max(scores, axis=1)
    best1 = op.arg_max(_transposed(scores), axis=1, keepdims=0)  # along rows, which is several times faster
    rows = op.range(op.const(np.int64(0)), op.squeeze(pair.m), op.const(np.int64(1)))
    mutual = op.equal(op.gather(best1, best0), op.unsqueeze(rows, _ints(1)))
    matches = op.where(mutual, best0, _ints(-1))
    probabilities = op.where(mutual, op.exp(op.gather_elements(scores, best0, axis=1)), net.const([0]))
    return op.squeeze(matches, _ints(1)), op.squeeze(probabilities, _ints(1))
