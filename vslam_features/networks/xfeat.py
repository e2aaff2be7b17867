"""XFeat (Potje et al., CVPR 2024, https://arxiv.org/abs/2404.19174) as an ONNX graph: sparse keypoints and descriptors.

Architecture and conventions of https://github.com/verlab/accelerated_features (``XFeat.detectAndCompute``), read from
its state dict. What differs is how, not what:

- The first two convolutions are written at half resolution (:func:`_at_half_resolution`), unfolding and pooling of the
  image as strided convolutions, so that no tensor has more channels than one at full resolution.
- Non-maximum suppression is a mask, the ranking a TopK over 3x3 blocks, of which each holds at most one maximum.
- Descriptors are interpolated at the kept keypoints only, by gathering; there is no GridSample.
- Sizes that are no multiple of 32 are padded rather than resized.

No shape depends on the image's content, and there is no control flow.
"""

from __future__ import annotations

import numpy as np
import onnx
import spox.opset.ai.onnx.v18 as op
from spox import Tensor, Var, argument

from ..errors import ConfigError, DataError
from .layers import Layers, finish

CELL = 8  # pixels a cell of the feature map
STRIDE = 32  # the coarsest level divides the image by this
DIM = 64  # channels of a descriptor
THRESHOLD = 0.05  # least probability of a keypoint within its cell
NMS = 5  # a keypoint is the maximum of such a window, pixels
BLOCK = NMS // 2 + 1  # side of the largest block that lies within the window of each of its pixels
CUBIC = -0.75  # parameter a of Keys' kernel, as in torch

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
        precision: "fp32", or "fp16" for the CNN; positions, scores and inputs and outputs stay float32.

    Raises:
        ConfigError: unknown precision.
        DataError: a tensor is missing or has another shape.
    """
    if precision not in ("fp32", "fp16"):
        raise ConfigError(f"XFeat: precision is {precision!r}, expected 'fp32' or 'fp16'")
    net = Layers(_checked(weights), np.float16 if precision == "fp16" else np.float32)
    image = argument(Tensor(np.float32, (1, "C", "H", "W")))
    max_keypoints = argument(Tensor(np.int64, (1,)))

    size = op.shape(image, start=2)
    x = _normalised(image, size)
    features, logits, reliability = _cnn(net, net.cast(x))
    score = _score(logits, reliability, size)
    keypoints, scores = _best(score, size, max_keypoints)
    descriptors = _sample(features, keypoints)
    return finish(
        "xfeat",
        {"image": image, "max_keypoints": max_keypoints},
        {"keypoints": keypoints, "scores": scores, "descriptors": descriptors},
    )


def _checked(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    for name, shape in shapes().items():
        if name not in weights:
            raise DataError(f"XFeat weights: no tensor {name!r}, expected one of shape {shape}; is this xfeat.pt?")
        if weights[name].shape != shape:
            raise DataError(f"XFeat weights: tensor {name!r} has shape {weights[name].shape}, expected {shape}")
    return weights


def _ints(*values: int) -> Var:
    return op.const(np.array(values, np.int64))


def _float(value) -> Var:
    return op.const(np.asarray(value, np.float32))


def _normalised(image: Var, size: Var) -> Var:
    """Grey image of mean 0 and deviation 1, padded on the right and below to multiples of 32."""
    # The mean over C as a product: ReduceMean over an axis in the middle takes ONNX Runtime five times as long.
    channels = op.shape(image, start=1, end=2)
    share = op.expand(op.div(_float(1), op.cast(channels, to=np.float32)), op.concat([_ints(1), channels], axis=0))
    grey = op.matmul(share, op.reshape(image, op.concat([channels, _ints(-1)], axis=0)))
    grey = op.reshape(grey, op.concat([_ints(1, 1), size], axis=0))
    x = op.sub(grey, _mean(grey))
    x = op.div(x, op.sqrt(op.add(_mean(op.mul(x, x)), _float(1e-5))))
    # (-size) mod 32; a mean beyond the border is what the convolutions see there, too.
    missing = op.mod(op.neg(size), _ints(STRIDE))
    return op.pad(x, op.concat([_ints(0, 0, 0, 0, 0, 0), missing], axis=0))


def _mean(x: Var) -> Var:
    """Mean of an image: of its rows' means, because one long float32 sum costs the descriptors 1e-4."""
    return op.reduce_mean(op.reduce_mean(x, _ints(3)), _ints(2))


