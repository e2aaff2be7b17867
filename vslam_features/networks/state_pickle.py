"""Reads the pickle of a PyTorch state dict as data: no import, no call, no attribute, whatever the pickle asks for.

A pickle is a program, and loading it with Python's machine runs that program. Here its opcodes are interpreted by
hand: containers, strings, numbers, and the few names that ``torch.save`` writes for tensors. Tensors come out as
:class:`TensorRef`, a description that the container (zip or legacy file) resolves to bytes.
"""

from __future__ import annotations

import io
import pickletools
from typing import Any, NamedTuple

from ..errors import WeightsError

# The pickle of a network with ten thousand tensors takes about 2 MB; a byte of pickle can cost about 100 of memory.
MAX_PICKLE_BYTES = 4 << 20

STORAGE_DTYPES = {
    "DoubleStorage": "f8",
    "FloatStorage": "f4",
    "HalfStorage": "f2",
    "BFloat16Storage": "bf16",
    "LongStorage": "i8",
    "IntStorage": "i4",
    "ShortStorage": "i2",
    "CharStorage": "i1",
    "ByteStorage": "u1",
    "BoolStorage": "b1",
    "ComplexFloatStorage": "c8",
    "ComplexDoubleStorage": "c16",
}
_ORDERED_DICT = "collections OrderedDict"
_REBUILD_TENSOR = "torch._utils _rebuild_tensor_v2"
_REBUILD_PARAMETER = "torch._utils _rebuild_parameter"
_ADMITTED = {_ORDERED_DICT, _REBUILD_TENSOR, _REBUILD_PARAMETER, *(f"torch {name}" for name in STORAGE_DTYPES)}


class StorageRef(NamedTuple):
    """A flat run of numbers that lies elsewhere in the file: numpy type code (or ``bf16``), key, number of elements."""

    dtype: str
    key: str
    numel: int


class TensorRef(NamedTuple):
    """A strided view on a storage; offset and strides in elements, as PyTorch counts them."""

    storage: StorageRef
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Name(NamedTuple):
    """An admitted global: only ever compared, never looked up."""

    name: str


_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_NUMBERS = {"BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"}
_STRINGS = {"BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES"}
_EMPTY = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}
_FIXED_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_OTHER = "PROTO FRAME STOP MARK BINPUT LONG_BINPUT MEMOIZE BINGET LONG_BINGET TUPLE APPEND APPENDS SETITEM SETITEMS"
_OTHER += " GLOBAL STACK_GLOBAL BINPERSID REDUCE BUILD"
_OPCODES = {*_CONSTANTS, *_NUMBERS, *_STRINGS, *_EMPTY, *_FIXED_TUPLES, *_OTHER.split()}


class _Machine:
    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []  # heights of the stack
        self.memo: dict[int, Any] = {}

    def pop(self, kind: type = object) -> Any:
        value = self.stack.pop()
        if not isinstance(value, kind):
            raise WeightsError(f"a {type(value).__name__} where {kind.__name__.lstrip('_')} was expected")
        return value

    def pop_to_mark(self) -> list[Any]:
        at = self.marks.pop()
        items = self.stack[at:]
        del self.stack[at:]
        return items

    def set_items(self, flat: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict) or len(flat) % 2:
            raise WeightsError(f"entries are set in a {type(target).__name__}")
        for key, value in zip(flat[::2], flat[1::2]):
            # Hashing a tuple of shared tuples can take forever; state dicts have no such keys.
            if not isinstance(key, (str, int)):
                raise WeightsError(f"a key is a {type(key).__name__}, not a string")
            target[key] = value

    def step(self, opcode: str, argument: Any) -> None:
        stack = self.stack
        if opcode in ("PROTO", "FRAME"):
            pass
        elif opcode in _NUMBERS or opcode in _STRINGS:
            stack.append(argument)
        elif opcode in _CONSTANTS:
            stack.append(_CONSTANTS[opcode])
        elif opcode in _EMPTY:
            stack.append(_EMPTY[opcode]())
        elif opcode == "MARK":
            self.marks.append(len(stack))
        elif opcode in ("BINPUT", "LONG_BINPUT"):
            self.memo[argument] = stack[-1]
        elif opcode == "MEMOIZE":
            self.memo[len(self.memo)] = stack[-1]
        elif opcode in ("BINGET", "LONG_BINGET"):
            stack.append(self.memo[argument])
        elif opcode == "TUPLE":
            stack.append(tuple(self.pop_to_mark()))
        elif opcode in _FIXED_TUPLES:
            stack.append(tuple([self.pop() for _ in range(_FIXED_TUPLES[opcode])][::-1]))
        elif opcode == "APPEND":
            value = self.pop()
            _as_list(stack[-1]).append(value)
        elif opcode == "APPENDS":
            items = self.pop_to_mark()
            _as_list(stack[-1]).extend(items)
        elif opcode == "SETITEM":
            value = self.pop()
            self.set_items([self.pop(), value])
        elif opcode == "SETITEMS":
            self.set_items(self.pop_to_mark())
        elif opcode == "GLOBAL":
            stack.append(_admit(argument))
        elif opcode == "STACK_GLOBAL":
            name = self.pop(str)
            stack.append(_admit(f"{self.pop(str)} {name}"))
        elif opcode == "BINPERSID":
            stack.append(_storage(self.pop(tuple)))
        elif opcode == "REDUCE":
            arguments = self.pop(tuple)
            stack.append(_known_call(self.pop(_Name).name, arguments))
        elif opcode == "BUILD":
            # The version table (`_metadata`) that state_dict() hangs on its OrderedDict; nothing else has a state here.
            self.pop(dict)
            if not isinstance(stack[-1], dict):
                raise WeightsError(f"it sets attributes of a {type(stack[-1]).__name__}")


