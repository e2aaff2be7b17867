"""XFeat (Potje et al., CVPR 2024, https://arxiv.org/abs/2404.19174) as an ONNX graph: sparse keypoints and descriptors.

Architecture and conventions of https://github.com/verlab/accelerated_features (``XFeat.detectAndCompute``), read from
its state dict. What differs is how, not what:

- The first two convolutions are written at half resolution (:func:`_at_half_resolution`), unfolding and pooling of the
  image as strided convolutions, so that at full resolution there is no tensor of more than one channel.
- Keypoints are selected without shapes that depend on the image (``xfeat_points.py``).
- Sizes that are no multiple of 32 are continued rather than resized.
"""

from __future__ import annotations

import numpy as np
import onnx
import spox.opset.ai.onnx.v18 as op
from spox import Tensor, Var, argument

from .layers import Layers, checked, computing_type, finish
from .xfeat_points import CELL, best_pixels, floats, ints, sample, score_map

STRIDE = 32  # the coarsest level divides the image by this

# (output, input, kernel) of each convolution with batch normalisation; ``NAME.INDEX.layer.0`` in the state dict.
_BLOCKS = {
    "block1": [(4, 1, 3), (8, 4, 3), (8, 8, 3), (24, 8, 3)],
    "block2": [(24, 24, 3), (24, 24, 3)],
    "block3": [(64, 24, 3), (64, 64, 3), (64, 64, 1)],
    "block4": [(64, 64, 3), (64, 64, 3), (64, 64, 3)],
    "block5": [(128, 64, 3), (128, 128, 3), (128, 128, 3), (64, 128, 1)],
    "block_fusion": [(64, 64, 3), (64, 64, 3)],
    "heatmap_head": [(64, 64, 1), (64, 64, 1)],
    "keypoint_head": [(64, 64, 1), (64, 64, 1), (64, 64, 1)],
}
# The same of each convolution with bias instead; the full name.
_PLAIN = {
    "skip1.1": (24, 1, 1),
    "block_fusion.2": (64, 64, 1),
    "heatmap_head.2": (1, 64, 1),
    "keypoint_head.3": (CELL * CELL + 1, 64, 1),
}


def shapes() -> dict[str, tuple[int, ...]]:
    """Tensors of the state dict that :func:`build` reads, name -> shape (others are ignored)."""
    expected = {}
    for block, layers in _BLOCKS.items():
        for i, (out, inp, k) in enumerate(layers):
            expected[f"{block}.{i}.layer.0.weight"] = (out, inp, k, k)
            expected[f"{block}.{i}.layer.1.running_mean"] = (out,)
            expected[f"{block}.{i}.layer.1.running_var"] = (out,)
    for name, (out, inp, k) in _PLAIN.items():
        expected[f"{name}.weight"] = (out, inp, k, k)
        expected[f"{name}.bias"] = (out,)
    return expected


def build(weights: dict[str, np.ndarray], precision: str = "fp32") -> onnx.ModelProto:
    """The graph, of opset 18.

    Inputs: ``image`` float32 (1, C, H, W), C 1 or 3, 0..1, any H and W >= 1; ``max_keypoints`` int64 (1,), >= 1.

    Outputs, with N = min(max_keypoints, H*W): ``keypoints`` float32 (N, 2), x and y in pixels of ``image``, (0, 0) the
    centre of the top-left pixel; ``scores`` float32 (N,), best first; ``descriptors`` float32 (N, 64) of length 1. Rows
    with score 0 come last and are no keypoints. As upstream the last row and column of the image and its pixel (0, 0)
    hold none.

    Args:
        weights: state dict of the published model, see :func:`shapes`.
        precision: "fp32", or "fp16" for the CNN; scores, their selection, positions, inputs and outputs stay float32.

    Raises:
        ConfigError: unknown precision.
        WeightsError: a tensor is missing or has another shape.
    """
    dtype = computing_type("XFeat", precision)
    net = Layers(_at_half_resolution(checked("XFeat", weights, shapes(), "is this xfeat.pt?")), dtype)
    image = argument(Tensor(np.float32, (1, "C", "H", "W")))
    max_keypoints = argument(Tensor(np.int64, (1,)))

    size = op.shape(image, start=2)
    x = _normalised(image, size)
    features, logits, reliability = _cnn(net, net.cast(x))
    score = score_map(logits, reliability, size)
    keypoints, scores = best_pixels(score, size, max_keypoints)
    descriptors = sample(features, keypoints)
    return finish(
        "xfeat",
        {"image": image, "max_keypoints": max_keypoints},
        {"keypoints": keypoints, "scores": scores, "descriptors": descriptors},
    )


