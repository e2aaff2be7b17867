"""What an ONNX file says beside its graph: metadata, opset and IR version, without the onnx package.

An ONNX file is one protobuf message (``ModelProto`` in
https://github.com/onnx/onnx/blob/main/onnx/onnx.proto). Its top-level fields are walked here and the graph, which holds
the weights, is skipped by seeking, so that a model of any size costs a few reads. Nothing marks the end of the message
or the file's kind, hence the checks: known field numbers with their wire types, and lengths that fit the file exactly.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

from ..errors import ModelFileError

# No metadata of ours is near this; a field that claims more is damage.
MAX_FIELD_BYTES = 16 << 20
_VARINT, _BYTES = 0, 2
# Fields of ModelProto, number -> wire type. 20 and 25 are training_info and functions, 26 is configuration.
_FIELDS = {1: _VARINT, 2: _BYTES, 3: _BYTES, 4: _BYTES, 5: _VARINT, 6: _BYTES, 7: _BYTES, 8: _BYTES, 14: _BYTES}
_FIELDS |= {20: _BYTES, 25: _BYTES, 26: _BYTES}
_IR_VERSION, _PRODUCER, _PRODUCER_VERSION, _GRAPH, _OPSET, _METADATA = 1, 2, 3, 7, 8, 14


@dataclass
class OnnxHeader:
    """The fields of a ModelProto other than its graph; ``opsets``: domain -> version, "" is ONNX's own."""

    ir_version: int = 0
    producer: str = ""
    opsets: dict[str, int] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    graph_bytes: int = 0


def read_metadata(path: str | Path) -> dict[str, str]:
    """The ``metadata_props`` of an ONNX file. Raises ModelFileError as :func:`read_header` does."""
    return read_header(path).metadata


def read_header(path: str | Path) -> OnnxHeader:
    """Walks the file without reading its graph.

    Raises ModelFileError for a file that cannot be opened, is no ONNX model, or is cut short; the message then has
    the bytes that are there and those that the lengths in the file ask for. A cut exactly between two fields leaves a
    valid message: it is noticed where graph or opset come after the cut, and not where only metadata do.
    """
    path = Path(path)
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            return _walk(file, size, str(path))
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror or error}") from error


def without_metadata(path: Path) -> list[tuple[int, int]]:
    """[start, end) of the bytes of an ONNX file that are not ``metadata_props``. Raises ModelFileError."""
    kept: list[tuple[int, int]] = []
    try:
        with open(path, "rb") as file:
            for f in _fields(file, os.fstat(file.fileno()).st_size, str(path)):
                if f.number != _METADATA:
                    kept.append((f.at, f.end))
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror or error}") from error
    return kept


def graph_span(path: Path) -> tuple[int, int]:
    """[start, end) of the bytes of the graph, a message of its own. Raises ModelFileError as :func:`read_header`."""
    if read_header(path).graph_bytes:
        with open(path, "rb") as file:
            for f in _fields(file, os.fstat(file.fileno()).st_size, str(path)):
                if f.number == _GRAPH:
                    return f.end - f.value, f.end
    raise ModelFileError(f"{path} has no graph: fetch it again")


class _Field(NamedTuple):
    """A field, bytes ``at`` to ``end``. ``value``: the number, or how many of these bytes its content has."""

    number: int
    at: int
    value: int
    end: int


def _fields(file: BinaryIO, size: int, name: str) -> Iterator[_Field]:
    """Stands at the value of each that is given; raises ModelFileError where the next one is none of an ONNX file."""
    at = 0
    while at < size:
        file.seek(at)
        number, wire = divmod(read_varint(file, name, size), 8)
        if _FIELDS.get(number) != wire:
            raise ModelFileError(f"{name} is no ONNX model: byte {at} of {size} begins no field of one")
        value = read_varint(file, name, size)
        end = file.tell() + (value if wire == _BYTES else 0)
        if end > size:
            raise ModelFileError(
                f"{name} is cut short or no ONNX model: it has {size} bytes, and its field {number} at byte {at} "
                f"asks for {end}: fetch it again"
            )
        yield _Field(number, at, value, end)
        at = end


def _walk(file: BinaryIO, size: int, name: str) -> OnnxHeader:
    header, singles = OnnxHeader(), set()
    for number, at, value, _ in _fields(file, size, name):
        if number in (_IR_VERSION, _GRAPH) and number in singles:
            raise ModelFileError(
                f"{name} is no ONNX model: field {number} is there twice, again at byte {at} of {size}"
            )
        singles.add(number)
        if number == _IR_VERSION:
            header.ir_version = value
        elif number == _GRAPH:
            header.graph_bytes = value
        elif number in (_PRODUCER, _PRODUCER_VERSION, _OPSET, _METADATA):
            if value > MAX_FIELD_BYTES:
                raise ModelFileError(f"{name}: its field {number} at byte {at} has {value} bytes, which no model needs")
            _take(header, number, file.read(value), f"{name}: its field {number} at byte {at}")
    parts = {"IR version": header.ir_version, "graph": header.graph_bytes, "opset": header.opsets}
    missing = [label for label, there in parts.items() if not there]
    if missing:
        raise ModelFileError(
            f"{name} ({size} bytes) has no {' and no '.join(missing)}: cut short, or no ONNX model; fetch it again"
        )
    return header


def _take(header: OnnxHeader, number: int, content: bytes, where: str) -> None:
    if number == _PRODUCER:
        header.producer = _text(content, where)
    elif number == _PRODUCER_VERSION:
        header.producer = f"{header.producer} {_text(content, where)}".strip()
    elif number == _OPSET:
        entry = _message(content, {1: _BYTES, 2: _VARINT}, where)
        header.opsets[_text(entry.get(1, b""), where)] = entry.get(2, 0)
    else:
        entry = _message(content, {1: _BYTES, 2: _BYTES}, where)
        header.metadata[_text(entry.get(1, b""), where)] = _text(entry.get(2, b""), where)


def _message(content: bytes, fields: dict[int, int], where: str) -> dict[int, bytes | int]:
    """The fields of a small message, number -> value; unknown ones are refused."""
    values: dict[int, bytes | int] = {}
    at = 0
    while at < len(content):
        tag, at = _varint_in(content, at, where)
        number, wire = divmod(tag, 8)
        if fields.get(number) != wire:
            raise ModelFileError(f"{where} is damaged: it holds field {number} of type {wire}")
        value, at = _varint_in(content, at, where)
        if wire == _BYTES:
            if at + value > len(content):
                raise ModelFileError(f"{where} is damaged: {value} bytes asked for, {len(content) - at} there")
            values[number], at = content[at : at + value], at + value
        else:
            values[number] = value
    return values


def _text(content: bytes, where: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ModelFileError(f"{where} is damaged: text that is not UTF-8 ({error})") from error


def _varint_in(content: bytes, at: int, where: str) -> tuple[int, int]:
    value = 0
    for index, byte in enumerate(content[at : at + 10]):
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value, at + index + 1
    raise ModelFileError(f"{where} is damaged: a number has no end")


def read_varint(file: BinaryIO, name: str, size: int) -> int:
    """The number at the file's position, which moves behind it; raises ModelFileError where it has no end."""
    at = file.tell()
    value, end = _varint_in(file.read(10), 0, f"{name}: byte {at} of {size}")
    file.seek(at + end)
    return value
