"""Rows of a map file that may be damaged, and that others write to."""

from __future__ import annotations

import contextlib
import itertools
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np

from ..errors import DataError, MapError, VslamFeaturesError
from . import database
from .rows import Row, read, scan
from .tables import FEATURES, KEYFRAMES, META, Table

T = TypeVar("T")


class RowReader:
    """One connection to a map, used by one thread at a time; its errors name the file and the table.

    Raises:
        MapFileError: no such file, not a map, another schema version.
        MapDamagedError: its row of ``meta`` is not what was written.
    """

    def __init__(self, path: Path):
        self.path = Path(path)
        self._lock = threading.RLock()
        self._checked: set[tuple[str, int]] = set()
        self._connection = database.open_for_reading(self.path)
        try:
            with self._reading("meta"):
                row = read(self._connection, META, 0)
                if row is None:
                    raise DataError("there is no row")
                self.meta = {c.name: row[c.name] for c in META.columns}
        except BaseException:
            self.close()
            raise

    def __enter__(self: T) -> T:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file. Safe to call twice."""
        with self._lock:
            self._connection.close()

    def rows(self, table: Table, step: int = 1024) -> Iterator[Row]:
        """All rows of a table without their arrays, in steps, so that a writer is never kept waiting for long."""
        first, count, wanted = 0, 0, 0
        with self._reading("meta"):
            counter = "keyframes" if table is FEATURES else table.name
            if counter in self.meta:  # a tree whose end is lost ends without an error
                wanted = read(self._connection, META, 0)[counter]
        while True:
            with self._reading(table.name, f"{first} and on"):
                rows = list(itertools.islice(scan(self._connection, table, first), step))
                count += len(rows)
                if len(rows) < step and count < wanted:
                    raise DataError(f"{wanted} rows expected, got {count}")
            yield from rows
            if len(rows) < step:
                return
            first = rows[-1]["id"] + 1

    @contextlib.contextmanager
    def _reading(self, table: str, row: int | str = "?") -> Iterator[None]:
        """One thread at a time, with errors that name the file and the table."""
        try:
            with self._lock, database.reported(self.path, table):
                yield
        except MapError:
            raise
        except VslamFeaturesError as error:
            raise database.damaged(self.path, table, row, error) from error

    @contextlib.contextmanager
    def _snapshot(self) -> Iterator[None]:
        """The block's reads share one lock of the file, which otherwise each statement and each array takes anew."""
        with self._lock:
            within = True
            try:
                with self._reading("meta"):
                    within = self._connection.in_transaction
                    if not within:
                        self._connection.execute("BEGIN")
                yield
            finally:
                # Nothing was written: where SQLite has ended it already, after an error, there is nothing to end.
                with contextlib.suppress(sqlite3.Error):
                    if not within:
                        self._connection.execute("ROLLBACK")

    def _row(self, table: Table, row_id: int) -> Row:
        row = read(self._connection, table, row_id)
        if row is None and table is KEYFRAMES and not 0 <= row_id < self._count():
            raise IndexError(f"keyframe id {row_id}: {self.path} has 0 to {self._count() - 1}")
        if row is None:
            raise DataError("the row is missing")
        return row

    def _count(self) -> int:
        meta = read(self._connection, META, 0)
        return meta["keyframes"] if meta else 0

    def _array(self, row: Row, name: str) -> np.ndarray | None:
        key = (f"{row.table.name}.{name}", row["id"])
        array = row.array(name, checked=key not in self._checked)
        self._checked.add(key)
        return array
