"""The running map: all headers in memory, keyframes on their way to the store, ids and sessions."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np

from ..errors import MapDamagedError
from ..types import Candidate, Keyframe, KeyframeHeader, MapEntry, PairResult, Pose
from .memory import MemoryStore
from .store import KeyframeStore, entry_bytes

logger = logging.getLogger(__name__)

LOCALISATION_KEEPS = 32
"""Keyframes of a localisation that stay readable. More than may wait for loop closure; dense ones have 2 MB each."""
_GRACE_S = 0.5  # that a flush waits for keyframes whose loops are being closed


class KeyframeMap:
    """Keyframes by id, over a store that keeps them. Each map that is opened is a new session of it.

    A new keyframe is held here until it is *finished*; then it goes to the store, once, with all that belongs to it,
    and ids reach the store in order. Safe between threads: one adds, one finishes, others read.

    Over a read-only store (localisation) new keyframes get the ids after the map's. They are never put; only the
    newest stay readable, and their headers with them.

    Attributes:
        store: where finished keyframes are.
        first_id: the first id of this session.
        session: number of this session.
        keep: so many of the newest keyframes of this session stay in memory, also after they are stored.
    Raises:
        MapDamagedError: the headers of the store are out of order.
    """

    def __init__(self, store: KeyframeStore | None = None, keep: int = 1):
        self.store = MemoryStore() if store is None else store
        self.keep = max(keep, LOCALISATION_KEEPS) if self.read_only else keep
        self._changed = threading.Condition()
        self._headers: dict[int, KeyframeHeader] = {}
        self._travelled: dict[int, float] = {}
        self._held: dict[int, MapEntry] = {}  # ids ascending; those below self._next_put are in the store as well
        for header in self.store.headers():
            self._append_stored(header)
        self.first_id = self._next_id = self._next_put = len(self._headers)
        self.session = self._headers[self.first_id - 1].session + 1 if self.first_id else 0

    def __len__(self) -> int:
        return self._next_id

    def __getitem__(self, kf_id: int) -> Keyframe:
        """Raises IndexError for an id that is not there, MapDamagedError for a keyframe that cannot be read."""
        with self._changed:
            entry = self._held.get(kf_id)
        if entry is not None:
            return entry.keyframe
        self.header(kf_id)  # tells why it is not there
        return self.store.keyframe(kf_id)

    @property
    def read_only(self) -> bool:
        """The map is there to localise in: keyframes of this session are not stored."""
        return self.store.read_only

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays that are in memory now, here and in the store."""
        with self._changed:
            own = [e for kf_id, e in self._held.items() if self.read_only or kf_id >= self._next_put]
        return sum(map(entry_bytes, own)) + self.store.nbytes

    @property
    def stored(self) -> int:
        """Keyframes that are in the store, and where that is a file, on the disk."""
        with self._changed:
            return self._next_put - self.store.waiting

    def header(self, kf_id: int) -> KeyframeHeader:
        """A keyframe without its arrays, from memory. Raises IndexError for an id that is not there."""
        header = self._headers.get(kf_id)
        if header is None and self.first_id <= kf_id < self._next_id:
            raise IndexError(f"keyframe {kf_id}: of a localisation only the newest {self.keep} keyframes are kept")
        if header is None:
            raise IndexError(f"keyframe {kf_id}: the map has {self._next_id}, ids count from 0")
        return header

    def last(self, count: int) -> list[Keyframe]:
        """The newest ``count`` keyframes of this session, newest first. At most ``keep`` are surely in memory."""
        newest = self._next_id
        return [self[i] for i in range(newest - 1, max(newest - count, self.first_id) - 1, -1) if i in self._headers]

    def travelled(self, from_id: int, to_id: int) -> float:
        """Metres along the pose track between two keyframes of one session.

        Steps without a pose, or to another frame, count as zero. Raises IndexError.
        """
        self.header(from_id), self.header(to_id)
        return abs(self._travelled[to_id] - self._travelled[from_id])

    def newest_older_than(self, keyframe: Keyframe, seconds: float, count: int) -> int:
        """Largest id at least ``seconds`` and ``count`` keyframes older than a ``keyframe`` of this session.

        Keyframes of older sessions are all older. -1 where there is none.
        """
        limit_ns = keyframe.stamp_ns - round(seconds * 1e9)
        kf_id = self.first_id - 1 if self.read_only else keyframe.id - max(count, 1)
        while kf_id >= self.first_id and self._headers[kf_id].stamp_ns > limit_ns:
            kf_id -= 1
        return max(kf_id, self.first_id - 1)

    def global_descriptors(self) -> Iterator[tuple[int, np.ndarray]]:
        """(id, (D,) descriptor) of the stored keyframes that have one. Raises MapDamagedError."""
        # Another process may be adding to a file that is open for reading: what came after the headers is not ours.
        known = self._next_put
        return ((kf_id, d) for kf_id, d in self.store.global_descriptors() if kf_id < known)

    def confirmed_loops(self) -> list[tuple[int, int]]:
        """(id, reference id) of the verified loops in the store. Raises MapDamagedError."""
        known = self._next_put
        return [pair for pair in self.store.confirmed_loops() if all(0 <= i < known for i in pair)]

    # -- how a keyframe gets into the map: add, attach, describe, finish ---------------------------

    def add(self, keyframe: Keyframe) -> Keyframe:
        """Take a keyframe under the next id, and return it with that and the session.

        Raises MapError where the store has no room for it, DataError where it never takes such a keyframe: then no id
        is given. May block shortly.
        """
        if not self.read_only:
            self.store.check(keyframe)
            self.store.wait_for_room()
        with self._changed:
            last = self._headers.get(self._next_id - 1) if self._next_id > self.first_id else None
            keyframe = dataclasses.replace(keyframe, id=self._next_id, session=self.session)
            self._append(keyframe.header, last)
            self._held[keyframe.id] = MapEntry(keyframe)
            self._next_id += 1
            self._forget_old()
            return keyframe

    def attach(self, kf_id: int, pairs: Sequence[PairResult]) -> None:
        """Add attempted pairs to a keyframe that is not finished."""
        with self._changed:
            entry = self._unfinished(kf_id)
            if entry is not None:
                self._held[kf_id] = dataclasses.replace(entry, pairs=(*entry.pairs, *pairs))

    def describe(self, kf_id: int, descriptor: np.ndarray) -> None:
        """Attach the (D,) global descriptor to a keyframe that is not finished."""
        with self._changed:
            entry = self._unfinished(kf_id)
            if entry is not None:
                keyframe = dataclasses.replace(entry.keyframe, global_descriptor=descriptor)
                self._held[kf_id] = dataclasses.replace(entry, keyframe=keyframe)

    def finish(
        self,
        kf_id: int,
        pairs: Sequence[PairResult] = (),
        candidates: Sequence[Candidate] = (),
        gated: Sequence[Candidate] = (),
    ) -> None:
        """A keyframe is complete with these pairs beside those attached: it goes to the store.

        So do all older ones that nobody finished, as they are: their loops were never searched for.
        """
        with self._changed:
            entry = self._unfinished(kf_id)
            if entry is None:
                return
            self._held[kf_id] = MapEntry(entry.keyframe, (*entry.pairs, *pairs), tuple(candidates), tuple(gated))
            self._put_until(kf_id)

    def flush(self, timeout_s: float | None = None, *, unfinished: bool = False) -> None:
        """Return once all finished keyframes are on the disk. Raises MapError with the reason where that fails.

        Keyframes whose loops are being closed get a moment to be finished. Those that are not by then stay here, since
        what is stored is never changed, and follow when they are; ``unfinished`` stores them at once as they are, for
        when nothing will finish them any more.
        """
        started = time.monotonic()
        with self._changed:
            newest = self._next_id - 1
            if unfinished:
                self._put_until(newest)
            elif not self.read_only:
                grace = _GRACE_S if timeout_s is None else min(timeout_s, _GRACE_S)
                self._changed.wait_for(lambda: self._next_put > newest, grace)
        left = None if timeout_s is None else max(timeout_s - (time.monotonic() - started), 0.0)
        self.store.flush(left)

    def close(self) -> None:
        """Store what is unfinished as it is, and let go of the store. Safe to call twice.

        Raises MapError where keyframes are lost.
        """
        with self._changed:
            self._put_until(self._next_id - 1)
        self.store.close()

    # -- under the lock ----------------------------------------------------------------------------

    def _append(self, header: KeyframeHeader, last: KeyframeHeader | None) -> None:
        step = 0.0
        if last is not None and last.session == header.session and Pose.comparable(last.pose, header.pose):
            step = float(np.linalg.norm(header.pose.t - last.pose.t))
        self._travelled[header.id] = (0.0 if last is None else self._travelled[last.id]) + step
        self._headers[header.id] = header

    def _append_stored(self, header: KeyframeHeader) -> None:
        last = self._headers.get(len(self._headers) - 1)
        if header.id != len(self._headers) or header.session < (last.session if last else 0):
            raise MapDamagedError(
                f"map {self._name}: table keyframes: expected keyframe {len(self._headers)} next, in session "
                f"{last.session if last else 0} or later, got {header.id} in session {header.session}"
            )
        self._append(header, last)

    def _unfinished(self, kf_id: int) -> MapEntry | None:
        """None for one that is stored, and for all of a localisation."""
        if not 0 <= kf_id < self._next_id:
            self.header(kf_id)
        return None if self.read_only or kf_id < self._next_put else self._held[kf_id]

    def _put_until(self, kf_id: int) -> None:
        while not self.read_only and self._next_put <= kf_id:
            self.store.put(self._held[self._next_put])
            self._next_put += 1  # only now may it be dropped here: readers find it at any time
        self._forget_old()
        self._changed.notify_all()

    def _forget_old(self) -> None:
        limit = self._next_id - self.keep
        while self._held and (oldest := next(iter(self._held))) < limit:
            if self.read_only:
                del self._headers[oldest], self._travelled[oldest]
            elif oldest >= self._next_put:
                break
            del self._held[oldest]

    @property
    def _name(self) -> str:
        return "in memory" if self.store.path is None else str(self.store.path)
