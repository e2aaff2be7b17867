"""Deformable convolution of standard operators: one bilinear sampling of all taps, then a 1x1 convolution."""

from __future__ import annotations

import numpy as np
import spox.opset.ai.onnx.v18 as op
from spox import Var

F32 = np.float32


def extent(x: Var, axis: int) -> Var:
    """The size of one axis, int64 (1,)."""
    return op.shape(x, start=axis, end=axis + 1)


def ramp(n: Var, dtype=F32) -> Var:
    """0, 1, ..., n - 1 for ``n`` int64 (1,)."""
    zero, one = (op.const(np.int64(v)) for v in (0, 1))
    return op.cast(op.range(zero, op.squeeze(n, op.const(np.array([0]))), one), to=dtype)


def deformed_taps(x: Var, offsets: Var, kernel: int = 3) -> Var:
    """What each tap of a deformable convolution (Dai et al., ICCV 2017) of stride 1 and equal size sees.

    A convolution whose kernel is this 1x1 over the result, its weight (O, C, k, k) as (O, C k k, 1, 1), completes it.
    The operator DeformConv of opset 19 does the same but is missing in runtimes. The taps lie one below the other
    in a tall grid, so that the result needs no transposition.

    Args:
        x: (1, C, h, w), any float type, C fixed; zero outside.
        offsets: (1, 2 k k, h, w) pixels, float32; (dy, dx) tap after tap, taps row by row.
        kernel: the odd side k of the kernel.

    Returns:
        (1, C k k, h, w) of the type of ``x``, bilinear.
    """
    taps = kernel * kernel
    h, w = extent(x, 2), extent(x, 3)

    def along(axis: int, size: Var) -> Var:
        """Coordinate of every tap in GridSample's units: -1 and 1 are the outer borders of the image's pixels."""
        start, end, step = (op.const(np.array([v])) for v in (axis, 2 * taps, 2))
        offset = op.slice(offsets, start, end, op.const(np.array([1])), step)  # (1, k k, h, w)
        tap = np.indices((kernel, kernel))[axis].reshape(taps, 1, 1) - kernel // 2
        line = op.unsqueeze(ramp(size), op.const(np.array([1]))) if axis == 0 else ramp(size)
        pixel = op.add(op.add(offset, line), op.const(tap.astype(F32)))
        centre = op.add(op.mul(pixel, op.const(F32(2))), op.const(F32(1)))
        return op.unsqueeze(op.sub(op.div(centre, op.cast(size, to=F32)), op.const(F32(1))), op.const(np.array([4])))

    grid = op.concat([along(1, w), along(0, h)], axis=4)  # (1, k k, h, w, 2)
    one, two, minus = (op.const(np.array([v])) for v in (1, 2, -1))
    grid = op.reshape(grid, op.concat([one, minus, w, two], axis=0))
    dtype = x.unwrap_tensor().dtype
    # One type for image and grid: some runtimes have no other kernel, and positions need float32.
    seen = op.grid_sample(op.cast(x, to=F32), grid, mode="bilinear", padding_mode="zeros", align_corners=0)
    # Not left to a -1: TensorRT takes no convolution whose number of channels it does not know when it builds.
    channels = op.const(np.array([x.unwrap_tensor().shape[1] * taps]))
    return op.cast(op.reshape(seen, op.concat([one, channels, h, w], axis=0)), to=dtype)
