"""A connection to a map that also has the file open, for what SQLite has no call for."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

from ..errors import MapError
from .open_file import OpenFile

T = TypeVar("T")

BUSY_S = 30.0
"""Another process holds the file for a few keyframes that it writes, or for a copy of the map that it makes."""

_POLL_MS = 2
_ATTEMPTS = 3


class MapConnection(sqlite3.Connection):
    """An SQLite connection to a map.

    Attributes:
        file: the same file.
        waits_s: a statement that finds the file locked is tried again for so long. SQLite itself looks every 100 ms,
            and would miss the few between two transactions of a writer that never pauses.
    """

    file: OpenFile | None = None
    waits_s = 0.0

    def execute(self, *arguments) -> sqlite3.Cursor:
        """As of any connection."""
        return self._waiting(super().execute, *arguments)

    def blobopen(self, *arguments, **options) -> sqlite3.Blob:
        """As of any connection, from Python 3.11 on."""
        return self._waiting(super().blobopen, *arguments, **options)

    def _waiting(self, call: Callable[..., T], *arguments, **options) -> T:
        end = None
        while True:
            try:
                return call(*arguments, **options)
            except sqlite3.OperationalError as error:
                if not self.waits_s or "locked" not in str(error):
                    raise
                end = end or time.monotonic() + self.waits_s
                if time.monotonic() > end:
                    raise

    def close(self) -> None:
        """Let go of the file. Safe to call twice."""
        super().close()
        file, self.file = self.file, None
        if file is not None:
            file.release()

    def __del__(self):
        with contextlib.suppress(Exception):  # while the interpreter ends
            self.close()


def connect(path: Path, mode: str, writes: bool = False) -> MapConnection:
    """Open a map that is there. ``mode``: SQLite's ``ro`` or ``rw``. Raises sqlite3.Error, OSError, MapError."""
    uri = f"file://{quote(os.fsencode(path.absolute()))}?mode={mode}"
    timeout_s = BUSY_S if writes else _POLL_MS / 1e3
    for _ in range(_ATTEMPTS):
        file = OpenFile.acquire(path)
        try:
            connection = sqlite3.connect(
                uri, uri=True, timeout=timeout_s, isolation_level=None, check_same_thread=False, factory=MapConnection
            )
        except BaseException:
            file.release()
            raise
        connection.file = file
        connection.waits_s = 0.0 if writes else BUSY_S
        try:
            if file.is_at(path):
                return connection
        except BaseException:
            connection.close()
            raise
        connection.close()
    raise MapError(f"{path}: other files take its place again and again while it is opened; try again")
