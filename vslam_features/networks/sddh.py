"""Sparse deformable descriptor head (SDDH) of ALIKED: descriptors from features sampled around each keypoint."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import spox.opset.ai.onnx.v18 as op
from spox import Var

from .deformable import F32
from .layers import Layers


def _i64(*values: int) -> Var:
    return op.const(np.array(values, np.int64))


@dataclass(frozen=True)
class Pyramid:
    """Feature maps of several resolutions that stand for their concatenation at full resolution.

    The full map is read only where a descriptor needs it: it is by far the largest tensor of the network.
    """

    levels: list[Var]  # (1, c, H / s, W / s) float32, of the padded image
    padded: Var  # (2, 1) float32: W, H of the padded image
    size: Var  # (2, 1) float32: w, h of the image itself
    offset: Var  # (2, 1) float32: x, y of the image in the padded one

    def at(self, xy: Var) -> tuple[Var, Var]:
        """Features (C, P) at pixels xy (2, P) of the image, upsampled bilinearly, and 1 over their norm (1, P)."""
        one, two = op.const(F32(1)), op.const(F32(2))
        # The corners' centres are at -1 and 1 in every resolution.
        last = op.max([op.sub(self.padded, one), one])
        grid = op.sub(op.div(op.mul(op.add(xy, self.offset), two), last), one)
        grid = op.unsqueeze(op.transpose(grid, perm=[1, 0]), _i64(0, 1))  # (1, 1, P, 2)
        seen = [
            op.grid_sample(
                level,
                grid,
                mode="nearest" if level is self.levels[0] else "bilinear",
                padding_mode="border",
                align_corners=1,
            )
            for level in self.levels
        ]
        features = op.squeeze(op.concat(seen, axis=1), _i64(0, 2))
        norm = op.sqrt(op.reduce_sum(op.mul(features, features), _i64(0), keepdims=1))
        return features, op.reciprocal(op.max([norm, op.const(F32(1e-12))]))


def describe(net: Layers, pyramid: Pyramid, xy: Var, positions: int, kernel: int = 3) -> Var:
    """Unit descriptors (N, D) of keypoints.

    Args:
        net: float32 layers ``desc_head.*``.
        pyramid: feature maps.
        xy: (N, 2) float32 pixels of the image.
        positions: how many samples make a descriptor.
        kernel: side of the square of pixels that the samples' offsets are computed from.
    """
    zero, one = op.const(F32(0)), op.const(F32(1))
    last = op.sub(pyramid.size, one)
    n = op.shape(xy, start=0, end=1)
    xy = op.transpose(xy, perm=[1, 0])  # (2, N)

    # Square around the keypoint's pixel. The far limit is one less than it need be: so the network was trained.
    corner = op.sub(op.floor(xy), op.const(F32(kernel // 2)))
    corner = op.max([op.min([corner, op.sub(last, op.const(F32(kernel)))]), zero])
    square = np.indices((kernel, kernel))[::-1].reshape(2, -1, 1).astype(F32)  # (2, k k, 1), x and y
    pixels = op.add(op.unsqueeze(corner, _i64(1)), op.const(square))
    pixels = op.min([op.reshape(pixels, _i64(2, -1)), last])
    features, scale = pyramid.at(pixels)
    patch = op.reshape(op.mul(features, scale), op.concat([_i64(-1), n], axis=0))  # (C k k, N)

    def pointwise(x: Var, name: str) -> Var:
        """A convolution whose kernel covers its whole input, over columns."""
        weight = net.weights[name + ".weight"]
        y = op.matmul(net.const(weight.reshape(len(weight), -1)), x)
        bias = net.weights.get(name + ".bias")
        return y if bias is None else op.add(y, net.const(bias[:, None]))

    offset = pointwise(op.selu(pointwise(patch, "desc_head.offset_conv.0")), "desc_head.offset_conv.2")
    reach = op.div(op.reduce_max(pyramid.size, keepdims=1), op.const(F32(4)))
    offset = op.max([op.min([offset, reach]), op.neg(reach)])
    offset = op.reshape(offset, op.concat([_i64(2, positions), n], axis=0))
    position = op.reshape(op.add(op.unsqueeze(xy, _i64(1)), offset), _i64(2, -1))  # (2, positions N)

    # Features are normalised at pixels, then interpolated: the four corners are read one by one.
    floor = op.floor(position)
    part = op.sub(position, floor)
    corners, weights = [], []
    for dy, dx in np.ndindex(2, 2):
        corner = op.add(floor, op.const(np.array([[dx], [dy]], F32)))
        inside = op.and_(op.greater_or_equal(corner, zero), op.less_or_equal(corner, last))
        near = [op.sub(one, part), part]
        x, y = (op.gather(near[d], _i64(i)) for i, d in enumerate((dx, dy)))
        weight = op.concat([x, y], axis=0)
        weights.append(op.reduce_prod(op.where(inside, weight, zero), _i64(0), keepdims=1))
        corners.append(op.min([op.max([corner, zero]), last]))
    features, scale = pyramid.at(op.concat(corners, axis=1))
    weighted = op.mul(features, op.mul(scale, op.concat(weights, axis=1)))
    # (C, 4, positions N)
    weighted = op.reshape(weighted, _i64(0, 4, -1))
    sampled = op.reduce_sum(weighted, _i64(1), keepdims=0)

    sampled = op.selu(pointwise(sampled, "desc_head.sf_conv"))
    aggregate = net.weights["desc_head.agg_weights"].transpose(2, 1, 0)  # (D, C, positions)
    sampled = op.reshape(sampled, op.concat([_i64(-1), n], axis=0))  # (C positions, N)
    descriptors = op.matmul(net.const(aggregate.reshape(len(aggregate), -1)), sampled)  # (D, N)
    norm = op.sqrt(op.reduce_sum(op.mul(descriptors, descriptors), _i64(0), keepdims=1))
    return op.transpose(op.div(descriptors, op.max([norm, op.const(F32(1e-12))])), perm=[1, 0])
