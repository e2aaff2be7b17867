"""A connection to a map that also has the file open, for what SQLite has no call for."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
import weakref
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
        repairs: the map, whose crashed writer's transaction is rolled back where this connection may not do it.
    """

    file: OpenFile | None = None
    waits_s = 0.0
    repairs: Path | None = None

    def __init__(self, *arguments, **options):
        self._cursors: weakref.WeakSet[sqlite3.Cursor] = weakref.WeakSet()
        super().__init__(*arguments, **options)

    def execute(self, *arguments) -> sqlite3.Cursor:
        """As of any connection."""
        cursor = self._waiting(super().execute, *arguments)
        self._cursors.add(cursor)
        return cursor

    def blobopen(self, *arguments, **options) -> sqlite3.Blob:
        """As of any connection, from Python 3.11 on."""
        return self._waiting(super().blobopen, *arguments, **options)

    def _waiting(self, call: Callable[..., T], *arguments, **options) -> T:
        end, repaired = None, self.repairs is None
        while True:
            try:
                return call(*arguments, **options)
            except sqlite3.OperationalError as error:
                if "readonly" in str(error) and not repaired:
                    repaired = True
                    with contextlib.suppress(sqlite3.Error, OSError, MapError):  # else the error is that of this one
                        if self.file.is_at(self.repairs):
                            roll_back(self.repairs)
                    continue
                if not self.waits_s or "locked" not in str(error):
                    raise
                end = end or time.monotonic() + self.waits_s
                if time.monotonic() > end:
                    raise

    def close(self) -> None:
        """Let go of the file. Safe to call twice."""
        for cursor in list(self._cursors):  # one that is not at its end keeps SQLite's lock after the close
            cursor.close()
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
        connection.repairs = path if mode == "ro" else None
        try:
            # A file that somebody else made may define what it likes: nothing of it is to run.
            connection.execute("PRAGMA trusted_schema = OFF")
            connection.execute("PRAGMA cell_size_check = ON")
            connection.execute("PRAGMA cache_size = -4096")
            if file.is_at(path):
                return connection
        except BaseException:
            connection.close()
            raise
        connection.close()
    raise MapError(f"{path}: other files take its place again and again while it is opened; try again")


def roll_back(path: Path) -> None:
    """Undo what a crash left half-written, as opening for writing does. Raises as ``connect``."""
    with contextlib.closing(connect(path, "rw")) as connection:
        connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
