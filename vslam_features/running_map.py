"""The map that a front-end uses now: where it is kept, how it is opened, copied and closed."""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .config import Config
from .errors import MapError
from .maps.copy import placed_map
from .maps.file_store import FileStore
from .maps.keyframe_map import KeyframeMap
from .maps.lock import WriterLock
from .maps.reader import MapReader
from .maps.writer import MapWriter
from .session_files import in_use
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
class RunningMap:
    """``own``: a file of this run in the state folder, or memory; else a file that somebody named.

    ``mark``: keeps other runs from removing a file of this run that is only read.
    """

    keyframes: KeyframeMap
    own: bool
    warning: str = ""
    mark: WriterLock | None = None

    @classmethod
    def open(
        cls,
        path: Path,
        config: Config,
        models: MapModels,
        *,
        own: bool = False,
        warning: str = "",
        localise: bool = False,
        create: bool = False,
    ) -> RunningMap:
        """A map in a file; ``create``: a new one. Raises MapError, IdentityError."""
        cache_bytes, queue = config.map.cache_mb << 20, config.map.queue
        store = FileStore(path, models, read_only=localise, create=create, cache_bytes=cache_bytes, queue=queue)
        try:
            return cls(KeyframeMap(store), own, warning, _mark(path) if own and localise else None)
        except BaseException:
            with contextlib.suppress(MapError):
                store.close()
            raise

    @classmethod
    def in_memory(cls, reason: str) -> RunningMap:
        """A map without a file, which is told."""
        warning = f"the map is in memory only: {reason}"
        logger.warning("%s", warning)
        return cls(KeyframeMap(), own=True, warning=warning)

    @property
    def path(self) -> Path | None:
        """Its file; None where it is in memory."""
        return self.keyframes.store.path

    @property
    def localises(self) -> bool:
        """Places are recognised and the file never changes."""
        return self.keyframes.read_only

    def __str__(self) -> str:
        k = self.keyframes
        if self.path is None:
            return self.warning
        if self.localises:
            return f"localising in {self.path}: {count(k.first_id)}"
        return (
            f"{self.path} is continued: {count(k.first_id)}, session {k.session}"
            if k.first_id
            else f"{self.path} is new"
        )

    @property
    def astray(self) -> str:
        """Why its file is not the one of its name, or not whole; empty where all is well."""
        return self.keyframes.store.astray

    def is_in(self, path: Path) -> bool:
        """Whether that is its file."""
        if self.path is None:
            return False
        with contextlib.suppress(OSError):
            return os.path.samefile(path, self.path)
        return path == self.path

    def copy(self, target: Path, models: MapModels, progress: Callable[[int, int], None] | None) -> int:
        """A copy of what is stored in another file, which may be an older map; its keyframes. Raises MapError."""
        if not target.parent.is_dir():
            raise MapError(f"{target}: the folder {target.parent} does not exist; create it, or set another map_path")
        if self.path is not None:
            self.keyframes.store.copy(target, progress)
        else:
            self._write(target, models)
        with MapReader(target) as copied:
            return copied.meta["keyframes"]

    def _write(self, target: Path, models: MapModels) -> None:
        with placed_map(target) as part, MapWriter(part, models, create=True) as writer:
            for kf_id in range(self.keyframes.stored):
                writer.append(self.keyframes.store.entry(kf_id))

    def close(self) -> None:
        """Put all on the disk and let go of the file; one of this run that no keyframe came to is removed.

        Raises MapError for keyframes that are lost. Safe to call twice.
        """
        try:
            self.keyframes.close()
        finally:
            if self.mark is not None:
                self.mark.release()
        if self.own and self.path is not None and not len(self.keyframes):
            with contextlib.suppress(OSError):
                self.path.unlink()

    def status(self, last_save: str, last_save_age_s: float) -> MapStatus:
        """Of now."""
        keyframes, store, astray = self.keyframes, self.keyframes.store, self.astray
        return MapStatus(
            path="" if store.path is None else str(store.path),
            mode="localization" if self.localises else "mapping",
            keyframes=len(keyframes),
            first_id=keyframes.first_id,
            stored=0 if store.path is None else keyframes.stored,
            waiting=store.waiting,
            file_bytes=store.file_bytes,
            memory_bytes=keyframes.nbytes,
            problem=store.problem or ("" if self.localises else astray),
            warning=self.warning or (astray if self.localises else ""),
            last_save=last_save,
            last_save_age_s=last_save_age_s,
        )


def _mark(path: Path) -> WriterLock | None:
    with contextlib.suppress(MapError):
        return in_use(path)
    return None


def count(keyframes: int) -> str:
    """For people."""
    return "1 keyframe" if keyframes == 1 else f"{keyframes} keyframes"
