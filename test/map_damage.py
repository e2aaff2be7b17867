"""A small map with everything in it: which pages of its file belong to which rows, and what damage to it does."""

from __future__ import annotations

import contextlib
import sqlite3
import zlib
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from power_cut.entries import MODELS, assert_same, entry

from vslam_features.errors import MapDamagedError, MapFileError
from vslam_features.maps.reader import MapReader
from vslam_features.maps.rows import checksum
from vslam_features.maps.tables import PAGE_SIZE, TABLES
from vslam_features.maps.writer import MapWriter
from vslam_features.types import MapEntry

COUNT, SECOND_SESSION = 30, 17


def known(n: int) -> MapEntry:
    """Keyframe n of the map: sessions 0 and 1, no thumbnail, pose, camera or global descriptor here and there."""
    want = entry(n)
    fields = {"session": int(n >= SECOND_SESSION)}
    for every, name in ((4, "thumbnail"), (5, "pose"), (9, "camera"), (6, "global_descriptor")):
        if n % every == every - 1:
            fields[name] = None
    return replace(want, keyframe=replace(want.keyframe, **fields))


@cache
def map_bytes() -> bytes:
    """The file."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "a.vmap"
        with MapWriter(path, MODELS, create=True) as writer:
            for n in range(COUNT):
                writer.append(known(n))
        return path.read_bytes()


@dataclass(frozen=True)
class Page:
    """Of a table. ``rows``: ids of those that have a part in it; none of interior pages."""

    number: int
    table: str
    kind: str
    rows: tuple[int, ...]

    @property
    def start(self) -> int:
        """Offset in the file."""
        return (self.number - 1) * PAGE_SIZE


@cache
def pages() -> tuple[Page, ...]:
    """All pages by number, by SQLite's own statistics. Skips the test where SQLite was built without them."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "a.vmap"
        path.write_bytes(map_bytes())
        with contextlib.closing(sqlite3.connect(path)) as db:
            try:
                rows = db.execute(
                    "SELECT name, path, pageno, pagetype, ncell FROM dbstat ORDER BY name, path"
                ).fetchall()
            except sqlite3.OperationalError as error:
                pytest.skip(f"SQLite without dbstat: {error}")
            ids = {name: [i for (i,) in db.execute(f"SELECT rowid FROM {name} ORDER BY rowid")] for name, *_ in rows}
    found, leaves = [], {}
    for name, place, number, kind, cells in rows:
        here: tuple[int, ...] = ()
        if kind == "leaf":
            here, ids[name] = tuple(ids[name][:cells]), ids[name][cells:]
            leaves[name, place] = here
        elif kind == "overflow":  # named after its leaf, the cell there, and its place in the chain
            leaf, _, part = place.rpartition("/")
            here = (leaves[name, f"{leaf}/"][int(part.split("+")[0], 16)],)
        found.append(Page(number, name, kind, here))
    return tuple(sorted(found, key=lambda p: p.number))


def structure(page: Page) -> list[int]:
    """Offsets of what leads to rows: of a page's head and list of cells, of the heads of cells, of chains."""
    if page.kind == "overflow":
        return list(range(page.start, page.start + 4))
    data, head = map_bytes(), page.start + (100 if page.number == 1 else 0)
    count, size, cell = int.from_bytes(data[head + 3 : head + 5], "big"), 12, 6
    if page.kind == "leaf":
        size, cell = 8, 16
    out = list(range(head, head + size + 2 * count))
    for i in range(head + size, head + size + 2 * count, 2):
        start = page.start + int.from_bytes(data[i : i + 2], "big")
        out += range(start, start + cell)
    return out


def rows_in(damaged: set[int]) -> set[tuple[str, int]]:
    """(table, id) of all rows that have a part in one of these pages."""
    return {(page.table, row) for page in pages() if page.number in damaged for row in page.rows}


def touched(damage: bytes) -> set[int]:
    """Numbers of the pages in which a damaged file differs from the whole one, or which it lacks."""
    whole = map_bytes()
    return {
        page.number
        for page in pages()
        if damage[page.start : page.start + PAGE_SIZE] != whole[page.start : page.start + PAGE_SIZE]
    }


def rewrite(path: Path, table: str, row_id: int, plain: dict, blobs: dict[str, np.ndarray]) -> None:
    """Change a row as somebody would who knows the format: all checksums are right."""
    found = next(t for t in TABLES if t.name == table)
    with contextlib.closing(sqlite3.connect(path)) as db:
        changes = dict(plain)
        for name, array in blobs.items():
            changes |= {name: array.tobytes(), f"{name}_crc": zlib.crc32(array.tobytes())}
        for name, value in changes.items():
            db.execute(f"UPDATE {table} SET {name} = ? WHERE id = ?", (value, row_id))
        values = db.execute(f"SELECT {', '.join(found.plain)} FROM {table} WHERE id = ?", (row_id,)).fetchone()
        db.execute(f"UPDATE {table} SET crc = ? WHERE id = ?", (checksum(found, list(values)), row_id))
        db.commit()


def read_damaged(path: Path, lies: bool = False) -> bool:
    """Read all there is. True where something was refused.

    Raises AssertionError where an error does not say what is wrong, or where a result differs from that of the whole
    map (not with ``lies``, which may be told in other words).
    """
    refused = []

    def attempt(read, want) -> None:
        try:
            got = read()
        except MapFileError as error:
            assert str(path) in str(error), error
            if isinstance(error, MapDamagedError):
                assert "table" in str(error) or "damaged" in str(error), error
            refused.append(str(error))
        else:
            if not lies:
                assert_same(got, want)

    def opened() -> None:
        nonlocal reader
        reader = stack.enter_context(MapReader(path))

    with contextlib.ExitStack() as stack:
        reader = None
        attempt(opened, None)
        if reader is None:
            return True
        entries = [known(n) for n in range(COUNT)]
        attempt(lambda: reader.models, MODELS)
        attempt(lambda: tuple(reader.headers()), tuple(e.keyframe.header for e in entries))
        attempt(lambda: tuple(reader.sessions()), (0, 1))
        places = [(e.keyframe.id, e.keyframe.global_descriptor) for e in entries]
        places = tuple(p for p in places if p[1] is not None)
        attempt(lambda: tuple(reader.global_descriptors()), places)
        loops = tuple((c.kf_id, c.ref_kf_id) for e in entries for c in e.candidates)
        attempt(lambda: tuple(reader.confirmed_loops()), loops)
        for n, want in enumerate(entries):
            attempt(lambda n=n: reader.entry(n), want)
            attempt(lambda n=n: reader.thumbnail(n), want.keyframe.thumbnail)
    return bool(refused)
