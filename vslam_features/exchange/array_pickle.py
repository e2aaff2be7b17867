"""Reads pickles of numpy arrays and plain containers, without running anything of them."""

from __future__ import annotations

import math
import re
import sys
from typing import Any

import numpy as np

from ..errors import MapFileError
from ..pickle_machine import Name, PickleMachine

MAX_BYTES = 64 << 20
"""A keyframe's dense fp32 descriptors take 4 MB, a colour image 1 to 6 MB."""
_MAX_STEPS = 1_000_000  # each can cost about 100 bytes; an array takes about 30

_MODULES = ("numpy.core", "numpy._core")  # up to numpy 1, from numpy 2 on
_RECONSTRUCT = {f"{m}.multiarray _reconstruct" for m in _MODULES}
_SCALAR = {f"{m}.multiarray scalar" for m in _MODULES}
_FROM_BUFFER = {f"{m}.numeric _frombuffer" for m in _MODULES}
_ARRAY, _DTYPE, _ENCODE, _BYTES = "numpy ndarray", "numpy dtype", "_codecs encode", "__builtin__ bytes"
TYPE_CODE = re.compile(r"[<>|=]?(b1|[iu][1248]|f[248])")
_PLAIN = (np.ndarray, np.generic, dict, list, tuple, str, bytes, bytearray, bool, int, float, type(None))


class _Dtype:
    """A dtype that is being described: its byte order comes after the pickle has remembered it."""

    def __init__(self, dtype: np.dtype):
        self.dtype = dtype


class _ArrayMachine(PickleMachine):
    kind = "array"
    error = MapFileError
    max_bytes = MAX_BYTES
    max_steps = _MAX_STEPS
    admitted = frozenset({*_RECONSTRUCT, *_SCALAR, *_FROM_BUFFER, _ARRAY, _DTYPE, _ENCODE, _BYTES})
    more = frozenset({"BYTEARRAY8", "BINBYTES8"})
    keys = (str, int, bytes)

    def __init__(self, single_object: bool):
        super().__init__()
        self._single_object = single_object

    def hint(self) -> str:
        return "only arrays, numbers, strings and plain containers are admitted (nothing was run)"

    def item(self, value: Any) -> Any:
        return value.dtype if isinstance(value, _Dtype) else value

    def call(self, name: str, arguments: tuple) -> Any:
        if name in _RECONSTRUCT:
            kind, shape, code = self._arguments(arguments, 3)
            if kind != Name(_ARRAY) or shape != (0,) or code != b"b":
                raise self.error("an array of another class")
            return np.empty(0, np.int8)
        if name == _DTYPE:
            return self._dtype(self._arguments(arguments, 3)[0])
        if name in _SCALAR:
            dtype, data = self._arguments(arguments, 2)
            return self._filled(dtype, (), data, "C")[()]
        if name in _FROM_BUFFER:
            data, dtype, shape, order = self._arguments(arguments, 4)
            return self._filled(dtype, shape, data, order)
        if name == _ENCODE:  # bytes in protocol 2
            text, codec = self._arguments(arguments, 2)
            if codec != "latin1" or type(text) is not str:
                raise self.error("a text that is encoded as other than latin1")
            return text.encode("latin1")
        if name == _BYTES and not arguments:
            return b""
        return super().call(name, arguments)

    def build(self, target: Any, state: Any) -> None:
        if isinstance(target, _Dtype):
            # (version, byte order, subarray, names, fields, size, alignment, flags): of a number only the order counts.
            if not isinstance(state, tuple) or len(state) not in (8, 9) or state[1] not in ("<", ">", "|", "="):
                raise self.error("a dtype whose state is none")
            if state[2:8] not in ((None, None, None, -1, -1, 0), (None, None, None, -1, -1, 63)):
                raise self.error("a dtype with fields, or of a size of its own")
            target.dtype = target.dtype.newbyteorder(state[1])
        elif isinstance(target, np.ndarray):
            self._build_array(target, state)
        else:
            super().build(target, state)

    def _build_array(self, target: np.ndarray, state: Any) -> None:
        version, shape, dtype, fortran, data = self._arguments(state, 5)
        if version != 1 or type(fortran) is not bool or target.shape != (0,) or target.dtype != np.int8:
            raise self.error("an array whose state is none, or is set twice")
        if isinstance(dtype, np.dtype) and dtype.hasobject:
            if not self._single_object or shape != () or type(data) is not list or len(data) != 1:
                raise self.error("an array of objects")
            target.__setstate__((1, (), np.dtype("O"), False, data))
            return
        # Checked before numpy sees it, and only then set: the pickle remembers this object, so it must stay the same.
        self._filled(dtype, shape, data, "F" if fortran else "C")
        target.__setstate__((1, shape, dtype, fortran, bytes(data)))

    def _dtype(self, code: Any) -> _Dtype:
        if type(code) is str and TYPE_CODE.fullmatch(code):
            return _Dtype(np.dtype(code))
        if code in ("O8", "O") and self._single_object:
            return _Dtype(np.dtype("O"))
        if type(code) is not str:  # and is not shown: the text of tuples of shared tuples has no end
            raise self.error("a dtype that is no text")
        raise self.error(f"an array of type {code[:40]!r}: only numbers and bools are admitted")

    def _filled(self, dtype: Any, shape: Any, data: Any, order: Any) -> np.ndarray:
        if not isinstance(dtype, np.dtype) or dtype.hasobject or not isinstance(data, (bytes, bytearray)):
            raise self.error("an array without a plain type or without bytes")
        counts = type(shape) is tuple and len(shape) <= 16 and all(type(n) is int and 0 <= n < 1 << 40 for n in shape)
        if not counts or order not in ("C", "F"):
            raise self.error("an array whose shape or order is none")
        if math.prod(shape) * dtype.itemsize != len(data):
            raise self.error(f"an array of {dtype} {shape} with {len(data)} bytes")
        return np.frombuffer(data, dtype).reshape(shape, order=order)

    def _arguments(self, values: Any, count: int) -> tuple:
        if type(values) is not tuple or len(values) != count:
            raise self.error(f"{count} arguments were expected, got {str(type(values))[:40]}")
        return values


