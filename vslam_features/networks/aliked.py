"""ALIKED, keypoints and descriptors (Zhao et al., IEEE TIM 2023), as an ONNX graph; github.com/Shiaoming/ALIKED."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
import spox.opset.ai.onnx.v18 as op
from spox import Tensor, Var, argument

from .deformable import F32, deformed_taps, extent
from .dkd import detect
from .layers import Layers, checked, computing_type, finish
from .sddh import Pyramid, describe

_MULTIPLE = 32  # sides of the padded image: the coarsest level has a 32nd of the resolution
_STEPS = (1, 2, 8, 32)  # pixels of the image between those of each level
# SELU is _GAMMA times this ELU. The factor goes into the weights of the layers that follow, because runtimes fuse a
# convolution with an ELU, but not with a SELU. Descriptors are of normalised features, where it drops out.
_ALPHA, _GAMMA = 1.6732632423543772, 1.0507009873554805


@dataclass(frozen=True)
class AlikedSizes:
    """Sizes of a variant."""

    channels: tuple[int, int, int, int]  # of the four blocks
    dim: int  # of the descriptors, a multiple of 4
    positions: int  # samples that make a descriptor
    threshold: float = 0.2  # least score of a keypoint


N16 = AlikedSizes(channels=(16, 32, 64, 128), dim=128, positions=16)
T16 = AlikedSizes(channels=(8, 16, 32, 64), dim=64, positions=16)


def shapes(sizes: AlikedSizes) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the published state dict that the graph reads."""
    table: dict[str, tuple[int, ...]] = {}
    before = 3
    for i, c in enumerate(sizes.channels, 1):
        for j, inputs in (1, before), (2, c):
            name = f"block{i}.conv{j}"
            if i >= 3:  # deformable
                table[f"{name}.offset_conv.weight"] = (18, inputs, 3, 3)
                table[f"{name}.offset_conv.bias"] = (18,)
                name += ".regular_conv"
            table[f"{name}.weight"] = (c, inputs, 3, 3)
            table |= {f"block{i}.bn{j}.{s}": (c,) for s in ("weight", "bias", "running_mean", "running_var")}
        if i >= 2:
            table[f"block{i}.downsample.weight"] = (c, before, 1, 1)
            table[f"block{i}.downsample.bias"] = (c,)
        table[f"conv{i}.weight"] = (sizes.dim // 4, c, 1, 1)
        before = c
    for layer, (outputs, inputs, side) in zip((0, 2, 4, 6), ((8, sizes.dim, 1), (4, 8, 3), (4, 4, 3), (1, 4, 3))):
        table[f"score_head.{layer}.weight"] = (outputs, inputs, side, side)
    offsets = 2 * sizes.positions
    table["desc_head.offset_conv.0.weight"] = (offsets, sizes.dim, 3, 3)
    table["desc_head.offset_conv.2.weight"] = (offsets, offsets, 1, 1)
    table |= {f"desc_head.offset_conv.{i}.bias": (offsets,) for i in (0, 2)}
    table["desc_head.sf_conv.weight"] = (sizes.dim, sizes.dim, 1, 1)
    table["desc_head.agg_weights"] = (sizes.positions, sizes.dim, sizes.dim)
    return table


def build(weights: dict[str, np.ndarray], sizes: AlikedSizes, precision: str = "fp32") -> onnx.ModelProto:
    """The model.

    Inputs: ``image`` float32 (1, 1 or 3, H, W) in 0..1, grey or RGB, of any size; ``max_keypoints`` int64 (1,).
    Outputs, of min(max_keypoints, H W) rows, best first: ``keypoints`` float32 (N, 2), x and y in pixels of the image
    with (0, 0) the centre of the first pixel; ``scores`` float32 (N,), 0 for a row that is no keypoint;
    ``descriptors`` float32 (N, dim) of unit length.

    Args:
        weights: published state dict, see :func:`shapes`.
        sizes: of the variant that the weights are of.
        precision: "fp32", or "fp16" for the backbone; what positions and scores are made from stays in float32.

    Raises:
        ConfigError: unknown precision.
        WeightsError: a tensor is missing or has another shape.
    """
    dtype = computing_type("ALIKED", precision)
    checked("ALIKED", weights, shapes(sizes), "choose the variant (n16, t16) that the weights are of")
    image = argument(Tensor(F32, (1, "C", "H", "W")))
    max_keypoints = argument(Tensor(np.int64, (1,)))

    size = op.concat([extent(image, 3), extent(image, 2)], axis=0)  # w, h
    pads = op.mod(op.sub(_i64(_MULTIPLE), op.mod(size, _i64(_MULTIPLE))), _i64(_MULTIPLE))
    before = op.div(pads, _i64(2))
    rows = _i64(1, 0)  # w, h to the order of the axes
    begin, after = op.gather(before, rows), op.gather(op.sub(pads, before), rows)
    padded = op.pad(image, op.concat([_i64(0, 0), begin, _i64(0, 0), after], axis=0), mode="edge")
    padded = op.expand(padded, _i64(1, 3, 1, 1))

    net = Layers(_rearranged(weights), dtype)
    levels = _levels(net, padded)
    scores = op.sigmoid(op.cast(_score_logits(net, levels), to=F32))
    scores = op.slice(scores, begin, op.add(begin, op.gather(size, rows)), _i64(2, 3))
    found = detect(scores, max_keypoints, sizes.threshold)

    pyramid = Pyramid([op.cast(level, to=F32) for level in levels], size=size, offset=before)
    descriptors = describe(Layers(weights, F32), pyramid, found.xy, sizes.positions)
    return finish(
        "aliked",
        {"image": image, "max_keypoints": max_keypoints},
        {"keypoints": found.xy, "scores": found.scores, "descriptors": descriptors},
    )


def _i64(*values: int) -> Var:
    return op.const(np.array(values, np.int64))


def _elu(x: Var) -> Var:
    return op.elu(x, alpha=_ALPHA)


def _rearranged(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Weights of the backbone as the graph multiplies them: after ELU in place of SELU, deformable kernels over sampled
    taps, and the first layer of the score head level by level."""
    out = dict(weights)
    for name, w in weights.items():
        if w.ndim == 4 and name != "block1.conv1.weight":  # the one whose input is no activation
            out[name] = w = w * F32(_GAMMA)
        if name.endswith(".regular_conv.weight"):
            out[name] = w.reshape(len(w), -1, 1, 1)
    for i, part in enumerate(np.split(out["score_head.0.weight"], 4, axis=1), 1):
        out[f"score_head.0.level{i}.weight"] = part
    return out


def _levels(net: Layers, image: Var) -> list[Var]:
    """Features of dim / 4 channels each, at 1, 1/2, 1/8 and 1/32 of the resolution."""

    def conv(x: Var, block: int, layer: int) -> Var:
        name, norm = f"block{block}.conv{layer}", f"block{block}.bn{layer}"
        if block < 3:
            return net.conv(x, name, padding=1, norm=norm)
        offsets = op.cast(net.conv(x, name + ".offset_conv", padding=1), to=F32)
        reach = op.cast(op.max([extent(x, 2), extent(x, 3)]), to=F32)
        reach = op.div(reach, op.const(F32(4)))
        offsets = op.max([op.min([offsets, reach]), op.neg(reach)])
        return net.conv(deformed_taps(x, offsets), name + ".regular_conv", norm=norm)

    x = net.cast(image)
    x = _elu(conv(_elu(conv(x, 1, 1)), 1, 2))
    levels = [x]
    for block, pool in (2, 2), (3, 4), (4, 4):
        x = op.average_pool(x, kernel_shape=[pool, pool], strides=[pool, pool])
        y = conv(_elu(conv(x, block, 1)), block, 2)
        x = _elu(op.add(y, net.conv(x, f"block{block}.downsample")))
        levels.append(x)
    return [_elu(net.conv(x, f"conv{i}")) for i, x in enumerate(levels, 1)]


def _score_logits(net: Layers, levels: list[Var]) -> Var:
    """(1, 1, H, W). Its first layer is linear, so it comes before the upsampling, which then has 8 channels a level."""
    x = None
    for i, (level, step) in enumerate(zip(levels, _STEPS), 1):
        y = net.conv(level, f"score_head.0.level{i}")
        if step > 1:
            scales = op.const(np.array([1, 1, step, step], F32))
            y = op.resize(y, scales=scales, mode="linear", coordinate_transformation_mode="align_corners")
        x = y if x is None else op.add(x, y)
    for layer in (2, 4, 6):
        x = net.conv(_elu(x), f"score_head.{layer}", padding=1)
    return x
