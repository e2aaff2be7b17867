"""Files that a process reads beside SQLite, without taking SQLite's locks away."""

from __future__ import annotations

import os
import threading
from collections import deque
from pathlib import Path

_guard = threading.Lock()
_released: deque[OpenFile] = deque()


class OpenFile:
    """A map file that is open once in a process, for all who read it.

    Where a process closes any descriptor of a file, POSIX takes all its locks on that file away, SQLite's as well
    (https://www.sqlite.org/howtocorrupt.html, section 2.2). So this one is closed after the last connection.
    """

    _opened: dict[tuple[int, int], OpenFile] = {}  # by device and inode: one file may have several names

    def __init__(self, key: tuple[int, int], descriptor: int):
        self._key, self._descriptors, self._uses = key, [descriptor], 0
        self._written = os.fstat(descriptor).st_size

    @classmethod
    def acquire(cls, path: Path) -> OpenFile:
        """The file that has this name now; ``release`` it after the connection was closed. Raises OSError."""
        try:
            with _guard:
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
        finally:
            _close_released()

    def release(self) -> None:
        """One user less. May be called by a garbage collection or a signal, at any point of this module."""
        _released.append(self)
        _close_released()

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

    def pass_over(self) -> None:
        """What was added since the last ``start_writing`` is synced: the next one is to leave it in memory."""
        self._written = os.fstat(self.descriptor).st_size

    def is_at(self, path: Path) -> bool:
        """True while this is the file of that name. Raises OSError where there is none."""
        return _key(os.stat(path)) == self._key


def _close_released() -> None:
    # Never waits: whoever has the guard does this after it, also for those who came meanwhile.
    while _released and _guard.acquire(blocking=False):
        try:
            while _released:
                file = _released.popleft()
                file._uses -= 1
                if file._uses == 0:
                    del OpenFile._opened[file._key]
                    for descriptor in file._descriptors:
                        os.close(descriptor)
        finally:
            _guard.release()


def _key(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_guard.acquire, after_in_parent=_guard.release, after_in_child=_guard.release)
