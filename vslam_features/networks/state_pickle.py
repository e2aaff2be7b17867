"""Reads the pickle of a PyTorch state dict as data: no import, no call, no attribute, whatever the pickle asks for.

Of :class:`PickleMachine`, with the few names that ``torch.save`` writes for tensors. Tensors come out as
:class:`TensorRef`, a description that the container (zip or legacy file) resolves to bytes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..errors import WeightsError
from ..pickle_machine import Name, PickleMachine

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
_ADMITTED = frozenset(
    [_ORDERED_DICT, _REBUILD_TENSOR, _REBUILD_PARAMETER, *(f"torch {name}" for name in STORAGE_DTYPES)]
)


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


class _StateMachine(PickleMachine):
    kind = "state dict"
    error = WeightsError
    max_bytes = MAX_PICKLE_BYTES
    admitted = _ADMITTED

    def hint(self) -> str:
        return (
            "only the names of tensors and storages are admitted (nothing was run); a whole model or training state: "
            "save its state_dict() with PyTorch and use that file"
        )

    def persistent(self, reference: Any) -> StorageRef:
        return _storage(reference)

    def call(self, name: str, arguments: tuple) -> Any:
        return _known_call(name, arguments)

    def build(self, target: Any, state: Any) -> None:
        # The version table (`_metadata`) that state_dict() hangs on its OrderedDict; nothing else has a state here.
        if not isinstance(target, dict) or not isinstance(state, dict):
            super().build(target, state)


def read_state_pickle(data: bytes, start: int = 0) -> tuple[Any, int]:
    """The object that one pickle describes, and the position after it.

    ``data[start:]`` must begin with the pickle; what follows it is not looked at. The object is made of dict, list,
    tuple, str, bytes, int, float, bool, None and TensorRef. Raises WeightsError (without the file's name, which the
    caller knows) for a name or an opcode that is not admitted, damage, or more than 4 MiB.
    """
    return _StateMachine().read(data, start)


def tensors_below(tree: Any) -> list[TensorRef]:
    """Every tensor of the tree, each container visited once, so that shared ones cost nothing."""
    found, todo, seen = [], [tree], set()
    while todo:
        node = todo.pop()
        if isinstance(node, TensorRef):
            found.append(node)
        elif isinstance(node, (dict, list, tuple)) and id(node) not in seen:
            seen.add(id(node))
            todo.extend(node.values() if isinstance(node, dict) else node)
    return found


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 48


def _storage(persistent: Any) -> StorageRef:
    """From ``("storage", type, key, device, numel)``; the legacy format has a sixth item, the part of a view."""
    if not isinstance(persistent, tuple) or len(persistent) not in (5, 6) or persistent[0] != "storage":
        raise WeightsError("a reference to something other than a storage")
    kind, key, numel = persistent[1], persistent[2], persistent[4]
    if not isinstance(kind, Name) or not kind.name.endswith("Storage"):
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
