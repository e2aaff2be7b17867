"""Sparse deformable descriptor head (SDDH) of ALIKED: descriptors from features sampled around each keypoint."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import spox.opset.ai.onnx.v18 as op
from spox import Var

from .deformable import F32, extent
from .layers import Layers

_TINY = F32(1e-12)  # keeps a zero vector zero


def _i64(*values: int) -> Var:
    return op.const(np.array(values, np.int64))


def _last(size: Var) -> Var:
    """Coordinate of the last pixel, float32."""
    return op.cast(op.sub(size, _i64(1)), to=F32)


def _clip(x: Var, last: Var) -> Var:
    return op.max([op.min([x, last]), op.const(F32(0))])


def _hat(x: Var, pixels: Var) -> Var:
    """Bilinear weights along one axis of pixels for a position x; the two broadcast."""
    return op.max([op.sub(op.const(F32(1)), op.abs(op.sub(x, pixels))), op.const(F32(0))])


def _outer(ys: Var, xs: Var, combine) -> Var:
    """Both axes of P squares of pixels, (P, k) each, combined row by row: (P, k k)."""
    side = xs.unwrap_tensor().shape[1]
    return op.reshape(combine(op.unsqueeze(ys, _i64(2)), op.unsqueeze(xs, _i64(1))), _i64(-1, side * side))


@dataclass(frozen=True)
class Pyramid:
    """Feature maps of several resolutions that stand for their concatenation at full resolution.

    The full map would be by far the largest tensor of the network. It is computed where a descriptor needs it, from
    pixels gathered as rows, which takes ONNX Runtime a fraction of the time of GridSample.
    """

    levels: list[Var]  # (1, c, H / s, W / s) float32, of the padded image, the finest first
    size: Var  # int64 (2,), w and h of the image itself
    offset: Var  # int64 (2,), x and y of the image in the padded one

    def at(self, xs: Var, ys: Var) -> tuple[Var, Var]:
        """Features, upsampled bilinearly, of P squares of k x k whole pixels, k at most 3.

        Args:
            xs, ys: (P, k) float32, columns and rows of each square, ascending, inside the image.

        Returns:
            (P, k k, C) row by row, and 1 over their norm (P, k k, 1).
        """
        side = xs.unwrap_tensor().shape[1]
        xs, ys = (op.add(v, op.cast(op.gather(self.offset, _i64(i)), to=F32)) for i, v in enumerate((xs, ys)))
        height, width = (_last(extent(self.levels[0], axis)) for axis in (2, 3))
        seen = []
        for i, level in enumerate(self.levels):
            h, w = extent(level, 2), extent(level, 3)
            rows = op.transpose(level, perm=[0, 2, 3, 1])
            rows = op.reshape(rows, _i64(-1, level.unwrap_tensor().shape[1]))

            def gather(ys: Var, xs: Var, rows=rows, pitch=w) -> Var:
                ys, xs = (op.cast(v, to=np.int64) for v in (ys, xs))
                return op.gather(rows, _outer(ys, xs, lambda y, x: op.add(op.mul(y, pitch), x)))

            if i == 0:
                seen.append(gather(ys, xs))
                continue
            cells, weights = [], []
            for v, last, full in (ys, _last(h), height), (xs, _last(w), width):
                # First and last pixels of all levels coincide. A square covers three cells of a level at most.
                v = op.div(op.mul(v, last), full)
                cell = op.add(op.floor(op.gather(v, _i64(0), axis=1)), op.const(np.array([0, 1, 2], F32)))
                weights.append(_hat(op.unsqueeze(v, _i64(2)), op.unsqueeze(cell, _i64(1))))  # (P, k, 3)
                cells.append(op.min([cell, last]))
            along_y, along_x = op.unsqueeze(weights[0], _i64(2, 4)), op.unsqueeze(weights[1], _i64(1, 3))
            weight = op.reshape(op.mul(along_y, along_x), _i64(-1, side * side, 9))
            seen.append(op.matmul(weight, gather(*cells)))
        features = op.concat(seen, axis=2)
        norm = op.sqrt(op.reduce_sum_square(features, _i64(2), keepdims=1))
        return features, op.reciprocal(op.max([norm, op.const(_TINY)]))


def describe(net: Layers, pyramid: Pyramid, xy: Var, positions: int, kernel: int = 3) -> Var:
    """Unit descriptors (N, D) of keypoints.

    Args:
        net: float32 layers ``desc_head.*``.
        pyramid: feature maps.
        xy: (N, 2) float32 pixels of the image.
        positions: how many samples make a descriptor.
        kernel: side of the square of pixels that the samples' offsets are computed from.
    """

    def pointwise(rows: Var, name: str) -> Var:
        """A convolution whose kernel covers its whole input, here pixels and then channels of one row."""
        weight = net.weights[name + ".weight"].transpose(2, 3, 1, 0)
        y = op.matmul(rows, net.const(weight.reshape(-1, weight.shape[-1])))
        bias = net.weights.get(name + ".bias")
        return y if bias is None else op.add(y, net.const(bias))

    x, y = (op.gather(xy, _i64(i), axis=1) for i in range(2))  # (N, 1)
    last_x, last_y = (_last(op.gather(pyramid.size, _i64(i))) for i in range(2))

    def line(v: Var, last: Var) -> Var:
        """One coordinate (N, k) of the pixels around the keypoint's."""
        first = op.sub(op.floor(v), op.const(F32(kernel // 2)))
        # The far limit is a pixel less than it need be, as the published network was trained.
        first = _clip(first, op.sub(last, op.const(F32(kernel))))
        return op.min([op.add(first, op.const(np.arange(kernel, dtype=F32))), last])

    features, scale = pyramid.at(line(x, last_x), line(y, last_y))
    dim = features.unwrap_tensor().shape[2]
    patch = op.reshape(op.mul(features, scale), _i64(-1, kernel * kernel * dim))
    offset = pointwise(op.selu(pointwise(patch, "desc_head.offset_conv.0")), "desc_head.offset_conv.2")
    reach = op.div(op.cast(op.reduce_max(pyramid.size), to=F32), op.const(F32(4)))
    offset = op.max([op.min([offset, reach]), op.neg(reach)])  # (N, 2 positions), first all x
    dx, dy = op.split(offset, num_outputs=2, axis=1)
    x, y = (op.reshape(op.add(v, d), _i64(-1, 1)) for v, d in ((x, dx), (y, dy)))

    # Features are normalised at pixels, then interpolated; outside the image they are zero.
    pixels, weights = [], []
    for v, last in (x, last_x), (y, last_y):
        two = op.add(op.floor(v), op.const(np.array([0, 1], F32)))
        pixels.append(_clip(two, last))
        weights.append(op.where(op.equal(two, pixels[-1]), _hat(v, two), op.const(F32(0))))
    features, scale = pyramid.at(*pixels)
    weight = op.mul(op.unsqueeze(_outer(weights[1], weights[0], op.mul), _i64(1)), op.transpose(scale, perm=[0, 2, 1]))
    sampled = op.squeeze(op.matmul(weight, features), _i64(1))

    sampled = op.reshape(op.selu(pointwise(sampled, "desc_head.sf_conv")), _i64(-1, positions * dim))
    descriptors = op.matmul(sampled, net.const(net.weights["desc_head.agg_weights"].reshape(positions * dim, -1)))
    norm = op.sqrt(op.reduce_sum_square(descriptors, _i64(1), keepdims=1))
    return op.div(descriptors, op.max([norm, op.const(_TINY)]))
