"""Where the keyframes of a map are kept."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ..types import Keyframe, KeyframeHeader, MapEntry
from .keyframe_cache import nbytes_of


def entry_bytes(entry: MapEntry) -> int:
    """Bytes of the arrays of an entry."""
    matches = [pair.matches for pair in entry.pairs]
    return nbytes_of(entry.keyframe) + sum(m.pairs.nbytes + m.scores.nbytes + m.inliers.nbytes for m in matches)


class KeyframeStore(ABC):
    """Keeps entries; ids are 0, 1, 2 ... Entries are put one at a time and in order, while other threads read.

    Attributes:
        path: the file, None where all is in memory.
        read_only: entries cannot be put.
    """

    path: Path | None = None
    read_only = False

    @abstractmethod
    def headers(self) -> list[KeyframeHeader]:
        """Of all keyframes that are there, ids ascending without gaps. Called once, at the start."""

    @abstractmethod
    def keyframe(self, kf_id: int) -> Keyframe:
        """Raises IndexError for an id that is not there, MapDamagedError for one that cannot be read."""

    @abstractmethod
    def put(self, entry: MapEntry) -> None:
        """Take over the next entry. Neither waits for a disk nor fails because of one: see ``problem``."""

    @abstractmethod
    def global_descriptors(self) -> Iterator[tuple[int, np.ndarray]]:
        """(id, (D,) descriptor) of the keyframes that have one, ids ascending."""

    @abstractmethod
    def confirmed_loops(self) -> list[tuple[int, int]]:
        """(id, reference id) of all verified loops (pairs of kind ``LOOP``)."""

    def check(self, keyframe: Keyframe) -> None:
        """Raises DataError for a keyframe that the store would never take."""
        return None

    def wait_for_room(self) -> None:
        """Return once an entry can be put. Raises MapError with the reason where none can be for now."""
        return None

    def flush(self, timeout_s: float | None = None) -> None:
        """Return once all that was put is on the disk. Raises MapError with the reason where that fails."""
        return None

    def close(self) -> None:
        """Flush and let go of the file. Raises MapError where entries are lost. Safe to call twice."""
        return None

    @property
    def nbytes(self) -> int:
        """Bytes of arrays that are in memory now."""
        return 0

    @property
    def waiting(self) -> int:
        """Entries that are not on the disk yet."""
        return 0

    @property
    def problem(self) -> str:
        """Why entries cannot be written now; empty where they can."""
        return ""

    @property
    def astray(self) -> str:
        """Why the open file is not the one of its name, or not whole; empty where all is well."""
        return ""

    @property
    def file_bytes(self) -> int:
        """Size of the file."""
        return 0
