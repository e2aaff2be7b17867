"""A map file as a database: made whole or not at all, opened with all checks that need no scan, errors that say what.

Rollback journal rather than WAL: a WAL writes every byte twice, and a map that is copied without it has lost data.
Such a journal lies beside the map while it is written; after a crash the next who opens the map rolls it back.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

from .. import __version__
from ..errors import MapDamagedError, MapError, MapFileError
from .connection import BUSY_S, MapConnection, connect, roll_back
from .placing import placed_file
from .rows import insert
from .tables import APPLICATION_ID, META, PAGE_SIZE, SCHEMA_VERSION, TABLES

SOFTWARE = f"vslam_features {__version__}"
WRITE_CACHE = 20 << 20
"""What a transaction keeps in memory at most; what is beyond that is handed to the system before its end."""


def batch_cache(largest: int) -> int:
    """What one of several keyframes keeps in memory, for the bytes of the largest: the disk writes the first ones while
    the others are still prepared.

    For a single keyframe that would be one more sync of the journal. Less than the largest needs would write its pages
    twice.
    """
    return min(WRITE_CACHE, max(1 << 20, -(-largest * 7 // 5 >> 18) << 18))


def create(path: Path) -> None:
    """Make an empty map. Raises MapError where it cannot be written, or where ``path`` is there already."""
    with placed_file(path, replace=False) as part, reported(path):
        connection = sqlite3.connect(part, isolation_level=None)
        with contextlib.closing(connection):
            connection.execute(f"PRAGMA page_size = {PAGE_SIZE}")
            connection.execute("PRAGMA journal_mode = OFF")  # the file is not a map before its name says so
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            connection.execute("BEGIN")
            for table in TABLES:
                connection.execute(table.sql)
            counts = dict.fromkeys(("keyframes", "global_descriptors", "matches", "loops", "payload_bytes"), 0)
            insert(connection, META, 0, {"software": SOFTWARE, "created_ns": time.time_ns(), **counts})
            connection.execute("COMMIT")


def open_for_reading(path: Path) -> MapConnection:
    """A connection that cannot write, usable from any thread (by one at a time).

    Raises:
        MapFileError: no such file, not a map, another schema version.
        MapDamagedError: the schema is not that of its version, or the file is cut short.
    """
    _must_exist(path)
    if has_journal(path):  # of a crash, or of somebody who writes now: SQLite tells them apart
        with reported(path, "roll back what a crash left half-written"), _opening(path):
            roll_back(path)
    with reported(path), _opening(path):
        connection = _checked(path, connect(path, "ro"))
        # Arrays are read once from end to end: a small cache stays in the processor's, which saves a tenth of the time.
        connection.execute("PRAGMA cache_size = -256")
        return connection


def open_for_writing(path: Path) -> MapConnection:
    """As ``open_for_reading``, for the one writer. Hold its lock (:class:`~.lock.WriterLock`) first."""
    _must_exist(path)
    with reported(path), _opening(path):
        connection = _checked(path, connect(path, "rw", writes=True))
        # A journal that is overwritten rather than shrunk and grown: its syncs need no change of the file system's own.
        connection.execute("PRAGMA journal_mode = PERSIST")
        connection.execute("PRAGMA synchronous = FULL")
        # Rows that a growing tree moves to the end of the file stay legible where they were: 'map recover' reads them
        # there, if the end is lost.
        connection.execute("PRAGMA secure_delete = OFF")
        connection.execute("PRAGMA foreign_keys = ON")
        return connection


@contextlib.contextmanager
def reported(path: Path, table: str = "") -> Iterator[None]:
    """Turns SQLite's errors of the block into ours, which name the file and the table."""
    try:
        yield
    except FAILURES as error:
        raise translated(path, table, error) from error
    except OSError as error:
        raise MapError(f"{path}: {error.strerror or error}") from error


def damaged(path: Path, table: str, row: int | str, what: object) -> MapDamagedError:
    """The error for a row that is not what was written."""
    return MapDamagedError(f"{path}: table {table}, row {row}: {what}; 'map verify' lists all damage, {_RECOVER}")


FAILURES = (sqlite3.Error, OverflowError, UnicodeDecodeError)
"""What SQLite's calls raise on a damaged file: also for a text that is no UTF-8, or for a number that is too large."""

_DAMAGED = ("malformed", "decode to UTF-8", "no such", "cannot open value", "SQL logic error")
_RECOVER = "'map recover' saves what is intact"


@contextlib.contextmanager
def _opening(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        advice = ": check the permissions of the file and its folder" if isinstance(error, PermissionError) else ""
        raise MapFileError(f"{path}: {error.strerror or error}{advice}") from error


def _checked(path: Path, connection: MapConnection) -> MapConnection:
    try:
        application = connection.execute("PRAGMA application_id").fetchone()[0]
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if application != APPLICATION_ID:
            raise MapFileError(f"{path} is no map: its SQLite application id is {application:#x}, not 'VMAP'")
        if version != SCHEMA_VERSION:
            newer = "a newer version of this package made it" if version > SCHEMA_VERSION else "the header is damaged"
            raise MapFileError(f"{path}: schema version {version}, this version reads {SCHEMA_VERSION}: {newer}")
        found = {name: sql for name, sql in connection.execute("SELECT name, sql FROM sqlite_schema")}
        wrong = [t.name for t in TABLES if found.pop(t.name, None) != t.sql]
        if wrong or found:
            names = ", ".join([*wrong, *(str(name) for name in found)])
            raise damaged(path, "sqlite_schema", names, "not as schema version 1 defines it")
        return connection
    except BaseException:
        connection.close()
        raise


def _must_exist(path: Path) -> None:
    try:
        if not os.path.isfile(path):
            raise MapFileError(
                f"{path}: {'no file, but a folder or device' if os.path.exists(path) else 'there is no such map'}"
            )
        if os.path.getsize(path) == 0:
            raise MapFileError(f"{path} is no map: the file is empty")
    except OSError as error:
        raise MapFileError(f"{path}: {error.strerror or error}") from error


def has_journal(path: Path) -> bool:
    """True where there is one that is in use: SQLite ends a transaction by zeros over the journal's head."""
    with contextlib.suppress(OSError), open(f"{os.path.realpath(path)}-journal", "rb") as file:
        return file.read(1) not in (b"", b"\0")
    return False


def translated(path: Path, table: str, error: Exception) -> MapError:
    """Our error for one of ``FAILURES``: MapFileError where the file is not right, else MapError."""
    text = str(error)
    where = f"{path}: table {table}: " if table else f"{path}: "
    if "not a database" in text or "unsupported file format" in text:
        return MapFileError(f"{path} is no map: {text}; if it was one, {_RECOVER}")
    if isinstance(error, (sqlite3.DataError, OverflowError, UnicodeDecodeError)) or any(t in text for t in _DAMAGED):
        return MapDamagedError(f"{where}damaged ({text}); {_RECOVER}")
    if "full" in text:
        return MapError(f"{where}the disk is full, or the file may not grow ({text}): make room")
    if "disk I/O" in text:
        return MapError(f"{where}{text}: a limit of file sizes (ulimit -f), or a disk that fails or is gone")
    if "locked" in text:
        return MapError(f"{where}another process holds it for more than {BUSY_S:.0f} s ({text})")
    if "readonly" in text or "unable to open" in text:
        return MapFileError(f"{where}{text}: check the permissions of the file and its folder")
    return MapError(f"{where}{text}")
