"""The outcome of comparing a model with its reference on one pair, and what may differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

EVIDENCE = 8  # matches, or keypoints a view, below which a pair's agreement proves nothing
PAIR_FACTOR = 3


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
        border: match scores this near to the threshold may fall on either side; those of equal matches are
            ``PAIR_FACTOR`` times that off on average, at most (bf16 attention: 0.05 on the worst pair).
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


def relative_rms(figures: Sequence[TensorFigures]) -> float:
    """Of a tensor over several pairs."""
    return float(np.sqrt(sum(f.squared_error for f in figures) / sum(f.squared for f in figures)))


def non_finite(outputs: dict[str, np.ndarray]) -> int:
    """How many values are NaN or infinite."""
    return sum(int((~np.isfinite(v)).sum()) for v in outputs.values() if v.dtype.kind == "f")


def check_counts(result: Comparison, limits: Limits, unsure: int) -> None:
    """``unsure``: matches that may be there or not, beyond what the limits allow."""
    expected, got = result.matches
    if result.zero:
        result.problems.append(f"no match, the reference has {expected}")
    elif abs(got - expected) > max(limits.slack, limits.counts * expected) + unsure:
        result.problems.append(f"{got} matches, the reference has {expected}, at most {limits.counts:.0%} apart")


def row_cosine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Cosines (N,) f64 of the rows of two arrays (N, D)."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return (a * b).sum(axis=1) / np.maximum(lengths, 1e-24)


def figures_of(expected: np.ndarray, got: np.ndarray, floor: float = 1e-12) -> TensorFigures:
    """Figures of two arrays of one size; ``floor``: least RMS that differences are related to."""
    e, g = np.ravel(expected).astype(np.float64), np.ravel(got).astype(np.float64)
    return TensorFigures(
        float(((g - e) ** 2).sum()),
        max(float((e**2).sum()), e.size * floor**2),
        float(np.abs(g - e).max()),
        float(row_cosine(e[None], g[None])[0]),
    )
