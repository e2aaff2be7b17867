"""What the recorded processes do: ``python child.py SCENARIO FOLDER ...``. Notes in the log: ``begun N``, ``done N``.

``begun N``: N rows or keyframes were asked for. ``done N``: the call that promises N of them on the disk has returned.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sqlite3
import sys
import threading
from pathlib import Path

from power_cut.entries import MODELS, assert_same, entry
from vslam_features.errors import MapError
from vslam_features.maps import database
from vslam_features.maps.copy import copy_map
from vslam_features.maps.file_store import FileStore
from vslam_features.maps.keyframe_map import KeyframeMap
from vslam_features.maps.reader import MapReader
from vslam_features.maps.writer import MapWriter

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


def writer(folder: Path, count: str, until: str = "closed") -> None:
    """A map is made, or continued. ``until`` killed: the process ends without a word."""
    path = folder / "a.vmap"
    with MapWriter(path, MODELS, create=not path.exists()) as out:
        mark(f"done {len(out)}")
        for n in range(len(out), len(out) + int(count)):
            mark(f"begun {n + 1}")
            out.append(entry(n))
            mark(f"done {n + 1}")
        if until == "killed":
            os.kill(os.getpid(), signal.SIGKILL)


def waited(folder: Path, rounds: str, together: str) -> None:
    """Keyframes that share transactions, parts of which go to the file before the end: as with large keyframes."""
    database.batch_cache = lambda largest: 32 << 10
    with MapWriter(folder / "a.vmap", MODELS, create=True) as out:
        for n in range(0, int(rounds) * int(together), int(together)):
            mark(f"begun {n + int(together)}")
            out.append(*(entry(i) for i in range(n, n + int(together))))
            mark(f"done {n + int(together)}")


def half_written(folder: Path, name: str) -> None:
    """Ends while the map NAME has a journal that must be rolled back."""
    db = sqlite3.connect(folder / name, isolation_level=None)
    db.execute("PRAGMA cache_size=2")
    db.execute("PRAGMA cache_spill=2")
    db.execute("BEGIN IMMEDIATE")
    for table in ("matches", "features", "keyframes", "meta"):
        db.execute(f"DELETE FROM {table}")
    os.kill(os.getpid(), signal.SIGKILL)


def copy_of_map(folder: Path) -> None:
    """``new.vmap`` over ``target.vmap``."""
    mark("begun 1")
    copy_map(folder / "new.vmap", folder / "target.vmap")
    mark("done 1")


def reader(folder: Path) -> None:
    """Opening is all that is needed to roll back what a crash left."""
    with MapReader(folder / "a.vmap") as found:
        mark(f"done {len(found.headers())}")


def running(folder: Path) -> None:
    """A running map is saved over ``target.vmap`` while keyframes come. ``copying``, ``copied N``: at least N in it."""
    store = FileStore(folder / "a.vmap", MODELS, create=True)
    for n in range(4):
        mark(f"begun {n + 1}")
        store.put(entry(n))
    store.flush()
    mark("done 4")

    def more() -> None:
        for n in range(4, 8):
            mark(f"begun {n + 1}")
            store.put(entry(n))

    thread = threading.Thread(target=more)
    thread.start()
    mark("copying 4")
    store.copy(folder / "target.vmap")
    mark("copied 4")
    thread.join()
    store.flush()
    mark("done 8")
    mark("begun 9")
    store.put(entry(8))
    store.close()
    mark("done 9")


def say(text: str) -> None:
    """A line that is there at once, whatever comes."""
    os.write(1, f"{text}\n".encode())


def mapping(folder: Path) -> None:
    """Maps until it is killed. Says ``QUEUED STORED`` after each keyframe."""
    path = folder / "a.vmap"
    say("opening")
    keyframes = KeyframeMap(FileStore(path, MODELS, create=not path.exists()))
    while True:
        n = len(keyframes)
        e = entry(n)
        try:
            keyframes.add(e.keyframe)
        except MapError:  # the disk of a busy machine; tried again
            continue
        keyframes.finish(n, e.pairs, e.candidates, e.gated)
        say(f"{n + 1} {keyframes.stored}")


def slow_save(folder: Path, how: str) -> None:
    """Saves ``a.vmap`` over ``target.vmap`` on a slow disk. ``how``: interrupt, or go on where it is ``deaf``."""
    if "deaf" in how:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    store = FileStore(folder / "a.vmap", MODELS)
    _shim.power_cut_slow(5000)
    say("saving")
    if "store" in how:
        store.copy(folder / "target.vmap")
    else:
        copy_map(folder / "a.vmap", folder / "target.vmap")
    say("saved")


class Full:
    """A disk that is full while this is entered. ``how``: device, file size or pages."""

    def __init__(self, how: str, path: Path, store: FileStore | None = None):
        self._how, self._path, self._store = how, path, store

    def __enter__(self) -> Full:
        more = 30_000
        if self._how == "device":
            _shim.power_cut_room(ctypes.c_int64(more))
        elif self._how == "file size":
            limit = self._path.stat().st_size + more
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        else:
            self._pages(self._path.stat().st_size // 8192 + 4)
        return self

    def __exit__(self, *_) -> None:
        if self._how == "device":
            _shim.power_cut_room(ctypes.c_int64(-1))
        elif self._how == "file size":
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        else:
            self._pages(2**31 - 2)

    def _pages(self, most: int) -> None:
        self._store._writer._connection.execute(f"PRAGMA max_page_count={most}")


def map_on_full_disk(folder: Path, how: str) -> None:
    """25 keyframes, of which some come while the disk is full."""
    path = folder / "a.vmap"
    store = FileStore(path, MODELS, create=True)
    for n in range(5):
        store.put(entry(n))
    store.flush()
    with Full(how, path, store):
        for n in range(5, 25):
            store.put(entry(n))
        try:
            store.flush(20)
        except MapError as e:
            say(f"flush: {e}")
        say(f"problem: {store.problem}")
        say(f"waiting: {store.waiting}")
        with MapReader(path) as reader:
            headers = reader.headers()
            assert len(headers) == 25 - store.waiting
            for h in headers:
                assert_same(reader.entry(h.id), entry(h.id))
        for n in range(25):
            assert_same(store.keyframe(n), entry(n).keyframe)
    store.flush(20)
    say(f"problem then: {store.problem}")
    store.close()


def continue_on_full_disk(folder: Path) -> None:
    """A map is opened for writing where not one byte fits; then there is room."""
    _shim.power_cut_room(ctypes.c_int64(0))
    with MapWriter(folder / "a.vmap", MODELS) as out:
        try:
            out.append(entry(len(out)))
        except MapError as e:
            say(f"append: {e}")
        _shim.power_cut_room(ctypes.c_int64(-1))
        out.append(entry(len(out)))


def copy_to_full_disk(folder: Path, how: str) -> None:
    """``new.vmap`` over the smaller ``target.vmap``, which does not fit."""
    with Full(how, folder / "target.vmap"):
        try:
            copy_map(folder / "new.vmap", folder / "target.vmap")
        except MapError as e:
            say(f"copy: {e}")


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
