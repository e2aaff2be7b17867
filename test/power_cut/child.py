"""What the recorded processes do: ``python child.py SCENARIO FOLDER ...``. Notes in the log: ``begun N``, ``done N``.

``begun N``: N rows or keyframes were asked for. ``done N``: the call that promises N of them on the disk has returned.
"""

from __future__ import annotations

import ctypes
import os
import sqlite3
import sys
from pathlib import Path

_shim = ctypes.CDLL(None)


def mark(text: str) -> None:
    """A note in the log, in order with the file operations."""
    _shim.power_cut_mark(text.encode())


def row(n: int) -> bytes:
    """Content of row n; every fifth is larger than the cache of ``plain``."""
    return bytes([n % 251]) * (150_000 if n % 5 == 4 else 3000 + 700 * n)


def plain(folder: Path, rows: str, synchronous: str) -> None:
    """SQLite with the pragmas of a map and nothing of ours around it."""
    db = sqlite3.connect(folder / "plain.db", isolation_level=None)
    db.execute("PRAGMA page_size=8192")
    db.execute("PRAGMA cache_size=8")
    db.execute("PRAGMA journal_mode=TRUNCATE")
    db.execute(f"PRAGMA synchronous={synchronous}")
    db.execute("CREATE TABLE IF NOT EXISTS rows(n INTEGER PRIMARY KEY, data BLOB)")
    first = db.execute("SELECT count(*) FROM rows").fetchone()[0]
    for n in range(first, first + int(rows)):
        mark(f"begun {n + 1}")
        db.execute("BEGIN IMMEDIATE")
        db.execute("INSERT INTO rows VALUES (?, ?)", (n, row(n)))
        db.execute("COMMIT")
        mark(f"done {n + 1}")
    db.close()


def copy(folder: Path, sync: str) -> None:
    """A file over another one. ``sync``: which syncs are not left out, of ``file+folder``."""
    data = (folder / "new").read_bytes()
    mark("begun 1")
    with open(folder / "temp", "wb") as file:
        file.write(data)
        file.flush()
        if "file" in sync:
            os.fsync(file.fileno())
    os.rename(folder / "temp", folder / "target")
    if "folder" in sync:
        fd = os.open(folder, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
    mark("done 1")


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
