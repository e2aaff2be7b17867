"""Weights of safetensors files and PyTorch checkpoints as NumPy arrays: no PyTorch, no code of the file is run."""

from __future__ import annotations

import io
import os
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ..artifacts.file_kind import FileKind, identify
from ..errors import ModelFileError, WeightsError
from .state_pickle import StorageRef, TensorRef, read_state_pickle, tensors_below

MAX_FILE_BYTES = 1 << 30
# Tensors that share a storage, or bfloat16 made float32, may take more than the file, but not by any factor.
MAX_EXPANSION = 8
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_PROTOCOL = 1001
_NESTED_KEYS = ("state_dict", "model_state_dict", "model")
_SAFETENSORS_DTYPES = {"F64": "f8", "F32": "f4", "F16": "f2", "BF16": "bf16", "C64": "c8", "BOOL": "b1"}
_SAFETENSORS_DTYPES |= {f"{kind.upper()}{8 * n}": f"{kind}{n}" for kind in "iu" for n in (1, 2, 4, 8)}

# Of an unknown kind are tar archives of old checkpoints, which get a message of their own.
_WEIGHTS = (FileKind.SAFETENSORS, FileKind.ZIP, FileKind.PICKLE, FileKind.UNKNOWN)

Storages = Callable[[StorageRef], np.ndarray]


def read_tensors(path: str | Path) -> dict[str, np.ndarray]:
    """All tensors of a safetensors file, or of a state dict that ``torch.save`` wrote: name -> array.

    Reads the zip format (PyTorch 1.6 and later) and the stream of pickles before it. A checkpoint that holds one state
    dict among other entries gives that state dict. Its order is kept; tensors of a safetensors file come by name.
    Arrays are C-contiguous, writable, in native byte order and of the type saved; bfloat16 becomes float32. Values are
    not judged: the zip format has checksums, the others have none, so compare the file's sha256 with the registry's.

    Raises WeightsError for a file that is missing, damaged, over 1 GiB, or holds anything but tensors in the state
    dict; and for safetensors without the library of that name. No code in the file is run, and what is allocated is
    bounded by 8 times the file's length.
    """
    path = Path(path)
    try:
        facts = identify(path)
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > MAX_FILE_BYTES:
                raise WeightsError(f"{path} has {size} bytes; weights of over {MAX_FILE_BYTES >> 30} GiB are not read")
            data = file.read(size)
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror or error}") from error
    except ModelFileError as error:
        raise WeightsError(str(error)) from error
    if facts.kind not in _WEIGHTS:
        raise WeightsError(f"{path} ({size} bytes) is {facts}, expected a safetensors file or a PyTorch checkpoint")
    try:
        if facts.kind is FileKind.SAFETENSORS:
            return _read_safetensors(data)
        tree, storages = _read_zip(data) if facts.kind is FileKind.ZIP else _read_legacy(data)
        return _resolve(_state_dict(tree), storages, MAX_EXPANSION * len(data))
    except WeightsError as error:
        raise WeightsError(f"{path} ({len(data)} bytes) gives no weights: {error}") from error.__cause__


