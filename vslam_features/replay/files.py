"""Output files: all or nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path


def write_json(path: Path, data: dict) -> None:
    """Write strict JSON (no NaN), all or nothing. Raises ValueError on NaN, OSError."""
    text = json.dumps(data, indent=1, sort_keys=False, allow_nan=False)
    write_whole(path, text.encode())


def write_whole(path: Path, data: bytes) -> None:
    """Write a file beside its place and rename it, so that nobody reads half of it."""
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        partial.write_bytes(data)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
