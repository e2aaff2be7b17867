"""Reads ``.npy`` files as data: sizes are checked before anything is allocated, and a pickle in them runs nothing."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import MapFileError
from .array_pickle import MAX_BYTES, TYPE_CODE, native, read_array_pickle

# As numpy writes it. Its own reader evaluates the text as Python, within limits that depend on its version.
_HEAD = re.compile(
    rb"\x93NUMPY(?:\x01\x00..|\x02\x00....)"
    rb"\{'descr': '(?P<type>[ -&(-~]{1,8})', 'fortran_order': (?P<fortran>True|False), "
    rb"'shape': \((?P<shape>(?:[0-9]{1,15}(?:, [0-9]{1,15}){0,9},?)?)\), \} *\n",
    re.DOTALL,
)


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
    head = _HEAD.match(content)
    if head is None:
        raise MapFileError(f"{path}: no numpy file, or one of fields")
    shape = tuple(int(n) for n in head["shape"].decode().split(",") if n)
    rest = content[head.end() :]
    if head["type"] in (b"|O", b"O") and shape == ():
        try:
            return read_array_pickle(rest, single_object=True).item()
        except (MapFileError, AttributeError, ValueError) as error:
            raise MapFileError(f"{path}: {error}") from error
    type_code = head["type"].decode()
    if not TYPE_CODE.fullmatch(type_code) or math.prod(shape) * np.dtype(type_code).itemsize != len(rest):
        raise MapFileError(f"{path}: {type_code} {shape} in {len(rest)} bytes; numbers were expected")
    try:
        return native(np.frombuffer(rest, type_code).reshape(shape, order="F" if head["fortran"] == b"True" else "C"))
    except ValueError as error:
        raise MapFileError(f"{path}: {error}") from error
