"""Tables in text, for people."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Lines of cells, columns two spaces apart: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:]))] for row in rows)
    return "\n".join("  ".join(line).rstrip() for line in lines)
