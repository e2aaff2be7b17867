"""What the diagnostics tell: counts, rates, latencies and faults, safe between threads."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np

from ..types import Loops, PairKind, PairResult, Tracked

WINDOW = 200
"""Latest values that percentiles and ratios are made of."""

PAIR_STAGES = {"match": (PairKind.TRACK,), "verify": (PairKind.LOOP, PairKind.RELOCALISATION)}
"""The stages that make pairs, and of which kinds."""


@dataclass
class Stage:
    """One stage: latest latencies in ms, runs and faults since the start, the text of the last fault."""

    latency_ms: deque = field(default_factory=lambda: deque(maxlen=WINDOW))
    runs: int = 0
    faults: int = 0
    last_fault: str = ""

    def percentile(self, q: float) -> float:
        """Latency in ms; NaN before the first run."""
        return float(np.percentile(self.latency_ms, q)) if self.latency_ms else float("nan")


class Rate:
    """Events a second over the last few seconds."""

    def __init__(self, seconds: float = 5.0, clock=time.monotonic):
        self._seconds, self._clock = seconds, clock
        self._times: deque[float] = deque()
        self._start = clock()

    def tick(self) -> None:
        """An event happened."""
        self._times.append(self._clock())

    def value(self) -> float:
        """Events a second."""
        now = self._clock()
        while self._times and self._times[0] < now - self._seconds:
            self._times.popleft()
        return len(self._times) / max(min(self._seconds, now - self._start), 1e-9)


class Statistics:
    """Filled by the workers, read by the diagnostics. ``lock`` guards all attributes."""

    def __init__(self):
        self.lock = threading.Lock()
        self.stages: dict[str, Stage] = {}
        self.frame_rate, self.keyframe_rate = Rate(), Rate()
        self.statuses: dict[PairKind, Counter] = {kind: Counter() for kind in PairKind}
        self.recent_empty: dict[str, deque] = {stage: deque(maxlen=WINDOW) for stage in PAIR_STAGES}
        self.keyframes = self.candidates = self.gated = self.resets = 0
        self.uncalibrated = self.says_uncalibrated = self.without_pose = 0

    def fault(self, stage: str, text: str) -> None:
        """A stage failed on one item."""
        with self.lock:
            entry = self.stages.setdefault(stage, Stage())
            entry.faults += 1
            entry.last_fault = text

    def latency(self, stage: str, milliseconds: float) -> None:
        """A stage ran."""
        with self.lock:
            self._latency(stage, milliseconds)

    def tracked(self, result: Tracked) -> None:
        """A frame was tracked."""
        self._stages(result)
        with self.lock:
            self.frame_rate.tick()
            self.uncalibrated += result.frame.camera is None
            self.without_pose += result.frame.pose is None
            if result.keyframe is not None:
                self.keyframe_rate.tick()
                self.keyframes += 1
            self._pairs("match", result.pairs)

    def loops(self, result: Loops) -> None:
        """The loops of a keyframe were searched for."""
        self._stages(result)
        with self.lock:
            self.candidates += len(result.candidates)
            self.gated += len(result.gated)
            self._pairs("verify", result.pairs)

    def no_calibration(self) -> None:
        """The camera_info of an image says that the camera is uncalibrated."""
        with self.lock:
            self.says_uncalibrated += 1

    def reset(self) -> None:
        """The map was forgotten."""
        with self.lock:
            self.resets += 1

    def zero_match_ratio(self, stage: str) -> float:
        """Share of the latest pairs of ``match`` or ``verify`` without a match; NaN before the first. Hold the lock."""
        recent = self.recent_empty[stage]
        return sum(recent) / len(recent) if recent else float("nan")

    def pair_statuses(self, stage: str) -> Counter:
        """How often the pairs of ``match`` or ``verify`` had each status. Hold the lock."""
        return sum((self.statuses[kind] for kind in PAIR_STAGES[stage]), Counter())

    def _stages(self, result: Tracked | Loops) -> None:
        with self.lock:
            for stage, milliseconds in result.latency_ms.items():
                self._latency(stage, milliseconds)
        for stage, text in result.faults.items():
            self.fault(stage, text)

    def _latency(self, stage: str, milliseconds: float) -> None:
        entry = self.stages.setdefault(stage, Stage())
        entry.runs += 1
        entry.latency_ms.append(milliseconds)

    def _pairs(self, stage: str, pairs: tuple[PairResult, ...]) -> None:
        for pair in pairs:
            self.statuses[pair.kind][pair.matches.status] += 1
        self.recent_empty[stage].extend(len(p.matches) == 0 for p in pairs)