def read_array_pickle(data: bytes, *, single_object: bool = False) -> Any:
    """What a pickle of protocols 2 to 5 describes: numpy arrays and scalars of numbers, dtypes, dict, list, tuple, str,
    bytes, bool, int, float, None.

    Args:
        single_object: admit an array of objects of shape () too, which is how ``np.save`` writes a dict.
    Raises:
        MapFileError (without the file's name, which the caller knows): any other name, opcode or type, sizes that do
            not fit, over 64 MiB, damage. Nothing of the pickle is run, whatever it asks for.
    """
    if len(data) > MAX_BYTES:
        raise MapFileError(f"its pickle has {len(data)} bytes, over {MAX_BYTES >> 20} MiB")
    value, _ = _ArrayMachine(single_object).read(data)
    return _plain(value)


def _plain(value: Any) -> Any:
    """The value, once nothing in it belongs to the reading. Iterative: a pickle can nest without end."""
    seen, waiting = set(), [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, Name) or not isinstance(item, (*_PLAIN, np.dtype)):
            raise MapFileError(f"its pickle was refused: a {type(item).__name__} as a value")
        if isinstance(item, (dict, list, tuple)) and id(item) not in seen:
            seen.add(id(item))
            waiting.extend(item.values() if isinstance(item, dict) else item)
        elif isinstance(item, np.ndarray) and item.dtype.hasobject:
            waiting.append(item.item())
    return value


def native(array: np.ndarray) -> np.ndarray:
    """The array in the byte order of this machine."""
    other = array.dtype.byteorder not in ("=", "|", "<" if sys.byteorder == "little" else ">")
    return array.astype(array.dtype.newbyteorder("=")) if other else array
