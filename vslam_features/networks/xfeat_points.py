"""From XFeat's maps to keypoints and descriptors, without control flow or shapes that depend on what the image shows.

Non-maximum suppression is a mask, the ranking a TopK over 3x3 blocks, of which each holds one maximum at most (of two
equal ones in a block the first is kept), and descriptors are gathered at the kept keypoints only.
"""

from __future__ import annotations

import numpy as np
import spox.opset.ai.onnx.v18 as op
from spox import Var

CELL = 8  # pixels a cell of the feature map
DIM = 64  # channels of a descriptor
THRESHOLD = 0.05  # least probability of a keypoint within its cell
NMS = 5  # a keypoint is the maximum of such a window, pixels
BLOCK = NMS // 2 + 1  # side of the largest block that lies within the window of each of its pixels
CUBIC = -0.75  # parameter a of Keys' kernel, as in torch


def ints(*values: int) -> Var:
    """A constant int64 vector."""
    return op.const(np.array(values, np.int64))


def floats(value) -> Var:
    """A constant of float32, scalar or array."""
    return op.const(np.asarray(value, np.float32))


def _split(size: Var) -> tuple[Var, Var]:
    """Height and width (1,) each, of both (2,)."""
    return op.slice(size, ints(0), ints(1)), op.slice(size, ints(1), ints(2))


def _cells(points: Var, size: Var) -> Var:
    """Position on the feature map of pixels (N, 2), both in the order of ``size`` (2,), the map's.

    Upstream divides by one less than the image's size, yet samples with ``align_corners=False``.
    """
    cells = op.cast(size, to=np.float32)
    pixels = op.sub(op.mul(cells, floats(CELL)), floats(1))
    return op.sub(op.mul(points, op.div(cells, pixels)), floats(0.5))


def _range(end: Var) -> Var:
    """0, 1, ... end - 1 in float32; ``end`` (1,)."""
    return op.cast(op.range(op.const(np.int64(0)), op.squeeze(end), op.const(np.int64(1))), to=np.float32)


def _tents(length: Var, cells: Var) -> Var:
    """Weights (length, cells) that interpolate a row of cells linearly, with zeros beyond it, at each pixel.

    Upstream's rounding puts the last pixel outside of the map, hence no keypoint there.
    """
    pixel = _range(length)
    last = op.cast(op.sub(length, ints(1)), to=np.float32)
    position = op.where(op.less(pixel, last), _cells(pixel, cells), floats(-2))
    distance = op.abs(op.sub(op.unsqueeze(position, ints(1)), _range(cells)))
    return op.relu(op.sub(floats(1), distance))