def _read_safetensors(data: bytes) -> dict[str, np.ndarray]:
    try:
        from safetensors import SafetensorError, deserialize
    except ImportError as error:
        raise WeightsError(f"safetensors cannot be imported ({error}); pip install 'vslam_features[export]'") from error
    try:
        entries = deserialize(data)
    except SafetensorError as error:
        raise WeightsError(f"a safetensors file cut short or damaged ({error}); fetch it again") from error
    tensors = {}
    for name, entry in sorted(entries, key=lambda e: e[0]):  # they come in another order each time
        if entry["dtype"] not in _SAFETENSORS_DTYPES:
            raise WeightsError(f"tensor {name[:200]!r} is of type {entry['dtype']}; save it as F32, F16 or BF16")
        raw, dtype = entry["data"], _SAFETENSORS_DTYPES[entry["dtype"]]
        try:
            numbers = _numbers(raw, StorageRef(dtype, name, len(raw) // _itemsize(dtype)), "<")
            tensors[name] = numbers.reshape(entry["shape"])
        except (ValueError, OverflowError) as error:  # as in _resolve
            raise WeightsError(f"tensor {name[:200]!r} has shape {entry['shape']}: {error}") from error
    return tensors


def _read_zip(data: bytes) -> tuple[Any, Storages]:
    members, archive = _members(data)
    names = [n for n in members if n.count("/") == 1 and n.endswith("/data.pkl")]
    if len(names) != 1:
        raise WeightsError("a zip archive that torch.save did not write (no data.pkl); a wheel: unpack it first")
    prefix = names[0].removesuffix("data.pkl")
    if prefix + "constants.pkl" in members:
        raise WeightsError("a TorchScript archive; load it with PyTorch and save its state_dict()")
    order = _member(archive, members, prefix + "byteorder") if prefix + "byteorder" in members else b"little"
    if order not in (b"little", b"big"):
        raise WeightsError(f"byte order {order[:20]!r}, expected little or big")
    tree, _ = read_state_pickle(_member(archive, members, names[0]))

    def storage(ref: StorageRef) -> np.ndarray:
        return _numbers(_member(archive, members, f"{prefix}data/{ref.key}"), ref, "<" if order == b"little" else ">")

    return tree, storage


def _members(data: bytes) -> tuple[dict[str, zipfile.ZipInfo], zipfile.ZipFile]:
    try:
        archive = zipfile.ZipFile(io.BytesIO(data))
    except (zipfile.BadZipFile, ValueError, OSError, struct.error, NotImplementedError) as error:
        raise WeightsError(f"a damaged or incomplete zip archive ({error}); fetch it again") from error
    infos = archive.infolist()
    members = {info.filename: info for info in infos}
    if len(members) != len(infos):
        raise WeightsError("two members of its zip archive have the same name")
    # Stored members cannot grow; together with this sum, no member can be read twice under two names either.
    if sum(info.file_size for info in infos) > len(data):
        raise WeightsError("the members of its zip archive claim more bytes than the file has")
    return members, archive


def _member(archive: zipfile.ZipFile, members: dict[str, zipfile.ZipInfo], name: str) -> bytes:
    info = members.get(name)
    if info is None:
        raise WeightsError(f"its zip archive has no member {name[:200]!r}")
    if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size or info.flag_bits & 1:
        raise WeightsError(f"member {name[:200]!r} is compressed or encrypted, which torch.save does not do")
    try:
        content = archive.read(info)
    except (zipfile.BadZipFile, zlib.error, ValueError, OSError, EOFError, struct.error, RuntimeError) as error:
        raise WeightsError(f"member {name[:200]!r} is damaged ({error}); fetch the file again") from error
    if len(content) != info.file_size:
        raise WeightsError(f"member {name[:200]!r} has {len(content)} bytes, expected {info.file_size}")
    return content


def _read_legacy(data: bytes) -> tuple[Any, Storages]:
    """Magic number, protocol, machine, tree and keys as five pickles, then each storage as int64 count and numbers."""
    if data[257:262] == b"ustar":
        raise WeightsError("a tar checkpoint from PyTorch before 0.1.10; load it with PyTorch and save it again")
    if data[:1] != b"\x80":
        raise WeightsError(f"neither safetensors nor a PyTorch checkpoint; it begins with {data[:16]!r}")
    at, heads = 0, []
    for _ in range(5):
        head, at = read_state_pickle(data, at)
        heads.append(head)
    magic, protocol, machine, tree, keys = heads
    if magic != _LEGACY_MAGIC or protocol != _LEGACY_PROTOCOL:
        raise WeightsError("a pickle, but no PyTorch checkpoint")
    if not isinstance(machine, dict) or machine.get("little_endian") is not True:
        raise WeightsError("written on a big-endian machine; load it there and save it again")
    if not isinstance(keys, list) or not all(isinstance(k, str) for k in keys) or len(set(keys)) != len(keys):
        raise WeightsError("its list of storages is damaged")
    sizes = {ref.storage.key: ref.storage for ref in tensors_below(tree)}
    where = {}
    for key in keys:
        if key not in sizes:
            raise WeightsError(f"storage {key[:40]!r} belongs to no tensor; save the state_dict alone")
        expected = sizes[key].numel
        if data[at : at + 8] != struct.pack("<q", expected):
            raise WeightsError(f"cut short or damaged: storage {key[:40]!r} of {expected} numbers is not at byte {at}")
        where[sizes[key]] = at + 8
        at += 8 + expected * _itemsize(sizes[key].dtype)

    def storage(ref: StorageRef) -> np.ndarray:
        if ref not in where:
            raise WeightsError(f"storage {ref.key[:40]!r} of {ref.numel} numbers is not in the file")
        begin = where[ref]
        return _numbers(data[begin : begin + ref.numel * _itemsize(ref.dtype)], ref, "<")

    return tree, storage


def _itemsize(dtype: str) -> int:
    return 2 if dtype == "bf16" else np.dtype(dtype).itemsize


def _numbers(raw: bytes, ref: StorageRef, order: str) -> np.ndarray:
    """The storage as a flat array in native byte order; its bytes must be as many as the tree says."""
    itemsize = _itemsize(ref.dtype)
    if len(raw) != ref.numel * itemsize:
        raise WeightsError(f"storage {ref.key[:40]!r} has {len(raw)} bytes, expected {ref.numel} x {itemsize}")
    if ref.dtype == "bf16":
        halves = np.frombuffer(raw, np.dtype("u2").newbyteorder(order))
        return (halves.astype(np.uint32) << 16).view(np.float32)
    if ref.dtype == "b1":
        return np.frombuffer(raw, np.uint8) != 0
    stored = np.dtype(ref.dtype).newbyteorder(order)
    return np.frombuffer(raw, stored).astype(np.dtype(ref.dtype), copy=False)


def _state_dict(tree: Any) -> dict[str, TensorRef]:
    if not isinstance(tree, dict):
        raise WeightsError(f"it holds a {type(tree).__name__}, expected a dict of tensors")
    if any(isinstance(value, TensorRef) for value in tree.values()):
        other = [str(k)[:60] for k, v in tree.items() if not isinstance(v, TensorRef) or not isinstance(k, str)]
        if other:
            raise WeightsError(f"tensors are mixed with other entries ({', '.join(other[:5])}): save the tensors alone")
        return tree
    nested = {
        key: value
        for key, value in tree.items()
        if isinstance(value, dict)
        and value
        and all(isinstance(k, str) and isinstance(v, TensorRef) for k, v in value.items())
    }
    chosen = [key for key in _NESTED_KEYS if key in nested] or list(nested)
    if not chosen or (len(chosen) > 1 and chosen[0] not in _NESTED_KEYS):
        named = ", ".join(str(k)[:60] for k in list(tree)[:8]) or "nothing"
        raise WeightsError(f"{len(nested)} of its entries are state dicts, expected one; it has {named}")
    return nested[chosen[0]]


def _resolve(refs: dict[str, TensorRef], storages: Storages, budget: int) -> dict[str, np.ndarray]:
    loaded: dict[StorageRef, np.ndarray] = {}
    tensors = {}
    for name, ref in refs.items():
        if ref.storage not in loaded:
            loaded[ref.storage] = storages(ref.storage)
        flat = loaded[ref.storage]
        count = 1
        for extent in ref.shape:
            count *= extent
        budget -= count * flat.itemsize
        if budget < 0:
            raise WeightsError(f"its tensors, up to {name[:200]!r}, take over {MAX_EXPANSION} times the file's bytes")
        last = ref.offset + sum((extent - 1) * stride for extent, stride in zip(ref.shape, ref.strides))
        if ref.offset > len(flat) or (count and last >= len(flat)):
            raise WeightsError(
                f"tensor {name[:200]!r} of shape {ref.shape} and strides {ref.strides} at {ref.offset} "
                f"does not lie within its storage of {len(flat)} numbers"
            )
        steps = [stride * flat.itemsize for stride in ref.strides]
        try:
            tensors[name] = np.lib.stride_tricks.as_strided(flat[ref.offset :], ref.shape, steps).copy()
        except ValueError as error:  # no elements, but an extent that NumPy cannot address
            raise WeightsError(f"tensor {name[:200]!r} has shape {ref.shape}: {error}") from error
    return tensors
