"""Rows of a map file: written with checksums, read with every check, arrays only when they are asked for."""

from __future__ import annotations

import sqlite3
import struct
import zlib
from collections.abc import Callable, Iterator

import numpy as np

from ..errors import DataError
from .arrays import Packed, check, pack, shape_of, unpack
from .tables import Table

Value = int | float | str | None
_KINDS = {"INTEGER": int, "REAL": float, "TEXT": str}
_LARGE, _IN_PLACE = 1 << 20, 1 << 16
_OPENS_BLOBS = hasattr(sqlite3.Connection, "blobopen")  # from Python 3.11 on
_INTEGER, _REAL = struct.Struct("<q").pack, struct.Struct("<d").pack


def checksum(table: Table, values: list[Value]) -> int:
    """CRC-32 of the table's name and its plain columns, as ``docs/map_format.md`` encodes them."""
    parts = [table.name.encode()]
    try:
        for value in values:
            kind = type(value)
            if kind is int:
                parts += (b"i", _INTEGER(value))
            elif kind is str:
                text = value.encode("utf-8")
                parts += (b"t", _INTEGER(len(text)), text)
            elif kind is float:
                if value != value:
                    raise DataError(f"table {table.name}: a number is NaN, which SQLite does not store")
                parts += (b"r", _REAL(value))
            elif value is None:
                parts.append(b"n")
            else:
                raise DataError(f"a {kind.__name__} where a number or a text is expected")
    except UnicodeEncodeError as error:
        raise DataError(f"table {table.name}: the text {value[:40]!r} is no UTF-8") from error
    except struct.error as error:
        raise DataError(f"table {table.name}: the number {value} does not fit 64 bits") from error
    return zlib.crc32(b"".join(parts))


def insert(
    connection: sqlite3.Connection,
    table: Table,
    row_id: int,
    plain: dict[str, Value],
    arrays: dict[str, np.ndarray | Packed | None] | None = None,
) -> int:
    """Write a row; the bytes of its arrays. Raises DataError for an array that the table does not take."""
    values: list[Value] = [row_id, *(_plain(plain[c.name]) for c in table.columns)]
    blobs, nbytes = [], 0
    for column in table.arrays:
        array = (arrays or {}).get(column.name)
        if array is None:
            values += [None, None, None]
            blobs.append(None)
            continue
        dtype, shape, crc, data = array if isinstance(array, Packed) else pack(column, array)
        values += [dtype, shape, crc]
        blobs.append(data)
        nbytes += len(data)
    values.append(checksum(table, values))
    later = _written_later(blobs)
    marks = ["?"] * (len(values) + len(blobs))
    if later is not None:
        marks[-1], blobs[-1] = "zeroblob(?)", len(later)
    connection.execute(f"INSERT INTO {table.name} VALUES ({', '.join(marks)})", [*values, *blobs])
    if later is not None:
        with connection.blobopen(table.name, table.arrays[-1].name, row_id) as blob:
            blob.write(later)
    return nbytes


def _written_later(blobs: list) -> memoryview | None:
    """A row's last array where it is large: written in place, it is not copied three times on its way to the file."""
    data = blobs[-1] if blobs else None
    return data if data is not None and len(data) >= _IN_PLACE and _OPENS_BLOBS else None


def update(connection: sqlite3.Connection, table: Table, row_id: int, plain: dict[str, Value]) -> None:
    """Write the plain columns of a row without arrays anew."""
    values: list[Value] = [row_id, *(plain[c.name] for c in table.columns)]
    names = [*(c.name for c in table.columns), "crc"]
    assignments = ", ".join(f"{name} = ?" for name in names)
    connection.execute(
        f"UPDATE {table.name} SET {assignments} WHERE id = ?", [*values[1:], checksum(table, values), row_id]
    )


