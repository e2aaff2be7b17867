"""What is checked of a map before it is used: all that needs no array's bytes."""

from __future__ import annotations

from ..errors import DataError
from . import database
from .reader import MapReader
from .rows import Row
from .tables import FEATURES, GLOBAL_DESCRIPTORS, LOOPS, MATCHES, Table


def quick_check(reader: MapReader) -> None:
    """Check each row's checksum, the length of each array, and what rows refer to.

    The arrays themselves are checked when they are first read, or all at once by ``verify``. Rows that a writer adds
    meanwhile are left out. Raises MapDamagedError.
    """
    headers = reader.headers()
    models = len(reader.identities)
    for table in (FEATURES, GLOBAL_DESCRIPTORS, MATCHES, LOOPS):
        for row in reader.rows(table):
            if _keyframe(table, row) >= len(headers):
                break
            try:
                _check(table, row, models)
            except DataError as error:
                raise database.damaged(reader.path, table.name, row["id"], error) from error


def _keyframe(table: Table, row: Row) -> int:
    return row["id"] if table in (FEATURES, GLOBAL_DESCRIPTORS) else row["keyframe"]


def _check(table: Table, row: Row, models: int) -> None:
    for array in table.arrays:
        row.shape(array.name)
    if table in (MATCHES, LOOPS):
        if not 0 <= row["reference"] < row["keyframe"]:
            raise DataError(f"keyframe {row['keyframe']} refers to {row['reference']}, which is not an older one")
    elif not 0 <= row["model"] < models:
        raise DataError(f"model {row['model']} is missing")
