"""Keyframes of a running map in its file: written by a thread of their own, read back through a bounded cache."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import math
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from ..errors import DataError, MapError
from ..types import Keyframe, KeyframeHeader, MapEntry, MapModels
from .arrays import finite
from .copy import Progress, copy_map
from .keyframe_cache import KeyframeCache, nbytes_of
from .quick_check import quick_check
from .reader import MapReader
from .rows import checksum
from .store import KeyframeStore, entry_bytes
from .tables import FEATURES, KEYFRAMES
from .writer import MapWriter, require_models

logger = logging.getLogger(__name__)

RETRY_S = 1.0
"""A disk that failed is tried again after this time."""

ROOM_S = 2.0
"""A disk that is slow gets this time to take a keyframe, before one is refused."""

BATCH, BATCH_BYTES = 8, 16 << 20
"""Most that one transaction holds; it stays below ``database.WRITE_CACHE``."""


class FileStore(KeyframeStore):
    """A map file with one writer.

    Entries that were put are readable at once, and on the disk soon after, in order. A disk that fails costs nothing
    but memory, until ``queue`` entries wait: ``problem`` says why, and writing is tried again once a second.

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
        self._queue, self._cache = queue, KeyframeCache(cache_bytes)
        self._pending: OrderedDict[int, MapEntry] = OrderedDict()
        self._changed = threading.Condition()
        self._job: Callable[[], None] | None = None
        self._closing = self._closed = False
        self._problem, self._attempts, self._pending_bytes = "", 0, 0
        self._slow = self._cut = self._told = ""
        self._writer, self._reader = None if read_only else MapWriter(self.path, models, create), None
        try:
            self._reader = MapReader(self.path)
            require_models(self.path, self._reader.identities, models)
            self._headers = [] if create else quick_check(self._reader)
            self._file = self._stat()
            self._size = 0 if read_only else self._file.st_size  # to a reader a rollback of the writer looks like a cut
        except BaseException:
            if self._reader is not None:
                self._reader.close()
            if self._writer is not None:
                self._writer.close()
            raise
        self._thread = None
        if not read_only:
            self._thread = threading.Thread(target=self._write, name="map writer", daemon=True)
            self._thread.start()

    # -- reading ---------------------------------------------------------------------------

    def headers(self) -> list[KeyframeHeader]:
        """See :meth:`KeyframeStore.headers`."""
        return self._headers

    def keyframe(self, kf_id: int) -> Keyframe:
        """See :meth:`KeyframeStore.keyframe`. From the file it has read-only arrays."""
        with self._changed:
            entry = self._pending.get(kf_id)
        if entry is not None:
            return entry.keyframe
        found = self._cache.get(kf_id)
        if found is None:
            found = self._reader.keyframe(kf_id)
            self._cache.put(found, self._pending_bytes)
        return found

    def global_descriptors(self) -> Iterator[tuple[int, np.ndarray]]:
        """See :meth:`KeyframeStore.global_descriptors`."""
        return self._reader.global_descriptors()

    def confirmed_loops(self) -> list[tuple[int, int]]:
        """See :meth:`KeyframeStore.confirmed_loops`."""
        return self._reader.confirmed_loops()

    # -- writing ---------------------------------------------------------------------------

    def check(self, keyframe: Keyframe) -> None:
        """See :meth:`KeyframeStore.check`."""
        f, pose = keyframe.features, keyframe.pose
        if f.model != self.models.features:
            raise DataError(f"{self.path} is a map of {self.models.features}, it takes no features of {f.model}")
        for name, array in (("scores", f.scores), ("descriptors", f.descriptors)):
            if not finite(array):
                raise DataError(f"{name} of {f.model} are not finite: the keyframe is not stored")
        for name, array in (("descriptors", f.descriptors), ("thumbnail", keyframe.thumbnail)):
            column = FEATURES.array[name]
            if array is not None and not (array.dtype.name in column.dtypes and column.fits(array.shape)):
                raise DataError(f"{name} of {array.dtype} {array.shape}: no map takes such, the keyframe is not stored")
        if not math.isfinite(f.pixel_scale):
            raise DataError(f"pixel_scale {f.pixel_scale} of {f.model}: the keyframe is not stored")
        texts = [keyframe.frame_id, f.recovered, *([pose.frame_id] if pose is not None else [])]
        checksum(KEYFRAMES, [int(keyframe.stamp_ns), *texts])  # raises for what has no bytes

    def put(self, entry: MapEntry) -> None:
        """See :meth:`KeyframeStore.put`."""
        if self.read_only:
            raise MapError(f"{self.path} is open for reading only")
        with self._changed:
            self._pending[entry.keyframe.id] = entry
            self._pending_bytes += nbytes_of(entry.keyframe)
            self._cache.make_room(self._pending_bytes)
            self._changed.notify_all()

    def wait_for_room(self) -> None:
        """See :meth:`KeyframeStore.wait_for_room`. A slow disk gets two seconds, once until half of what waits is gone.

        Else each keyframe would hold up the images for as long.
        """
        with self._changed:
            if self._closing:
                raise MapError(f"{self.path} is closed")
            if not self._slow:
                self._changed.wait_for(lambda: len(self._pending) < self._queue or self._problem, ROOM_S)
            if len(self._pending) >= self._queue:
                if not self._problem:
                    self._slow = "the disk is too slow"
                why = self._problem or self._slow
                raise MapError(f"{len(self._pending)} keyframes wait to be stored, no more are taken: {why}")

    def flush(self, timeout_s: float | None = None) -> None:
        """See :meth:`KeyframeStore.flush`."""
        with self._changed:
            attempts, newest = self._attempts, next(reversed(self._pending), -1)  # more may come, without an end
            self._changed.notify_all()  # tried again now, so that the reason is that of now

            def left() -> int:
                return sum(kf_id <= newest for kf_id in self._pending)

            def done() -> bool:
                return not left() or self._closed or (bool(self._problem) and self._attempts > attempts)

            finished = self._changed.wait_for(done, timeout_s)
            if left():
                why = self._problem or "the map was closed"
                if not finished:
                    why = f"the disk has not taken them within {timeout_s:.0f} s"
                raise MapError(f"{self.path}: {left()} keyframes are not stored: {why}")

    def copy(self, target: Path, progress: Progress | None = None) -> int:
        """Copy the map, see :func:`~.copy.copy_map`, with all that was put before. Writing goes on meanwhile.

        Returns the bytes of the copy. Raises MapError.
        """
        if self.read_only:
            if self.astray:
                raise MapError(self.astray)
            return copy_map(self.path, target, progress)
        if self.astray and self._cut:
            raise MapError(self._cut)
        self.flush()
        done, result = threading.Event(), []

        def between(copied: int, total: int) -> None:
            self._append_next()  # once a step: with all that wait, a fast source would keep the copy from its end
            if progress:
                progress(copied, total)

        def job() -> None:
            try:
                result.append(self._writer.copy(target, between))
            except Exception as error:  # raised again below, in the caller's thread
                result.append(error)
            finally:
                done.set()

        with self._changed:
            if self._closing or self._job is not None:
                why = "it was left meanwhile, for another map or session" if self._closing else "a copy is being made"
                raise MapError(f"{self.path} is not copied, call again: {why}")
            self._job = job
            self._changed.notify_all()
        done.wait()
        if isinstance(result[0], Exception):
            raise result[0]
        return result[0]

    def close(self) -> None:
        """See :meth:`KeyframeStore.close`."""
        lost = "" if self.read_only or self._closed else self.astray
        try:
            if not self.read_only and not self._closed:
                self.flush()
            if lost and len(self._writer):
                raise MapError(lost)
        finally:
            with self._changed:
                self._closing = True
                self._changed.notify_all()
            if self._thread is not None:
                self._thread.join()
            if self._writer is not None:
                self._writer.close()
            self._reader.close()
            with self._changed:
                self._closed = True
                self._changed.notify_all()

    @property
    def nbytes(self) -> int:
        """See :attr:`KeyframeStore.nbytes`."""
        with self._changed:
            return self._pending_bytes + self._cache.nbytes

    @property
    def waiting(self) -> int:
        """See :attr:`KeyframeStore.waiting`."""
        with self._changed:
            return len(self._pending)

    @property
    def problem(self) -> str:
        """See :attr:`KeyframeStore.problem`."""
        return self._problem or self._slow

    @property
    def astray(self) -> str:
        """See :attr:`KeyframeStore.astray`. SQLite itself would write on into a file that has no name any more."""
        size = self._size  # before the look at the file, which grows meanwhile
        try:
            now = os.stat(self.path)
        except FileNotFoundError:
            return f"{self.path} was removed or renamed by another program: {self._advice}"
        except OSError as error:
            return f"{self.path}: {error.strerror or error}"
        if not os.path.samestat(now, self._file):
            return f"another file has taken the place of {self.path}: {self._advice}"
        if now.st_size < size:  # for good: the next keyframe would make it as long again, with a hole
            self._cut = f"{self.path} was cut short by another program: 'map recover' saves what is intact of it"
        return self._cut

    @property
    def _advice(self) -> str:
        if self.read_only:
            return "places are recognised in the one that was opened, until it is left"
        return "what is mapped is lost when it is left; save the running map to another file"

    @property
    def file_bytes(self) -> int:
        """See :attr:`KeyframeStore.file_bytes`."""
        with contextlib.suppress(OSError):
            return os.path.getsize(self.path)
        return 0

    def _stat(self) -> os.stat_result:
        try:
            return os.stat(self.path)
        except OSError as error:
            raise MapError(f"{self.path}: {error.strerror or error}") from error

    # -- the writer's thread ---------------------------------------------------------------

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._job or self._closing)
                job, self._job = self._job, None
                if self._closing and job is None:
                    return
            if job is not None:
                job()
            elif not self._append_next():
                with self._changed:
                    self._changed.wait(RETRY_S)

    def _append_next(self) -> bool:
        """Write the oldest entries that wait; False where there is none, or where it failed."""
        with self._changed:
            entries = self._batch()
        if not entries:
            return False
        if (astray := self.astray) != self._told:
            self._told = astray
            if astray:
                logger.error("%s", astray)
        try:
            self._append(entries)
            self._size = max(self._size, self.file_bytes)
        except Exception as error:  # whatever it is, the thread goes on and the user is told
            with self._changed:
                if str(error) != self._problem:
                    logger.error("keyframe %d is not stored yet: %s", entries[0].keyframe.id, error)
                self._problem, self._attempts = str(error) or type(error).__name__, self._attempts + 1
                self._changed.notify_all()
            return False
        with self._changed:
            for entry in entries:
                del self._pending[entry.keyframe.id]
                self._pending_bytes -= nbytes_of(entry.keyframe)
                self._cache.put(entry.keyframe, self._pending_bytes)
            if self._problem:
                logger.info("keyframes are stored again")
            self._problem, self._attempts = "", self._attempts + 1
            if len(self._pending) <= self._queue // 2:
                self._slow = ""
            self._changed.notify_all()
        return True

    def _batch(self) -> list[MapEntry]:
        """Entries for one transaction: one, or those that had to wait. What syncs cost a transaction they share."""
        entries, nbytes = [], 0
        for entry in itertools.islice(self._pending.values(), BATCH):
            nbytes += entry_bytes(entry)
            if entries and nbytes > BATCH_BYTES:
                break
            entries.append(entry)
        return entries

    def _append(self, entries: list[MapEntry]) -> None:
        try:
            self._writer.append(*entries)
        except DataError:
            for entry in entries[len(self._writer) - entries[0].keyframe.id :]:
                self._append_reduced(entry)

    def _append_reduced(self, entry: MapEntry) -> None:
        """Store an entry, or what of it a map takes: an entry that fails for ever would hold up all after it."""
        for what, reduced in _reductions(entry):
            try:
                self._writer.append(reduced)
            except DataError as error:
                logger.error("keyframe %d cannot be stored as it is: %s", entry.keyframe.id, error)
                problem = error
                continue
            if what:
                logger.error("keyframe %d is stored without its %s", entry.keyframe.id, what)
            return
        raise problem


def _reductions(entry: MapEntry) -> Iterator[tuple[str, MapEntry]]:
    kf = entry.keyframe
    yield "", entry
    yield "matches", MapEntry(kf)
    yield "matches and global descriptor", MapEntry(dataclasses.replace(kf, global_descriptor=None))
