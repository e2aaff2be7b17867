"""What can still be read of a recording whose end is missing (power cut, full disk, killed recorder).

The indexed readers refuse such files. These read from the front until the
damage. Both give ``topics() -> {name: (type, count)}`` and
``messages(names) -> (topic, log_ns, raw)`` in file order, and raise BagError
where nothing at all is readable.
"""

from __future__ import annotations

import importlib
import sqlite3
import struct
from collections import deque
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote

from ..errors import BagError

_MAGIC = b"\x89MCAP0\r\n"
_SCHEMA, _CHANNEL, _MESSAGE, _CHUNK, _DATA_END = 0x03, 0x04, 0x05, 0x06, 0x0F
_MAX_RECORD = 1 << 30  # a larger length is damage, not data


class McapSalvage:
    """Reads records of an MCAP file one after the other, without its index."""

    def __init__(self, path: Path):
        self.path = path

    def topics(self) -> dict[str, tuple[str, int]]:
        """Topics with type and the number of readable messages (reads the file once)."""
        counts: dict[str, tuple[str, int]] = {}
        for topic, kind, _, _ in self._walk():
            counts[topic] = (kind, counts.get(topic, (kind, 0))[1] + 1)
        if not counts:
            raise BagError(f"{self.path}: no message can be read; the file is empty, cut at the start, or no MCAP")
        return counts

    def messages(self, names) -> Iterator[tuple[str, int, bytes]]:
        """Messages of the topics ``names`` up to the damage."""
        return ((topic, stamp, bytes(raw)) for topic, _, stamp, raw in self._walk() if topic in names)

    def _walk(self) -> Iterator[tuple[str, str, int, memoryview]]:
        schemas: dict[int, str] = {}
        channels: dict[int, tuple[str, str]] = {}
        with self.path.open("rb") as file:
            if file.read(len(_MAGIC)) == _MAGIC:
                yield from self._records(file, schemas, channels)

    def _records(self, stream: BinaryIO, schemas, channels) -> Iterator[tuple[str, str, int, memoryview]]:
        while len(head := stream.read(9)) == 9:
            op, length = struct.unpack("<BQ", head)
            if op == _DATA_END or length > _MAX_RECORD:
                return
            data = stream.read(length)
            try:
                if op == _CHUNK:  # also one that is cut: its first messages may be whole
                    yield from self._records(BytesIO(_unpack_chunk(data)), schemas, channels)
                if len(data) < length:
                    return
                if op == _SCHEMA:
                    schemas[struct.unpack_from("<H", data)[0]] = _string(data, 2)[0]
                elif op == _CHANNEL:
                    channel, schema = struct.unpack_from("<HH", data)
                    channels[channel] = (_string(data, 4)[0], schemas.get(schema, ""))
                elif op == _MESSAGE:
                    channel, _, stamp = struct.unpack_from("<HIQ", data)
                    if channel in channels:
                        yield (*channels[channel], stamp, memoryview(data)[22:])
            except (struct.error, UnicodeDecodeError):
                return


