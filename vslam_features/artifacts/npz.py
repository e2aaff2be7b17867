"""Arrays with a JSON text ``meta`` in an ``.npz`` file, without pickles."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np

from ..errors import DataError


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """All arrays of a file by name, ``meta`` among them. Raises DataError, naming the file, where it is damaged."""
    try:
        with np.load(path, allow_pickle=False) as data:
            if not isinstance(data, np.lib.npyio.NpzFile):
                raise ValueError("a single array, not an .npz file")
            return {key: data[key] for key in data.files}
    except FileNotFoundError as error:
        raise DataError(f"{path}: is not there; 'vslam-features models verify --inputs' takes .npz files") from error
    except Exception as error:  # numpy and zipfile raise a dozen unrelated types on damaged bytes
        raise DataError(f"{path}: cannot be read as .npz: {type(error).__name__}: {error}") from error


def npz_bytes(meta: dict, arrays: dict[str, np.ndarray]) -> bytes:
    """The content of a file. Raises ValueError for an array of objects, which only a pickle could hold."""
    for key, value in arrays.items():
        if value.dtype.hasobject:
            raise ValueError(f"{key} is an array of objects")
    buffer = io.BytesIO()
    np.savez(buffer, meta=np.array(json.dumps(meta)), **arrays)
    return buffer.getvalue()
