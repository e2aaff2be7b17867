"""Inputs that the parity gate runs a matcher of dense maps on."""

from __future__ import annotations

from collections.abc import Callable

import cv2
import numpy as np

from ..images import to_grey
from . import golden
from .cases import MAX_KEYPOINTS, Case, matching

Describe = Callable[[np.ndarray], np.ndarray]

_CELL = 8  # pixels, of the seeded maps
_UNKNOWN = (64, 16, 20)
_FEWER = 31  # keypoints of the second image: equal numbers would hide a model that takes one for the other
# Time grows with the square of the cells: 4096 take a CPU seconds a pair, and the gate runs model and reference.
_MANY_CELLS, _STEP = 1024, 3


def dense_cases(describe: Describe | None = None, shape: tuple[int, int, int] | None = None) -> list[Case]:
    """Pairs for a matcher that takes two maps (C, h, w) f32; fewer of large maps.

    Args:
        describe: uint8 image -> map, by the features model: the pictures that ship are the pairs, with corners as
            keypoints. None: seeded maps, of which the second shows the first moved by whole cells, with noise.
        shape: of the seeded maps, None where any will do.
    """
    if describe is None:
        shape = shape or _UNKNOWN
        return [_seeded(seed, *shape) for seed in range(8)][:: _step(shape)]
    pairs, step, cases = golden.pairs(), None, []
    for i, pair in enumerate(pairs):
        if step is None or i % step == 0:
            most = MAX_KEYPOINTS, MAX_KEYPOINTS - _FEWER
            sides = [(_corners(im, n), describe(im), im.shape[1::-1]) for im, n in zip(pair.images, most)]
            step = _step(sides[0][1].shape)
            cases.append(Case(pair.name, (matching(sides),)))
    return cases


def _step(shape: tuple[int, ...]) -> int:
    return _STEP if shape[-1] * shape[-2] > _MANY_CELLS else 1


def _corners(image: np.ndarray, most: int) -> np.ndarray:
    """(N, 2) f32, at most so many corners, at least one point."""
    found = cv2.goodFeaturesToTrack(to_grey(image), most, 0.01, 4)
    return np.zeros((1, 2), np.float32) if found is None else found.reshape(-1, 2).astype(np.float32)


def _seeded(seed: int, channels: int, h: int, w: int) -> Case:
    """From pair to pair the views move apart; the numbers of keypoints differ."""
    rng = np.random.default_rng([60, seed])
    step = np.array([1 + seed % max(w // 4, 1), seed % max(h // 4, 1)])
    scene = rng.normal(size=(channels, h + step[1], w + step[0]))
    maps = [scene[:, step[1] :, step[0] :], scene[:, :h, :w] + 0.1 * rng.normal(size=(channels, h, w))]
    cells = np.stack(np.meshgrid(np.arange(w), np.arange(h)), axis=-1).reshape(-1, 2)
    common = cells[((cells + step) < (w, h)).all(axis=1)]
    common = rng.permutation(common)[: MAX_KEYPOINTS // 2]
    sides = []
    for chosen, extra, values in ((common, 20, maps[0]), (common + step, 31, maps[1])):
        chosen = np.concatenate([chosen, rng.integers(0, (w, h), (extra, 2))])
        keypoints = (rng.permutation(chosen) + 0.5) * _CELL - 0.5
        values = values / np.linalg.norm(values, axis=0)
        sides.append((keypoints, values.astype(np.float16), (w * _CELL, h * _CELL)))
    return Case(f"seeded-{seed}", (matching(sides),))
