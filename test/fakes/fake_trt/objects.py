"""Which objects of the library are alive: runtimes, engines, contexts, builders."""

from __future__ import annotations

import weakref

_alive: dict[str, weakref.WeakSet] = {}


def alive(kind: str, made) -> None:
    """Count an object until it is gone."""
    _alive.setdefault(kind, weakref.WeakSet()).add(made)


def counts() -> dict[str, int]:
    """How many there are of each kind."""
    return {kind: len(_alive.get(kind, ())) for kind in ("runtimes", "engines", "contexts", "builders")}
