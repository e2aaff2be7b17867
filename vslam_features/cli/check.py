"""One line of ``doctor``."""

from __future__ import annotations

from dataclasses import dataclass

OK, WARN, FAIL = "OK", "WARN", "FAIL"


@dataclass(frozen=True)
class Check:
    """``state``: OK, WARN (works, but) or FAIL; ``fix``: the next step, empty where none is needed."""

    state: str
    name: str
    text: str
    fix: str = ""
