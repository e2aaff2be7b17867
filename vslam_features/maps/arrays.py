"""Arrays as bytes in a map file: little-endian, C order, with dtype, shape and CRC-32 in columns of their own."""

from __future__ import annotations

import math
import zlib
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ..errors import DataError
from .tables import ArrayColumn

DTYPES = {
    "bool": np.dtype("|b1"),
    "uint8": np.dtype("|u1"),
    "int32": np.dtype("<i4"),
    "float16": np.dtype("<f2"),
    "float32": np.dtype("<f4"),
    "float64": np.dtype("<f8"),
}
_AXES = 4
_BLOCK = 1 << 15  # of halves: fits a processor's cache, so that the steps of a check do not go through memory


_HALF_MAGNITUDE, _HALF_INFINITY = np.uint16(0x7FFF), np.uint16(0x7C00)


class Packed(NamedTuple):
    """An array as a row holds it."""

    dtype: str
    shape: str
    crc: int
    data: memoryview


def pack(column: ArrayColumn, array: np.ndarray) -> Packed:
    """Raises DataError where an array is none of those that the column takes. A contiguous one is not copied."""
    name = array.dtype.newbyteorder("=").name
    if name not in column.dtypes or not column.fits(array.shape):
        raise DataError(
            f"map: {column.name} must be {' or '.join(column.dtypes)} of shape {_wanted(column)}, got {array.dtype} "
            f"{array.shape}"
        )
    if not finite(array):
        raise DataError(f"map: {column.name} is not finite; such arrays are not stored")
    data = np.ascontiguousarray(array, DTYPES[name]).reshape(-1).view(np.uint8).data
    return Packed(name, ",".join(map(str, array.shape)), zlib.crc32(data), data)


@lru_cache(maxsize=1024)  # most rows of a map say the same
def shape_of(column: ArrayColumn, dtype: str, shape: str, nbytes: int) -> tuple[int, ...]:
    """The shape that a file claims, after all checks that need no array: nothing is allocated for a lie.

    Raises DataError.
    """
    if dtype not in column.dtypes:
        raise DataError(f"{column.name}: dtype {dtype!r}, expected {' or '.join(column.dtypes)}")
    parts = shape.split(",") if isinstance(shape, str) and len(shape) < 64 else []
    if not 0 < len(parts) <= _AXES or not all(p.isascii() and p.isdigit() for p in parts):
        raise DataError(f"{column.name}: shape {str(shape)[:64]!r} is none")
    axes = tuple(map(int, parts))
    if not column.fits(axes):
        raise DataError(f"{column.name}: shape {axes}, expected {_wanted(column)}")
    expected = math.prod(axes) * DTYPES[dtype].itemsize
    if nbytes != expected:
        raise DataError(f"{column.name}: {nbytes} bytes, {expected} expected for {dtype} {axes}")
    return axes


def unpack(dtype: str, shape: tuple[int, ...], data: bytes) -> np.ndarray:
    """The array, read-only, without a copy. Call ``shape_of`` first."""
    return np.frombuffer(data, DTYPES[dtype]).reshape(shape)


def check(column: ArrayColumn, array: np.ndarray, crc: int, data: bytes) -> None:
    """Raises DataError where the bytes are not those that were written, or are no finite numbers."""
    if zlib.crc32(data) != crc:
        raise DataError(f"{column.name}: the checksum is wrong")
    if not finite(array):
        raise DataError(f"{column.name}: not finite")
    if array.dtype == bool and array.view(np.uint8).max(initial=0) > 1:
        raise DataError(f"{column.name}: a bool other than 0 and 1")


def finite(array: np.ndarray) -> bool:
    """True where there is neither NaN nor infinity."""
    if array.dtype == np.float16 and array.flags.c_contiguous:
        # By its bits, sign left out: numpy widens each half to a float first, which takes four times as long.
        bits = array.reshape(-1).view(np.uint16)
        blocks = (bits[i : i + _BLOCK] for i in range(0, len(bits), _BLOCK))
        return all((block & _HALF_MAGNITUDE).max() < _HALF_INFINITY for block in blocks)
    return bool(np.isfinite(array).all()) if array.dtype.kind == "f" else True


def _wanted(column: ArrayColumn) -> str:
    shapes = [s for s in (column.shape, column.also) if s is not None]
    return " or ".join("(" + ", ".join("n" if a is None else str(a) for a in s) + ")" for s in shapes)
