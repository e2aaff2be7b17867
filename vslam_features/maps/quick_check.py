"""What is checked of a map before it is used: all that needs no array's bytes."""

from __future__ import annotations

from ..errors import DataError
from ..types import KeyframeHeader
from . import database
from .reader import MapReader, require_older
from .rows import Row
from .tables import FEATURES, MATCHES, Table


def quick_check(reader: MapReader) -> list[KeyframeHeader]:
    """Check the checksum of each row, the lengths of their arrays and what they refer to; the map's headers.

    Rows of global descriptors and loops are left to the methods of the reader that read all of them. Arrays are checked
    when they are first read, or all at once by ``verify``. Rows that a writer adds meanwhile are left out. Raises
    MapDamagedError.
    """
    headers = reader.headers()
    models = len(reader.identities)
    for table in (FEATURES, MATCHES):
        for row in reader.rows(table):
            if row["id" if table is FEATURES else "keyframe"] >= len(headers):
                break
            try:
                _check(table, row, models)
            except DataError as error:
                raise database.damaged(reader.path, table.name, row["id"], error) from error
    return headers


def _check(table: Table, row: Row, models: int) -> None:
    for array in table.arrays:
        row.shape(array.name)
    if table is MATCHES:
        require_older(row)
    elif not 0 <= row["model"] < models:
        raise DataError(f"model {row['model']} is missing")
