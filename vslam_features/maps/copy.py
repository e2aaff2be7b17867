"""A consistent copy of a map under a name of its own, whole or not at all."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

from ..errors import MapDamagedError, MapError, MapFileError
from . import database
from .lock import WriterLock
from .placing import placed_file, sync

STEP_PAGES = 512
"""4 MiB at a time: between two steps a writer may commit."""

SYNC_STEPS = 8
"""Synced as it grows, so that the sync before the rename does not stall the writer for as long as the copy took."""

Progress = Callable[[int, int], None]


def copy_map(source: Path, target: Path, progress: Progress | None = None) -> int:
    """Copy a map as it is at one moment, synced, renamed into place. A writer of the source waits meanwhile.

    An older map at ``target`` is replaced, and is whole until then.

    Args:
        progress: called with (bytes copied, bytes in all).
    Returns:
        Bytes of the copy.
    Raises:
        MapError: the target cannot be written, is something else than a map, or another process maps into it; the
            source cannot be read.
    """
    source = Path(source)
    with contextlib.closing(database.open_for_reading(source)) as connection:
        with database.reported(source):
            # One read transaction over all steps: a copy begins anew at each commit of another process.
            connection.execute("BEGIN")
            connection.execute("SELECT id FROM meta").fetchone()
        return copy_connection(connection, source, target, progress)


def copy_connection(
    connection: sqlite3.Connection, source: Path, target: Path, progress: Progress | None = None
) -> int:
    """As ``copy_map``, from an open connection. ``progress`` may commit through it: the copy then has that as well."""
    target = Path(target)
    require_map_or_nothing(target)
    if target.exists() and source.exists() and os.path.samefile(source, target):
        raise MapError(f"{target}: source and target of the copy are the same file")
    with placed_map(target) as part:
        page, steps = connection.execute("PRAGMA page_size").fetchone()[0], 0

        def step(status: int, remaining: int, total: int) -> None:
            nonlocal steps
            steps += 1
            if steps % SYNC_STEPS == 0:
                sync(part)
            if progress:
                progress((total - remaining) * page, total * page)

        with database.reported(target), contextlib.closing(_plain(part)) as out:
            connection.backup(out, pages=STEP_PAGES, progress=step, sleep=0)
        # Opened and checked as any map is: what would not load does not get the name.
        with contextlib.closing(database.open_for_reading(part)):
            return os.path.getsize(part)


def compact_map(source: Path, target: Path) -> int:
    """Write a map anew without the space that is lost in it; otherwise as ``copy_map``."""
    source, target = Path(source), Path(target)
    require_map_or_nothing(target)
    with placed_map(target) as part:
        with contextlib.closing(database.open_for_reading(source)) as connection, database.reported(target):
            connection.execute("VACUUM INTO ?", (str(part),))
        with contextlib.closing(database.open_for_reading(part)):
            return os.path.getsize(part)


def require_map_or_nothing(target: Path) -> None:
    """Raises MapError where there is a file that is no map: it is somebody's, and stays."""
    if not target.exists() or target.is_dir():
        return
    try:
        database.open_for_reading(target).close()
    except MapFileError as error:
        # A map that is damaged, or of another version, is one. What cannot be read may be anything.
        if not isinstance(error, MapDamagedError) and "schema version" not in str(error):
            raise MapError(f"{error}; it is not replaced: choose another name, or remove it") from error


@contextlib.contextmanager
def placed_map(target: Path, *, overwrite: bool = True) -> Iterator[Path]:
    """As ``placed_file``. Only a map is replaced, and none that somebody writes to. Raises MapError."""
    lock = None
    if overwrite and target.exists():
        require_map_or_nothing(target)
        lock = WriterLock(target)  # whoever maps into the older file would go on in one that has no name any more
    try:
        with placed_file(target, replace=overwrite) as part:
            yield part
    finally:
        if lock is not None:
            lock.release()


def _plain(part: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(part, isolation_level=None)
    # Nobody sees the file before it is whole and synced by the one who renames it.
    connection.execute("PRAGMA journal_mode = OFF")
    connection.execute("PRAGMA synchronous = OFF")
    return connection
