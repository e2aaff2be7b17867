"""Which pairs of keyframes a matcher is compared on: hard ones first, and a few easy ones as controls.

A wrong engine is right on neighbours of a video for a long time. It fails on pairs that share little, and on places
that were come back to (tinynav, pull request 261: 6 such pairs failed, 2 controls did not).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ..artifacts.saved_pairs import KINDS
from ..types import PairKind, PairResult, Status

PLACES = PairKind.LOOP, PairKind.RELOCALISATION
FAILED = Status.FAULT_RECOVERED, Status.NON_FINITE, Status.BACKEND_ERROR
"""The model failed on the pair, whether or not the fallback made it good."""
NEAR = 3
"""Two pairs whose keyframes are no further apart than this (in count) show about the same."""


@dataclass(frozen=True)
class SeenPair:
    """An attempted pair of keyframes, the newer one first.

    ``moved``: median shift of its inliers as a share of the image diagonal, 0 where it is not known.
    """

    kf_id: int
    ref_kf_id: int
    stamp_ns: int
    ref_stamp_ns: int
    kind: PairKind
    status: Status
    matches: int
    inliers: int
    moved: float = 0.0

    @classmethod
    def of(cls, pair: PairResult, stamp_ns: int, moved: float = 0.0) -> SeenPair:
        """``stamp_ns``: of the newer keyframe."""
        m = pair.matches
        ids = pair.kf_id, pair.ref_kf_id, stamp_ns, pair.ref_stamp_ns
        return cls(*ids, pair.kind, m.status, len(m), m.num_inliers, moved)

    @property
    def worth(self) -> str:
        """Which of ``KINDS`` it is; empty where it proves little: without a match, or neighbours that do not verify."""
        if not (self.matches or self.failed):
            return ""
        if self.kind in PLACES:
            return "revisit"
        if self.kind is not PairKind.TRACK or not (self.status.confirms or self.failed):
            return ""
        if self.kf_id - self.ref_kf_id >= 2:
            return "wide"
        return "" if self.failed else "control"

    @property
    def failed(self) -> bool:
        """The model failed on it."""
        return self.status in FAILED

    def near(self, other: SeenPair) -> bool:
        """True where both pairs show about the same."""
        return abs(self.kf_id - other.kf_id) <= NEAR and abs(self.ref_kf_id - other.ref_kf_id) <= NEAR


@dataclass(frozen=True)
class Choice:
    """Chosen pairs with their kinds, hardest kind first; ``notes``: what there was less of than wanted, in words."""

    pairs: tuple[tuple[str, SeenPair], ...]
    notes: tuple[str, ...]

    def count(self, kind: str) -> int:
        """How many are of a kind."""
        return sum(k == kind for k, _ in self.pairs)


def shares(wanted: int) -> dict[str, int]:
    """How many of so many pairs are to be of each kind: a quarter are controls, the others half and half."""
    control = wanted // 4
    revisit = (wanted - control) // 2
    return {"wide": wanted - control - revisit, "revisit": revisit, "control": control}


def choose(seen: Iterable[SeenPair], wanted: int) -> Choice:
    """Choose up to ``wanted`` pairs by :func:`shares`; where a kind has too few, others take their place.

    Wide are neighbours, but not adjacent ones, that still verify with the fewest matches, and of equals those that
    moved most. Revisits are attempted loops: verified ones with the fewest matches, then those that are not, with the
    most. Of both, those come first on which the model failed. Controls are adjacent keyframes with a middling number,
    on which it did not. Pairs of a kind show different places where they can.
    """
    by_kind: dict[str, list[SeenPair]] = {kind: [] for kind in KINDS}
    for pair in {(p.kf_id, p.ref_kf_id): p for p in seen}.values():
        if pair.worth:
            by_kind[pair.worth].append(pair)
    middle = float(np.median([p.matches for p in by_kind["control"]])) if by_kind["control"] else 0.0
    order = {"wide": _hard, "revisit": _revisit, "control": lambda p: (abs(p.matches - middle), p.kf_id)}
    ranked = {kind: _spread(sorted(pairs, key=order[kind]), wanted) for kind, pairs in by_kind.items()}
    takes = {kind: min(count, len(ranked[kind])) for kind, count in shares(wanted).items()}
    for kind in KINDS:
        takes[kind] += min(wanted - sum(takes.values()), len(ranked[kind]) - takes[kind])
    pairs = tuple((kind, pair) for kind in KINDS for pair in ranked[kind][: takes[kind]])
    return Choice(pairs, tuple(_notes(takes, wanted)))


def enough(seen: Iterable[SeenPair], wanted: int) -> bool:
    """Whether there are as many controls as wanted, and as many others of whichever kind."""
    choice, share = choose(seen, wanted), shares(wanted)
    return choice.count("wide") + choice.count("revisit") >= share["wide"] + share["revisit"] and (
        choice.count("control") >= share["control"]
    )


def look_wide(
    ids: Sequence[int],
    match: Callable[[int, int], SeenPair],
    anchors: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[SeenPair]:
    """Pairs of neighbours that verify, each further apart than the one before: from some keyframes back in time.

    The distance doubles until a pair does not verify, and is then halved in between, down to a quarter of it.

    Args:
        ids: of keyframes of one video, in order.
        match: of a newer and an older id, the attempted pair.
        anchors: from so many keyframes, evenly spread.
    """
    found = []
    starts = (
        sorted({round(i) for i in np.linspace(min(2, len(ids) - 1), len(ids) - 1, anchors)}) if len(ids) > 2 else []
    )
    for done, start in enumerate(starts, 1):
        good, bad, step = 1, start + 1, 2
        while step < bad and bad - good > max(1, good // 4):
            pair = match(ids[start], ids[start - step])
            if pair.worth:
                found.append(pair)
            if pair.status.confirms:
                good = step
            else:
                bad = step
            step = 2 * good if 2 * good < bad else (good + bad) // 2
        progress(done, len(starts))
    return found


def _hard(pair: SeenPair) -> tuple:
    return not pair.failed, pair.matches, -pair.moved, pair.kf_id, pair.ref_kf_id


def _revisit(pair: SeenPair) -> tuple:
    sure = pair.status.confirms
    few = pair.matches if sure else -pair.matches
    return not pair.failed, not sure, few, -pair.moved, pair.kf_id, pair.ref_kf_id


def _spread(ranked: list[SeenPair], most: int) -> list[SeenPair]:
    """Up to ``most`` that show what none before them does, then the others, both in their order."""
    first: list[SeenPair] = []
    for pair in ranked:
        if len(first) < most and not any(pair.near(other) for other in first):
            first.append(pair)
    there = set(first)
    return first + [pair for pair in ranked if pair not in there]


def _notes(takes: dict[str, int], wanted: int) -> list[str]:
    share, notes = shares(wanted), []
    short = {kind: share[kind] - takes[kind] for kind in KINDS if takes[kind] < share[kind]}
    extra = [f"{takes[kind] - share[kind]} {kind}" for kind in KINDS if takes[kind] > share[kind]]
    for kind, count in short.items():
        notes.append(f"{share[kind] - count} of {share[kind]} {kind} pairs wanted were found")
    if extra:
        notes.append(f"more of others instead: {', '.join(extra)}")
    if (total := sum(takes.values())) < wanted:
        notes.append(f"{total} of {wanted} pairs in all")
    return notes
