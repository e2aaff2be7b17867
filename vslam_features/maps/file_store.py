"""Keyframes of a running map in its file: written through a queue, read back through a bounded cache."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ..errors import MapError
from ..types import Keyframe, KeyframeHeader, MapEntry, MapModels
from .copy import Progress, copy_map
from .file_watch import FileWatch
from .keyframe_cache import KeyframeCache
from .quick_check import quick_check
from .reader import MapReader
from .storable import require_storable
from .store import KeyframeStore
from .write_queue import WriteQueue
from .writer import MapWriter, require_models

logger = logging.getLogger(__name__)


class FileStore(KeyframeStore):
    """A map file with one writer.

    Entries that were put are readable at once, and on the disk soon after, in order.

    Args:
        path: of the map.
        models: identities of the front-end.
        create: make a new map, else continue the one that is there.
        read_only: open it for localisation; the file never changes.
        cache_bytes: memory for keyframes that were read or written lately; what waits for the disk counts.
        queue: most entries that wait for the disk.
    Raises:
        MapError: it cannot be made or opened, is no map, is damaged, or another process writes to it.
        IdentityError: it is a map of other models; the message names both.
    """

    def __init__(
        self,
        path: Path,
        models: MapModels,
        *,
        create: bool = False,
        read_only: bool = False,
        cache_bytes: int = 128 << 20,
        queue: int = 64,
    ):
        self.path, self.read_only, self.models = Path(path), read_only, models
        self._cache, self._told, self._closed = KeyframeCache(cache_bytes), "", False
        with contextlib.ExitStack() as opened:
            self._writer = None if read_only else opened.enter_context(MapWriter(self.path, models, create))
            self._reader = opened.enter_context(MapReader(self.path))
            require_models(self.path, self._reader.identities, models)
            self._headers = [] if create else quick_check(self._reader)
            self._watch = FileWatch(self.path, read_only)
            opened.pop_all()
        self._queue = None if read_only else WriteQueue(self._writer, queue, self._look, self._stored)

    def headers(self) -> list[KeyframeHeader]:
        """See :meth:`KeyframeStore.headers`."""
        return self._headers

    def keyframe(self, kf_id: int) -> Keyframe:
        """See :meth:`KeyframeStore.keyframe`. From the file it has read-only arrays."""
        found = (self._queue.get(kf_id) if self._queue else None) or self._cache.get(kf_id)
        if found is None:
            found = self._reader.keyframe(kf_id)
            self._cache.put(found, self._waiting_bytes)
        return found

    def global_descriptors(self) -> Iterator[tuple[int, np.ndarray]]:
        """See :meth:`KeyframeStore.global_descriptors`."""
        return self._reader.global_descriptors()

    def confirmed_loops(self) -> list[tuple[int, int]]:
        """See :meth:`KeyframeStore.confirmed_loops`."""
        return self._reader.confirmed_loops()

    def check(self, keyframe: Keyframe) -> None:
        """See :meth:`KeyframeStore.check`."""
        require_storable(keyframe, self.models)

    def put(self, entry: MapEntry) -> None:
        """See :meth:`KeyframeStore.put`."""
        if self._queue is None:
            raise MapError(f"{self.path} is open for reading only")
        self._queue.put(entry)
        self._cache.make_room(self._waiting_bytes)

    def wait_for_room(self) -> None:
        """See :meth:`KeyframeStore.wait_for_room`."""
        if self._queue is not None:
            self._queue.wait_for_room()

    def flush(self, timeout_s: float | None = None) -> None:
        """See :meth:`KeyframeStore.flush`."""
        if self._queue is not None:
            self._queue.flush(timeout_s)

    def copy(self, target: Path, progress: Progress | None = None) -> int:
        """Copy the map, see :meth:`WriteQueue.copy`; its bytes. Raises MapError."""
        astray = self.astray
        if self._queue is None:
            if astray:
                raise MapError(astray)
            return copy_map(self.path, target, progress)
        if self._watch.cut:
            raise MapError(self._watch.cut)
        return self._queue.copy(target, progress)

    def close(self) -> None:
        """See :meth:`KeyframeStore.close`."""
        astray, known = self.astray, self._closed
        self._closed = True
        try:
            if self._queue is not None:
                self._queue.close()
                if astray and not known and len(self._writer):
                    raise MapError(astray)
        finally:
            self._reader.close()

    @property
    def nbytes(self) -> int:
        """See :attr:`KeyframeStore.nbytes`."""
        return self._waiting_bytes + self._cache.nbytes

    @property
    def waiting(self) -> int:
        """See :attr:`KeyframeStore.waiting`."""
        return len(self._queue) if self._queue else 0

    @property
    def problem(self) -> str:
        """See :attr:`KeyframeStore.problem`."""
        return self._queue.problem if self._queue else ""

    @property
    def astray(self) -> str:
        """See :attr:`KeyframeStore.astray`."""
        return self._watch.astray

    @property
    def file_bytes(self) -> int:
        """See :attr:`KeyframeStore.file_bytes`."""
        with contextlib.suppress(OSError):
            return os.path.getsize(self.path)
        return 0

    @property
    def _waiting_bytes(self) -> int:
        return self._queue.nbytes if self._queue else 0

    def _look(self) -> None:
        """Before something is written."""
        if (astray := self.astray) != self._told:
            self._told = astray
            if astray:
                logger.error("%s", astray)

    def _stored(self, keyframe: Keyframe, waiting_bytes: int) -> None:
        self._cache.put(keyframe, waiting_bytes)
        self._watch.grown(self.file_bytes)
