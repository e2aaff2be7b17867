"""Frames of a source through the front end, synchronously: the same frames give the same results at any rate."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path

import cv2

from ..config import Config
from ..errors import ConfigError, MapError
from ..frontend import FrontEnd
from ..health import Health
from ..map_keeper import MapKeeper, absolute
from ..types import Frame, Keyframe, Loops, PairResult, Tracked
from .run_log import KeyframeRecord, MapRecord, MatchPoints, ModelRecord, PairRecord, RunLog
from .source import Source

MAP_MODES = ("new", "continue", "localize")


def replay(
    source: Source,
    config: Config | None = None,
    progress: Callable[[int, int], None] | None = None,
    *,
    rate: float = 0.0,
    max_frames: int = 0,
    map_path: str | Path | None = None,
    map_mode: str = "new",
) -> RunLog:
    """Process a source to its end.

    Args:
        config: the source's own where None. Its ``map_path`` and ``mode`` are those of a node and are not used.
        progress: called with (inputs used, inputs expected).
        rate: pace by the stamps, 1 is real time; 0: as fast as possible. Results do not depend on it.
        max_frames: stop after so many frames; 0: all.
        map_path: the map file; None: the map is in memory.
        map_mode: ``new`` makes the file, ``continue`` adds a session, ``localize`` only reads it.
    Returns:
        The log; ``incomplete`` says why a read is partial. An interrupt (Ctrl-C) ends the run after the image of now,
        not the program: what was done by then is in the log and in the map, and ``interrupted`` is set. A map that is
        not whole is in ``log.map.problems``.
    Raises:
        ConfigError: max_frames is negative, or there is no such map_mode.
        PluginError: a plug-in or its library is missing.
        MapError: a new map that is there already, another that is not, or one that cannot be opened.
        IdentityError: the map is one of other models; the message names both.
    """
    if max_frames < 0:
        raise ConfigError(f"max_frames: expected a number >= 0 (0 is all), got {max_frames}")
    check_map_file(map_path, map_mode)
    config = _with_map(config or source.config, source, map_path, map_mode)
    front_end = FrontEnd(config)
    expected = min(len(source), max_frames) if max_frames else len(source)
    log = RunLog(source.describe(), _shown(front_end.config), _models(front_end), expected=expected)
    log.instead, log.max_frames = front_end.warning, max_frames
    started, clock = datetime.now(timezone.utc), _Clock(rate)
    with _map_file(front_end, log, map_mode):
        try:
            for frame in source:
                clock.wait(frame.stamp_ns)
                with _uninterrupted():
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


def check_map_file(path: str | Path | None, mode: str) -> None:
    """What can be told of a map before anything else is done. Raises ConfigError, MapError."""
    if mode not in MAP_MODES:
        raise ConfigError(f"map_mode: expected {', '.join(MAP_MODES)}, got {mode}")
    if path is None:
        return
    file = absolute(path)
    there = os.path.lexists(file)
    if file.is_dir():
        raise MapError(f"{path} is a folder; a map is a file: give the name of one in it, such as {path}/house.vmap")
    if not file.parent.is_dir():
        raise MapError(f"{path}: the folder {file.parent} does not exist; create it, or name a map in another one")
    if mode == "new" and there:
        raise MapError(
            f"{path}: is there already; add to it with --map-mode continue, localise in it with --map-mode localize, "
            "or give the new map another name"
        )
    if mode != "new" and not there:
        raise MapError(f"{path}: no such map to {mode}; --map-mode new makes one")


def _with_map(config: Config, source: Source, path: str | Path | None, mode: str) -> Config:
    if path is not None:
        mode = "localization" if mode == "localize" else "mapping"
        return config.with_values(map_path=str(absolute(path)), mode=mode)
    if config.map_path:
        source.notes.add("map_path of the configuration is the node's and is not used: --map names the map of a replay")
    return config.with_values(map_path="", mode="mapping")


def _shown(config: Config) -> dict:
    """The configuration as plain values, the same wherever the map lies."""
    return {**config.to_dict(), "map_path": Path(config.map_path).name if config.map_path else ""}


@contextlib.contextmanager
def _map_file(front_end: FrontEnd, log: RunLog, mode: str) -> Iterator[None]:
    """The map of the configuration is the front-end's in the block; at its end all is on the disk or told."""
    if not front_end.config.map_path:
        yield
        return
    keeper = MapKeeper(front_end)
    keeper.start()
    path, keyframes = keeper.path, front_end.keyframes
    log.first_id = keyframes.first_id
    log.map = MapRecord(path.name, mode, keyframes.session, keyframes.first_id)
    try:
        log.add_older_descriptors(keyframes.global_descriptors())
        yield
    finally:
        try:
            with _uninterrupted():
                keeper.close()
        except MapError as error:
            log.map.problems.append(str(error).replace(f"{path.parent}{os.sep}", ""))
        except KeyboardInterrupt:
            log.interrupted = True  # after the first one all is on the disk, a second one did not wait for it
        log.map.after, log.map.file_bytes = keyframes.stored, keeper.status().file_bytes
        if mode != "localize" and keyframes.stored < len(keyframes) and not log.map.problems:
            log.map.problems.append(f"{path.name}: {len(keyframes) - keyframes.stored} keyframes are not stored")
        if mode == "new" and not log.map.after and not log.map.problems:
            path.unlink(missing_ok=True)  # a map of nothing would only be in the way of the next run


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C waits for the end of the block, so that a keyframe is whole in log and map; a second one does not wait."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    held = []

    def hold(*arguments) -> None:
        held.append(arguments)
        if len(held) > 1:
            before(*arguments)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if held:
        before(*held[0])


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
        log.add_pair(*pair_record(pair, tracked.keyframe, _reference(log, front_end, pair)))
    for part in (tracked, loops):
        for stage, text in (part.faults if part else {}).items():
            log.add_fault(where, stage, text)


def _reference(log: RunLog, front_end: FrontEnd, pair: PairResult) -> Keyframe | None:
    """The older keyframe of a pair; None where that has no matches, perhaps since it cannot be read."""
    if not len(pair.matches):
        return None
    try:
        ref = front_end.keyframes[pair.ref_kf_id]
    except MapError as error:
        log.add_fault(f"keyframe {pair.ref_kf_id}", "map", str(error))
        return None
    if ref.id < log.first_id and ref.id not in log.older:
        size, count = ref.features.image_size, len(ref.features)
        log.add_older(KeyframeRecord(ref.id, ref.stamp_ns, ref.frame_id, -1, size, count, ref.pose), ref.thumbnail)
    return ref


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


def pair_record(pair: PairResult, keyframe: Keyframe, ref: Keyframe | None) -> tuple[PairRecord, MatchPoints]:
    """The record of an attempted pair, and its matched points, none without ``ref``."""
    m = pair.matches
    record = PairRecord(
        pair.kind, m.status, pair.kf_id, pair.ref_kf_id, len(m), m.num_inliers, m.covisibility, m.model, m.detail
    )
    if ref is None:
        return record, MatchPoints.none()
    points = keyframe.features.keypoints[m.pairs[:, 0]], ref.features.keypoints[m.pairs[:, 1]]
    return record, MatchPoints(*points, m.inliers)
