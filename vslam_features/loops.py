"""Which verified candidates are loops: odometry gate, look-alike places, consensus."""

from __future__ import annotations

import dataclasses
from collections import deque

from .config import LoopsConfig
from .maps.memory import MemoryMap
from .odometry_gate import OdometryGate
from .types import Candidate, Keyframe, PairResult, Status


class LoopJudge:
    """Tells loops from look-alike places.

    With poses, candidates that odometry makes impossible are not tried, and
    a loop whose relative pose contradicts it is ``ambiguous``. Without, or with
    the gate off, a loop is ambiguous until several of the last keyframes agree
    on the place. Either way it is ambiguous while a *different* place verifies
    about as well.
    """

    def __init__(self, config: LoopsConfig, keyframes: MemoryMap, odometry: OdometryGate):
        self.config = config
        self.keyframes = keyframes
        self.odometry = odometry
        self._confirmed = _PairIndex(config.place_radius)
        self._recent: deque[tuple[int, tuple[int, ...]]] = deque(maxlen=config.consensus_window)

    def gate(self, keyframe: Keyframe, candidates: list[Candidate]) -> tuple[list[Candidate], list[Candidate]]:
        """Split candidates into possible and impossible ones, by the poses where both have one."""
        possible, impossible = [], []
        for c in candidates:
            allowed = self.odometry.possible(keyframe, self.keyframes[c.ref_kf_id])
            (possible if allowed else impossible).append(c)
        return possible, impossible

    def judge(self, keyframe: Keyframe, pairs: list[PairResult], still: bool = False) -> list[PairResult]:
        """The attempted pairs of one keyframe with their final status. Call once a keyframe, in order.

        ``still``: the view is that of the keyframe before, so that both together have one voice in the consensus.
        """
        pairs = [self._plausible(keyframe, p) for p in pairs]
        verified = [p for p in pairs if p.matches.verified]
        if still and self._recent:
            self._recent.pop()
        self._recent.append((keyframe.id, tuple(p.ref_kf_id for p in verified)))
        best = max(verified, key=lambda p: p.matches.num_inliers, default=None)
        judged = [self._decide(keyframe, p, best, verified) if p.matches.verified else p for p in pairs]
        for pair in judged:
            if pair.matches.verified:
                self._confirmed.add(pair.kf_id, pair.ref_kf_id)
        return judged

    def same_place(self, a: int, b: int) -> bool:
        """True where two keyframes are the same place, as far as it is known.

        Near in sequence, or near to the two ends of a confirmed loop; with poses, near in space.
        """
        r = self.config.place_radius
        if abs(a - b) <= r:
            return True
        first, second = self.keyframes[a], self.keyframes[b]
        if self.odometry.applies(first, second):
            return self.odometry.possible(first, second)
        return self._confirmed.near(a, b) or self._confirmed.near(b, a)

    def _plausible(self, keyframe: Keyframe, pair: PairResult) -> PairResult:
        if not pair.matches.verified:
            return pair
        if pair.matches.num_inliers < self.config.min_inliers:
            return _with_status(pair, Status.TOO_FEW_INLIERS, f"a loop needs {self.config.min_inliers} inliers")
        if not self.odometry.applies(keyframe, self.keyframes[pair.ref_kf_id]):
            share = pair.matches.num_inliers / min(len(keyframe.features), len(self.keyframes[pair.ref_kf_id].features))
            if share < self.config.min_inlier_share:
                detail = (
                    f"inliers on {share:.1%} of the keypoints: look-alike places have as many, so that a loop without "
                    f"poses needs {self.config.min_inlier_share:.0%}"
                )
                return _with_status(pair, Status.AMBIGUOUS, detail)
        reason = self.odometry.disagreement(keyframe, self.keyframes[pair.ref_kf_id], pair.matches)
        return _with_status(pair, Status.AMBIGUOUS, reason) if reason else pair

    def _decide(self, keyframe: Keyframe, pair: PairResult, best: PairResult, verified: list[PairResult]) -> PairResult:
        level = self.config.ambiguity_ratio * best.matches.num_inliers
        rivals = [p for p in verified if p.matches.num_inliers >= level]
        for rival in (best, *rivals):
            if not self.same_place(pair.ref_kf_id, rival.ref_kf_id):
                detail = f"keyframe {rival.ref_kf_id}, another place, verifies with {rival.matches.num_inliers} inliers"
                return _with_status(pair, Status.AMBIGUOUS, detail)
        if not self.odometry.applies(keyframe, self.keyframes[pair.ref_kf_id]):
            agree = self._agreeing(pair.ref_kf_id)
            if agree < self.config.consensus:
                detail = f"{agree} of the last {len(self._recent)} keyframes agree, {self.config.consensus} needed"
                return _with_status(pair, Status.AMBIGUOUS, detail)
        return pair

    def _agreeing(self, ref_kf_id: int) -> int:
        return sum(any(self.same_place(ref, ref_kf_id) for ref in refs) for _, refs in self._recent)


class _PairIndex:
    """Pairs (i, j) of ids, found by nearness of both without a look at all of them."""

    def __init__(self, radius: int):
        self._radius = radius
        self._cells: dict[tuple[int, int], list[tuple[int, int]]] = {}

    def add(self, i: int, j: int) -> None:
        """Add a pair."""
        self._cells.setdefault((i // self._radius, j // self._radius), []).append((i, j))

    def near(self, a: int, b: int) -> bool:
        """True where a pair has |a - i| and |b - j| within the radius."""
        r = self._radius
        around = [(a // r + x, b // r + y) for x in (-1, 0, 1) for y in (-1, 0, 1)]
        return any(abs(a - i) <= r and abs(b - j) <= r for cell in around for i, j in self._cells.get(cell, ()))


def _with_status(pair: PairResult, status: Status, detail: str) -> PairResult:
    return dataclasses.replace(pair, matches=dataclasses.replace(pair.matches, status=status, detail=detail))
