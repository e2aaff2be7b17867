"""Maps of known keyframes: written, and checked after whatever has happened to them."""

from __future__ import annotations

from pathlib import Path

from vslam_features.maps.reader import MapReader
from vslam_features.maps.writer import MapWriter

from .entries import MODELS, assert_same, entry


def write_map(path: Path, count: int, salt: int = 0) -> None:
    with MapWriter(path, MODELS, create=True) as writer:
        for n in range(count):
            writer.append(entry(n, salt=salt))


def check_map(path: Path, at_least: int, at_most: int, salt: int = 0) -> None:
    """The map is clean and holds its first keyframes with all that belongs to them, as they were given."""
    with MapReader(path) as reader:
        headers = reader.headers()
        assert at_least <= len(headers) <= at_most, f"{len(headers)} keyframes, not {at_least} to {at_most}"
        for header in headers:
            assert_same(reader.entry(header.id), entry(header.id, salt=salt))
