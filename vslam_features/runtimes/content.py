"""One name for what a model file computes: its bytes without its card, and those of the weights that lie beside it."""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import re
from pathlib import Path

from ..errors import CacheError, ModelFileError
from .onnx_header import without_metadata

# An entry of TensorProto.external_data (https://github.com/onnx/onnx/blob/main/onnx/onnx.proto) as protobuf writes it:
# field 1, "location"; field 2, its length as a varint of one or two bytes. Names longer than that no system has.
_LOCATION = re.compile(rb"\x0a\x08location\x12([\x01-\x7f]|[\x80-\xff][\x01-\x7f])", re.DOTALL)
_BLOCK = 1 << 20


def content_sha256(path: Path) -> str:
    """SHA-256 of a model: of its file, or of all where its weights lie beside it. Raises CacheError.

    Beside it: OpenVINO's ``.bin``; of ONNX the files of external data that the graph names, and those with the names
    that exporters give them. A named file that is not there is left out: no runtime loads such a model. Metadata inside
    an ONNX file count as little as a card beside it: the same network exported again, with other figures of its
    self-check, is the same model.
    """
    parts = [_sha256(p) for p in (path, *_beside(path))]
    return parts[0] if len(parts) == 1 else hashlib.sha256(" ".join(parts).encode()).hexdigest()


def _beside(path: Path) -> list[Path]:
    if path.suffix == ".xml":
        found = [path.with_suffix(".bin")]
    elif path.suffix == ".onnx":
        # Behind a link the data may lie beside the file itself: runtimes differ in where they look.
        folders = dict.fromkeys((path.parent, path.resolve().parent))
        found = [path.with_name(path.name + end) for end in (".data", "_data")]
        found += [folder / name for folder in folders for name in sorted(_locations(path))]
    else:
        found = []
    return [p for p in dict.fromkeys(found) if os.path.isfile(p)]  # False for names that no system takes, too


def _locations(path: Path) -> set[str]:
    """File names of external data in an ONNX file, found by its bytes: to parse the graph takes far longer."""
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return {_text(content, found) for found in _LOCATION.finditer(content)} - {""}
    except ValueError:  # an empty file cannot be mapped
        return set()
    except OSError as error:
        raise CacheError(f"{path} cannot be read: {error.strerror or error}") from error


def _text(content: mmap.mmap, found: re.Match) -> str:
    """The name behind an entry's length; empty where it is none."""
    length = sum((byte & 0x7F) << (7 * i) for i, byte in enumerate(found[1]))
    name = content[found.end() : found.end() + length]
    return "" if b"\0" in name else name.decode(errors="surrogateescape")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            for start, end in _counted(path, os.fstat(file.fileno()).st_size):
                file.seek(start)
                while start < end and (block := file.read(min(_BLOCK, end - start))):
                    digest.update(block)
                    start += len(block)
    except OSError as error:
        raise CacheError(f"{path} cannot be read: {error.strerror or error}") from error
    return digest.hexdigest()


def _counted(path: Path, size: int) -> list[tuple[int, int]]:
    """[start, end) of what counts: all of a file that is no ONNX model, or that is damaged."""
    if path.suffix == ".onnx":
        with contextlib.suppress(ModelFileError):
            return without_metadata(path)
    return [(0, size)]
