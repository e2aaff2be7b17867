"""Finds rows in the pages of a map file without SQLite, which gives up where the tree above them is damaged.

A row begins with the types of its columns. Each place of the file that may be such a beginning is tried, wherever it
lies: nothing of the tree, of the header or of the page around it is needed. That it is a row of ours, and of which
table, its checksum tells. The layout of cells and overflow pages: https://www.sqlite.org/fileformat2.html, section 1.6
and 2.1.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ..errors import DataError
from .open_file import OpenFile
from .rows import Row, Value
from .tables import PAGE_SIZE, TABLES, Table

Progress = Callable[[int, int], None]

_CHUNK = 256 * PAGE_SIZE
_PAGE_HEADER = 8
_MAX_LOCAL = PAGE_SIZE - 35
_MIN_LOCAL = (PAGE_SIZE - 12) * 32 // 255 - 23
_MAX_PLAIN = 1 << 20
"""Bytes of the plain columns of a row; texts in them are lines for people."""

_INTEGER_BYTES = (0, 1, 2, 3, 4, 6, 8, 8, 0, 0)
_BY_COLUMNS: dict[int, list[Table]] = {}
for _table in TABLES:
    _BY_COLUMNS.setdefault(len(_table.plain) + 1 + len(_table.arrays), []).append(_table)
_MAX_HEADER = 0x60
_MIN_HEADER = min(_BY_COLUMNS) + 1


class FoundRow(Row):
    """A row whose plain columns are as they were written. ``offset``: of its record in the file."""

    def __init__(self, pages: PageFile, table: Table, values: list, offset: int, size: int, starts: dict[str, int]):
        super().__init__(None, table, tuple(values))
        self.offset = offset
        self._pages, self._size, self._starts = pages, size, starts

    def _bytes(self, name: str, length: int) -> bytes:
        # Only what is before the array's end: what comes after it may be damaged.
        start = self._starts[name]
        return self._pages.payload(self.offset, self._size, start, start + length)


class PageFile:
    """The pages of a file. Nothing that is read from them is trusted.

    Raises OSError where the file cannot be read.
    """

    def __init__(self, path: Path):
        self._file = OpenFile.acquire(path)  # somebody else in this process may have a connection to it
        self.nbytes = os.fstat(self._file.descriptor).st_size

    def __enter__(self) -> PageFile:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file. Safe to call twice."""
        file, self._file = self._file, None
        if file is not None:
            file.release()

    def rows(self, progress: Progress | None = None) -> Iterator[FoundRow]:
        """All rows with right checksums, in the order of the file; arrays are not read. A row may come twice.

        Args:
            progress: called with (bytes looked at, bytes in all).
        """
        for base in range(0, self.nbytes, _CHUNK):
            chunk = self._read(base, _CHUNK)
            for at in _starts(chunk):
                if len(_types(chunk, at) or ()) not in _BY_COLUMNS:
                    continue
                page = chunk[at - at % PAGE_SIZE : at - at % PAGE_SIZE + PAGE_SIZE]
                row = self._row(page, at % PAGE_SIZE, base + at)
                if row is not None:
                    yield row
            if progress:
                progress(min(base + _CHUNK, self.nbytes), self.nbytes)

    def copy_to(self, file: BinaryIO) -> None:
        """Write all bytes to another file. Raises OSError."""
        for base in range(0, self.nbytes, _CHUNK):
            file.write(self._read(base, _CHUNK))

    def row(self, offset: int, table: Table) -> FoundRow | None:
        """The row at an offset that ``rows`` gave; None where it has changed since."""
        row = self._row(self._read(offset - offset % PAGE_SIZE, PAGE_SIZE), offset % PAGE_SIZE, offset)
        return row if row is not None and row.table is table else None

    def payload(self, offset: int, size: int, start: int, end: int) -> bytes:
        """Bytes ``start`` to ``end`` of the record of ``size`` bytes at ``offset``, across its overflow pages.

        Shorter where a page does not exist.
        """
        local = _local(size)
        room = PAGE_SIZE - 4
        parts = [self._read(offset + start, min(end, local) - start)] if start < local else []
        at, pointer = local, self._read(offset + local, 4) if end > local else b""
        while at < end:  # each step goes on by ``room``: a circle of pages ends, too
            if len(pointer) < 4:
                break
            number = int.from_bytes(pointer, "big")
            if not 1 <= number <= -(-self.nbytes // PAGE_SIZE):
                break
            if start < at + room:
                page = self._read((number - 1) * PAGE_SIZE, PAGE_SIZE)
                pointer = page[:4]
                parts.append(page[4 + max(0, start - at) : 4 + min(room, end - at)])
            else:
                pointer = self._read((number - 1) * PAGE_SIZE, 4)
            at += room
        return b"".join(parts)

    def _read(self, offset: int, count: int) -> bytes:
        return os.pread(self._file.descriptor, count, offset)

    def _row(self, page: bytes, at: int, offset: int) -> FoundRow | None:
        """The row whose record begins at ``at`` of a page; None where there is none."""
        types = _types(page, at) if at < len(page) else None
        tables = _BY_COLUMNS.get(len(types), ()) if types else ()
        if not tables:
            return None
        sizes = [_size(t) for t in types]
        size = page[at] + sum(sizes)
        local = _local(size)
        if size > self.nbytes or at + local + (4 if local < size else 0) > len(page):
            return None
        row_id = _row_id(page, at, size)
        if row_id is None:
            return None
        found = (self._row_of(table, page, at, offset, row_id, types, sizes) for table in tables)
        return next(filter(None, found), None)

    def _row_of(
        self, table: Table, page: bytes, at: int, offset: int, row_id: int, types: list[int], sizes: list[int]
    ) -> FoundRow | None:
        plain, size = len(table.plain) + 1, page[at] + sum(sizes)
        nbytes = page[at] + sum(sizes[:plain])
        if nbytes > _MAX_PLAIN or any(t != 0 and (t < 12 or t % 2) for t in types[plain:]):
            return None
        data = page[at : at + nbytes] if nbytes <= _local(size) else self.payload(offset, size, 0, nbytes)
        if len(data) < nbytes:
            return None
        try:
            values = [row_id, *_values(data, page[at] + sizes[0], types[1:plain], sizes[1:plain])]
            for i, column in enumerate(table.columns, 1):
                if column.kind == "REAL" and isinstance(values[i], int):
                    values[i] = float(values[i])  # SQLite stores 2.0 as the integer 2
            starts, begin = {}, nbytes
            for array, kind, length in zip(table.arrays, types[plain:], sizes[plain:]):
                values.append(None if kind == 0 else length)
                starts[array.name] = begin
                begin += length
            return FoundRow(self, table, values, offset, size, starts)
        except (DataError, UnicodeDecodeError):
            return None


def _starts(chunk: bytes) -> list[int]:
    """Where a record may begin: its header's size, NULL for the id (the cell's key), a column that is not NULL."""
    b = np.frombuffer(chunk, np.uint8)
    size, key, column = b[:-2], b[1:-1], b[2:]
    at = np.flatnonzero(key == 0)
    at = at[(size[at] >= _MIN_HEADER) & (size[at] <= _MAX_HEADER) & (column[at] > 0)]
    # Before it is the last byte of the cell's key, which is below 128.
    return at[(at > 0) & (b[at - 1] < 0x80)].tolist()


def _local(size: int) -> int:
    """How many bytes of a record are in its leaf page; the others follow in overflow pages."""
    if size <= _MAX_LOCAL:
        return size
    part = _MIN_LOCAL + (size - _MIN_LOCAL) % (PAGE_SIZE - 4)
    return part if part <= _MAX_LOCAL else _MIN_LOCAL


def _types(data: bytes, at: int) -> list[int] | None:
    """The types of the columns of a record."""
    out, value, nbytes = [], 0, 0
    for byte in data[at + 1 : at + data[at]]:
        nbytes += 1
        if byte < 0x80:
            value |= byte
            if nbytes > 5 or value in (10, 11):  # 5: more than 4 GB are no column of ours
                return None
            out.append(value)
            value = nbytes = 0
        else:
            value = (value | byte & 0x7F) << 7
    return None if nbytes else out


def _size(kind: int) -> int:
    return _INTEGER_BYTES[kind] if kind < 10 else (kind - 12) // 2


def _row_id(page: bytes, at: int, size: int) -> int | None:
    """The key of the cell, which stands between the size of its record and the record."""
    begin = at - 1
    while begin > _PAGE_HEADER and page[begin - 1] >= 0x80 and at - begin < 8:
        begin -= 1
    length = _varint(size)
    if begin < _PAGE_HEADER + len(length) or page[begin - len(length) : begin] != length or page[at - 1] >= 0x80:
        return None
    value = 0
    for byte in page[begin:at]:
        value = value << 7 | byte & 0x7F
    return value


def _varint(value: int) -> bytes:
    out = [value & 0x7F]
    while value := value >> 7:
        out.append(value & 0x7F | 0x80)
    return bytes(reversed(out))


def _values(data: bytes, at: int, types: list[int], sizes: list[int]) -> Iterator[Value]:
    for kind, size in zip(types, sizes):
        part = data[at : at + size]
        at += size
        if kind == 0:
            yield None
        elif kind < 7:
            yield int.from_bytes(part, "big", signed=True)
        elif kind == 7:
            yield struct.unpack(">d", part)[0]
        elif kind < 10:
            yield kind - 8
        elif kind % 2:
            yield part.decode("utf-8")
        else:
            raise DataError("bytes where a number or a text is expected")
