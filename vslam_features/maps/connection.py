"""A connection to a map that also has the file open, for what SQLite has no call for."""

from __future__ import annotations

import os
import sqlite3
import threading
from pathlib import Path
from urllib.parse import quote

from ..errors import MapError

BUSY_S = 30.0
"""Another process that reads or writes holds its lock for one keyframe, or for one step of a copy."""

_ATTEMPTS = 3


class MapConnection(sqlite3.Connection):
    """An SQLite connection to a map; ``file`` is the same file."""

    file: OpenFile | None = None

    def close(self) -> None:
        """Let go of the file. Safe to call twice."""
        super().close()
        file, self.file = self.file, None
        if file is not None:
            file.release()


class OpenFile:
    """A map file that is open once in a process, for all connections to it.

    Where a process closes any descriptor of a file, POSIX takes all its locks on that file away, SQLite's as well
    (https://www.sqlite.org/howtocorrupt.html, section 2.2). So this one is closed after the last connection.
    """

    _guard = threading.Lock()
    _opened: dict[tuple[int, int], OpenFile] = {}  # by device and inode: one file may have several names

    def __init__(self, key: tuple[int, int], descriptor: int):
        self._key, self._descriptors, self._uses = key, [descriptor], 0
        self._written = os.fstat(descriptor).st_size

    @classmethod
    def acquire(cls, path: Path) -> OpenFile:
        """The file that has this name now; ``release`` it after the connection was closed. Raises OSError."""
        with cls._guard:
            opened = cls._opened.get(_key(os.stat(path)))
            if opened is None:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                key = _key(os.fstat(descriptor))
                opened = cls._opened.get(key)
                if opened is None:
                    opened = cls._opened[key] = cls(key, descriptor)
                else:  # renamed in between, to one that is open: to close this one would end its locks
                    opened._descriptors.append(descriptor)
            opened._uses += 1
            return opened

    def release(self) -> None:
        """One connection less."""
        with self._guard:
            self._uses -= 1
            if self._uses == 0:
                del self._opened[self._key]
                for descriptor in self._descriptors:
                    os.close(descriptor)

    @property
    def descriptor(self) -> int:
        """For reading. Never close it, nor a duplicate of it."""
        return self._descriptors[0]

    def start_writing(self) -> None:
        """Have the system write what was added to the file since the last call, without waiting for it.

        A system that takes no such advice writes it when it is synced.
        """
        size = os.fstat(self.descriptor).st_size
        if size > self._written and hasattr(os, "posix_fadvise"):
            # On Linux this starts to write dirty pages at once; they stay in memory, only written ones are dropped.
            os.posix_fadvise(self.descriptor, self._written, size - self._written, os.POSIX_FADV_DONTNEED)
        self._written = size

    def is_at(self, path: Path) -> bool:
        """True while this is the file of that name. Raises OSError where there is none."""
        return _key(os.stat(path)) == self._key


def connect(path: Path, mode: str) -> MapConnection:
    """Open a map that is there. ``mode``: SQLite's ``ro`` or ``rw``. Raises sqlite3.Error, OSError, MapError."""
    uri = f"file:{quote(os.fsencode(path.absolute()))}?mode={mode}"
    for _ in range(_ATTEMPTS):
        file = OpenFile.acquire(path)
        try:
            connection = sqlite3.connect(
                uri, uri=True, timeout=BUSY_S, isolation_level=None, check_same_thread=False, factory=MapConnection
            )
        except BaseException:
            file.release()
            raise
        connection.file = file
        try:
            if file.is_at(path):
                return connection
        except BaseException:
            connection.close()
            raise
        connection.close()
    raise MapError(f"{path}: other files take its place again and again while it is opened; try again")


def _key(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
