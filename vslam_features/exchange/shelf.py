"""Opens a shelf (a dbm file) read-only and gives the bytes of its entries; unpickling them is the reader's affair.

The two formats that need no library are read by hand, since ``dbm`` trusts their sizes: ``dbm.dumb`` and
``dbm.sqlite3``. ``dbm.gnu`` and ``dbm.ndbm`` are C libraries, which not every Python has.
"""

from __future__ import annotations

import contextlib
import dbm
import importlib
import os
import re
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

from ..errors import MapFileError
from .array_pickle import MAX_BYTES

_GDBM_MAGIC = (0x13579ACE, 0x13579ACD, 0x13579ACF)
_SQLITE_MAGIC = b"SQLite format 3\0"
_DUMB_LINE = re.compile(rb"(?P<q>['\"])(?P<key>[ -~]{1,200})(?P=q), \((?P<at>\d{1,18}), (?P<size>\d{1,18})\)\s*")
_SUFFIXES = (".db", ".dat", ".dir", ".bak", ".pag")
COPY_COMMAND = (
    "python3 -c \"import dbm, dbm.dumb as d; [(lambda s: d.open(n, 'n').update(s))(dbm.open(n)) for n in "
    "('features', 'embeddings', 'depths')]\""
)
"""Copies the shelves of the folder it runs in to dbm.dumb, which any Python reads; unpickles nothing."""


class Shelf:
    """Keys, ascending, and the bytes of their values."""

    def __init__(self, path: Path, keys: list[str], read: Callable[[str], bytes]):
        self.path, self._keys, self._read = path, sorted(keys), read
        self._known = frozenset(keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: str) -> bool:
        return key in self._known

    def keys(self) -> list[str]:
        """All keys."""
        return list(self._keys)

    def __getitem__(self, key: str) -> bytes:
        """Raises MapFileError where the value cannot be read."""
        try:
            value = self._read(key)
        except (OSError, KeyError, sqlite3.Error, *_DBM_ERRORS) as error:
            raise MapFileError(f"{self.path}: entry {key!r} cannot be read: {error}") from error
        if not isinstance(value, bytes) or len(value) > MAX_BYTES:
            raise MapFileError(f"{self.path}: entry {key!r} is over {MAX_BYTES >> 20} MiB, or no bytes")
        return value


_DBM_ERRORS = dbm.error if isinstance(dbm.error, tuple) else (dbm.error,)


def shelf_name(path: Path) -> Path:
    """The name that ``shelve.open`` was given, from that or from one of its files."""
    return path.with_suffix("") if path.suffix in _SUFFIXES and path.exists() else path


def find_shelf(name: Path) -> bool:
    """True where ``name`` is a shelf's, as ``shelve.open`` was given it."""
    return _kind(name) is not None


@contextlib.contextmanager
def open_shelf(name: Path) -> Iterator[Shelf]:
    """The shelf that ``shelve.open(name)`` wrote. Nothing is written to it.

    Raises:
        MapFileError: there is none, it is damaged, or this Python cannot open its format (the message says what to do).
    """
    kind = _kind(name)
    if kind is None:
        raise MapFileError(
            f"{name}: no shelf of this name: {name}.db, {name}.dat with {name}.dir, or {name} is missing"
        )
    opener = {"dbm.dumb": _dumb, "dbm.sqlite3": _sqlite}.get(kind)
    with opener(name) if opener else _library(name, kind) as shelf:
        yield shelf


def _kind(name: Path) -> str | None:
    with_suffix = {suffix: Path(f"{name}{suffix}") for suffix in _SUFFIXES}
    if with_suffix[".dat"].is_file() and with_suffix[".dir"].is_file():
        return "dbm.dumb"
    if with_suffix[".db"].is_file() or (with_suffix[".pag"].is_file() and with_suffix[".dir"].is_file()):
        return "dbm.ndbm"
    if not name.is_file():
        return None
    with open(name, "rb") as file:
        head = file.read(16)
    if head == _SQLITE_MAGIC:
        return "dbm.sqlite3"
    if any(head[:4] == magic.to_bytes(4, order) for magic in _GDBM_MAGIC for order in ("little", "big")):
        return "dbm.gnu"
    return None


@contextlib.contextmanager
def _dumb(name: Path) -> Iterator[Shelf]:
    data, index = Path(f"{name}.dat"), Path(f"{name}.dir")
    with open(data, "rb") as file, open(index, "rb") as lines:
        total, places = os.fstat(file.fileno()).st_size, {}
        for number, line in enumerate(iter(lambda: lines.readline(1024), b""), 1):
            if not line.strip():
                continue
            match = _DUMB_LINE.fullmatch(line)
            if not match:
                raise MapFileError(f"{index}, line {number}: 'key', (place, size) expected, got {line[:60]!r}")
            at, size = int(match["at"]), int(match["size"])
            if at + size > total or size > MAX_BYTES:
                raise MapFileError(
                    f"{index}, line {number}: {size} bytes at {at}, but {data.name} has {total}: the shelf is damaged, "
                    "or was copied while it was written"
                )
            places[match["key"].decode("ascii")] = at, size

        def read(key: str) -> bytes:
            at, size = places[key]
            file.seek(at)
            return file.read(size)

        yield Shelf(data, list(places), read)


@contextlib.contextmanager
def _sqlite(name: Path) -> Iterator[Shelf]:
    try:
        connection = sqlite3.connect(f"file:{quote(str(name.absolute()))}?mode=ro", uri=True)
        with contextlib.closing(connection):
            connection.execute("PRAGMA trusted_schema = OFF")
            tables = connection.execute("SELECT type FROM sqlite_master WHERE name = 'Dict'").fetchall()
            if tables != [("table",)]:
                raise MapFileError(f"{name}: an SQLite file without the table Dict is no shelf")
            keys = [_text(name, k) for (k,) in connection.execute("SELECT CAST(key AS BLOB) FROM Dict")]

            def read(key: str) -> bytes:
                sql = "SELECT CAST(value AS BLOB) FROM Dict WHERE CAST(key AS BLOB) = ? AND length(value) <= ?"
                found = connection.execute(sql, (key.encode(), MAX_BYTES)).fetchone()
                return found[0] if found else b""

            yield Shelf(name, keys, read)
    except sqlite3.Error as error:
        raise MapFileError(f"{name}: the shelf is damaged: {error}") from error


@contextlib.contextmanager
def _library(name: Path, kind: str) -> Iterator[Shelf]:
    try:
        module = importlib.import_module(kind)
    except ImportError:
        raise MapFileError(
            f"{name}: a shelf of {kind}, which this Python cannot open. Copy it to a format that every Python reads, "
            f"with the Python that wrote the map, in the folder {name.parent}: {COPY_COMMAND}"
        ) from None
    try:
        file = module.open(str(name), "r")
    except (OSError, *_DBM_ERRORS, module.error) as error:
        raise MapFileError(f"{name}: {kind} cannot open the shelf: {error}") from error
    with contextlib.closing(file):
        yield Shelf(name, [_text(name, key) for key in file.keys()], lambda key: file[key.encode()])


def _text(name: Path, key: bytes) -> str:
    try:
        return key.decode("ascii")
    except (UnicodeDecodeError, AttributeError):
        raise MapFileError(f"{name}: the key {key!r:.60} is no number") from None