def _normalised(image: Var, size: Var) -> Var:
    """Grey image of mean 0 and deviation 1, continued on the right and below to multiples of 32.

    Mirrored, which leaves the keypoints and descriptors at the border nearest to those of a larger image; what is too
    small to be mirrored so far repeats its last pixel.
    """
    # The mean over C as a product: ReduceMean over an axis in the middle takes ONNX Runtime five times as long.
    channels = op.shape(image, start=1, end=2)
    share = op.expand(op.div(floats(1), op.cast(channels, to=np.float32)), op.concat([ints(1), channels], axis=0))
    grey = op.matmul(share, op.reshape(image, op.concat([channels, ints(-1)], axis=0)))
    grey = op.reshape(grey, op.concat([ints(1, 1), size], axis=0))
    x = op.sub(grey, _mean(grey))
    x = op.div(x, op.sqrt(op.add(_mean(op.mul(x, x)), floats(1e-5))))
    full = op.mul(op.div(op.add(size, ints(STRIDE - 1)), ints(STRIDE)), ints(STRIDE))
    missing = op.sub(full, size)
    mirrored = op.min([missing, op.sub(size, ints(1))])
    for amount, mode in (mirrored, "reflect"), (op.sub(missing, mirrored), "edge"):
        x = op.pad(x, op.concat([ints(0, 0, 0, 0, 0, 0), amount], axis=0), mode=mode)
    return x


def _mean(x: Var) -> Var:
    """Mean of an image: of its rows' means, because one long float32 sum costs the descriptors 1e-4.

    The reshape keeps OpenVINO from making one sum of both.
    """
    return op.reduce_mean(op.reshape(op.reduce_mean(x, ints(3)), ints(1, 1, 1, -1)), ints(3))


def _cnn(net: Layers, x: Var) -> tuple[Var, Var, Var]:
    """Features (1, 64, H/8, W/8), keypoint logits (1, 65, ...) and reliability (1, 1, ...), in float32."""

    def conv(x: Var, name: str, *, norm: str | None = None, stride=1, padding=None) -> Var:
        if padding is None:
            padding = net.weights[name + ".weight"].shape[-1] // 2
        return net.conv(x, name, norm=norm, stride=stride, padding=padding)

    def layer(x: Var, name: str, **options) -> Var:
        return op.relu(conv(x, name + ".layer.0", norm=name + ".layer.1", **options))

    def layers(x: Var, block: str, stride=1) -> Var:
        for i in range(len(_BLOCKS[block])):
            x = layer(x, f"{block}.{i}", stride=stride if i == 0 else 1)
        return x

    y = layer(x, "block1.0", stride=2, padding=1)
    y = layer(y, "block1.1", padding=(1, 1, 0, 0))
    y = layer(y, "block1.2")
    y = layer(y, "block1.3", stride=2)
    y = op.add(y, conv(x, "skip1.1", stride=4, padding=0))
    level3 = layers(layers(y, "block2"), "block3", stride=2)
    level4 = layers(level3, "block4", stride=2)
    level5 = layers(level4, "block5", stride=2)
    y = op.add(op.add(level3, _upsampled(level4, 2)), _upsampled(level5, 4))
    features = conv(layers(y, "block_fusion"), "block_fusion.2")
    # The last layers of the heads in float32: equal logits would be equal maxima.
    exact = Layers(net.weights)
    reliability = exact.conv(op.cast(layers(features, "heatmap_head"), to=np.float32), "heatmap_head.2")

    y = layer(x, "keypoint_head.0", stride=CELL, padding=0)
    y = layer(layer(y, "keypoint_head.1"), "keypoint_head.2")
    logits = exact.conv(op.cast(y, to=np.float32), "keypoint_head.3")
    return op.cast(features, to=np.float32), logits, op.sigmoid(reliability)


def _at_half_resolution(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same network with the image read by strided convolutions only.

    A 3x3 convolution at full resolution equals one of 4x4 and stride 2 that computes the four pixels of each 2x2 block
    as channels; the next, of stride 2, becomes one of 2x2 over these channels. Likewise the 8x8 unfolding before the
    keypoint head and the 4x4 average pooling before the skip connection.
    """
    weights = dict(weights)
    first, second = "block1.0.layer", "block1.1.layer"
    w = weights[f"{first}.0.weight"]  # (4, 1, 3, 3)
    blocks = np.zeros((2, 2, len(w), 1, 4, 4), w.dtype)
    for dy, dx in np.ndindex(2, 2):
        blocks[dy, dx, :, :, dy : dy + 3, dx : dx + 3] = w
    weights[f"{first}.0.weight"] = blocks.reshape(-1, 1, 4, 4)
    for statistic in ("running_mean", "running_var"):
        weights[f"{first}.1.{statistic}"] = np.tile(weights[f"{first}.1.{statistic}"], 4)

    w = weights[f"{second}.0.weight"]  # (8, 4, 3, 3): rows -1, 0, 1 are row 1 of the block above and 0, 1 of this one
    taps = np.pad(w, ((0, 0), (0, 0), (1, 0), (1, 0))).reshape(*w.shape[:2], 2, 2, 2, 2)  # out, in, by, dy, bx, dx
    weights[f"{second}.0.weight"] = taps.transpose(0, 3, 5, 1, 2, 4).reshape(len(w), -1, 2, 2)

    w = weights["skip1.1.weight"]
    weights["skip1.1.weight"] = np.tile(w / 16, (1, 1, 4, 4))
    head = "keypoint_head.0.layer.0.weight"
    weights[head] = weights[head].reshape(-1, 1, CELL, CELL)
    return weights


def _upsampled(x: Var, factor: int) -> Var:
    return op.resize(x, scales=floats([1, 1, factor, factor]), mode="linear")
