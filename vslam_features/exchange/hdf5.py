"""Reads and writes HDF5 files (h5py, extra ``hloc``); sizes are checked before anything is read."""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ..errors import MapError, MapFileError, PluginError
from .array_pickle import MAX_BYTES

_READ_ERRORS = (OSError, RuntimeError, KeyError, ValueError, TypeError)  # what h5py raises for damaged files


def h5py():
    """The library. Raises PluginError with the line that installs it."""
    try:
        import h5py
    except ImportError as error:
        raise PluginError(
            f"HDF5 files need h5py ({error}): pip install 'vslam_features[hloc]', or apt install python3-h5py"
        ) from None
    return h5py


class Hdf5File:
    """An open file; ``path`` names it in messages."""

    def __init__(self, path: Path, file):
        self.path, self._file = path, file

    def groups_with(self, dataset: str) -> list[str]:
        """Names of all groups that have a dataset of this name, ascending. Links out of the file are not followed."""
        found: list[str] = []

        def visit(name: str, _) -> None:
            parent, _, last = name.rpartition("/")
            if last == dataset and parent:
                found.append(parent)

        try:
            self._file.visititems(visit)
        except _READ_ERRORS as error:
            raise MapFileError(f"{self.path}: damaged: {error}") from error
        return sorted(found)

    def has(self, group: str, dataset: str) -> bool:
        """True where the group has it."""
        with contextlib.suppress(*_READ_ERRORS):
            return f"{group}/{dataset}" in self._file
        return False

    def array(self, group: str, dataset: str, kinds: str, axes: int) -> np.ndarray:
        """A dataset, finite, floats at most f32. ``kinds``: those of numpy dtypes that it may have.

        Raises MapFileError, which names file, group and dataset.
        """
        where = f"{self.path}, group {group}: {dataset}"
        if not self.has(group, dataset):
            raise MapFileError(f"{where} is missing")
        try:
            name = f"{group}/{dataset}"
            if not isinstance(self._file.get(name, getlink=True), h5py().HardLink):  # else of another file
                raise MapFileError(f"{where} is a link")
            found = self._file[name]
            if not isinstance(found, h5py().Dataset) or found.external or found.is_virtual:
                raise MapFileError(f"{where} is no dataset of this file")
            if found.dtype.kind not in kinds or found.shape is None or len(found.shape) != axes:
                raise MapFileError(
                    f"{where}: {axes} axes of kind {kinds!r} were expected, got {found.dtype} {found.shape}"
                )
            if math.prod(found.shape) * found.dtype.itemsize > MAX_BYTES:
                raise MapFileError(f"{where}: {found.dtype} {found.shape} is over {MAX_BYTES >> 20} MiB")
            array = found[()]
            if array.dtype.kind == "f" and array.dtype.itemsize > 4:
                with np.errstate(over="ignore"):
                    array = array.astype(np.float32)
        except _READ_ERRORS as error:
            raise MapFileError(f"{where} cannot be read, the file is damaged: {error}") from error
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise MapFileError(f"{where} is not finite")
        return array.astype(array.dtype.newbyteorder("="), copy=False)


@contextlib.contextmanager
def open_hdf5(path: Path) -> Iterator[Hdf5File]:
    """A file to read. Raises MapFileError where it is none."""
    library = h5py()
    if not Path(path).is_file():
        raise MapFileError(f"{path}: there is no such file; give the name of the file where it is called otherwise")
    try:
        file = library.File(path, "r")
    except _READ_ERRORS as error:
        raise MapFileError(f"{path}: no HDF5 file that can be read: {error}") from error
    with file:
        yield Hdf5File(Path(path), file)


class SafeFile(io.RawIOBase):
    """A new file for HDF5 to write to, which tells it of no failure: a write that fails crashes the process (HDF5 2.0).

    What did not fit on the disk is held in memory, so that HDF5 reads back what it wrote and can close its file. Ask
    ``check`` after each step, and stop when it raises.
    """

    def __init__(self, path: Path):
        self._file = open(path, "w+b", buffering=0)
        self._at = self._size = 0
        self._unwritten: list[tuple[int, bytes]] = []
        self._problem: BaseException | None = None

    def check(self) -> None:
        """Raises the error of the first write that failed."""
        if self._problem is not None:
            raise self._problem

    def close(self) -> None:
        self._file.close()
        super().close()

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def write(self, data) -> int:
        data = bytes(data)
        if self._problem is None:
            try:
                self._file.seek(self._at)
                rest = memoryview(data)
                while rest:
                    rest = rest[self._file.write(rest) :]
            except BaseException as error:  # an interrupt too: HDF5 must not see it here
                self._problem = error
        if self._problem is not None:
            self._unwritten.append((self._at, data))
        self._at += len(data)
        self._size = max(self._size, self._at)
        return len(data)

    def readinto(self, buffer) -> int:
        count = max(0, min(len(buffer), self._size - self._at))
        found = bytearray(count)
        self._file.seek(self._at)
        there = self._file.read(count) or b""
        found[: len(there)] = there
        for at, data in self._unwritten:
            first, last = max(at, self._at), min(at + len(data), self._at + count)
            if first < last:
                found[first - self._at : last - self._at] = data[first - at : last - at]
        buffer[:count] = found
        self._at += count
        return count

    def truncate(self, size: int | None = None) -> int:
        self._size = self._at if size is None else size
        if self._problem is None:
            try:
                self._file.truncate(self._size)
            except BaseException as error:
                self._problem = error
        return self._size

    def flush(self) -> None:
        """Nothing: writes are not buffered."""


@contextlib.contextmanager
def new_hdf5(path: Path) -> Iterator[tuple]:
    """(h5py's file to write to, the file below it whose ``check`` tells of a full disk)."""
    below = SafeFile(path)
    try:
        with h5py().File(below, "w") as file:
            yield file, below
        below.check()
    finally:
        below.close()


@contextlib.contextmanager
def write_errors(target: Path) -> Iterator[None]:
    """Errors of writing, as MapError."""
    try:
        yield
    except OSError as error:
        raise MapError(
            f"{target} cannot be written: {error.strerror or error}: make room, or choose another folder"
        ) from error