class Row:
    """A row whose plain columns are read and checked: ``row["name"]``; its arrays by ``array``."""

    def __init__(self, connection: sqlite3.Connection, table: Table, values: tuple):
        self._connection, self.table = connection, table
        count = len(table.plain)
        self._values = dict(zip(table.plain, values))
        for column, value in zip(table.columns, values[1:]):
            expected = _KINDS[column.kind]
            if not (isinstance(value, expected) or (value is None and column.optional)):
                raise DataError(f"{column.name} is {_short(value)}, expected {column.kind}")
        if checksum(table, list(values[:count])) != values[count]:
            raise DataError("the checksum of the row is wrong")
        self._lengths = dict(zip((a.name for a in table.arrays), values[count + 1 :]))

    def __getitem__(self, name: str) -> Value:
        return self._values[name]

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Of an array, checked against the length of its bytes, which are not read. None where there is no array."""
        column = self.table.array[name]
        dtype, length = self._values[f"{name}_dtype"], self._lengths[name]
        if dtype is None and length is None and column.optional:
            return None
        if not isinstance(length, int):
            raise DataError(f"{name}: no bytes")
        return shape_of(column, dtype, self._values[f"{name}_shape"], length)

    def array(self, name: str, checked: bool = True) -> np.ndarray | None:
        """An array, read-only. ``checked`` False leaves out what needs all its bytes: checksum and finiteness.

        Raises DataError.
        """
        shape = self.shape(name)
        if shape is None:
            return None
        data = self._bytes(name, self._lengths[name])
        if not isinstance(data, bytes) or len(data) != self._lengths[name]:
            raise DataError(f"{name}: its bytes cannot be read")
        array = unpack(self._values[f"{name}_dtype"], shape, data)
        if checked:
            check(self.table.array[name], array, self._values[f"{name}_crc"], data)
        return array

    def _bytes(self, name: str, length: int) -> bytes | None:
        # Memory for a length that the file cannot hold is not even asked for.
        if length > _LARGE and length > _file_bytes(self._connection):
            raise DataError(f"{name}: {length} bytes, more than the file has")
        return _blob(self._connection, self.table.name, name, self["id"])


def read(connection: sqlite3.Connection, table: Table, row_id: int) -> Row | None:
    """A row by its id; None where there is none. Raises DataError where it is not what was written."""
    found = connection.execute(f"{table.select} WHERE id = ?", (row_id,)).fetchone()
    return None if found is None else Row(connection, table, found)


def scan(
    connection: sqlite3.Connection,
    table: Table,
    first: int = 0,
    count: int | None = None,
    failed: Callable[[object, DataError], None] | None = None,
) -> Iterator[Row]:
    """Rows with ids from ``first`` on, ascending, at most ``count`` ids. Arrays are not read.

    A row that is not what was written raises a DataError that names it; with ``failed`` it is left out, and
    ``failed(id, error)`` is called.
    """
    where, limits = "WHERE id >= ?", [first]
    if count is not None:
        where, limits = "WHERE id >= ? AND id < ?", [first, first + count]
    last = first - 1
    for values in connection.execute(f"{table.select} {where} ORDER BY id", limits):
        if values[0] <= last:  # a damaged tree leads to one row twice
            raise DataError(f"row {values[0]} follows row {last}")
        last = values[0]
        try:
            row = Row(connection, table, values)
        except DataError as error:
            if failed is None:
                raise DataError(f"row {values[0]}: {error}") from error
            failed(values[0], error)
            continue
        yield row


def ids(connection: sqlite3.Connection, table: Table) -> Iterator[int]:
    """Of all rows, ascending. Raises DataError where they are not."""
    last = -1
    for (row_id,) in connection.execute(f"SELECT id FROM {table.name} ORDER BY id"):
        if row_id <= last:  # as above; to look such an id up finds another row
            raise DataError(f"row {row_id} follows row {last}")
        last = row_id
        yield row_id


def _blob(connection: sqlite3.Connection, table: str, name: str, row_id: int) -> Value:
    if _OPENS_BLOBS:  # a third of the time of SELECT, which copies once more
        with connection.blobopen(table, name, row_id, readonly=True) as blob:
            return blob.read()
    found = connection.execute(f"SELECT {name} FROM {table} WHERE id = ?", (row_id,)).fetchone()
    return None if found is None else found[0]  # a damaged tree may list a row that it does not find


def _file_bytes(connection: sqlite3.Connection) -> int:
    pages, size = (connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "page_size"))
    return pages * size


def _plain(value: Value) -> Value:
    # Numbers of numpy and bools, which SQLite would store as bytes or refuse.
    if isinstance(value, (bool, np.integer)):
        return int(value)
    return float(value) if isinstance(value, np.floating) else value


def _short(value) -> str:
    return f"{type(value).__name__} {str(value)[:40]!r}"
