"""What a check of a map found."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

MAX_LISTED = 1000
"""Damages that are told one by one; all are counted."""


@dataclass(frozen=True)
class Finding:
    """``row`` None: of the table, or (``table`` empty) of the file as a whole."""

    table: str
    row: int | None
    what: str

    def __str__(self) -> str:
        where = f"{self.table} {self.row}" if self.row is not None else self.table or "file"
        return f"{where}: {self.what}"


@dataclass
class VerifyReport:
    """A map file, checked whole.

    Args:
        rows: table -> rows that there must be.
        intact: table -> rows that are as they were written.
        damages: of the file, at most ``MAX_LISTED``; ``num_damages`` counts all.
        oddities: what was written so, but hardly meant so (at most ``MAX_LISTED``): no damage.
        intact_keyframes: (N,) bool, those that are intact with all that belongs to them.
        notes: what could not be checked.
    """

    path: Path
    nbytes: int = 0
    rows: dict[str, int] = field(default_factory=dict)
    intact: Counter[str] = field(default_factory=Counter)
    damages: list[Finding] = field(default_factory=list)
    num_damages: int = 0
    oddities: list[Finding] = field(default_factory=list)
    num_oddities: int = 0
    intact_keyframes: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    notes: list[str] = field(default_factory=list)

    @property
    def damaged(self) -> bool:
        """True where the file is not what was written, or no map at all."""
        return self.num_damages > 0

    def damage(self, table: str, row: int | None, what: object) -> None:
        """Add a damage."""
        self.num_damages += 1
        if len(self.damages) < MAX_LISTED:
            self.damages.append(Finding(table, row, str(what)))

    def odd(self, table: str, row: int | None, what: object) -> None:
        """Add an oddity."""
        self.num_oddities += 1
        if len(self.oddities) < MAX_LISTED:
            self.oddities.append(Finding(table, row, str(what)))

    @property
    def intact_ranges(self) -> list[tuple[int, int]]:
        """First and last id of each run of intact keyframes."""
        edges = np.flatnonzero(np.diff(np.concatenate([[False], self.intact_keyframes, [False]]).astype(np.int8)))
        return [(int(a), int(b) - 1) for a, b in zip(edges[::2], edges[1::2])]

    def to_dict(self) -> dict:
        """For JSON."""
        return {
            "path": str(self.path),
            "bytes": self.nbytes,
            "damaged": self.damaged,
            "tables": {name: {"rows": n, "intact": self.intact[name]} for name, n in self.rows.items()},
            "keyframes": len(self.intact_keyframes),
            "keyframes_intact": int(self.intact_keyframes.sum()),
            "intact_ranges": self.intact_ranges,
            "damages": [vars(d) for d in self.damages],
            "num_damages": self.num_damages,
            "oddities": [vars(d) for d in self.oddities],
            "num_oddities": self.num_oddities,
            "notes": self.notes,
        }
