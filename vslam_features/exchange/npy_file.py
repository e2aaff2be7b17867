"""Reads ``.npy`` files as data: sizes are checked before anything is allocated, and a pickle in them runs nothing."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import MapFileError
from .array_pickle import MAX_BYTES, native, read_array_pickle


def read_npy(path: Path) -> Any:
    """The array of a file; where ``np.save`` was given a dict, that.

    Raises MapFileError: damaged, over 64 MiB, or objects other than arrays, numbers, strings and containers.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise MapFileError(f"{path}: {error.strerror or error}") from error
    if len(content) > MAX_BYTES:
        raise MapFileError(f"{path}: over {MAX_BYTES >> 20} MiB")
    stream = io.BytesIO(content)
    try:
        version = np.lib.format.read_magic(stream)
        readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        if version not in readers:
            raise ValueError(f"format version {version}")
        shape, fortran, dtype = readers[version](stream)
    except (ValueError, TypeError, SyntaxError, KeyError, MemoryError, RecursionError) as error:
        raise MapFileError(f"{path}: no numpy file: {str(error)[:200]}") from error
    rest = content[stream.tell() :]
    if dtype == np.dtype("O") and shape == ():
        try:
            return read_array_pickle(rest, single_object=True).item()
        except (MapFileError, AttributeError, ValueError) as error:
            raise MapFileError(f"{path}: {error}") from error
    if dtype.kind not in "biuf" or dtype.hasobject or math.prod(shape) * dtype.itemsize != len(rest):
        raise MapFileError(f"{path}: {dtype} {shape} in {len(rest)} bytes")
    return native(np.frombuffer(rest, dtype).reshape(shape, order="F" if fortran else "C"))
