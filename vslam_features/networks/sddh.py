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


def _neighbours(x: Var, last: Var) -> tuple[Var, Var]:
    """The two pixels of one axis around x (P, 1), and their bilinear weights, zero outside 0..last: (P, 2) each."""
    zero, one = op.const(F32(0)), op.const(F32(1))
    pixels = op.add(op.floor(x), op.const(np.array([0, 1], F32)))
    weights = op.sub(one, op.abs(op.sub(x, pixels)))
    inside = op.and_(op.greater_or_equal(pixels, zero), op.less_or_equal(pixels, last))
    return _clip(pixels, last), op.where(inside, weights, zero)


def _outer(x: Var, y: Var, combine) -> Var:
    """Both axes of P squares of pixels, (P, 2) each, combined: (P, 4)."""
    return op.reshape(combine(op.unsqueeze(y, _i64(2)), op.unsqueeze(x, _i64(1))), _i64(-1, 4))


def _weighted(weights: Var, rows: Var) -> Var:
    """Sums (P, C) of four rows (P, 4, C) by their weights (P, 4)."""
    return op.squeeze(op.matmul(op.unsqueeze(weights, _i64(1)), rows), _i64(1))


@dataclass(frozen=True)
class Pyramid:
    """Feature maps of several resolutions that stand for their concatenation at full resolution.

    The full map, by far the largest tensor of the network, is computed only where a descriptor needs it. Pixels are
    gathered as rows, which takes a tenth of the time of GridSample in ONNX Runtime.
    """

    levels: list[Var]  # (1, c, H / s, W / s) float32, of the padded image, the finest first
    size: Var  # int64 (2,), w and h of the image itself
    offset: Var  # int64 (2,), x and y of the image in the padded one

    def at(self, x: Var, y: Var) -> tuple[Var, Var]:
        """Features (P, C), upsampled bilinearly, at whole pixels x, y (P, 1) of the image; 1 over their norm (P, 1)."""
        x, y = (op.add(v, op.cast(op.gather(self.offset, _i64(i)), to=F32)) for i, v in enumerate((x, y)))
        height, width = (extent(self.levels[0], axis) for axis in (2, 3))
        seen = []
        for level in self.levels:
            h, w = extent(level, 2), extent(level, 3)
            channels = level.unwrap_tensor().shape[1]
            rows = op.reshape(op.transpose(level, perm=[0, 2, 3, 1]), _i64(-1, channels))
            pitch = op.cast(w, to=F32)

            def index(row: Var, column: Var, pitch=pitch) -> Var:
                return op.cast(op.add(op.mul(row, pitch), column), to=np.int64)

            if level is self.levels[0]:
                seen.append(op.gather(rows, op.squeeze(index(y, x), _i64(1))))
                continue
            # First and last pixels of all levels coincide.
            (xs, along_x), (ys, along_y) = (
                _neighbours(op.div(op.mul(v, _last(n)), _last(full)), _last(n))
                for v, n, full in ((x, w, width), (y, h, height))
            )
            four = op.gather(rows, _outer(xs, ys, index))
            seen.append(_weighted(_outer(along_x, along_y, op.mul), four))
        features = op.concat(seen, axis=1)
        norm = op.sqrt(op.reduce_sum_square(features, _i64(1), keepdims=1))
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

    def square(v: Var, last: Var, axis: int) -> Var:
        """One coordinate (N k k, 1) of the pixels around the keypoint's."""
        first = op.sub(op.floor(v), op.const(F32(kernel // 2)))
        # The far limit is a pixel less than it need be, as the published network was trained.
        first = _clip(first, op.sub(last, op.const(F32(kernel))))
        pixels = op.add(first, op.const(np.indices((kernel, kernel))[axis].reshape(1, -1).astype(F32)))
        return op.reshape(op.min([pixels, last]), _i64(-1, 1))

    features, scale = pyramid.at(square(x, last_x, 1), square(y, last_y, 0))
    dim = features.unwrap_tensor().shape[1]
    patch = op.reshape(op.mul(features, scale), _i64(-1, kernel * kernel * dim))
    offset = pointwise(op.selu(pointwise(patch, "desc_head.offset_conv.0")), "desc_head.offset_conv.2")
    reach = op.div(op.cast(op.reduce_max(pyramid.size), to=F32), op.const(F32(4)))
    offset = op.max([op.min([offset, reach]), op.neg(reach)])  # (N, 2 positions), first all x
    dx, dy = op.split(offset, num_outputs=2, axis=1)
    x, y = (op.reshape(op.add(v, d), _i64(-1, 1)) for v, d in ((x, dx), (y, dy)))

    # Features are normalised at pixels, then interpolated.
    (xs, along_x), (ys, along_y) = _neighbours(x, last_x), _neighbours(y, last_y)
    repeated = [op.const(np.array(i)) for i in ([0, 1, 0, 1], [0, 0, 1, 1])]
    corners = (op.reshape(op.gather(v, i, axis=1), _i64(-1, 1)) for v, i in zip((xs, ys), repeated))
    features, scale = pyramid.at(*corners)
    weights = op.mul(_outer(along_x, along_y, op.mul), op.reshape(scale, _i64(-1, 4)))
    sampled = _weighted(weights, op.reshape(features, _i64(-1, 4, dim)))

    sampled = op.reshape(op.selu(pointwise(sampled, "desc_head.sf_conv")), _i64(-1, positions * dim))
    descriptors = op.matmul(sampled, net.const(net.weights["desc_head.agg_weights"].reshape(positions * dim, -1)))
    norm = op.sqrt(op.reduce_sum_square(descriptors, _i64(1), keepdims=1))
    return op.div(descriptors, op.max([norm, op.const(_TINY)]))
