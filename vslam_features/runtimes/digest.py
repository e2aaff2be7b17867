"""One name for one set of input tensors: faults and incident files refer to inputs by it."""

from __future__ import annotations

import hashlib

import numpy as np


def input_digest(inputs: dict[str, np.ndarray]) -> str:
    """SHA-256 (hex) over names in sorted order, dtypes, shapes and the little-endian, C-ordered values."""
    digest = hashlib.sha256()
    for name in sorted(inputs):
        value = np.asarray(inputs[name])
        value = value.astype(value.dtype.newbyteorder("<"), order="C", copy=False)
        header = f"{name}\0{value.dtype.str}\0{value.shape}\0"  # names hold no NUL, so that no two headers are alike
        digest.update(header.encode())
        digest.update(value.tobytes())
    return digest.hexdigest()
