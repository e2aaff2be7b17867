"""Half precision where it loses nothing."""

from __future__ import annotations

import numpy as np


def exact_half(array: np.ndarray) -> np.ndarray:
    """A float32 array as float16 where every value survives the round trip, else unchanged; other types unchanged."""
    if array.dtype != np.float32:
        return array
    with np.errstate(over="ignore"):  # 70000.0 becomes infinity, which the comparison sees
        half = array.astype(np.float16)
    return half if np.array_equal(half.astype(np.float32), array) else array
