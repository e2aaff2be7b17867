"""TensorRT engine files: 4 bytes of length (little-endian), a JSON object of that length, then the engine.

The object is the model's card, with one more key, ``engine``: what it was built from, for which GPU and by what. A
plan says none of that itself, and TensorRT's own words about a plan of another machine do not help anybody. Both parts
have their digests, for a card in which one digit fell over is as wrong as a kernel.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shlex
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ..errors import ModelFileError
from .build_facts import BuildFacts, problems_of
from .cuda import Gpu

SUFFIX = ".engine"
_KEY = "engine"
_LENGTH = struct.Struct("<I")
_MAX_HEADER_BYTES = 1 << 20
_NAME = re.compile(r"[\w.+-]{1,100}")  # of a model, as a command can have it


@dataclass(frozen=True)
class EngineHeader:
    """``card``: fields of the model card, as ``ModelCard.to_dict`` gives them."""

    card: dict
    facts: BuildFacts

    @property
    def name(self) -> str:
        """Of the model, for messages and commands."""
        name = self.card.get("name")
        return name if isinstance(name, str) and _NAME.fullmatch(name) else "NAME"


def write(file: BinaryIO, header: EngineHeader, engine: bytes) -> EngineHeader:
    """Write a whole engine file; the header as it was written. Raises ModelFileError for a header that cannot be."""
    facts = dataclasses.replace(header.facts, bytes=len(engine), sha256=hashlib.sha256(engine).hexdigest())
    values = {**header.card, _KEY: dataclasses.asdict(facts)}
    facts = dataclasses.replace(facts, header_sha256=_digest(values))
    values[_KEY]["header_sha256"] = facts.header_sha256
    try:
        text = json.dumps(values, sort_keys=True, allow_nan=False).encode()
    except ValueError as error:
        raise ModelFileError(f"the card of {header.name} has a number that is not finite: correct it") from error
    if len(text) > _MAX_HEADER_BYTES:
        raise ModelFileError(f"the header of an engine is limited to {_MAX_HEADER_BYTES} bytes, got {len(text)}")
    file.write(_LENGTH.pack(len(text)))
    file.write(text)
    file.write(engine)
    return EngineHeader(header.card, facts)


def read_header(path: str | Path) -> EngineHeader:
    """The header alone, as it was written; that so many bytes follow as it says is checked, but not what they are.

    Raises ModelFileError for a file that cannot be read, is no engine with a header, or is cut short.
    """
    path = Path(path)
    try:
        with open(path, "rb") as file:
            return _read_header(file, path)
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror or error}") from error


def read_engine(path: str | Path) -> tuple[EngineHeader, bytes]:
    """Header and engine, which is the one that was built. Raises ModelFileError as ``read_header``, or: damaged."""
    path = Path(path)
    try:
        with open(path, "rb") as file:
            header = _read_header(file, path)
            engine = file.read(header.facts.bytes)
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror or error}") from error
    if hashlib.sha256(engine).hexdigest() != header.facts.sha256:
        raise ModelFileError(f"{path} is damaged: its {len(engine)} bytes of engine changed; {rebuild(header)}")
    return header, engine


def peek(file: BinaryIO, size: int) -> dict | None:
    """The JSON object at the start of an engine of ``size`` bytes, by whomever; None where there is none."""
    file.seek(0)
    head = file.read(_LENGTH.size + 1)
    if len(head) <= _LENGTH.size or head[-1:] != b"{":
        return None
    (length,) = _LENGTH.unpack(head[: _LENGTH.size])
    if length > min(_MAX_HEADER_BYTES, size - _LENGTH.size):
        return None
    file.seek(_LENGTH.size)
    try:
        values = json.loads(file.read(length))
    except (ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) else None


def machine_differences(facts: BuildFacts, gpu: Gpu, tensorrt: str) -> list[str]:
    """Why an engine is none for this GPU and this version of TensorRT; empty: it is one.

    A plan holds for one model of GPU and one version. Its kernels were chosen by their times under one driver, and its
    parity record is of that driver too: with another it is built and compared again.
    """
    here = {"gpu": gpu.name, "capability": gpu.capability, "driver": gpu.driver_version, "tensorrt": tensorrt}
    labels = {"gpu": "GPU", "capability": "compute capability", "tensorrt": "TensorRT"}
    return [
        f"{labels.get(n, n)} {value}, was {getattr(facts, n)}"
        for n, value in here.items()
        if getattr(facts, n) != value
    ]


def rebuild(header: EngineHeader | None = None) -> str:
    """The next step where an engine cannot be used: its model again, by the name or the file, in its precision."""
    model, precision = (header.name, header.facts.precision) if header else ("NAME", "")
    source = header.facts.source if header else ""
    if not Path(source).name.startswith(f"{model}.") and os.path.isfile(source):  # none of the registry
        model = shlex.quote(source)
    half = " --precision fp16" if precision == "fp16" else ""  # one of bf16 is a file of its own
    return f"run 'vslam-features models build {model} --runtime tensorrt{half}'"


def _read_header(file: BinaryIO, path: Path) -> EngineHeader:
    """Leaves the file at the engine's first byte."""
    size = os.fstat(file.fileno()).st_size
    values = peek(file, size)
    if values is None:
        raise ModelFileError(
            f"{path} ({size} bytes) begins with no header of an engine: cut short, damaged, or written by another "
            f"program, which does not say what it is for; {rebuild()}"
        )
    if not isinstance(values.get(_KEY), dict):
        raise ModelFileError(f"{path}: its header has no '{_KEY}': another program wrote it; {rebuild()}")
    digest = _digest(values)
    facts = values.pop(_KEY)
    header = EngineHeader(values, BuildFacts("", "", "", "", "", "", "", "", "", "", "", False))
    problems = problems_of(facts)
    if not problems and facts["header_sha256"] != digest:
        problems = ["it is not what was written"]
    if problems:
        raise ModelFileError(
            f"{path}: its header is damaged or of another version of vslam_features: {'; '.join(problems)}; "
            f"{rebuild(header)}"
        )
    header = EngineHeader(values, BuildFacts(**facts))
    there = size - file.tell()
    if there != header.facts.bytes:
        state = "cut short" if there < header.facts.bytes else "damaged"
        raise ModelFileError(
            f"{path} is {state}: expected {header.facts.bytes} bytes of engine behind the header, got {there}; "
            f"{rebuild(header)}"
        )
    return header


def _digest(values: dict) -> str:
    """Of a header, but for its digest; alike for however JSON writes the same values."""
    facts = {n: v for n, v in values[_KEY].items() if n != "header_sha256"}
    return hashlib.sha256(json.dumps({**values, _KEY: facts}, sort_keys=True).encode()).hexdigest()