def _cnn(net: Layers, x: Var) -> tuple[Var, Var, Var]:
    """Features (1, 64, H/8, W/8), keypoint logits (H/8*W/8, 65) and reliability (1, 1, H/8, W/8), in float32."""
    weights = net.weights = _at_half_resolution(net.weights)

    def conv(x: Var, name: str, *, norm: str | None = None, stride=1, padding=None) -> Var:
        if padding is None:
            padding = weights[name + ".weight"].shape[-1] // 2
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
    reliability = op.sigmoid(op.cast(conv(layers(features, "heatmap_head"), "heatmap_head.2"), to=np.float32))

    y = layer(x, "keypoint_head.0", stride=CELL, padding=0)
    y = layer(layer(y, "keypoint_head.1"), "keypoint_head.2")
    logits = op.cast(conv(y, "keypoint_head.3"), to=np.float32)
    return op.cast(features, to=np.float32), logits, reliability


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
    return op.resize(x, scales=_float([1, 1, factor, factor]), mode="linear")


def _cells(points: Var, size: Var) -> Var:
    """Position on the feature map of pixels (N, 2), both in the order of ``size`` (2,), the map's.

    Upstream divides by one less than the image's size, yet samples with ``align_corners=False``.
    """
    cells = op.cast(size, to=np.float32)
    pixels = op.sub(op.mul(cells, _float(CELL)), _float(1))
    return op.sub(op.mul(points, op.div(cells, pixels)), _float(0.5))


def _range(end: Var) -> Var:
    return op.cast(op.range(op.const(np.int64(0)), op.squeeze(end), op.const(np.int64(1))), to=np.float32)


def _tents(length: Var, cells: Var) -> Var:
    """Weights (length, cells) that interpolate a row of cells linearly, with zeros beyond it, at each pixel.

    Upstream's rounding puts the last pixel outside of the map, hence no keypoint there.
    """
    pixel = _range(length)
    last = op.cast(op.sub(length, _ints(1)), to=np.float32)
    position = op.where(op.less(pixel, last), _cells(pixel, cells), _float(-2))
    distance = op.abs(op.sub(op.unsqueeze(position, _ints(1)), _range(cells)))
    return op.relu(op.sub(_float(1), distance))


