"""What a benchmark asks of the figures that it measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Criterion:
    """A figure that is to be at most its limit, or ``at_least``."""

    name: str
    value: float
    limit: float
    unit: str = ""
    at_least: bool = False

    @property
    def met(self) -> bool:
        return bool(self.value >= self.limit if self.at_least else self.value <= self.limit)

    def to_dict(self) -> dict:
        """Plain JSON values."""
        return asdict(self) | {"met": self.met}


def table(criteria: Sequence[Criterion]) -> str:
    """A line each."""
    width = max(len("criterion"), *(len(c.name) for c in criteria))
    lines = [f"{'criterion':<{width}} {'value':>9}    limit"]
    for c in criteria:
        sign, verdict = ">=" if c.at_least else "<=", "PASS" if c.met else "FAIL"
        lines.append(f"{c.name:<{width}} {c.value:>9.3f} {sign} {c.limit:<6.4g} {c.unit:<4} {verdict}")
    return "\n".join(lines)
