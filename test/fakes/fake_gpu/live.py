"""What is allocated now."""

from __future__ import annotations

from .memory import MEMORY
from .streams import EVENTS, GRAPHS, INSTANCES, STREAMS

__all__ = ["live"]


def live() -> dict[str, int]:
    """What is allocated now; of the fake only."""
    return {
        "device": MEMORY.count("device"),
        "pinned": MEMORY.count("pinned"),
        "device_bytes": MEMORY.total("device"),
        "pinned_bytes": MEMORY.total("pinned"),
        "streams": len(STREAMS),
        "events": len(EVENTS),
        "graphs": len(GRAPHS),
        "graph_instances": len(INSTANCES),
    }
