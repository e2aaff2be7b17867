"""Keypoints and descriptors of a model against those of its reference.

Ranks may swap, and keypoints near the detector's threshold may come or go: they
are compared by position, and the presence of one only where its score lies
above the weakest tenth.
"""

from __future__ import annotations

import numpy as np

from .comparison import EVIDENCE, Comparison, Limits, check_counts, figures_of, row_cosine
from .contract import TENSORS

_RATIO = 0.9  # of distances to the best and second-best descriptor, for mutual matches
_WEAKEST = 0.1  # share of keypoints whose presence is not compared
_SAME_PX = 1.0  # two keypoints may be the same; detectors keep theirs further apart


def compare_keypoints(result: Comparison, expected, got, limits: Limits) -> None:
    """Fill in ``result`` for outputs of role ``features``, of one view or two."""
    stacks, sides_e, sides_g = {"scores": [], "descriptors": []}, [], []
    found, offsets, counts, absent = [], [], [0, 0], 0
    for e, g in zip(expected, got):
        e, g = ({k: v[o["scores"] > 0] for k, v in o.items() if k in TENSORS["features"]} for o in (e, g))
        counts[0] += len(e["keypoints"])
        counts[1] += len(g["keypoints"])
        to_g, distance = _same(e["keypoints"], g["keypoints"])
        rows = np.flatnonzero(to_g >= 0)
        absent += max(len(e["keypoints"]), len(g["keypoints"])) - len(rows)
        good_e, good_g = np.zeros(len(e["keypoints"]), bool), np.zeros(len(g["keypoints"]), bool)
        if len(rows):
            partner = to_g[rows]
            offsets.append(g["keypoints"][partner] - e["keypoints"][rows])
            cosine = row_cosine(e["descriptors"][rows], g["descriptors"][partner])
            good_e[rows] = good_g[partner] = (distance[rows] <= limits.radius_px) & (cosine >= limits.descriptor)
            for name, stack in stacks.items():
                stack.append((e[name][rows], g[name][partner]))
        found += [_strongest(good_e, e["scores"]), _strongest(good_g, g["scores"])]
        sides_e.append(e["descriptors"])
        sides_g.append(g["descriptors"])
    result.keypoints = counts[0], counts[1]
    result.evidence = all(len(d) >= EVIDENCE for d in sides_e)
    if len(expected) == 2 and np.array_equal(*(e["keypoints"] for e in expected)):
        result.evidence = False  # a reference that says the same of every picture proves nothing
    if offsets and result.evidence:
        shift = np.median(np.concatenate(offsets), axis=0)
        result.shift_px = float(np.abs(shift).max())
        if result.shift_px > limits.shift_px:
            result.problems.append(
                f"keypoints are shifted by ({shift[0]:+.2f}, {shift[1]:+.2f}) px, at most {limits.shift_px} px"
            )
    result.agreement = min((float(good.mean()) for good in found if len(good)), default=1.0)
    missed = max(int((~good).sum()) for good in found)
    if missed > limits.slack and result.agreement < limits.agreement:
        result.problems.append(
            f"{result.agreement:.1%} of keypoints are the same (within {limits.radius_px} px, descriptors of cosine "
            f"{limits.descriptor}), at least {limits.agreement:.0%}"
        )
    if len(sides_e) == 2:
        result.matches = _mutual(*sides_e), _mutual(*sides_g)
        check_counts(result, limits, absent)
    if result.evidence:
        for name, stack in stacks.items():
            if stack:
                a, b = (np.concatenate([pair[side].ravel() for pair in stack]) for side in (0, 1))
                result.tensors[name] = figures_of(a, b)


def _same(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each keypoint of ``a`` (N, 2) its mutual nearest within ``_SAME_PX`` in ``b``, -1 where none; and how far."""
    if not len(a) or not len(b):
        return np.full(len(a), -1), np.full(len(a), np.inf)
    x, y = (a[:, None, i].astype(np.float64) - b[None, :, i] for i in range(2))
    distance = np.sqrt(x * x + y * y)
    to_b, to_a = distance.argmin(axis=1), distance.argmin(axis=0)
    near = distance[np.arange(len(a)), to_b]
    return np.where((to_a[to_b] == np.arange(len(a))) & (near <= _SAME_PX), to_b, -1), near


def _strongest(values: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Those whose scores lie above the weakest tenth."""
    return values[np.argsort(-scores, kind="stable")[: int(np.ceil(len(scores) * (1 - _WEAKEST)))]]


def _mutual(a: np.ndarray, b: np.ndarray) -> int:
    """How many rows of ``a`` (M, D) and ``b`` (N, D) are mutual nearest and pass the ratio test on distances."""
    if len(a) < 2 or len(b) < 2:
        return 0
    cosine = _unit(a) @ _unit(b).T
    to_b, to_a = cosine.argmax(axis=1), cosine.argmax(axis=0)
    second, best = np.partition(cosine, -2, axis=1)[:, -2:].T
    distinct = np.sqrt(np.maximum(2 - 2 * best, 0)) < _RATIO * np.sqrt(np.maximum(2 - 2 * second, 0))
    return int((distinct & (to_a[to_b] == np.arange(len(a)))).sum())


def _unit(d: np.ndarray) -> np.ndarray:
    d = d.astype(np.float32)
    return d / np.maximum(np.linalg.norm(d, axis=1, keepdims=True), 1e-12)
