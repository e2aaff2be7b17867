"""The inputs of an ONNX file's graph, without the onnx package and without reading its weights."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from ..errors import ModelFileError
from .onnx_header import graph_span, read_varint

_VARINT, _I64, _BYTES, _I32 = 0, 1, 2, 5
_FIXED = {_I64: 8, _I32: 4}
# Field numbers of onnx.proto: of GraphProto, TensorProto, ValueInfoProto, TypeProto, its Tensor, TensorShapeProto and
# its Dimension.
_INITIALIZER, _INPUT = 5, 11
_TENSOR_NAME = 8
_VALUE_NAME, _VALUE_TYPE = 1, 2
_TENSOR_TYPE = 1
_ELEMENT, _SHAPE = 1, 2
_DIMENSION = 1
_DIM_VALUE, _DIM_PARAM = 1, 2
_DTYPES = {
    **{1: np.float32, 2: np.uint8, 3: np.int8, 4: np.uint16, 5: np.int16, 6: np.int32, 7: np.int64},
    **{9: np.bool_, 10: np.float16, 11: np.float64, 12: np.uint32, 13: np.uint64},
}


@dataclass(frozen=True)
class GraphInput:
    """An input of a graph.

    Args:
        dtype: None for types that no array holds, such as BF16.
        dims: a number where an axis is fixed, its name where it has one (equal names are equal lengths), else "".
            None as a whole where the file does not even say how many axes there are.
    """

    dtype: np.dtype | None
    dims: tuple[int | str, ...] | None

    @property
    def dynamic(self) -> bool:
        """Whether something is left to the run."""
        return self.dims is None or any(isinstance(d, str) for d in self.dims)


def read_inputs(path: str | Path) -> dict[str, GraphInput]:
    """Tensor inputs by name, in the file's order, without those that are weights. Raises ModelFileError."""
    path, where = Path(path), str(path)
    start, end = graph_span(path)
    inputs: dict[str, GraphInput] = {}
    weights: set[str] = set()
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size < end:
                raise ModelFileError(f"{where} has become shorter while it was read: start again")
            for f in _fields(file, start, end, where):
                if f.number == _INPUT:
                    name, found = _input(file, f, where)
                    if found is not None:
                        inputs[name] = found
                elif f.number == _INITIALIZER:  # before IR version 4 every weight was an input, too
                    if (weight := _one(file, f, _TENSOR_NAME, where)) is not None:
                        weights.add(_text(file, weight, where))
    except OSError as error:
        raise ModelFileError(f"{where} cannot be read: {error.strerror or error}") from error
    return {name: found for name, found in inputs.items() if name not in weights}


class _Field(NamedTuple):
    """A field of a message: its content is bytes ``at`` to ``end``, or ``value`` where it is a number."""

    number: int
    at: int
    end: int
    value: int


def _fields(file: BinaryIO, start: int, end: int, where: str) -> Iterator[_Field]:
    at = start
    while at < end:
        file.seek(at)
        number, wire = divmod(read_varint(file, where, end), 8)
        value = 0 if wire in _FIXED else read_varint(file, where, end)
        begin = file.tell()
        after = begin + (value if wire == _BYTES else _FIXED.get(wire, 0))
        if wire not in (_VARINT, _BYTES, *_FIXED) or not number or after > end:
            raise ModelFileError(f"{where}: its graph is damaged at byte {at}: fetch or export it again")
        yield _Field(number, begin, after, value)
        at = after


def _one(file: BinaryIO, message: _Field, number: int, where: str) -> _Field | None:
    """A field that a message has at most once; of several the last counts, as protobuf says."""
    found = None
    for f in _fields(file, message.at, message.end, where):
        found = f if f.number == number else found
    return found


def _input(file: BinaryIO, info: _Field, where: str) -> tuple[str, GraphInput | None]:
    """Name and tensor; None for a sequence, a map or an optional."""
    name, kind = _one(file, info, _VALUE_NAME, where), _one(file, info, _VALUE_TYPE, where)
    tensor = _one(file, kind, _TENSOR_TYPE, where) if kind else None
    text = _text(file, name, where) if name else ""
    if tensor is None:
        return text, None
    element, shape = _one(file, tensor, _ELEMENT, where), _one(file, tensor, _SHAPE, where)
    dtype = _DTYPES.get(element.value) if element else None
    dims = None
    if shape is not None:
        axes = [f for f in _fields(file, shape.at, shape.end, where) if f.number == _DIMENSION]
        dims = tuple(_dim(file, axis, where) for axis in axes)
    return text, GraphInput(None if dtype is None else np.dtype(dtype), dims)


def _dim(file: BinaryIO, axis: _Field, where: str) -> int | str:
    found: int | str = ""
    for f in _fields(file, axis.at, axis.end, where):
        if f.number == _DIM_VALUE:
            found = f.value if f.value < 1 << 63 else ""  # a negative number is how some files write "unknown"
        elif f.number == _DIM_PARAM:
            found = _text(file, f, where)
    return found


def _text(file: BinaryIO, f: _Field, where: str) -> str:
    if f.end - f.at > 1 << 16:
        raise ModelFileError(f"{where}: its graph is damaged: a name of {f.end - f.at} bytes at byte {f.at}")
    file.seek(f.at)
    try:
        return file.read(f.end - f.at).decode()
    except UnicodeDecodeError as error:
        raise ModelFileError(f"{where}: its graph is damaged: a name that is not UTF-8 at byte {f.at}") from error