def _score(logits: Var, reliability: Var, size: Var) -> Var:
    """Score (1, 1, H, W) of each pixel of the image, 0 where there is no keypoint."""
    cells = op.shape(reliability, start=2)
    rows, columns = (op.slice(cells, _ints(i), _ints(i + 1)) for i in range(2))
    probability = op.softmax(op.transpose(logits, perm=[0, 2, 3, 1]))
    probability = op.slice(probability, _ints(0), _ints(CELL * CELL), _ints(3))
    probability = op.reshape(probability, op.concat([cells, _ints(CELL, CELL)], axis=0))
    probability = op.transpose(probability, perm=[0, 2, 1, 3])
    full = op.concat([_ints(1, 1), op.mul(cells, _ints(CELL))], axis=0)
    probability = op.slice(op.reshape(probability, full), _ints(0, 0), size, _ints(2, 3))

    height, width = (op.slice(size, _ints(i), _ints(i + 1)) for i in range(2))
    reliability = op.matmul(op.matmul(_tents(height, rows), reliability), op.transpose(_tents(width, columns)))

    maximum, _ = op.max_pool(probability, kernel_shape=[NMS, NMS], pads=[NMS // 2] * 4)
    kept = op.and_(op.equal(probability, maximum), op.greater(probability, _float(THRESHOLD)))
    score = op.mul(op.mul(probability, reliability), op.cast(kept, to=np.float32))  # Where takes thrice as long
    return op.scatter_nd(score, op.const(np.zeros((1, 4), np.int64)), _float([0]))


def _best(score: Var, size: Var, count: Var) -> tuple[Var, Var]:
    """The ``count`` best pixels, x and y (N, 2), and their scores (N,)."""
    # A margin of one pixel covers the last row and column, which hold no keypoint, where 3 does not divide the size.
    blocks, _ = op.max_pool(score, kernel_shape=[BLOCK, BLOCK], strides=[BLOCK, BLOCK], pads=[1] * 4)
    count = op.min([count, op.reduce_prod(size)])
    blocks_wide = op.shape(blocks, start=3)
    blocks = op.reshape(blocks, _ints(-1))
    lacking = op.max([op.sub(count, op.shape(blocks)), _ints(0)])
    blocks = op.concat([blocks, op.expand(_float([0]), lacking)], axis=0)
    scores, index = op.top_k(blocks, count)

    row = op.div(index, blocks_wide)
    corner = op.concat(
        [op.unsqueeze(v, _ints(1)) for v in (row, op.sub(index, op.mul(row, blocks_wide)))], axis=1
    )  # (N, 2) y, x
    corner = op.sub(op.mul(corner, _ints(BLOCK)), _ints(1))
    window = np.stack(np.meshgrid(*[np.arange(BLOCK)] * 2, indexing="ij"), axis=-1).reshape(1, -1, 2)
    pixels = op.add(op.unsqueeze(corner, _ints(1)), op.const(window))  # (N, 9, 2)
    pixels = op.max([op.min([pixels, op.sub(size, _ints(1))]), _ints(0)])
    values = op.gather_nd(op.squeeze(score, _ints(0, 1)), pixels)  # (N, 9)
    chosen = op.arg_max(values, axis=1)  # (N, 1)
    yx = op.squeeze(op.gather_nd(pixels, op.unsqueeze(chosen, _ints(2)), batch_dims=1), _ints(1))
    return op.cast(op.gather(yx, _ints(1, 0), axis=1), to=np.float32), scores


def _sample(features: Var, keypoints: Var) -> Var:
    """Unit descriptors (N, 64) at keypoints (N, 2), by bicubic interpolation of unit vectors, zeros outside."""
    cells = op.shape(features, start=2)
    table = _unit(op.reshape(op.transpose(features, perm=[0, 2, 3, 1]), _ints(-1, DIM)))
    size = op.gather(cells, _ints(1, 0))  # x, y
    position = _cells(keypoints, size)
    base = op.floor(position)
    tap = op.add(op.unsqueeze(base, _ints(2)), _float([-1, 0, 1, 2]))  # (N, 2, 4)
    weight = _keys(op.abs(op.sub(op.unsqueeze(position, _ints(2)), tap)))
    limit = op.cast(op.unsqueeze(op.sub(size, _ints(1)), _ints(1)), to=np.float32)
    clipped = op.max([op.min([tap, limit]), _float(0)])
    weight = op.where(op.equal(tap, clipped), weight, _float(0))
    tap = op.cast(clipped, to=np.int64)

    def axis(x: Var, i: int) -> Var:
        return op.gather(x, op.const(np.int64(i)), axis=1)

    wx, wy, ix, iy = axis(weight, 0), axis(weight, 1), axis(tap, 0), axis(tap, 1)
    index = op.add(op.mul(op.unsqueeze(iy, _ints(2)), op.slice(size, _ints(0), _ints(1))), op.unsqueeze(ix, _ints(1)))
    weight = op.mul(op.unsqueeze(wy, _ints(2)), op.unsqueeze(wx, _ints(1)))
    weight = op.reshape(weight, _ints(-1, 1, 16))
    values = op.gather(table, op.reshape(index, _ints(-1, 16)))  # (N, 16, 64)
    return _unit(op.squeeze(op.matmul(weight, values), _ints(1)))


def _keys(d: Var) -> Var:
    """Keys' cubic kernel at distances 0 <= d <= 2 (IEEE TASSP 29(6), 1981, equation 15 with parameter a)."""

    def cubic(*coefficients: float) -> Var:  # Horner's scheme
        value = _float(coefficients[0])
        for c in coefficients[1:]:
            value = op.add(op.mul(value, d), _float(c))
        return value

    a = CUBIC
    return op.where(op.less_or_equal(d, _float(1)), cubic(a + 2, -a - 3, 0, 1), cubic(a, -5 * a, 8 * a, -4 * a))


def _unit(x: Var) -> Var:
    return op.div(x, op.max([op.reduce_l2(x, _ints(-1)), _float(1e-12)]))