def score_map(logits: Var, reliability: Var, size: Var) -> Var:
    """Score (1, 1, H, W) of each pixel of the image, 0 where there is no keypoint.

    Args:
        logits: (1, 65, h, w), h and w of the whole cells: one for each pixel of a cell, row by row, and one for none.
        reliability: (1, 1, h, w), 0..1.
        size: H, W of the image, at most 8*h, 8*w; what lies beyond neither is nor suppresses a keypoint.
    """
    cells = op.shape(reliability, start=2)
    rows, columns = _split(cells)
    probability = op.softmax(op.transpose(logits, perm=[0, 2, 3, 1]))
    probability = op.slice(probability, ints(0), ints(CELL * CELL), ints(3))
    probability = op.reshape(probability, op.concat([cells, ints(CELL, CELL)], axis=0))
    probability = op.transpose(probability, perm=[0, 2, 1, 3])
    full = op.concat([ints(1, 1), op.mul(cells, ints(CELL))], axis=0)
    probability = op.slice(op.reshape(probability, full), ints(0, 0), size, ints(2, 3))

    height, width = _split(size)
    reliability = op.matmul(op.matmul(_tents(height, rows), reliability), op.transpose(_tents(width, columns)))

    maximum, _ = op.max_pool(probability, kernel_shape=[NMS, NMS], pads=[NMS // 2] * 4)
    kept = op.and_(op.equal(probability, maximum), op.greater(probability, floats(THRESHOLD)))
    score = op.mul(op.mul(probability, reliability), op.cast(kept, to=np.float32))  # Where takes thrice as long
    return op.scatter_nd(score, op.const(np.zeros((1, 4), np.int64)), floats([0]))


def best_pixels(score: Var, size: Var, count: Var) -> tuple[Var, Var]:
    """The ``count`` (1,) best pixels of ``score`` (1, 1, H, W): x and y (N, 2), and their scores (N,), best first."""
    # A margin of one pixel covers the last row and column, which hold no keypoint, where 3 does not divide the size.
    blocks, _ = op.max_pool(score, kernel_shape=[BLOCK, BLOCK], strides=[BLOCK, BLOCK], pads=[1] * 4)
    height, width = _split(size)
    count = op.min([count, op.mul(height, width)])
    blocks_wide = op.shape(blocks, start=3)
    blocks = op.reshape(blocks, ints(-1))
    lacking = op.max([op.sub(count, op.shape(blocks)), ints(0)])
    blocks = op.concat([blocks, op.expand(floats([0]), lacking)], axis=0)
    scores, index = op.top_k(blocks, count)

    row = op.div(index, blocks_wide)
    column = op.sub(index, op.mul(row, blocks_wide))
    yx = op.concat([op.unsqueeze(row, ints(1)), op.unsqueeze(column, ints(1))], axis=1)
    corner = op.sub(op.mul(yx, ints(BLOCK)), ints(1))  # (N, 2)
    window = np.stack(np.meshgrid(*[np.arange(BLOCK)] * 2, indexing="ij"), axis=-1).reshape(1, -1, 2)
    pixels = op.add(op.unsqueeze(corner, ints(1)), op.const(window))  # (N, 9, 2)
    pixels = op.max([op.min([pixels, op.sub(size, ints(1))]), ints(0)])
    values = op.gather_nd(op.squeeze(score, ints(0, 1)), pixels)  # (N, 9)
    chosen = op.arg_max(values, axis=1)  # (N, 1)
    yx = op.squeeze(op.gather_nd(pixels, op.unsqueeze(chosen, ints(2)), batch_dims=1), ints(1))
    return op.cast(op.gather(yx, ints(1, 0), axis=1), to=np.float32), scores


def sample(features: Var, keypoints: Var) -> Var:
    """Unit descriptors (N, 64) at keypoints (N, 2), by bicubic interpolation of ``features`` (1, 64, h, w).

    Upstream makes the features unit vectors first, and takes zeros outside of the map.
    """
    cells = op.shape(features, start=2)
    table = _unit(op.reshape(op.transpose(features, perm=[0, 2, 3, 1]), ints(-1, DIM)))
    size = op.gather(cells, ints(1, 0))  # x, y
    position = _cells(keypoints, size)
    tap = op.add(op.unsqueeze(op.floor(position), ints(2)), floats([-1, 0, 1, 2]))  # (N, 2, 4)
    weight = _keys(op.abs(op.sub(op.unsqueeze(position, ints(2)), tap)))
    limit = op.cast(op.unsqueeze(op.sub(size, ints(1)), ints(1)), to=np.float32)
    clipped = op.max([op.min([tap, limit]), floats(0)])
    weight = op.where(op.equal(tap, clipped), weight, floats(0))
    tap = op.cast(clipped, to=np.int64)

    def axis(x: Var, i: int) -> Var:
        return op.gather(x, op.const(np.int64(i)), axis=1)

    wx, wy, ix, iy = axis(weight, 0), axis(weight, 1), axis(tap, 0), axis(tap, 1)
    index = op.add(op.mul(op.unsqueeze(iy, ints(2)), op.slice(size, ints(0), ints(1))), op.unsqueeze(ix, ints(1)))
    weight = op.mul(op.unsqueeze(wy, ints(2)), op.unsqueeze(wx, ints(1)))
    weight = op.reshape(weight, ints(-1, 1, 16))
    values = op.gather(table, op.reshape(index, ints(-1, 16)))  # (N, 16, 64)
    return _unit(op.squeeze(op.matmul(weight, values), ints(1)))


def _keys(d: Var) -> Var:
    """Keys' cubic kernel at distances 0 <= d <= 2 (IEEE TASSP 29(6), 1981, equation 15 with parameter a)."""

    def cubic(*coefficients: float) -> Var:  # Horner's scheme
        value = floats(coefficients[0])
        for c in coefficients[1:]:
            value = op.add(op.mul(value, d), floats(c))
        return value

    a = CUBIC
    return op.where(op.less_or_equal(d, floats(1)), cubic(a + 2, -a - 3, 0, 1), cubic(a, -5 * a, 8 * a, -4 * a))


def _unit(x: Var) -> Var:
    """Vectors of length 1 along the last axis; 0 stays 0."""
    return op.div(x, op.max([op.reduce_l2(x, ints(-1)), floats(1e-12)]))
