"""A map that is in memory only."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..errors import MapError
from ..types import Keyframe, KeyframeHeader, MapEntry, PairKind
from .store import KeyframeStore, entry_bytes


class MemoryStore(KeyframeStore):
    """Keeps every entry in memory; it is lost with the process."""

    def __init__(self, read_only: bool = False):
        self.read_only = read_only
        self._entries: list[MapEntry] = []
        self._nbytes = 0

    def headers(self) -> list[KeyframeHeader]:
        """See :meth:`KeyframeStore.headers`."""
        return [entry.keyframe.header for entry in self._entries]

    def entry(self, kf_id: int) -> MapEntry:
        """All that is kept of a keyframe. Raises IndexError for an id that is not there."""
        if not 0 <= kf_id < len(self._entries):
            raise IndexError(f"keyframe {kf_id}: the map in memory has {len(self._entries)}, ids count from 0")
        return self._entries[kf_id]

    def keyframe(self, kf_id: int) -> Keyframe:
        """See :meth:`KeyframeStore.keyframe`."""
        return self.entry(kf_id).keyframe

    def put(self, entry: MapEntry) -> None:
        """See :meth:`KeyframeStore.put`. Raises MapError for an id out of order, or where it is read-only."""
        if self.read_only:
            raise MapError("map in memory: it is read-only, and takes no keyframe")
        if entry.keyframe.id != len(self._entries):
            raise MapError(f"map in memory: expected keyframe {len(self._entries)} next, got {entry.keyframe.id}")
        self._entries.append(entry)
        self._nbytes += entry_bytes(entry)

    def global_descriptors(self) -> Iterator[tuple[int, np.ndarray]]:
        """See :meth:`KeyframeStore.global_descriptors`."""
        for entry in self._entries:
            if entry.keyframe.global_descriptor is not None:
                yield entry.keyframe.id, entry.keyframe.global_descriptor

    def confirmed_loops(self) -> list[tuple[int, int]]:
        """See :meth:`KeyframeStore.confirmed_loops`."""
        pairs = (p for entry in self._entries for p in entry.pairs)
        return [(p.kf_id, p.ref_kf_id) for p in pairs if p.kind is PairKind.LOOP and p.matches.verified]

    @property
    def nbytes(self) -> int:
        """See :attr:`KeyframeStore.nbytes`."""
        return self._nbytes
