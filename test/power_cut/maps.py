"""Maps of known keyframes: written, and checked after whatever has happened to them."""

from __future__ import annotations

import contextlib
import dataclasses
import sqlite3
from pathlib import Path

from vslam_features.maps.reader import MapReader
from vslam_features.maps.verify import verify
from vslam_features.maps.writer import MapWriter

from .entries import MODELS, assert_same, entry


def write_map(path: Path, count: int, salt: int = 0) -> None:
    with MapWriter(path, MODELS, create=True) as writer:
        for n in range(count):
            writer.append(entry(n, salt=salt))


def check_map(path: Path, at_least: int, at_most: int, salt: int = 0) -> list[int]:
    """The map is clean and holds its first keyframes with all that belongs to them, as they were given.

    Returns the session of each.
    """
    with MapReader(path) as reader:
        headers = reader.headers()
        assert at_least <= len(headers) <= at_most, f"{len(headers)} keyframes, not {at_least} to {at_most}"
        for header in headers:
            want = entry(header.id, salt=salt)
            keyframe = dataclasses.replace(want.keyframe, session=header.session)
            assert_same(reader.entry(header.id), dataclasses.replace(want, keyframe=keyframe))
    report = verify(path)
    assert not report.damaged, report.damages
    _check_rows(path, [entry(h.id, salt=salt) for h in headers])
    return [h.session for h in headers]


def _check_rows(path: Path, entries: list) -> None:
    """Told by SQLite alone: the database is sound, and there is no row of a keyframe that is not there."""
    pairs = sum(len(e.pairs) for e in entries)
    loops = sum(len(e.candidates) + len(e.gated) for e in entries)
    want = {"keyframes": len(entries), "features": len(entries), "matches": pairs, "loops": loops}
    with contextlib.closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert db.execute("PRAGMA foreign_key_check").fetchall() == []
        got = {table: db.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in want}
    assert got == want
