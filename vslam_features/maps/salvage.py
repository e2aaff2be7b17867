"""Which rows of a damaged map there are, and where."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ..errors import DataError, VslamFeaturesError
from .pages import FoundRow, PageFile, Progress
from .tables import FEATURES, KEYFRAMES, Table

T = TypeVar("T")


class Salvage:
    """The intact rows of a file by table and id. Holds their places only; rows are read when they are asked for.

    Raises OSError where the file cannot be read. Use as a context manager.
    """

    def __init__(self, path: Path, progress: Progress | None = None):
        self._pages = PageFile(path)
        self._at: dict[str, dict[int, int]] = {}
        self._again: dict[tuple[str, int], list[int]] = {}
        try:
            for row in self._pages.rows(progress):
                name, row_id = row.table.name, row["id"]
                if self._at.setdefault(name, {}).setdefault(row_id, row.offset) != row.offset:
                    self._again.setdefault((name, row_id), []).append(row.offset)
        except BaseException:
            self._pages.close()
            raise

    def __enter__(self) -> Salvage:
        return self

    def __exit__(self, *_) -> None:
        self._pages.close()

    def __len__(self) -> int:
        """How many keyframes there may be."""
        return len(self.ids(KEYFRAMES) & self.ids(FEATURES))

    @property
    def any(self) -> bool:
        """False where there is nothing of a map."""
        return bool(self._at)

    def ids(self, table: Table) -> set[int]:
        """Of the rows of a table."""
        return set(self._at.get(table.name, ()))

    def range(self, table: Table, first: int, count: int) -> list[int]:
        """The ids in a range, which may be absurd, that there are."""
        there = self._at.get(table.name, {})
        if count > len(there):
            return sorted(i for i in there if first <= i < first + count)
        return [i for i in range(first, first + count) if i in there]

    def row(self, table: Table, row_id: int) -> FoundRow:
        """A row. Raises DataError where there is none."""
        return self.any_of(table, row_id, lambda row: row)

    def first(self, table: Table, row_id: int, read: Callable[[FoundRow], T]) -> T | None:
        """As ``any_of``; None where it raises."""
        try:
            return self.any_of(table, row_id, read)
        except DataError:
            return None

    def any_of(self, table: Table, row_id: int, read: Callable[[FoundRow], T]) -> T:
        """What ``read`` makes of a row, or else of another copy of it. Raises DataError where all are damaged.

        The tree moves rows between pages and leaves copies behind, of which parts are overwritten later.
        """
        failure: VslamFeaturesError = DataError("the row is damaged")
        for offset in (self._at.get(table.name, {}).get(row_id), *self._again.get((table.name, row_id), ())):
            row = None if offset is None else self._pages.row(offset, table)
            if row is None:
                continue
            try:
                return read(row)
            except VslamFeaturesError as error:
                failure = error
        raise DataError(str(failure)) from failure
