"""Frames of a source through the front end, synchronously: the same frames give the same results at any rate."""

from __future__ import annotations

import dataclasses
import os
import platform
import re
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

import cv2

from ..config import Config
from ..errors import ConfigError
from ..frontend import FrontEnd
from ..health import Health
from ..types import Frame, Keyframe, Loops, PairResult, Tracked
from .run_log import KeyframeRecord, MatchPoints, ModelRecord, PairRecord, RunLog
from .source import Source


def replay(
    source: Source,
    config: Config | None = None,
    progress: Callable[[int, int], None] | None = None,
    *,
    rate: float = 0.0,
    max_frames: int = 0,
) -> RunLog:
    """Process a source to its end.

    Args:
        config: the source's own where None.
        progress: called with (inputs used, inputs expected).
        rate: pace by the stamps, 1 is real time; 0: as fast as possible. Results do not depend on it.
        max_frames: stop after so many frames; 0: all.
    Returns:
        The log; ``incomplete`` says why a read is partial. An interrupt (Ctrl-C) ends the run,
        not the program: what was done by then is in the log, and ``interrupted`` is set.
    Raises:
        ConfigError: max_frames is negative.
        PluginError: a plug-in or its library is missing.
    """
    if max_frames < 0:
        raise ConfigError(f"max_frames: expected a number >= 0 (0 is all), got {max_frames}")
    config = config or source.config
    front_end = FrontEnd(config)
    expected = min(len(source), max_frames) if max_frames else len(source)
    log = RunLog(source.describe(), front_end.config.to_dict(), _models(front_end), expected=expected)
    log.instead, log.max_frames = front_end.warning, max_frames
    started, clock = datetime.now(timezone.utc), _Clock(rate)
    try:
        for frame in source:
            clock.wait(frame.stamp_ns)
            start = time.perf_counter()
            tracked, loops = front_end.process(frame)
            elapsed = (time.perf_counter() - start) * 1e3
            _record(log, front_end, source.position, tracked, loops, elapsed)
            if progress:
                progress(source.position + 1, expected)
            if max_frames and log.frames >= max_frames:
                break
    except KeyboardInterrupt:
        log.interrupted = True
    _account(log, source)
    log.engines = [_engine(health) for health in front_end.models.health()]
    log.run = {
        "started": started.isoformat(timespec="seconds"),
        "seconds": round(clock.elapsed(), 3),
        "rate": rate,
        "path": str(source.path),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "opencv_threads": cv2.getNumThreads(),
    }
    return log


def _account(log: RunLog, source: Source) -> None:
    """What became no frame, and why the log is partial where it is."""
    log.skipped, log.notes = dict(source.skipped.counts), dict(source.notes.counts)
    examples = {**source.skipped.examples, **source.notes.examples}
    log.examples = {k: [_without_folder(t, source.path) for t in texts] for k, texts in examples.items() if texts}
    log.damaged = bool(source.damage)
    reasons = [f"interrupted after {log.frames} of {log.expected} images"] if log.interrupted else []
    log.incomplete = "; ".join([*reasons, source.reason] if source.reason else reasons)
    if 0 < log.max_frames <= log.frames and source.position + 1 < len(source):
        log.notes[f"stopped after {log.frames} of {len(source)} images as asked"] = 1


def _without_folder(text: str, path: Path) -> str:
    """The text with files named as they are in the input: the numbers of a run are the same wherever it lies."""
    text = re.sub(rf"(^|: ){re.escape(str(path))}/", r"\1", text)
    return re.sub(rf"(^|: ){re.escape(str(path))}(?=: )", lambda m: m[1] + path.name, text)


class _Clock:
    """Waits until a stamp is due at the wanted rate."""

    def __init__(self, rate: float):
        self.rate, self.first_ns, self.start = rate, None, time.perf_counter()

    def elapsed(self) -> float:
        return time.perf_counter() - self.start

    def wait(self, stamp_ns: int) -> None:
        if self.rate <= 0:
            return
        if self.first_ns is None:
            self.first_ns, self.start = stamp_ns, time.perf_counter()
        delay = (stamp_ns - self.first_ns) / 1e9 / self.rate - self.elapsed()
        if delay > 0:
            time.sleep(delay)


def _models(front_end: FrontEnd) -> dict[str, str]:
    models = {"features": front_end.features.identity}
    if front_end.global_descriptor is not None:
        models["global"] = front_end.global_descriptor.identity
    # Which solver "auto" is depends on the machine, and decides as much as the matcher.
    return {**{role: str(m) for role, m in models.items()}, "solver": front_end.matcher.verifier.solver.name}


def _engine(health: Health) -> ModelRecord:
    known = {**vars(health), **vars(health.counts)}
    return ModelRecord(**{f.name: known[f.name] for f in dataclasses.fields(ModelRecord)})


def _record(log: RunLog, front_end: FrontEnd, position: int, tracked: Tracked, loops: Loops | None, ms: float) -> None:
    log.add_latency({**tracked.latency_ms, **(loops.latency_ms if loops else {}), "frame": ms})
    log.frames += 1
    where = f"image {position}"
    if tracked.keyframe is not None:
        where = f"keyframe {tracked.keyframe.id}"
        log.add_keyframe(keyframe_record(tracked.keyframe, tracked.frame, position), tracked.frame.image)
    pairs = list(tracked.pairs)
    if loops is not None:
        log.candidates += loops.candidates
        log.gated += len(loops.gated)
        log.add_descriptor(loops.keyframe.id, loops.keyframe.global_descriptor)
        pairs += loops.pairs
    for pair in pairs:
        # One without matches is perhaps one whose reference cannot be read.
        ref = front_end.keyframes[pair.ref_kf_id] if len(pair.matches) else tracked.keyframe
        log.add_pair(*pair_record(pair, tracked.keyframe, ref))
    for part in (tracked, loops):
        for stage, text in (part.faults if part else {}).items():
            log.add_fault(where, stage, text)


def keyframe_record(keyframe: Keyframe, frame: Frame, position: int) -> KeyframeRecord:
    """The record of a keyframe whose image is the ``position``-th of the input."""
    return KeyframeRecord(
        keyframe.id,
        keyframe.stamp_ns,
        keyframe.frame_id,
        position,
        frame.image_size,
        len(keyframe.features),
        frame.pose,
    )


def pair_record(pair: PairResult, keyframe: Keyframe, ref: Keyframe) -> tuple[PairRecord, MatchPoints]:
    """The record of an attempted pair, and its matched points."""
    m = pair.matches
    record = PairRecord(
        pair.kind, m.status, pair.kf_id, pair.ref_kf_id, len(m), m.num_inliers, m.covisibility, m.model, m.detail
    )
    points = keyframe.features.keypoints[m.pairs[:, 0]], ref.features.keypoints[m.pairs[:, 1]]
    return record, MatchPoints(*points, m.inliers)
