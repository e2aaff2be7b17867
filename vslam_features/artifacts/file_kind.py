"""What a file really is, by its first bytes and size: the wrong file gets a name and a remedy, not a parse error."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from ..errors import ModelFileError
from ..runtimes.engine_file import peek
from ..runtimes.onnx_header import read_header

_HEAD_BYTES = 8192
_MAX_SAFETENSORS_HEADER = 100_000_000  # the format's own limit
_POINTER = re.compile(
    rb"version https://git-lfs\.github\.com/spec/v1\n(?:ext-.*\n)*oid (sha256:[0-9a-f]{64})\nsize (\d+)\n?$"
)
_TITLE = re.compile(rb"<title[^>]*>\s*(.{1,200}?)\s*</title>", re.IGNORECASE | re.DOTALL)


class FileKind(str, Enum):
    """Kinds that are told apart; the value is what a message calls them."""

    ONNX = "an ONNX model"
    OPENVINO_XML = "an OpenVINO model"
    TENSORRT_ENGINE = "a TensorRT engine with a model card"
    ZIP = "a zip archive"
    SAFETENSORS = "a safetensors file"
    PICKLE = "a pickle"
    GIT_LFS_POINTER = "a Git LFS pointer"
    HTML = "a web page"
    EMPTY = "empty"
    CUT_ONNX = "an ONNX model that is cut short"
    UNKNOWN = "of an unknown kind"


@dataclass(frozen=True)
class FileFacts:
    """``detail``: what else is known, and what to do about it where the kind is never what one wants."""

    kind: FileKind
    size: int
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind.value} ({self.detail})" if self.detail else self.kind.value


def identify(path: str | Path) -> FileFacts:
    """Kind and size of a file. Any content gives an answer; raises ModelFileError where it cannot be read."""
    path = Path(path)
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(_HEAD_BYTES)
            card = peek(file, size)
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror or error}") from error
    if not head:
        return FileFacts(FileKind.EMPTY, size, "0 bytes; a download or a copy that failed: fetch it again")
    if pointer := _POINTER.match(head):
        oid, stands_for = pointer[1].decode(), int(pointer[2])
        detail = f"it stands for {stands_for} bytes, {oid}: run 'git lfs pull' in the repository that it lies in"
        return FileFacts(FileKind.GIT_LFS_POINTER, size, detail)
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return FileFacts(FileKind.ZIP, size)
    # 8-byte little-endian length, then a JSON object. Asked early: the length can look like a pickle or like markup.
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= _MAX_SAFETENSORS_HEADER:
        return FileFacts(FileKind.SAFETENSORS, size)
    if markup := _markup(head, size):
        return markup
    if card is not None:
        return FileFacts(FileKind.TENSORRT_ENGINE, size, f"model {card.get('name')!r}")
    if head[:1] == b"\x80" and head[1:2] in (b"\2", b"\3", b"\4", b"\5"):
        return FileFacts(FileKind.PICKLE, size)
    return _onnx_or_unknown(path, head, size)


def require_kind(path: str | Path, *kinds: FileKind) -> FileFacts:
    """The facts of a file that is of one of ``kinds``.

    Raises ModelFileError that says what the file is instead and, for a pointer, a web page or a cut file, what to do.
    """
    facts = identify(path)
    if facts.kind not in kinds:
        expected = " or ".join(kind.value for kind in kinds)
        raise ModelFileError(f"{path} ({facts.size} bytes) is {facts}, expected {expected}")
    return facts


def _markup(head: bytes, size: int) -> FileFacts | None:
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if not start.startswith(b"<"):
        return None
    if start.startswith((b"<!doctype html", b"<html", b"<head")) or (start.startswith(b"<?xml") and b"<html" in start):
        title = _TITLE.search(head)
        said = f"titled {title[1].decode(errors='replace')!r}" if title else "without a title"
        return FileFacts(
            FileKind.HTML, size, f"{said}; a login, an error or the page about the file: fetch the raw file"
        )
    if re.search(rb"<net\s[^>]*\bversion=", start):
        return FileFacts(FileKind.OPENVINO_XML, size)
    return FileFacts(FileKind.UNKNOWN, size, f"markup that begins with {head[:60]!r}")


def _onnx_or_unknown(path: Path, head: bytes, size: int) -> FileFacts:
    try:
        header = read_header(path)
    except ModelFileError as error:
        # Exporters begin with the IR version, a small number; what goes wrong after it is damage of an ONNX file.
        if head[:1] == b"\x08" and b"\0" < head[1:2] < b"\x40":
            return FileFacts(FileKind.CUT_ONNX, size, str(error).removeprefix(f"{path} "))
        return FileFacts(FileKind.UNKNOWN, size, f"it begins with {head[:16]!r}")
    opset = header.opsets.get("", header.opsets.get("ai.onnx", 0))
    return FileFacts(FileKind.ONNX, size, f"opset {opset}, {header.producer or 'no producer'}")
