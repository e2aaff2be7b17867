"""Differentiable keypoint detection (DKD) of ALIKE/ALIKED: maxima of a score map, refined below the pixel."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import spox.opset.ai.onnx.v18 as op
from spox import Var

from .deformable import F32, extent, ramp

RADIUS = 2  # of the suppression, of the refinement and of the border
TEMPERATURE = 0.1  # of the soft-argmax
_SIDE = 2 * RADIUS + 1


@dataclass(frozen=True)
class Detections:
    """Keypoints, best first. All rows are finite; a row of score 0 is no keypoint."""

    xy: Var  # (N, 2) float32, pixels, inside the image
    scores: Var  # (N,) float32


def _i64(*values: int) -> Var:
    return op.const(np.array(values, np.int64))


def _pool(x: Var) -> Var:
    """Maximum over the square of suppression around each pixel. A row and a column cost less than the square."""
    row = op.max_pool(x, kernel_shape=[1, _SIDE], pads=[0, RADIUS, 0, RADIUS])[0]
    return op.max_pool(row, kernel_shape=[_SIDE, 1], pads=[RADIUS, 0, RADIUS, 0])[0]


def suppress(scores: Var) -> Var:
    """Non-maximum suppression of (1, 1, h, w) positive scores: zero but at maxima.

    Maxima that only a suppressed pixel had hidden come back, in two rounds.
    """
    zero = op.const(F32(0))
    maxima = op.equal(scores, _pool(scores))
    for _ in range(2):
        near = op.greater(_pool(op.cast(maxima, to=F32)), zero)
        rest = op.where(near, zero, scores)
        maxima = op.or_(maxima, op.and_(op.equal(rest, _pool(rest)), op.not_(near)))
    return op.where(maxima, scores, zero)


def detect(scores: Var, max_keypoints: Var, threshold: float) -> Detections:
    """The best keypoints of a score map.

    They are chosen by the score of their pixel, and sorted by their own score, which is interpolated at the refined
    position. Where no maximum exceeds the threshold, those above the mean of the map count, as in the published code.

    Args:
        scores: (1, 1, h, w) float32 in 0..1.
        max_keypoints: int64 (1,).
        threshold: least score of a keypoint's pixel.

    Returns:
        min(max_keypoints, h w) rows.
    """
    h, w = extent(scores, 2), extent(scores, 3)
    zero, one = op.const(F32(0)), op.const(F32(1))

    def inner(size: Var) -> Var:
        line = ramp(size, np.int64)
        return op.and_(op.greater_or_equal(line, _i64(RADIUS)), op.less(line, op.sub(size, _i64(RADIUS))))

    inside = op.and_(op.unsqueeze(inner(h), _i64(1)), inner(w))
    maxima = op.where(inside, suppress(scores), zero)
    limit = op.const(F32(threshold))
    found = op.greater(op.reduce_max(maxima, keepdims=1), limit)
    limit = op.where(found, limit, op.reduce_mean(scores, keepdims=1))
    chosen = op.reshape(op.where(op.greater(maxima, limit), maxima, zero), _i64(-1))
    best, index = op.top_k(chosen, op.min([max_keypoints, op.mul(h, w)]))

    x, y = op.mod(index, w), op.div(index, w)
    border = op.const(np.array([0, 0, RADIUS, RADIUS] * 2, np.int64))
    padded = op.reshape(op.pad(scores, border), _i64(-1))
    pitch = op.add(w, _i64(2 * RADIUS))
    dy, dx = np.indices((_SIDE, _SIDE)).reshape(2, -1)
    corner = op.unsqueeze(op.add(op.mul(y, pitch), x), _i64(1))
    around = op.add(op.mul(op.const(dy), pitch), op.const(dx))
    patch = op.gather(padded, op.add(corner, around))  # (N, 25)

    peak = op.reduce_max(patch, _i64(1), keepdims=1)
    weight = op.exp(op.div(op.sub(patch, peak), op.const(F32(TEMPERATURE))))
    weight = op.div(weight, op.reduce_sum(weight, _i64(1), keepdims=1))
    grid = np.stack([dx, dy], axis=1).astype(F32) - RADIUS  # (25, 2)
    shift = op.matmul(weight, op.const(grid))  # soft-argmax
    distance = op.abs(op.sub(op.const(grid), op.unsqueeze(shift, _i64(1))))  # (N, 25, 2)
    bilinear = op.reduce_prod(op.max([op.sub(one, distance), zero]), _i64(2), keepdims=0)
    score = op.reduce_sum(op.mul(patch, bilinear), _i64(1), keepdims=0)

    pixel = op.cast(op.concat([op.unsqueeze(x, _i64(1)), op.unsqueeze(y, _i64(1))], axis=1), to=F32)
    last = op.cast(op.sub(op.concat([w, h], axis=0), _i64(1)), to=F32)
    xy = op.min([op.max([op.add(pixel, shift), zero]), last])
    ranked, order = op.top_k(op.where(op.greater(best, zero), score, zero), op.shape(best))
    return Detections(op.gather(xy, order), ranked)
