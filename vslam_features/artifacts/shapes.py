"""Smallest, usual and largest shapes of a tensor, and the one way to write them: ``1x1x2,1x1024x2,1x2048x2``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import ConfigError
from ..runtimes.provider_shapes import KINDS, SHAPE

_GRAMMAR = "expected MIN,OPT,MAX, each as 1x1024x2, or one shape for all three"


@dataclass(frozen=True)
class Profile:
    """Shapes that an engine is built for: from ``min`` to ``max``, fastest at ``opt``.

    Args:
        min, opt, max: a number an axis, ascending from ``min`` to ``max``.
        values: they are what the tensor holds, not its shape: it says how large another one becomes (a shape tensor).
    Raises:
        ConfigError: numbers of axes that differ, an axis shorter than 1, or one that does not ascend.
    """

    min: tuple[int, ...]
    opt: tuple[int, ...]
    max: tuple[int, ...]
    values: bool = False

    def __post_init__(self):
        if not len(self.min) == len(self.opt) == len(self.max):
            raise ConfigError(f"{self} are of {len(self.min)}, {len(self.opt)} and {len(self.max)} axes: expected one")
        for axis, (low, usual, high) in enumerate(zip(self.min, self.opt, self.max)):
            if not 1 <= low <= usual <= high:
                raise ConfigError(f"{self}: axis {axis} goes {low}, {usual}, {high}: expected 1 or more, ascending")

    def __str__(self) -> str:
        return ",".join("x".join(map(str, getattr(self, kind))) for kind in KINDS)

    @property
    def axes(self) -> list[tuple[int, int, int]]:
        """(min, opt, max) of each axis; equal where it never changes."""
        return list(zip(self.min, self.opt, self.max))


def parse_shapes(text: str) -> Profile:
    """``1x1x2,1x1024x2,1x2048x2``, or one shape for all three. Raises ConfigError."""
    shapes = [part.strip() for part in text.split(",")]
    if len(shapes) not in (1, 3) or not all(SHAPE.fullmatch(shape) for shape in shapes):
        raise ConfigError(f"'{text.strip()}': {_GRAMMAR}")
    sizes = [tuple(map(int, shape.split("x"))) for shape in shapes]
    return Profile(*(sizes if len(sizes) == 3 else sizes * 3))


def parse_profiles(text: str) -> dict[str, Profile]:
    """``keypoints0:1x1x2,1x1024x2,1x2048x2; image:1x3x480x640``, by the names in it.

    Raises ConfigError that names the tensor.
    """
    found: dict[str, Profile] = {}
    for part in filter(None, (part.strip() for part in text.split(";"))):
        name, _, shapes = part.rpartition(":")
        if not name.strip():
            raise ConfigError(f"shapes: '{part}': expected NAME:SHAPES; several are separated by ';'")
        if name.strip() in found:
            raise ConfigError(f"shapes: '{name.strip()}' is given twice")
        try:
            found[name.strip()] = parse_shapes(shapes)
        except ConfigError as error:
            raise ConfigError(f"shapes: '{name.strip()}': {error}") from error
    return found


def joined(profiles: Mapping[str, Profile], kind: str) -> str:
    """``a:1x3x64x64,b:1x2``: one of ``KINDS`` as trtexec and ONNX Runtime's provider read it.

    Raises ConfigError for a tensor whose name they would take apart.
    """
    if odd := [name for name in profiles if set(name) & set(",:;'\"\\ ")]:
        raise ConfigError(f"TensorRT's tools cannot be told shapes of a tensor named {odd[0]!r}: rename it in the file")
    return ",".join(f"{name}:{'x'.join(map(str, getattr(p, kind)))}" for name, p in profiles.items())
