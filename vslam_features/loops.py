"""Which verified candidates are loops: odometry gate, look-alike places, consensus."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable

from .config import LoopsConfig
from .maps.keyframe_map import KeyframeMap
from .odometry_gate import OdometryGate
from .types import Candidate, Keyframe, KeyframeHeader, PairResult, Status


class LoopJudge:
    """Tells loops from look-alike places.

    With poses, candidates that odometry makes impossible are not tried, and
    a loop whose relative pose contradicts it is ``ambiguous``. Without, or with
    the gate off, a loop is ambiguous until several of the last keyframes agree
    on the place. Either way it is ambiguous while a *different* place verifies
    about as well. It needs no more of older keyframes than their headers.
    """

    def __init__(
        self,
        config: LoopsConfig,
        keyframes: KeyframeMap,
        odometry: OdometryGate,
        confirmed: Iterable[tuple[int, int]] = (),
    ):
        """``confirmed``: (id, reference id) of the loops that are known already."""
        self.config = config
        self.keyframes = keyframes
        self.odometry = odometry
        self._confirmed = _PairIndex(config.place_radius)
        for pair in confirmed:
            self._confirmed.add(*map(keyframes.header, pair))
        self._recent: deque[tuple[int, tuple[int, ...]]] = deque(maxlen=config.consensus_window)

    def gate(self, keyframe: Keyframe, candidates: list[Candidate]) -> tuple[list[Candidate], list[Candidate]]:
        """Split candidates into possible and impossible ones, by the poses where both have one."""
        possible, impossible, header = [], [], keyframe.header
        for c in candidates:
            allowed = self.odometry.possible(header, self.keyframes.header(c.ref_kf_id))
            (possible if allowed else impossible).append(c)
        return possible, impossible

    def judge(self, keyframe: Keyframe, pairs: list[PairResult], still: bool = False) -> list[PairResult]:
        """The attempted pairs of one keyframe with their final status. Call once a keyframe, in order.

        ``still``: the view is that of the keyframe before, so that both together have one voice in the consensus.
        """
        header = keyframe.header
        pairs = [self._plausible(header, p) for p in pairs]
        verified = [p for p in pairs if p.matches.verified]
        if still and self._recent:
            self._recent.pop()
        self._recent.append((keyframe.id, tuple(p.ref_kf_id for p in verified)))
        best = max(verified, key=lambda p: p.matches.num_inliers, default=None)
        judged = [self._decide(header, p, best, verified) if p.matches.verified else p for p in pairs]
        for pair in judged:
            # A keyframe of a localisation is soon forgotten, and joins no places of the map.
            if pair.matches.verified and not self.keyframes.read_only:
                self._confirmed.add(header, self.keyframes.header(pair.ref_kf_id))
        return judged

    def same_place(self, a: int, b: int) -> bool:
        """True where two keyframes are the same place, as far as it is known.

        Near in the sequence of one session, or near to the two ends of a confirmed loop; with poses, near in space.
        """
        first, second = self.keyframes.header(a), self.keyframes.header(b)
        if first.session == second.session and abs(a - b) <= self.config.place_radius:
            return True
        if self.odometry.applies(first, second):
            return self.odometry.possible(first, second)
        return self._confirmed.near(first, second) or self._confirmed.near(second, first)

    def _plausible(self, header: KeyframeHeader, pair: PairResult) -> PairResult:
        if not pair.matches.verified:
            return pair
        if pair.matches.num_inliers < self.config.min_inliers:
            return _with_status(pair, Status.TOO_FEW_INLIERS, f"a loop needs {self.config.min_inliers} inliers")
        ref = self.keyframes.header(pair.ref_kf_id)
        if not self.odometry.applies(header, ref):
            share = pair.matches.num_inliers / min(header.num_keypoints, ref.num_keypoints)
            if share < self.config.min_inlier_share:
                detail = (
                    f"inliers on {share:.1%} of the keypoints: look-alike places have as many, so that a loop without "
                    f"poses needs {self.config.min_inlier_share:.0%}"
                )
                return _with_status(pair, Status.AMBIGUOUS, detail)
        reason = self.odometry.disagreement(header, ref, pair.matches)
        return _with_status(pair, Status.AMBIGUOUS, reason) if reason else pair

    def _decide(
        self, header: KeyframeHeader, pair: PairResult, best: PairResult, verified: list[PairResult]
    ) -> PairResult:
        level = self.config.ambiguity_ratio * best.matches.num_inliers
        rivals = [p for p in verified if p.matches.num_inliers >= level]
        for rival in (best, *rivals):
            if not self.same_place(pair.ref_kf_id, rival.ref_kf_id):
                detail = f"keyframe {rival.ref_kf_id}, another place, verifies with {rival.matches.num_inliers} inliers"
                return _with_status(pair, Status.AMBIGUOUS, detail)
        if not self.odometry.applies(header, self.keyframes.header(pair.ref_kf_id)):
            agree = self._agreeing(pair.ref_kf_id)
            if agree < self.config.consensus:
                detail = f"{agree} of the last {len(self._recent)} keyframes agree, {self.config.consensus} needed"
                return _with_status(pair, Status.AMBIGUOUS, detail)
        return pair

    def _agreeing(self, ref_kf_id: int) -> int:
        return sum(any(self.same_place(ref, ref_kf_id) for ref in refs) for _, refs in self._recent)


class _PairIndex:
    """Pairs (i, j) of keyframes, found by nearness of both without a look at all of them.

    Near are ids of one session: across its border, ids that follow one another are of different places.
    """

    def __init__(self, radius: int):
        self._radius = radius
        self._cells: dict[tuple[int, int, int, int], list[tuple[int, int]]] = {}

    def add(self, i: KeyframeHeader, j: KeyframeHeader) -> None:
        """Add a pair."""
        cell = i.session, j.session, i.id // self._radius, j.id // self._radius
        self._cells.setdefault(cell, []).append((i.id, j.id))

    def near(self, a: KeyframeHeader, b: KeyframeHeader) -> bool:
        """True where a pair has |a - i| and |b - j| within the radius."""
        r = self._radius
        around = [(a.session, b.session, a.id // r + x, b.id // r + y) for x in (-1, 0, 1) for y in (-1, 0, 1)]
        return any(abs(a.id - i) <= r and abs(b.id - j) <= r for cell in around for i, j in self._cells.get(cell, ()))


def _with_status(pair: PairResult, status: Status, detail: str) -> PairResult:
    return dataclasses.replace(pair, matches=dataclasses.replace(pair.matches, status=status, detail=detail))