def read_state_pickle(data: bytes, start: int = 0) -> tuple[Any, int]:
    """The object that one pickle describes, and the position after it.

    ``data[start:]`` must begin with the pickle; what follows it is not looked at. The object is made of dict, list,
    tuple, str, bytes, int, float, bool, None and TensorRef. Raises WeightsError (without the file's name, which the
    caller knows) for a name or an opcode that is not admitted, damage, or more than 4 MiB.
    """
    machine, position = _Machine(), 0
    stream = io.BytesIO(data[start : start + MAX_PICKLE_BYTES])
    try:
        while code := stream.read(1):
            position = stream.tell() - 1
            opcode = pickletools.code2op.get(code.decode("latin-1"))
            # Before its argument is read: reading a number or a string of protocol 0 can take long.
            if opcode is None or opcode.name not in _OPCODES:
                name = opcode.name if opcode else code
                raise WeightsError(f"it holds the opcode {name}, which no state dict needs")
            argument = opcode.arg.reader(stream) if opcode.arg else None
            if opcode.name == "STOP":
                return machine.pop(), start + position + 1
            machine.step(opcode.name, argument)
    except WeightsError as error:
        raise WeightsError(f"its pickle was refused at byte {start + position}: {error}") from None
    except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
        raise WeightsError(
            f"its pickle is damaged or longer than {MAX_PICKLE_BYTES >> 20} MiB, "
            f"at byte {start + position}: {type(error).__name__}: {error}"
        ) from error
    raise WeightsError(f"its pickle has no end within {len(data) - start} bytes")


def _as_list(value: Any) -> list:
    if not isinstance(value, list):
        raise WeightsError(f"items are appended to a {type(value).__name__}")
    return value


def _admit(name: str) -> _Name:
    if name not in _ADMITTED:
        raise WeightsError(
            f"it asks for {name[:200].replace(' ', '.')!r}, and only the names of tensors and storages are admitted "
            "(nothing was run); a whole model or training state: save its state_dict() with PyTorch and use that file"
        )
    return _Name(name)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 48


def _storage(persistent: tuple) -> StorageRef:
    """From ``("storage", type, key, device, numel)``; the legacy format has a sixth item, the part of a view."""
    if len(persistent) not in (5, 6) or persistent[0] != "storage":
        raise WeightsError("a reference to something other than a storage")
    kind, key, numel = persistent[1], persistent[2], persistent[4]
    if not isinstance(kind, _Name) or not kind.name.endswith("Storage"):
        raise WeightsError("a storage without a type")
    if not isinstance(key, str) or not _is_count(numel):
        raise WeightsError("a storage whose key is no string or whose size is no count")
    if len(persistent) == 6 and persistent[5] is not None:
        raise WeightsError(
            "a storage that is a view of another, from PyTorch before 0.4: save it again with a newer one"
        )
    return StorageRef(STORAGE_DTYPES[kind.name.split(" ")[1]], key, numel)


def _known_call(name: str, arguments: tuple) -> Any:
    if name == _ORDERED_DICT:
        if arguments:
            raise WeightsError("an OrderedDict with arguments")
        return {}
    if name == _REBUILD_PARAMETER:
        if len(arguments) != 3 or not isinstance(arguments[0], TensorRef):
            raise WeightsError("a parameter that is no tensor")
        return arguments[0]
    if name != _REBUILD_TENSOR:
        raise WeightsError(f"it calls {name.replace(' ', '.')}")
    if len(arguments) not in (6, 7) or not isinstance(arguments[0], StorageRef):
        raise WeightsError("a tensor without a storage")
    storage, offset, shape, strides = arguments[:4]
    counts = [
        offset,
        *(shape if isinstance(shape, tuple) else [None]),
        *(strides if isinstance(strides, tuple) else []),
    ]
    if not all(map(_is_count, counts)) or len(shape) != len(strides) or len(shape) > 16:
        raise WeightsError("a tensor whose offset, shape or strides are no counts")
    return TensorRef(storage, offset, shape, strides)
