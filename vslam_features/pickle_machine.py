"""Reads a pickle as data: no import, no call, no attribute, whatever the pickle asks for.

A pickle is a program, and loading it with Python's machine runs that program; ``Unpickler.find_class`` only chooses
which names it may call. Here the opcodes of protocols 2 to 5 are interpreted by hand: containers, strings and numbers.
What a format needs beyond them (tensors, arrays) it adds by admitting names, which are compared and never looked up.
"""

from __future__ import annotations

import io
import pickletools
from typing import Any, NamedTuple

from .errors import VslamFeaturesError


class Name(NamedTuple):
    """An admitted global, ``module name``: only ever compared, never looked up."""

    name: str


_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_NUMBERS = {"BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"}
_STRINGS = {"BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES"}
_EMPTY = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}
_FIXED_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_OTHER = "PROTO FRAME STOP MARK BINPUT LONG_BINPUT MEMOIZE BINGET LONG_BINGET TUPLE APPEND APPENDS SETITEM SETITEMS"
_OTHER += " GLOBAL STACK_GLOBAL BINPERSID REDUCE BUILD"


class PickleMachine:
    """Interprets one pickle; a format derives from it. An instance serves once.

    Attributes:
        kind: what the format calls its content, for messages.
        error: the exception that is raised for a pickle that is refused.
        max_bytes, max_steps: no pickle may be longer. A byte of pickle can cost about 100 of memory, except in strings.
        admitted: globals, each ``module name``.
        more: opcodes that push their argument, beside numbers and strings.
        keys: types that keys may have. Hashing a tuple of shared tuples can take forever.
    """

    kind = "data"
    error: type[VslamFeaturesError] = VslamFeaturesError
    max_bytes = 4 << 20
    max_steps = 4 << 20
    admitted: frozenset[str] = frozenset()
    more: frozenset[str] = frozenset()
    keys: tuple[type, ...] = (str, int)

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._marks: list[int] = []  # heights of the stack
        self._memo: dict[int, Any] = {}
        self._values = _NUMBERS | _STRINGS | self.more
        self._opcodes = {*_CONSTANTS, *self._values, *_EMPTY, *_FIXED_TUPLES, *_OTHER.split()}

    # -- what a format adds ----------------------------------------------------------------

    def call(self, name: str, arguments: tuple) -> Any:
        """What an admitted name gives for these arguments."""
        raise self.error(f"it calls {name.replace(' ', '.')}")

    def build(self, target: Any, state: Any) -> None:
        """Give an object its state."""
        raise self.error(f"it sets attributes of a {type(target).__name__}")

    def persistent(self, reference: Any) -> Any:
        """An object that lies outside of the pickle."""
        raise self.error("it refers to something outside of the file")

    def item(self, value: Any) -> Any:
        """A value as a container holds it."""
        return value

    def hint(self) -> str:
        """The next step where a name is refused."""
        return ""

    # -- the machine -----------------------------------------------------------------------

    def read(self, data: bytes, start: int = 0) -> tuple[Any, int]:
        """The object that one pickle describes, and the position after it.

        ``data[start:]`` must begin with the pickle; what follows it is not looked at. Raises ``error`` (without the
        file's name, which the caller knows) for a name or an opcode that is not admitted, damage, or too many bytes.
        """
        position, steps = 0, 0
        stream = io.BytesIO(memoryview(data)[start : start + self.max_bytes])
        try:
            while code := stream.read(1):
                position, steps = stream.tell() - 1, steps + 1
                opcode = pickletools.code2op.get(code.decode("latin-1"))
                # Before its argument is read: reading a number or a string of protocol 0 can take long.
                if opcode is None or opcode.name not in self._opcodes:
                    name = opcode.name if opcode else code
                    raise self.error(f"it holds the opcode {name}, which no {self.kind} needs")
                if steps > self.max_steps:
                    raise self.error(f"it has over {self.max_steps} opcodes")
                argument = opcode.arg.reader(stream) if opcode.arg else None
                if opcode.name == "STOP":
                    return self.item(self._pop()), start + position + 1
                self._step(opcode.name, argument)
        except self.error as error:
            raise self.error(f"its pickle was refused at byte {start + position}: {error}") from None
        except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
            raise self.error(
                f"its pickle is damaged or longer than {self.max_bytes >> 20} MiB, "
                f"at byte {start + position}: {type(error).__name__}: {error}"
            ) from error
        raise self.error(f"its pickle has no end within {min(len(data) - start, self.max_bytes)} bytes")

    def _pop(self, kind: type = object) -> Any:
        value = self._stack.pop()
        if not isinstance(value, kind):
            raise self.error(f"a {type(value).__name__} where {kind.__name__} was expected")
        return value

    def _pop_to_mark(self) -> list[Any]:
        at = self._marks.pop()
        items = self._stack[at:]
        del self._stack[at:]
        return [self.item(value) for value in items]

    def _top(self, kind: type, doing: str) -> Any:
        value = self._stack[-1]
        if not isinstance(value, kind):
            raise self.error(f"{doing} a {type(value).__name__}")
        return value

    def _set_items(self, flat: list[Any]) -> None:
        target = self._top(dict, "entries are set in")
        if len(flat) % 2:
            raise self.error("an entry without a value")
        for key, value in zip(flat[::2], flat[1::2]):
            if not isinstance(key, self.keys):
                raise self.error(f"a key is a {type(key).__name__}, not a string")
            # Beyond 64 bits any number of integers share one hash.
            if isinstance(key, int) and not -(1 << 63) <= key < 1 << 64:
                raise self.error("a key is an integer of more than 64 bits")
            target[key] = value

    def _admit(self, name: str) -> Name:
        if name not in self.admitted:
            raise self.error(f"it asks for {name[:200].replace(' ', '.')!r}, and {self.hint()}")
        return Name(name)

    def _step(self, opcode: str, argument: Any) -> None:
        stack = self._stack
        if opcode in ("PROTO", "FRAME"):
            pass
        elif opcode in self._values:
            stack.append(argument)
        elif opcode in _CONSTANTS:
            stack.append(_CONSTANTS[opcode])
        elif opcode in _EMPTY:
            stack.append(_EMPTY[opcode]())
        elif opcode == "MARK":
            self._marks.append(len(stack))
        elif opcode in ("BINPUT", "LONG_BINPUT"):
            self._memo[argument] = stack[-1]
        elif opcode == "MEMOIZE":
            self._memo[len(self._memo)] = stack[-1]
        elif opcode in ("BINGET", "LONG_BINGET"):
            stack.append(self._memo[argument])
        elif opcode == "TUPLE":
            stack.append(tuple(self._pop_to_mark()))
        elif opcode in _FIXED_TUPLES:
            stack.append(tuple([self.item(self._pop()) for _ in range(_FIXED_TUPLES[opcode])][::-1]))
        elif opcode == "APPEND":
            value = self.item(self._pop())
            self._top(list, "items are appended to").append(value)
        elif opcode == "APPENDS":
            items = self._pop_to_mark()
            self._top(list, "items are appended to").extend(items)
        elif opcode == "SETITEM":
            value = self.item(self._pop())
            self._set_items([self._pop(), value])
        elif opcode == "SETITEMS":
            self._set_items(self._pop_to_mark())
        elif opcode == "GLOBAL":
            stack.append(self._admit(argument))
        elif opcode == "STACK_GLOBAL":
            name = self._pop(str)
            stack.append(self._admit(f"{self._pop(str)} {name}"))
        elif opcode == "BINPERSID":
            stack.append(self.persistent(self._pop()))
        elif opcode == "REDUCE":
            arguments = self._pop(tuple)
            stack.append(self.call(self._pop(Name).name, arguments))
        elif opcode == "BUILD":
            state = self._pop()
            self.build(stack[-1], state)
