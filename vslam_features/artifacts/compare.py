"""What a model computed against what its reference computed, one pair at a time.

Rows of keypoints may swap their ranks, and keypoints and matches near a
threshold may come or go: neither is a difference here. Keypoints are compared
by position, and the presence of one only where its score lies above the weakest
tenth; a match that is there or not only where its score is not near the host's
threshold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

MATCH_THRESHOLD = 0.1  # the host's, on ``mscores0``
EVIDENCE = 8  # matches, or keypoints a view, below which a pair's agreement proves nothing
# Match scores above this are compared: those between are on the steep part of a sigmoid, where rounding errors grow.
CONFIDENT = 0.8
PAIR_FACTOR = 3
_RATIO = 0.9  # of distances to the best and second-best descriptor, for mutual matches
_WEAKEST = 0.1  # share of keypoints, the weakest, whose presence is not compared
_SAME_PX = 1.0  # two keypoints may be the same; detectors keep theirs further apart


@dataclass(frozen=True)
class Limits:
    """What may differ.

    Args:
        rms: relative RMS of a tensor's difference over all pairs; on one pair ``PAIR_FACTOR`` times that.
        agreement: least share of equal matches, or of keypoints found with their descriptor.
        counts: relative difference in the number of matches; ``slack`` matches more or less always pass.
        radius_px: that a keypoint may lie off. shift_px: the median offset of all.
        descriptor: least cosine of a keypoint's descriptors.
        cosine: least one of global descriptors.
        border: match scores this near to the threshold may fall on either side.
    """

    rms: float
    agreement: float
    counts: float
    slack: int
    radius_px: float
    shift_px: float
    descriptor: float
    cosine: float
    border: float


# Relative RMS that was measured (OpenVINO and ONNX Runtime, x86 with AVX512-FP16 and -BF16; XFeat, ALIKED, LighterGlue,
# LightGlue, EfficientNet): fp32 <= 0.001 % (descriptors 0.02 %, for golden ones are fp16); fp16 files <= 0.5 %; all
# computed in fp16 0.4-0.9 %, in bf16 2-6 % (bf16 has three bits less: eight times the limit). Equal matches or
# keypoints on the worst pair: fp32 100 %, fp16 96 %, bf16 91 %. Match counts within 5 %, in bf16 8 %; matchers that
# TensorRT runs in mixed precision lose 5 to 10 %. What must fail is far off: a graph whose indices were rounded to fp16
# kept 15 % of the keypoints, with descriptors 34 % off; half a pixel keeps none.
LIMITS = {
    "fp32": Limits(0.001, 0.99, 0.01, 1, 0.05, 0.02, 0.9999, 0.9999, 0.002),
    "fp16": Limits(0.01, 0.90, 0.10, 3, 0.25, 0.10, 0.99, 0.999, 0.02),
    "bf16": Limits(0.08, 0.85, 0.10, 4, 0.35, 0.15, 0.97, 0.995, 0.05),
    "int8": Limits(0.15, 0.70, 0.15, 6, 0.45, 0.20, 0.90, 0.98, 0.10),
}


@dataclass
class TensorFigures:
    """Of one tensor on one pair. ``max_error``: in the tensor's unit; ``squared*``: sums over its values."""

    squared_error: float
    squared: float
    max_error: float
    cosine: float

    @property
    def rms(self) -> float:
        """Relative RMS of the difference."""
        return relative_rms([self])


@dataclass
class Comparison:
    """Of one pair. Counts are None where the role has none. ``problems``: what is beyond its limit, in words."""

    nan: int = 0
    keypoints: tuple[int, int] | None = None
    matches: tuple[int, int] | None = None
    agreement: float | None = None
    cosine: float | None = None
    shift_px: float | None = None
    similarity: tuple[float, float] | None = None
    evidence: bool = False
    tensors: dict[str, TensorFigures] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def zero(self) -> bool:
        """Nothing was found where the reference found enough."""
        return self.matches is not None and self.matches[0] >= EVIDENCE and self.matches[1] == 0