class SqliteSalvage:
    """Reads the pages that are left of a rosbag2 ``.db3``."""

    def __init__(self, path: Path):
        self.path = path

    def topics(self) -> dict[str, tuple[str, int]]:
        """Topics with type and the number of readable messages."""
        counts = {}
        with self._open() as db:
            names = self._names(db)
            for topic, _, data in self._until_damage(db):  # with data, as its pages may be the missing ones
                if topic in names and isinstance(data, bytes):
                    counts[topic] = counts.get(topic, 0) + 1
        if not counts:
            raise BagError(
                f"{self.path}: no message can be read; the file is empty, no rosbag2, or cut before the end of "
                "its first messages"
            )
        return {name: (kind, counts.get(key, 0)) for key, (name, kind) in names.items()}

    def messages(self, names) -> Iterator[tuple[str, int, bytes]]:
        """Messages of the topics ``names`` up to the damage."""
        with self._open() as db:
            known = self._names(db)
            for topic, stamp, data in self._until_damage(db):
                if topic in known and known[topic][0] in names and isinstance(data, bytes):
                    yield known[topic][0], stamp, data

    def _open(self):
        return _Database(self.path)

    def _names(self, db) -> dict[int, tuple[str, str]]:
        try:
            rows = db.execute("SELECT id, name, type FROM topics").fetchall()
        except sqlite3.Error as error:
            raise BagError(f"{self.path}: the table of topics cannot be read: {error}") from error
        return {key: (name, kind) for key, name, kind in rows if isinstance(name, str) and isinstance(kind, str)}

    def _until_damage(self, db) -> Iterator[tuple]:
        """Rows (topic id, timestamp, data), without those that may lie on a page that was cut.

        SQLite takes what is missing of the page for zeros and says nothing. Rows come in the order in
        which their pages were written, so those of the last page are held back: as many as fill one.
        """
        held: deque[tuple[int, tuple]] = deque()
        page, size = sqlite_size(self.path), self.path.stat().st_size
        hold = page[0] if page is not None and size % page[0] else 0
        filled = 0
        try:
            for row in db.execute("SELECT topic_id, timestamp, data FROM messages ORDER BY id"):
                share = min(len(row[2]), _least_on_page(hold)) if isinstance(row[2], bytes) else 0
                held.append((share, row))
                filled += share
                while held and filled - held[0][0] >= hold:
                    share, row = held.popleft()
                    filled -= share
                    yield row
        except (sqlite3.Error, OverflowError):
            return


def _least_on_page(page: int) -> int:
    """Bytes that a row keeps in its table page at least, even where it goes on in overflow pages.

    M of https://www.sqlite.org/fileformat2.html (B-tree pages), with as many reserved bytes as a page can have.
    """
    return max(0, (page - 255 - 12) * 32 // 255 - 23)


class _Database:
    """A read-only connection as a context; SQLite's own ends a transaction but does not close."""

    def __init__(self, path: Path):
        self.db = sqlite3.connect(f"file:{quote(str(path.resolve()))}?immutable=1", uri=True)
        # Without this SQLite refuses a file that has fewer pages than its header says.
        self.db.execute("PRAGMA writable_schema=ON")

    def __enter__(self):
        return self.db

    def __exit__(self, *_):
        self.db.close()


def sqlite_size(path: Path) -> tuple[int, int] | None:
    """(page size, bytes the file should have) by the header of an SQLite file; None where it has none."""
    with path.open("rb") as file:
        header = file.read(100)
    if len(header) < 100 or not header.startswith(b"SQLite format 3"):
        return None
    (page,) = struct.unpack_from(">H", header, 16)
    change, pages = struct.unpack_from(">II", header, 24)
    (valid_for,) = struct.unpack_from(">I", header, 92)
    page = 65536 if page == 1 else max(page, 1)
    return page, pages * page if change == valid_for else 0


def decompressor(kind: str):
    """A function (bytes, limit) -> bytes that gives what it can of a cut ``zstd`` or ``lz4`` frame."""
    if kind == "zstd":
        return _zstd()
    if kind == "lz4":
        from lz4.frame import LZ4FrameDecompressor

        return lambda data, limit: LZ4FrameDecompressor().decompress(data, limit)
    return lambda data, limit: data


def _zstd():
    """By the library that rosbags brings: Python 3.14's own, its backport, or the older zstandard."""
    for name in ("compression.zstd", "backports.zstd"):
        try:
            zstd = importlib.import_module(name)
        except ImportError:
            continue
        return lambda data, limit: zstd.ZstdDecompressor().decompress(data, limit)
    import zstandard

    return lambda data, limit: zstandard.ZstdDecompressor().decompressobj().decompress(data)


def _unpack_chunk(data: bytes) -> bytes:
    """The records of a chunk, as far as they go; empty where nothing is left."""
    (size,) = struct.unpack_from("<Q", data, 16)
    compression, offset = _string(data, 28)
    payload = data[offset + 8 :]
    try:
        return decompressor(compression)(payload, min(size, _MAX_RECORD))
    except Exception:  # zstd and lz4 have no common error; whatever they raise is damage here
        return b""


def _string(data: bytes, offset: int) -> tuple[str, int]:
    (length,) = struct.unpack_from("<I", data, offset)
    end = offset + 4 + length
    if end > len(data):
        raise struct.error("string beyond the record")
    return data[offset + 4 : end].decode(), end
