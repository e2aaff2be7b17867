"""Dims, numpy types, and the checks that pybind11 makes of arguments."""

from __future__ import annotations

import numpy as np

from .enums import DataType

NUMPY = {
    "FLOAT": np.float32,
    "HALF": np.float16,
    "INT8": np.int8,
    "INT32": np.int32,
    "INT64": np.int64,
    "BOOL": np.bool_,
    "UINT8": np.uint8,
}
_BITS = {"FLOAT": 32, "HALF": 16, "BF16": 16, "INT8": 8, "INT32": 32, "INT64": 64, "BOOL": 8, "UINT8": 8, "FP8": 8}
_BITS |= {"INT4": 4, "FP4": 4, "E8M0": 8}
DataType.itemsize = property(lambda self: _BITS[self.name] / 8 if _BITS[self.name] < 8 else _BITS[self.name] // 8)


class Dims:
    """A shape, -1 for what is not known; length 0 for a scalar."""

    MAX_DIMS = 8

    def __init__(self, shape=()):
        if not isinstance(shape, (list, tuple, Dims)):
            raise TypeError("__init__(): incompatible constructor arguments")
        if len(shape) > self.MAX_DIMS:
            raise ValueError("The number of dimensions exceeds MAX_DIMS")
        self._sizes = tuple(integer(size) for size in shape)

    def __len__(self) -> int:
        return len(self._sizes)

    def __getitem__(self, index):
        try:
            return self._sizes[index]
        except IndexError:
            raise IndexError("Out of bounds") from None

    def __eq__(self, other) -> bool:
        return isinstance(other, (list, tuple, Dims)) and tuple(other) == self._sizes

    __hash__ = None

    def __repr__(self) -> str:
        return str(self._sizes)


def integer(value) -> int:
    """What pybind11 takes for an int; raises TypeError."""
    if isinstance(value, (float, str, bytes)) or not (hasattr(value, "__index__") or hasattr(value, "__int__")):
        raise TypeError(f"incompatible function arguments: expected int, got {type(value).__name__}")
    return int(value)


def text(value) -> str:
    """What pybind11 takes for a str; raises TypeError."""
    if not isinstance(value, str):
        raise TypeError(f"incompatible function arguments: expected str, got {type(value).__name__}")
    return value


def volume(iterable) -> int:
    """Number of elements; 1 for a scalar."""
    product = 1
    for size in iterable:
        product *= size
    return product


def nptype(trt_type):
    """The numpy type; TypeError for those that numpy has not."""
    if trt_type.name not in NUMPY:
        raise TypeError("Could not resolve TensorRT datatype to an equivalent numpy datatype.")
    return NUMPY[trt_type.name]
