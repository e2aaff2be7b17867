"""Five ways to keep keyframes on a disk, all synced after each one, and a plain file to compare with."""

from __future__ import annotations

import os
import shelve
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from _map_data import MODELS, arrays_of, arrays_of_keyframe

from vslam_features.maps.reader import MapReader
from vslam_features.maps.write_queue import BATCH
from vslam_features.maps.writer import MapWriter
from vslam_features.types import MapEntry

NPZ_EVERY = 4
"""Only so many of the keyframes, to spare the disk: deleted files would give npz blocks that are quicker to write."""


class Contender:
    """Keeps keyframes. ``write`` prepares the next one and gives what is timed: it stores ``at_once`` keyframes."""

    at_once = 1

    def write(self, entry: MapEntry) -> Callable[[], None]:
        raise NotImplementedError

    def forget(self) -> None:
        """Drop what was written from the page cache; it is on the disk."""
        raise NotImplementedError

    def finish(self) -> None:
        """No more is written."""


class Vmap(Contender):
    """A map file. A keyframe is one transaction: SQLite syncs its journal, the map, and the end of the journal."""

    def __init__(self, folder: Path):
        self.path = folder / "bench.vmap"
        self._writer = MapWriter(self.path, MODELS, create=True)
        self._reader: MapReader | None = None

    def write(self, entry: MapEntry) -> Callable[[], None]:
        return lambda: self._writer.append(entry)

    def forget(self) -> None:
        _forget_map(self._writer)

    def finish(self) -> None:
        self._writer.close()

    def open(self) -> None:
        """A new reader, to which every keyframe is unread."""
        self.close()
        self._reader = MapReader(self.path)
        self._reader.headers()

    def read(self, kf_id: int) -> object:
        return self._reader.keyframe(kf_id)

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None


class Waiting(Contender):
    """A map file whose keyframes had to wait, as they do when they come faster than the disk: 24 in a transaction."""

    at_once = BATCH

    def __init__(self, folder: Path):
        self._path = folder / "waiting.vmap"
        self._writer = MapWriter(self._path, MODELS, create=True)
        self._entries: list[MapEntry] = []

    def write(self, entry: MapEntry) -> Callable[[], None]:
        self._entries.append(entry)
        return lambda: self._store() if len(self._entries) == BATCH else None

    def _store(self) -> None:
        self._writer.append(*self._entries)
        self._entries.clear()

    def forget(self) -> None:
        _forget_map(self._writer)

    def finish(self) -> None:
        self._writer.close()
        self._path.unlink()


class Raw(Contender):
    """The same bytes at the end of a plain file, fsync after each keyframe. Read by one readinto of fresh memory."""

    def __init__(self, folder: Path):
        self.path = folder / "raw.bin"
        self._file = open(self.path, "w+b", buffering=0)
        self._starts: list[int] = []
        self._lengths: list[int] = []

    def write(self, entry: MapEntry) -> Callable[[], None]:
        parts = [a.tobytes() for a in arrays_of(entry).values()]
        self._starts.append(self._file.seek(0, os.SEEK_END))
        self._lengths.append(sum(a.nbytes for a in arrays_of_keyframe(entry.keyframe).values()))
        data = b"".join(parts)

        def run() -> None:
            if self._file.write(data) != len(data):
                raise OSError("a short write: is the disk full?")
            os.fsync(self._file.fileno())

        return run

    def forget(self) -> None:
        os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def finish(self) -> None:
        self._file.close()
        self._file = open(self.path, "rb", buffering=0)

    def read(self, kf_id: int) -> np.ndarray:
        buffer = np.empty(self._lengths[kf_id], np.uint8)
        self._file.seek(self._starts[kf_id])
        if self._file.readinto(buffer) != len(buffer):
            raise OSError("a short read")
        return buffer

    def read_checked(self, kf_id: int) -> bool:
        """As ``read``, with what a first read of a map does: a checksum, and a search for what is not finite."""
        data = self.read(kf_id)
        return zlib.crc32(data) >= 0 and bool(np.isfinite(data.view(np.float16)).all())

    def close(self) -> None:
        self._file.close()


class Shelve(Contender):
    """``shelve`` with pickle 5; synced: ``Shelf.sync()``, then fsync of each of its files."""

    def __init__(self, folder: Path):
        self._folder = folder / "shelve"
        self._folder.mkdir()
        self._shelf = shelve.open(str(self._folder / "bench"), "n", protocol=5)
        self.backend = type(self._shelf.dict).__module__

    def write(self, entry: MapEntry) -> Callable[[], None]:
        key, arrays = str(entry.keyframe.id), arrays_of(entry)

        def run() -> None:
            self._shelf[key] = arrays
            self._shelf.sync()
            for file in self._folder.iterdir():
                _fsync(file)

        return run

    def read(self, kf_id: int) -> object:
        return self._shelf[str(kf_id)]

    def forget(self) -> None:
        for file in self._folder.iterdir():
            forget(file)

    def close(self) -> None:
        self._shelf.close()


class Npz(Contender):
    """``numpy.savez`` into a file a keyframe, fsync of that file.

    After a kill or a power cut the name may be missing, or that of half a file. ``placed``: written under another name,
    synced, renamed, fsync of the folder: whole or not at all, as a keyframe of a map is.
    """

    def __init__(self, folder: Path, placed: bool):
        self._folder = folder / ("npz_placed" if placed else "npz")
        self._folder.mkdir()
        self._placed = placed

    def write(self, entry: MapEntry) -> Callable[[], None]:
        path, arrays = self._folder / f"{entry.keyframe.id}.npz", arrays_of(entry)
        self._last = path

        def run() -> None:
            written = path.with_suffix(".part") if self._placed else path
            with open(written, "wb") as file:
                np.savez(file, **arrays)
                file.flush()
                os.fsync(file.fileno())
            if self._placed:
                os.replace(written, path)
                _fsync(self._folder)

        return run

    def read(self, kf_id: int) -> object:
        with np.load(self._folder / f"{kf_id}.npz") as file:
            return {name: file[name] for name in file.files if not name[-1].isdigit()}

    def forget(self) -> None:
        forget(self._last)


def _forget_map(writer: MapWriter) -> None:
    # By the descriptor that the writer has: to close another one would end its locks.
    os.posix_fadvise(writer._connection.file.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def forget(path: Path) -> None:
    """Drop a file from the page cache: synced first, as dirty pages stay."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)


def remember(path: Path) -> None:
    """Have all of a file in the page cache."""
    with open(path, "rb") as file:
        while file.read(1 << 20):
            pass


def settle(folder: Path) -> None:
    """Let the file system commit what it has pending, by a sync of a small file."""
    path = folder / "settle"
    path.write_bytes(os.urandom(16))
    _fsync(path)