def compare(role: str, runs, expected, got, limits: Limits) -> Comparison:
    """Compare a model's outputs on a pair with its reference's.

    Args:
        runs: inputs of each run. expected, got: outputs of each, by our tensor names.
    """
    result = Comparison(nan=sum(non_finite(outputs) for outputs in got))
    for e, g in zip(expected, got):
        result.problems += _shape_problems(role, e, g)
    if result.problems:
        return result
    if result.nan:
        if role == "matcher":  # NaN in what matches depend on leaves none of them
            result.matches = int(matched(expected[0]).sum()), int(matched(got[0]).sum())
        values = sum(v.size for outputs in got for v in outputs.values())
        result.problems.append(f"{result.nan} of {values} values are NaN or infinite")
        return result
    {"features": _features, "matcher": _matches, "global": _globals}[role](result, runs, expected, got, limits)
    most = PAIR_FACTOR * limits.rms
    result.problems += [
        f"{name} is {figures.rms:.2%} RMS off the reference, on a pair at most {most:.1%}"
        for name, figures in result.tensors.items()
        if not figures.rms <= most
    ]
    return result


def relative_rms(figures: Sequence[TensorFigures]) -> float:
    """Of a tensor over several pairs."""
    return float(np.sqrt(sum(f.squared_error for f in figures) / sum(f.squared for f in figures)))


def non_finite(outputs: dict[str, np.ndarray]) -> int:
    """How many values are NaN or infinite."""
    return sum(int((~np.isfinite(v)).sum()) for v in outputs.values() if v.dtype.kind == "f")


def matched(outputs: dict[str, np.ndarray]) -> np.ndarray:
    """Bool (M,): keypoints that a matcher matched, by the host's rule."""
    return (outputs["matches0"] >= 0) & (outputs["mscores0"] > MATCH_THRESHOLD)


def _shape_problems(role: str, expected, got) -> list[str]:
    problems = []
    for name in {"features": ("keypoints", "scores", "descriptors"), "matcher": ("matches0", "mscores0")}.get(
        role, ("descriptor",)
    ):
        if name not in got:
            problems.append(f"output '{name}' is missing, there are {', '.join(sorted(got))}; check the card's binding")
        elif role == "features":
            if got[name].ndim != expected[name].ndim or got[name].shape[1:] != expected[name].shape[1:]:
                problems.append(f"{name} has shape {got[name].shape}, the reference {expected[name].shape}")
            elif "keypoints" in got and len(got[name]) != len(got["keypoints"]):
                problems.append(f"{name} has {len(got[name])} rows for {len(got['keypoints'])} keypoints")
        elif got[name].size != expected[name].size:
            problems.append(f"{name} has shape {got[name].shape}, the reference {expected[name].shape}")
    return problems


def _matches(result: Comparison, runs, expected, got, limits: Limits) -> None:
    (e,), (g,) = expected, got
    is_e, is_g = matched(e), matched(g)
    result.matches = int(is_e.sum()), int(is_g.sum())
    result.evidence = result.matches[0] >= EVIDENCE
    n = len(runs[0].get("keypoints1", ())) or None
    if n is not None and ((g["matches0"] >= n).any() or (g["matches0"] < -1).any()):
        result.problems.append(f"matches0 goes from {g['matches0'].min()} to {g['matches0'].max()} for {n} keypoints")
    same = is_e & is_g & (e["matches0"] == g["matches0"])
    certain = np.maximum(np.where(is_e, e["mscores0"], 0), np.where(is_g, g["mscores0"], 0))
    unsure = (is_e != is_g) & (certain <= MATCH_THRESHOLD + limits.border)
    _check_counts(result, limits, int(unsure.sum()))
    either = (is_e | is_g) & ~unsure
    if either.any():
        result.agreement = float(same[either].mean())
        wrong = int((either & ~same).sum())
        if wrong > limits.slack and result.agreement < limits.agreement and not result.zero:
            result.problems.append(f"{result.agreement:.1%} of matches agree, at least {limits.agreement:.0%}")
    same &= e["mscores0"] > CONFIDENT
    if result.evidence and same.any():
        result.tensors["mscores0"] = _figures(e["mscores0"][same], g["mscores0"][same])
    if "covisibility_score" in e and "covisibility_score" in g:
        a, b = np.ravel(e["covisibility_score"]), np.ravel(g["covisibility_score"])
        result.tensors["covisibility_score"] = _figures(a, b, floor=0.1)


