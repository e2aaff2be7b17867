"""What the header of an engine says of how it was built."""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import dataclass, field

_CHOICES = {"precision": ("fp32", "fp16", "bf16"), "typing": ("strong", "weak")}
_MAX_LENGTH = (1 << 31) - 1  # of an axis in TensorRT


@dataclass(frozen=True)
class BuildFacts:
    """What is under ``engine`` in the header.

    Args:
        key: of everything that the engine depends on, see ``artifacts/engine_key.py``.
        gpu, capability, driver, cuda: as in ``cuda.Gpu`` (its ``driver_version`` and ``runtime``).
        tensorrt: version of the library.
        source: file name of the ONNX model that was asked for; source_sha256: its content.
        built_from_sha256: content of the patched model that TensorRT parsed.
        precision: ``fp32``, ``fp16`` or ``bf16``. typing: ``strong`` or ``weak``.
        has_if: whether the model branches; then no CUDA graph can be captured.
        patches: name -> version of what was done to the model first.
        profiles: tensor of the file -> its smallest, optimal and largest shape (of a shape tensor: values), ascending.
        options: of the build, name -> value.
        layer_precisions: layer -> type that it was told to compute in.
        made_with: program -> version. time: when it was built, ISO 8601, UTC.
        bytes, sha256: of the engine behind the header; header_sha256: of the header. ``write`` fills them in.
    """

    key: str
    gpu: str
    capability: str
    driver: str
    cuda: str
    tensorrt: str
    source: str
    source_sha256: str
    built_from_sha256: str
    precision: str
    typing: str
    has_if: bool
    patches: dict[str, int] = field(default_factory=dict)
    profiles: dict[str, list[list[int]]] = field(default_factory=dict)
    options: dict[str, bool | int | float | str] = field(default_factory=dict)
    layer_precisions: dict[str, str] = field(default_factory=dict)
    made_with: dict[str, str] = field(default_factory=dict)
    time: str = ""
    bytes: int = 0
    sha256: str = ""
    header_sha256: str = ""


def problems_of(facts: dict) -> list[str]:
    """What is wrong with a JSON object that is to be :class:`BuildFacts`, in words; empty: nothing."""
    hints = typing.get_type_hints(BuildFacts)
    known = {f.name: f for f in dataclasses.fields(BuildFacts)}
    problems = [f"unknown field '{n}'" for n in sorted(set(facts) - set(known))]
    problems += [f"field '{n}' is missing" for n in known if n not in facts]
    problems += [f"{n}: got {facts[n]!r:.60}" for n in known if n in facts and not _fits(facts[n], hints[n])]
    if not problems:
        problems = [f"{n}: got {facts[n]!r:.60}" for n, kinds in _CHOICES.items() if facts[n] not in kinds]
        if set(facts["layer_precisions"].values()) - set(_CHOICES["precision"]):
            problems.append("layer_precisions has a type that is none")
        odd = [n for n, shapes in facts["profiles"].items() if not _ascending(shapes)]
        problems += [f"profiles of {n!r:.60}: got {facts['profiles'][n]!r:.60}" for n in odd]
    return problems


def _ascending(shapes: list[list[int]]) -> bool:
    """Whether these are a smallest, an optimal and a largest shape that TensorRT can have."""
    ranks = {len(shape) for shape in shapes}
    return (
        len(shapes) == 3
        and len(ranks) == 1
        and 0 not in ranks
        and all(low <= usual <= high <= _MAX_LENGTH for low, usual, high in zip(*shapes))
    )


def _fits(value, kind) -> bool:
    """Whether a JSON value is of a type as it is written in ``BuildFacts``."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(v, args[1]) for v in value.values())
    if origin is list:
        return isinstance(value, list) and all(_fits(v, args[0]) for v in value)
    if origin is types.UnionType:
        return any(_fits(value, a) for a in args)
    if kind is int:
        return type(value) is int and value >= 0  # lengths, sizes and versions
    return type(value) is kind
