"""Which map is the running one: opens, saves, loads and exchanges maps as the configuration and the services say."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from .config import Config
from .errors import ConfigError, MapError, VslamFeaturesError
from .frontend import FrontEnd
from .maps.copy import require_map_or_nothing
from .maps.file_store import FileStore
from .maps.keyframe_map import KeyframeMap
from .maps.lock import WriterLock
from .maps.memory import MemoryStore
from .maps.placing import placed_file
from .maps.writer import MapWriter
from .session_files import SessionFiles
from .types import MapModels

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class MapStatus:
    """What diagnostics tell of the running map.

    ``path``: empty where it is in memory only. ``mode``: as in the configuration. ``first_id``: of the keyframes of
    this session. ``stored``: keyframes on the disk; ``waiting``: those on their way. ``problem``: why none can be
    written now. ``warning``: what a person should know of where the map is kept. ``last_save``: of the service,
    ``last_save_age_s`` seconds ago (NaN: never).
    """

    path: str = ""
    mode: str = "mapping"
    keyframes: int = 0
    first_id: int = 0
    stored: int = 0
    waiting: int = 0
    file_bytes: int = 0
    memory_bytes: int = 0
    problem: str = ""
    warning: str = ""
    last_save: str = ""
    last_save_age_s: float = math.nan


@dataclass(frozen=True)
class _Running:
    """``own``: a file of this run in the state folder, or memory; else one that somebody named."""

    keyframes: KeyframeMap
    own: bool
    warning: str = ""

    @property
    def path(self) -> Path | None:
        return self.keyframes.store.path

    @property
    def name(self) -> str:
        return "the map in memory" if self.path is None else str(self.path)


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
        self._running = _Running(front_end.keyframes, own=True)
        self._last_save, self._saved_at = "", math.nan

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
            running = self._new_session()
        else:
            path, localise = absolute(self._config.map_path), self._config.mode == "localization"
            running = _Running(self._open(path, localise, create=not localise and not path.exists()), own=False)
        self._use(running)
        return self._text()

    def save(self, path: str | Path) -> str:
        """Make sure that the running map is in a file, as it is now. Mapping goes on meanwhile."""
        target, running = absolute(path), self._running
        running.keyframes.flush()
        if running.path is not None and _same(target, running.path):
            where = f"in {target}, the running map"
        else:
            _require_folder(target)
            require_map_or_nothing(target)
            with _writer_of(target):  # its writer would go on in a file that has no name any more
                if running.path is None:
                    keyframes = running.keyframes
                    _write(keyframes.store, keyframes.stored, target, self._front_end.map_models)
                else:
                    running.keyframes.store.copy(target, self._progress)
            where = f"in {target}"
        size = target.stat().st_size / 1e6
        self._last_save = f"{_count(running.keyframes.stored)} {where}, {size:.1f} MB"
        self._saved_at = time.monotonic()
        return self._last_save

    def load(self, path: str | Path) -> str:
        """Replace the running map by the one in a file, in the mode of now. That is checked before."""
        target, running = absolute(path), self._running
        localise = running.keyframes.read_only
        if not localise and running.path is not None and _same(target, running.path):
            return f"{self._text()}; it is the running map already"
        if not target.is_file():
            raise MapError(f"{target}: no such file; set map_path to a map that is there")
        new = _Running(self._open(target, localise, create=False), own=False)
        self._exchange(lambda: new)
        return self._text()

    def set_localization(self, on: bool) -> str:
        """Only recognise places of the running map, or go on to add to it."""
        running = self._running
        if running.keyframes.read_only == on:
            return f"{self._text()}; nothing changed"
        if running.path is None:
            raise MapError(f"the map is in memory only, and cannot be localised in ({running.warning}): save it first")
        if on:
            running.keyframes.flush()  # most of it while images are still processed
            if not running.keyframes.stored:
                raise MapError(f"{running.path} has no keyframe yet: nothing to localise in")

        def reopened() -> _Running:
            if on:
                running.keyframes.flush(unfinished=True)
            return self._reopened(running, localise=on)

        self._exchange(reopened)
        return self._text()

    def reset(self, forget: bool) -> bool:
        """A new session; call it between frames. True where ids count from the beginning of the session again.

        ``forget``: with an empty map; the one of now stays in its file. Else, after a jump back in time, a map that
        somebody named is continued. In a localisation the keyframes in memory are forgotten, and the map stays.
        """
        running = self._running
        if running.keyframes.read_only:
            return self._forget_located(running)
        self._end(running)
        reason = "reset"
        if not (forget or running.own):
            try:
                self._use(self._reopened(running, localise=False))
                return False
            except VslamFeaturesError as error:
                logger.error("%s is not continued: %s", running.path, error)
                reason = str(error)
        new = self._new_session()
        if not (running.own or new.warning):
            new = replace(new, warning=f"the map is {new.path} since {running.path} was left ({reason})")
        self._use(new)
        return True

    def flush(self) -> None:
        """Return once all keyframes are on the disk. Call it while nothing is tracked. Raises MapError."""
        self._running.keyframes.flush(unfinished=True)

    def close(self) -> None:
        """Put all keyframes on the disk and let go of the file. Raises MapError for what is lost.."""
        _close(self._running)

    def status(self) -> MapStatus:
        """What there is now."""
        running = self._running
        keyframes, store = running.keyframes, running.keyframes.store
        return MapStatus(
            path="" if store.path is None else str(store.path),
            mode="localization" if keyframes.read_only else "mapping",
            keyframes=len(keyframes),
            first_id=keyframes.first_id,
            stored=keyframes.stored if store.path is not None else 0,
            waiting=store.waiting,
            file_bytes=store.file_bytes,
            memory_bytes=keyframes.nbytes,
            problem=store.problem,
            warning=running.warning,
            last_save=self._last_save,
            last_save_age_s=time.monotonic() - self._saved_at,
        )

    # -- steps -----------------------------------------------------------------------------

    def _exchange(self, opened: Callable[[], _Running]) -> None:
        """Replace the running map by another, which must open first; the old one is closed when images go on."""
        old = self._running
        with self._between_frames():
            self._use(opened())
        self._end(old)

    def _use(self, running: _Running) -> None:
        try:
            self._front_end.use_map(running.keyframes)
        except BaseException:
            with contextlib.suppress(MapError):
                _close(running)
            raise
        self._running = running
        self._exchanged()

    def _end(self, running: _Running) -> None:
        try:
            _close(running)
        except MapError as error:
            logger.error("%s is left with keyframes that are not stored: %s", running.name, error)

    def _open(self, path: Path, localise: bool, create: bool) -> KeyframeMap:
        config = self._config
        store = FileStore(
            path,
            self._front_end.map_models,
            read_only=localise,
            create=create,
            cache_bytes=config.map.cache_mb << 20,
            queue=config.map.queue,
        )
        try:
            return KeyframeMap(store)
        except BaseException:
            with contextlib.suppress(MapError):
                store.close()
            raise

    def _reopened(self, running: _Running, localise: bool) -> _Running:
        return replace(running, keyframes=self._open(running.path, localise, create=False))

    def _forget_located(self, running: _Running) -> bool:
        try:
            self._use(self._reopened(running, localise=True))
        except VslamFeaturesError as error:  # the map may be gone; what is open can be read on
            logger.error("keyframes of this localisation are not forgotten: %s", error)
            return False
        self._end(running)
        return True

    def _new_session(self) -> _Running:
        try:
            path = self._sessions.new()
            running = _Running(self._open(path, localise=False, create=True), own=True)
        except (OSError, MapError) as error:
            return _in_memory(f"the map is in memory only: {error}; set map_path, or VSLAM_FEATURES_STATE")
        self._sessions.remove_old(path)
        return running

    def _text(self) -> str:
        running, k = self._running, self._running.keyframes
        if k.read_only:
            return f"localising in {running.name}: {_count(k.first_id)}"
        if k.first_id:
            return f"{running.name} is continued: {_count(k.first_id)}, session {k.session}"
        return f"{running.name} is new" if running.path else running.warning


def check_map(config: Config) -> None:
    """Raises ConfigError where ``map_path`` and ``mode`` cannot be what is meant."""
    if not config.map_path:
        if config.mode == "localization":
            raise ConfigError("mode: localization needs a map: set map_path to its file")
        return
    folder = absolute(config.map_path).parent
    if not folder.is_dir():
        raise ConfigError(f"map_path: the folder {folder} does not exist; create it, or leave map_path empty")


def absolute(path: str | Path) -> Path:
    """A path as it was meant, ``~`` included."""
    return Path(os.path.abspath(Path(path).expanduser()))


def _in_memory(warning: str) -> _Running:
    logger.warning("%s", warning)
    return _Running(KeyframeMap(), own=True, warning=warning)


def _close(running: _Running) -> None:
    """Close; a file of this run that no keyframe came to is removed."""
    keyframes = running.keyframes
    keyframes.close()
    if running.own and running.path is not None and not len(keyframes):
        with contextlib.suppress(OSError):
            running.path.unlink()


def _write(store: MemoryStore, count: int, target: Path, models: MapModels) -> None:
    with placed_file(target, replace=True) as part, MapWriter(part, models, create=True) as writer:
        for kf_id in range(count):
            writer.append(store.entry(kf_id))


def _require_folder(target: Path) -> None:
    if not target.parent.is_dir():
        raise MapError(f"{target}: the folder {target.parent} does not exist; create it, or set another map_path")


@contextlib.contextmanager
def _writer_of(target: Path):
    lock = WriterLock(target)
    try:
        yield
    finally:
        lock.release()


def _same(a: Path, b: Path) -> bool:
    with contextlib.suppress(OSError):
        return os.path.samefile(a, b)
    return a == b


def _count(keyframes: int) -> str:
    return "1 keyframe" if keyframes == 1 else f"{keyframes} keyframes"