def _features(result: Comparison, runs, expected, got, limits: Limits) -> None:
    stacks, sides_e, sides_g = {"scores": [], "descriptors": []}, [], []
    found, offsets, counts, absent = [], [], [0, 0], 0
    for e, g in zip(expected, got):
        e, g = ({k: v[o["scores"] > 0] for k, v in o.items() if k in _OF_FEATURES} for o in (e, g))
        counts[0] += len(e["keypoints"])
        counts[1] += len(g["keypoints"])
        to_g, distance = _same(e["keypoints"], g["keypoints"])
        rows = np.flatnonzero(to_g >= 0)
        absent += max(len(e["keypoints"]), len(g["keypoints"])) - len(rows)
        good_e, good_g = np.zeros(len(e["keypoints"]), bool), np.zeros(len(g["keypoints"]), bool)
        if len(rows):
            partner = to_g[rows]
            offsets.append(g["keypoints"][partner] - e["keypoints"][rows])
            cosine = _row_cosine(e["descriptors"][rows], g["descriptors"][partner])
            good_e[rows] = good_g[partner] = (distance[rows] <= limits.radius_px) & (cosine >= limits.descriptor)
            for name, stack in stacks.items():
                stack.append((e[name][rows], g[name][partner]))
        found += [_strongest(good_e, e["scores"]), _strongest(good_g, g["scores"])]
        sides_e.append(e["descriptors"])
        sides_g.append(g["descriptors"])
    result.keypoints = counts[0], counts[1]
    result.evidence = all(len(d) >= EVIDENCE for d in sides_e)
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
        _check_counts(result, limits, absent)
    if result.evidence:
        for name, stack in stacks.items():
            if stack:
                a, b = (np.concatenate([pair[side].ravel() for pair in stack]) for side in (0, 1))
                result.tensors[name] = _figures(a, b)


def _globals(result: Comparison, runs, expected, got, limits: Limits) -> None:
    e, g = ([np.ravel(o["descriptor"]).astype(np.float64) for o in outputs] for outputs in (expected, got))
    result.evidence = all(np.linalg.norm(d) > 0 for d in e)
    cosines = [float(_row_cosine(a[None], b[None])[0]) for a, b in zip(e, g)]
    result.cosine = min(cosines)
    if result.cosine < limits.cosine:
        result.problems.append(f"cosine to the reference {result.cosine:.6f}, at least {limits.cosine}")
    for name, length in (("first", np.linalg.norm(g[0])), ("second", np.linalg.norm(g[-1]))):
        if abs(length - np.linalg.norm(e[0 if name == "first" else -1])) > 10 * limits.rms:
            result.problems.append(f"the {name} descriptor has length {length:.4f}")
            break
    result.tensors["descriptor"] = _figures(np.concatenate(e), np.concatenate(g))
    if len(e) == 2:
        result.similarity = tuple(float(_row_cosine(d[0][None], d[1][None])[0]) for d in (e, g))


_OF_FEATURES = ("keypoints", "scores", "descriptors")


def _check_counts(result: Comparison, limits: Limits, unsure: int) -> None:
    """``unsure``: matches that may be there or not, beyond what the limits allow."""
    expected, got = result.matches
    if result.zero:
        result.problems.append(f"no match, the reference has {expected}")
    elif abs(got - expected) > max(limits.slack, limits.counts * expected) + unsure:
        result.problems.append(f"{got} matches, the reference has {expected}, at most {limits.counts:.0%} apart")


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


def _row_cosine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    a, b = a.astype(np.float64), b.astype(np.float64)
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return (a * b).sum(axis=1) / np.maximum(lengths, 1e-24)


def _figures(expected: np.ndarray, got: np.ndarray, floor: float = 1e-12) -> TensorFigures:
    """``floor``: least RMS that differences are related to."""
    e, g = np.ravel(expected).astype(np.float64), np.ravel(got).astype(np.float64)
    return TensorFigures(
        float(((g - e) ** 2).sum()),
        max(float((e**2).sum()), e.size * floor**2),
        float(np.abs(g - e).max()),
        float(_row_cosine(e[None], g[None])[0]),
    )
