"""Reads and writes HDF5 files (h5py, extra ``hloc``); sizes are checked before anything is read."""

from __future__ import annotations

import contextlib
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
    try:
        file = library.File(path, "r")
    except _READ_ERRORS as error:
        raise MapFileError(f"{path}: no HDF5 file that can be read: {error}") from error
    with file:
        yield Hdf5File(Path(path), file)


@contextlib.contextmanager
def write_errors(target: Path) -> Iterator[None]:
    """h5py's errors while it writes, as MapError."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # a full disk is a RuntimeError where it shows on closing
        raise MapError(f"{target} cannot be written: {error}: make room, or choose another folder") from error
