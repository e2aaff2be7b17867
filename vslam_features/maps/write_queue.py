"""Entries on their way into a map file, and the thread that writes them."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path

from ..errors import DataError, MapError
from ..types import Keyframe, MapEntry
from .copy import Progress
from .keyframe_cache import nbytes_of
from .store import entry_bytes
from .writer import MapWriter

logger = logging.getLogger(__name__)

RETRY_S = 1.0
"""A disk that failed is tried again after this time."""

ROOM_S = 2.0
"""A disk that is slow gets this time to take a keyframe, before one is refused."""

BATCH, BATCH_BYTES = 24, 60 << 20
"""Most that one transaction holds."""

HOLD_S = 0.25
"""Those who read the file wait while a transaction is written: several keyframes share one for as long at most."""


class WriteQueue:
    """Writes what is put, in order, in a thread of its own. Safe between threads.

    A disk that fails costs nothing but memory, until ``capacity`` entries wait: ``problem`` says why, and writing is
    tried again once a second.

    Args:
        writer: used by the thread only, until ``close``, which closes it.
        capacity: entries that may wait.
        before: called in the thread before something is written.
        stored: called in the thread, under the queue's lock, with each keyframe that is on the disk.
    """

    def __init__(
        self, writer: MapWriter, capacity: int, before: Callable[[], None], stored: Callable[[Keyframe, int], None]
    ):
        self.path, self._writer, self._capacity = writer.path, writer, capacity
        self._before, self._stored = before, stored
        self._pending: OrderedDict[int, MapEntry] = OrderedDict()
        self._changed = threading.Condition()
        self._job: Callable[[], None] | None = None
        self._closing = self._closed = False
        self._problem = self._slow = ""
        self._attempts = self.nbytes = 0
        self._seconds = HOLD_S / 4  # that a keyframe took lately
        self._thread = threading.Thread(target=self._write, name="map writer", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        with self._changed:
            return len(self._pending)

    @property
    def problem(self) -> str:
        """Why entries cannot be written now; empty where they can."""
        return self._problem or self._slow

    def get(self, kf_id: int) -> Keyframe | None:
        """A keyframe that waits."""
        with self._changed:
            entry = self._pending.get(kf_id)
        return None if entry is None else entry.keyframe

    def put(self, entry: MapEntry) -> None:
        """Take over the next entry, at once."""
        with self._changed:
            self._pending[entry.keyframe.id] = entry
            self.nbytes += nbytes_of(entry.keyframe)
            self._changed.notify_all()

    def wait_for_room(self) -> None:
        """Return once an entry can be put. A slow disk gets two seconds, once until half of what waits is gone.

        Else each keyframe would hold up the images for as long. Raises MapError with the reason.
        """
        with self._changed:
            if self._closing:
                raise MapError(f"{self.path} is closed")
            if not self._slow:
                self._changed.wait_for(lambda: len(self._pending) < self._capacity or self._problem, ROOM_S)
            if len(self._pending) >= self._capacity:
                if not self._problem:
                    self._slow = "the disk is too slow"
                why = self._problem or self._slow
                raise MapError(f"{len(self._pending)} keyframes wait to be stored, no more are taken: {why}")

    def flush(self, timeout_s: float | None = None) -> None:
        """Return once all that was put before is on the disk. Raises MapError with the reason where that fails."""
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
        """Copy the map with all that was put before, see :func:`~.copy.copy_map`; writing goes on meanwhile.

        Returns the bytes of the copy. Raises MapError; where its own disk does not take what waits, after a copy of the
        rest was made.
        """
        missing = None
        try:
            self.flush()
        except MapError as error:
            missing = error
        size = self._run(lambda: self._writer.copy(target, lambda *now: self._between(progress, *now)))
        if missing is not None:
            raise MapError(f"{target} has what is stored, but {missing}")
        return size

    def close(self) -> None:
        """Write what waits, end the thread and close the writer. Raises MapError for what is lost. Safe to call twice.

        A copy that is being made is finished first.
        """
        try:
            if not self._closed:
                self.flush()
        finally:
            with self._changed:
                self._closing = True
                self._changed.notify_all()
            self._thread.join()
            self._writer.close()
            with self._changed:
                self._closed = True
                self._changed.notify_all()

    # -- the thread ------------------------------------------------------------------------

    def _run(self, work: Callable[[], int]) -> int:
        """Do something with the writer in its thread; what it returns or raises."""
        done, result = threading.Event(), []

        def job() -> None:
            try:
                result.append(work())
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

    def _between(self, progress: Progress | None, copied: int, total: int) -> None:
        self._append_next(1)  # one a step: more would grow the map as fast as it is copied
        if progress:
            progress(copied, total)

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._job or self._closing)
                job, self._job = self._job, None
                if self._closing and job is None:
                    return
            if job is not None:
                job()
            elif not self._append_next(BATCH):
                with self._changed:
                    self._changed.wait(RETRY_S)

    def _append_next(self, most: int) -> bool:
        """Write the oldest entries that wait; False where there is none, or where it failed."""
        with self._changed:
            entries = self._batch(1 if self._problem else most)  # what is left of a disk may do for one
        if not entries:
            return False
        try:
            self._before()
            begin = time.monotonic()
            self._append(entries)
            self._seconds = max(time.monotonic() - begin, 1e-6) / len(entries)
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
                self.nbytes -= nbytes_of(entry.keyframe)
                self._stored(entry.keyframe, self.nbytes)
            if self._problem:
                logger.info("keyframes are stored again")
            self._problem, self._attempts = "", self._attempts + 1
            if len(self._pending) <= self._capacity // 2:
                self._slow = ""
            self._changed.notify_all()
        return True

    def _batch(self, most: int) -> list[MapEntry]:
        """Entries for one transaction: one, or those that had to wait. What syncs cost a transaction they share."""
        entries, nbytes = [], 0
        for entry in itertools.islice(self._pending.values(), min(most, max(1, int(HOLD_S / self._seconds)))):
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
