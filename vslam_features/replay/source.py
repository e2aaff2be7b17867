"""Where frames come from, and what is known of those that did not come."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ..config import Config
from ..types import Frame

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".pgm", ".ppm", ".pnm", ".tif", ".tiff", ".webp")
BAG_SUFFIXES = (".mcap", ".db3", ".bag")
DUPLICATE = "duplicate stamp"
"""The one reason to skip an input that loses nothing."""


@dataclass
class Ledger:
    """What was left out or done without, counted by reason, with a few examples for people."""

    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def add(self, reason: str, detail: str = "") -> None:
        """Count one case; the first three details of a reason are kept."""
        self.counts[reason] = self.counts.get(reason, 0) + 1
        seen = self.examples.setdefault(reason, [])
        if detail and len(seen) < 3:
            seen.append(detail)

    @property
    def total(self) -> int:
        """Number of cases."""
        return sum(self.counts.values())


class Source(ABC):
    """Frames in stamp order, and an honest account of what did not become one.

    Iterate once; ``len`` is the number of images expected. While iterating:

    Attributes:
        config: the effective configuration (an image folder has its own defaults).
        skipped: inputs that became no frame, by reason.
        notes: frames that lack something that was asked for (such as a pose), by reason, and remarks
            on what was chosen or left out.
        position: index of the last yielded frame among the inputs, the skipped ones included.
        damage: why the input could not be read to its end; empty where it could.
    """

    def __init__(self, path: Path, config: Config):
        self.path = path
        self.config = config
        self.skipped, self.notes = Ledger(), Ledger()
        self.position = -1
        self.damage = ""

    @property
    def name(self) -> str:
        """Short name for titles and output folders."""
        path = self.path.resolve()
        generic = path.is_dir() and path.name in ("images", "image", "rgb", "left", "data")
        return path.parent.name if generic else path.name.split(".")[0] if path.is_file() else path.name

    @property
    def complete(self) -> bool:
        """True where everything promised was read to the end and none of it was unreadable."""
        return not self.reason

    @property
    def reason(self) -> str:
        """Why the read is partial, one line; empty where it is complete."""
        if self.damage:
            return self.damage
        lost = {reason: n for reason, n in self.skipped.counts.items() if reason != DUPLICATE}
        return "skipped " + ", ".join(f"{n} x {reason}" for reason, n in lost.items()) if lost else ""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[Frame]: ...

    @abstractmethod
    def describe(self) -> dict:
        """Plain values that say what is read, the same on every machine (for provenance)."""

    def close(self) -> None:  # noqa: B027 - optional for subclasses
        """Release files. Safe to call twice."""

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_) -> None:
        self.close()
