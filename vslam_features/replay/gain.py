"""What stopping early gains and loses on pairs of images, for any decay and threshold, from one run without a stop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from ..artifacts.stop_rule import stopped_after
from ..types import Matches, Status


class Overlap(Enum):
    """What is known of a pair beforehand. Truth of loops marks revisits: a pair without a mark may overlap too."""

    UNKNOWN = "unknown"
    MARKED = "overlaps"
    APART = "other scene"


@dataclass(frozen=True)
class PairScores:
    """A pair matched without a stop.

    Args:
        names: of the later and the earlier image, the order in which they were matched.
        status: after geometric verification.
        matches, inliers: their number.
        verified: by the bar of the run (:class:`Bar`).
        covisibility: final score, None where the matcher did not run.
        layer_scores: after each checked layer; empty where the matcher did not run.
    """

    names: tuple[str, str]
    overlap: Overlap
    status: Status
    matches: int = 0
    inliers: int = 0
    verified: bool = False
    covisibility: float | None = None
    layer_scores: tuple[float, ...] = ()

    @property
    def ran(self) -> bool:
        """Whether the matcher gave scores: it does not run on images without keypoints, and it may fail."""
        return self.covisibility is not None and bool(self.layer_scores)


@dataclass(frozen=True)
class Bar:
    """What counts as verified: geometry confirms it, with so many inliers, on that share of the fewer keypoints."""

    min_inliers: int = 0
    min_share: float = 0.0

    def passes(self, matches: Matches, keypoints: int) -> bool:
        """``keypoints``: of the image that has fewer."""
        return matches.verified and matches.num_inliers >= max(self.min_inliers, self.min_share * keypoints)

    def __str__(self) -> str:
        share = f" on {self.min_share:.0%} of the keypoints" if self.min_share else ""
        return f"by geometry, {self.min_inliers} inliers or more{share}" if self.min_inliers or share else "by geometry"


@dataclass(frozen=True)
class Cost:
    """Median milliseconds on some pairs, by the model and by the plain one in turns. ``pairs``: how many were timed."""

    pairs: int
    ms: float
    plain_ms: float


@dataclass(frozen=True)
class Setting:
    """A threshold and a decay."""

    min_covisibility: float
    decay: float

    def __str__(self) -> str:
        return f"{self.min_covisibility:g}/{self.decay:g}"


@dataclass(frozen=True)
class Row:
    """What a setting does to the pairs that ran.

    Args:
        pairs: how many ran; verified: how many of those verify without a stop.
        stopped: checked layer -> pairs that stop after it.
        rejected: pairs that run through and are below the threshold at the end.
        hasty: pairs that stop although their final score passes the threshold.
        lost: pairs that verify without a stop, and that a stop or the threshold takes away.
        time: of all pairs, as a share of what the plain model takes; None where it was not measured.
    """

    setting: Setting
    pairs: int
    verified: int
    stopped: dict[int, int]
    rejected: int
    hasty: tuple[PairScores, ...]
    lost: tuple[PairScores, ...]
    time: float | None

    @property
    def num_stopped(self) -> int:
        """Pairs that stop, after whichever layer."""
        return sum(self.stopped.values())

    def to_dict(self) -> dict:
        """Plain JSON values."""
        return {
            "min_covisibility": self.setting.min_covisibility,
            "early_stop_decay": self.setting.decay,
            "stopped": self.num_stopped,
            "stopped_share": _share(self.num_stopped, self.pairs),
            "stopped_after_layer": {str(layer): count for layer, count in self.stopped.items()},
            "below_at_the_end": self.rejected,
            "passing_but_stopped": _told(self.hasty, self.pairs),
            "verified_lost": _told(self.lost, self.verified) | {"pairs": [list(pair.names) for pair in self.lost]},
            "time_of_plain": None if self.time is None else round(self.time, 4),
        }


def stops(pairs: Sequence[PairScores], checked: Sequence[int], layers: int, setting: Setting) -> np.ndarray:
    """(P,) int64, the layer after which each pair stops; 0: it does not. All must have run."""
    scores = np.array([pair.layer_scores for pair in pairs], np.float32).reshape(len(pairs), len(checked))
    return stopped_after(scores, checked, layers, setting.min_covisibility, setting.decay)


def gain_row(
    pairs: Sequence[PairScores],
    checked: Sequence[int],
    layers: int,
    setting: Setting,
    costs: Mapping[int, Cost] | None = None,
) -> Row:
    """What a setting does.

    Args:
        pairs: those that did not run count nowhere.
        checked: layers, ascending. layers: L of the rule.
        costs: layer after which it stops, 0 for no stop -> what that costs; all that occur.
    """
    ran = [pair for pair in pairs if pair.ran]
    after = stops(ran, checked, layers, setting)
    final = np.array([pair.covisibility for pair in ran], np.float32)
    passes = ~(final < np.float32(setting.min_covisibility))
    verified = np.array([pair.verified for pair in ran], bool)
    counts = {layer: int((after == layer).sum()) for layer in (0, *checked)}

    def chosen(mask: np.ndarray) -> tuple[PairScores, ...]:
        return tuple(ran[i] for i in np.flatnonzero(mask))

    return Row(
        setting,
        len(ran),
        int(verified.sum()),
        {layer: counts[layer] for layer in checked},
        int(((after == 0) & ~passes).sum()),
        chosen((after > 0) & passes),
        chosen(verified & ((after > 0) | ~passes)),
        _time(counts, costs),
    )


def _time(counts: Mapping[int, int], costs: Mapping[int, Cost] | None) -> float | None:
    """Each pair takes what those that stop after the same layer do, with either model."""
    if not costs or not any(counts.values()):
        return None
    used = [(count, costs[layer]) for layer, count in counts.items() if count]
    return sum(n * cost.ms for n, cost in used) / sum(n * cost.plain_ms for n, cost in used)


def _told(pairs: Sequence[PairScores], of: int) -> dict:
    known = {f"known_{kind.name.lower()}": sum(p.overlap is kind for p in pairs) for kind in list(Overlap)[1:]}
    return {"count": len(pairs), "share": _share(len(pairs), of), "verified": sum(p.verified for p in pairs), **known}


def _share(count: int, of: int) -> float | None:
    return round(count / of, 6) if of else None
