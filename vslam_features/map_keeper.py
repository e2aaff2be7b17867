"""Which map is the running one: opens, saves, loads and exchanges maps as the configuration and the services say."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

from .config import Config
from .errors import ConfigError, MapError, VslamFeaturesError
from .frontend import FrontEnd
from .maps.keyframe_map import KeyframeMap
from .running_map import MapStatus, RunningMap, count
from .session_files import SessionFiles

logger = logging.getLogger(__name__)

_NEEDS_LOOPS = "localisation needs loops.enabled: true, by which places are recognised"


class MapKeeper:
    """Gives a front-end its map and keeps it on the disk.

    ``save``, ``load``, ``set_localization`` belong to one thread (any), ``reset`` to the one that tracks, ``status`` to
    all. Errors are VslamFeaturesErrors with the reason and the next step, and leave the running map as it was.

    Args:
        front_end: its map is exchanged; its configuration says which one to start with.
        progress: called with (bytes copied, bytes in all) during a copy.
        between_frames: gives a block in which nobody else uses the front-end; maps are exchanged within.
        exchanged: called there when the running map is another one.
    """

    def __init__(
        self,
        front_end: FrontEnd,
        *,
        progress: Callable[[int, int], None] | None = None,
        between_frames: Callable[[], AbstractContextManager] = nullcontext,
        exchanged: Callable[[], None] = lambda: None,
    ):
        self._front_end, self._progress = front_end, progress
        self._between_frames, self._exchanged = between_frames, exchanged
        self._config = front_end.config
        self._sessions = SessionFiles(self._config.map.keep_sessions)
        self._running = RunningMap(front_end.keyframes, own=True)
        self._last_save, self._saved_at, self._lost = "", math.nan, ""

    @property
    def path(self) -> Path | None:
        """The file of the running map; None where it is in memory only."""
        return self._running.path

    def start(self) -> str:
        """Open the map that the configuration names; a line that says what was done.

        Raises:
            ConfigError: ``mode: localization`` without a map.
            MapError: the map cannot be opened or made, or another process writes to it.
            IdentityError: it is one of other models.
        """
        check_map(self._config)
        if not self._config.map_path:
            self._use(self._new_session())
        else:
            path, localise = absolute(self._config.map_path), self._config.mode == "localization"
            self._use(self._open(path, localise=localise, create=not (localise or path.exists())))
        return str(self._running)

    def save(self, path: str | Path) -> str:
        """Make sure that the running map is in a file, as it is now. Mapping goes on meanwhile.

        Keyframes whose loops are still being searched for follow later, and are not in a copy.
        """
        target, running = absolute(path), self._running
        there = len(running.keyframes) if not running.localises else running.keyframes.first_id
        running.keyframes.flush()
        if running.is_in(target) and not running.astray:
            where, stored = f"{target}, the running map", running.keyframes.stored
        elif running.astray and target.exists() and target == running.path:
            raise MapError(running.astray)
        else:
            where, stored = str(target), running.copy(target, self._front_end.map_models, self._progress)
        text = f"{count(stored)} in {where}, {target.stat().st_size / 1e6:.1f} MB"
        if there > stored:
            text += f"; without {count(there - stored)} whose loops are still being searched for"
        self._last_save, self._saved_at = text, time.monotonic()
        return text

    def load(self, path: str | Path) -> str:
        """Replace the running map by the one in a file, in the mode of now. That is checked before."""
        target, running = absolute(path), self._running
        if running.is_in(target) and not running.localises:
            if running.astray:
                raise MapError(f"{running.astray}, reset, and call again")
            return f"{running}; it is the running map already"
        if not target.is_file():
            raise MapError(f"{target}: no such file; set map_path to a map that is there")
        try:
            running.keyframes.flush()  # what the disk does not take now would be lost
        except MapError as error:
            raise MapError(f"{error}; the running map stays, a reset gives up what is not stored") from error
        new = self._open(target, localise=running.localises)
        return f"{new}{self._exchange(lambda _: new)}"

    def set_localization(self, on: bool) -> str:
        """Only recognise places of the running map, or go on to add to it."""
        running = self._running
        if running.localises == on:
            return f"{running}; nothing changed"
        if running.path is None:
            raise MapError(f"the map cannot be localised in: {running.warning}; save it, and load it")
        if running.astray:
            raise MapError(running.astray)
        running.keyframes.flush()  # most of it while images are still processed

        def reopened(now: RunningMap) -> RunningMap:
            if on:
                now.keyframes.flush(unfinished=True)
                if not len(now.keyframes):
                    raise MapError(f"{now.path} has no keyframe yet: nothing to localise in")
            return self._reopened(now, localise=on)

        lost = self._exchange(reopened)
        return f"{self._running}{lost}"

    def reset(self, forget: bool) -> bool:
        """A new session; call it between frames. True where ids count from the beginning of the session again.

        ``forget``: with an empty map; the one of now stays in its file. Else, after a jump back in time, a map that
        somebody named is continued. In a localisation the keyframes in memory are forgotten, and the map stays.
        """
        running = self._running
        if running.localises:
            return self._forget_located(running)
        reason = running.astray
        lost = self._end(running)
        self._lost = lost and f"keyframes were lost at a reset: {lost}"
        if not (forget or running.own or reason):
            try:
                self._use(self._reopened(running, localise=False))
                return False
            except VslamFeaturesError as error:
                logger.error("%s is not continued: %s", running.path, error)
                reason = str(error)
        new = self._new_session()
        if not (running.own or new.warning):
            new = replace(new, warning=f"the map is {new.path} since {running.path} was left ({reason or 'reset'})")
        self._use(new)
        return True

    def flush(self) -> None:
        """Return once all keyframes are on the disk. Call it while nothing is tracked. Raises MapError."""
        self._running.keyframes.flush(unfinished=True)

    def close(self) -> None:
        """Put all keyframes on the disk and let go of the file. Raises MapError for what is lost."""
        self._running.close()

    def status(self) -> MapStatus:
        """What there is now."""
        status = self._running.status(self._last_save, time.monotonic() - self._saved_at)
        return replace(status, warning="; ".join(filter(None, (status.warning, self._lost))))

    # -- steps -----------------------------------------------------------------------------

    def _exchange(self, opened: Callable[[RunningMap], RunningMap]) -> str:
        """Replace the running map by another, which must open first; the old one is closed when images go on.

        What to add to the answer: why keyframes of the old one are lost, where they are.
        """
        with self._between_frames():
            old = self._running  # only now: a reset may have come first
            self._use(opened(old))
        lost = self._end(old)
        return lost and f"; keyframes of the map before it are lost: {lost}"

    def _use(self, running: RunningMap) -> None:
        try:
            self._front_end.use_map(running.keyframes)
        except BaseException:
            with contextlib.suppress(MapError):
                running.close()
            raise
        self._running = running
        self._exchanged()

    def _end(self, running: RunningMap) -> str:
        """Close a map; why keyframes are lost, where they are."""
        try:
            running.close()
        except MapError as error:
            logger.error("keyframes are lost: %s", error)
            return str(error)
        return ""

    def _open(self, path: Path, *, localise: bool = False, **options) -> RunningMap:
        models = self._front_end.map_models
        running = RunningMap.open(path, self._config, models, localise=localise, **options)
        if localise:
            try:
                self._require_places(running)
            except BaseException:
                running.close()
                raise
        return running

    def _require_places(self, running: RunningMap) -> None:
        """Raises for a localisation that could never recognise anything."""
        if not self._config.loops.enabled:
            raise ConfigError(_NEEDS_LOOPS)
        if not len(running.keyframes):
            raise MapError(f"{running.path} has no keyframe yet: nothing to localise in")
        if next(iter(running.keyframes.global_descriptors()), None) is None:
            raise MapError(
                f"{running.path} cannot be localised in: none of its keyframes has a global descriptor (it was made "
                "with loops.enabled: false)"
            )

    def _reopened(self, running: RunningMap, localise: bool) -> RunningMap:
        return self._open(running.path, localise=localise, own=running.own, warning=running.warning)

    def _forget_located(self, running: RunningMap) -> bool:
        # The file stays open: it may be gone, or another may be there by now.
        again = replace(running, keyframes=KeyframeMap(running.keyframes.store))
        try:
            self._front_end.use_map(again.keyframes)
        except VslamFeaturesError as error:
            logger.error("keyframes of this localisation are not forgotten: %s", error)
            return False
        self._running = again
        self._exchanged()
        return True

    def _new_session(self) -> RunningMap:
        try:
            running = self._open(self._sessions.new(), own=True, create=True)
        except (OSError, MapError) as error:
            return RunningMap.in_memory(f"{error}; set map_path, or VSLAM_FEATURES_STATE to a folder")
        self._sessions.remove_old(running.path)
        return running


def check_map(config: Config) -> None:
    """Raises ConfigError where ``map_path`` and ``mode`` cannot be what is meant."""
    if not config.map_path:
        if config.mode == "localization":
            raise ConfigError("mode: localization needs a map: set map_path to its file")
        return
    if config.mode == "localization" and not config.loops.enabled:
        raise ConfigError(_NEEDS_LOOPS)
    folder = absolute(config.map_path).parent
    if not folder.is_dir():
        raise ConfigError(f"map_path: the folder {folder} does not exist; create it, or leave map_path empty")


def absolute(path: str | Path) -> Path:
    """A path as it was meant, ``~`` included. Raises ConfigError where that has no meaning."""
    try:
        return Path(os.path.abspath(Path(path).expanduser()))
    except RuntimeError as error:
        raise ConfigError(f"map_path {path}: {str(error).rstrip('.')}") from error
