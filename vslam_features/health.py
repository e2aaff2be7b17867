"""How a learned model does: counts of what happened to its runs, and a snapshot for people."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counts:
    """What happened to the runs of a model.

    ``non_finite``, ``errors`` and ``empty`` (nothing found where ``empty_guard`` doubts it, and the fallback did) are
    faults; ``recovered`` of them were made good by the fallback, ``lost`` were not. ``empty_agreed``: it found
    nothing either.
    """

    runs: int = 0
    non_finite: int = 0
    errors: int = 0
    empty: int = 0
    empty_agreed: int = 0
    recovered: int = 0
    lost: int = 0
    incidents: int = 0

    @property
    def faults(self) -> int:
        """All faults."""
        return self.non_finite + self.errors + self.empty


@dataclass(frozen=True)
class Health:
    """How a model does, for diagnostics, metrics and reports. ``linked``: a passing parity record vouches for it."""

    role: str
    name: str
    file: str
    sha256: str
    precision: str
    runtime: str
    device: str
    note: str
    verified: str
    linked: bool
    fallback: str
    counts: Counts
    last_fault: str
