"""Joins two maps of the same models."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from ..errors import IdentityError, MapError
from ..types import Candidate, MapEntry, MapModels, PairResult
from .copy import placed_map
from .reader import MapReader
from .tables import SESSIONS
from .writer import MapWriter

T = TypeVar("T", PairResult, Candidate)


def merge(
    a: Path, b: Path, target: Path, progress: Callable[[int, int], None] | None = None, *, overwrite: bool = False
) -> int:
    """Write the keyframes of ``a``, and after them those of ``b``, whose ids and sessions go on from there.

    Returns how many there are.

    Nothing connects the two parts: loops between them come when the map is continued.

    Args:
        progress: called with (keyframes done, keyframes in all).
    Raises:
        IdentityError: they are of different models; the message names both.
        MapError: the target is there (and not ``overwrite``), cannot be written, or is one of the sources; both maps
            are empty; one is damaged. No target is left.
    """
    a, b, target = Path(a), Path(b), Path(target)
    for source in (a, b):
        if target.exists() and source.exists() and os.path.samefile(source, target):
            raise MapError(f"{target}: source and target of the merge are the same file")
    with MapReader(a) as first, MapReader(b) as second:
        counts, models = (len(first.headers()), len(second.headers())), _models(first, second)
        with (
            placed_map(target, overwrite=overwrite) as part,
            MapWriter(part, models, create=True, durable=False) as writer,
        ):
            shift, session_shift = 0, 0
            for reader, count in zip((first, second), counts):
                newest = -1
                for row in reader.rows(SESSIONS):
                    newest = row["id"]
                    writer.begin_session(session_shift + newest, row["started_ns"], row["software"])
                for kf_id in range(count):
                    writer.append(_shifted(reader.entry(kf_id), shift, session_shift))
                    if progress:
                        progress(shift + kf_id + 1, sum(counts))
                shift, session_shift = count, session_shift + newest + 1
    return sum(counts)


def _models(first: MapReader, second: MapReader) -> MapModels:
    """Of both. A map that has no keyframe, or no global descriptor, goes with any."""
    a, b = first.models, second.models
    if a is None or b is None:
        if a is b:
            raise MapError(f"{first.path} and {second.path} have no keyframes: there is nothing to merge")
        return a or b
    for one, other in ((a.features, b.features), (a.global_descriptor, b.global_descriptor)):
        if one is not None and other is not None and one != other:
            raise IdentityError(
                f"{first.path} is a map of {one}, {second.path} one of {other}: their descriptors cannot be compared; "
                "only maps of the same models are merged"
            )
    return MapModels(a.features, a.global_descriptor or b.global_descriptor)


def _shifted(entry: MapEntry, shift: int, session_shift: int) -> MapEntry:
    def moved(items: tuple[T, ...]) -> tuple[T, ...]:
        return tuple(replace(i, kf_id=i.kf_id + shift, ref_kf_id=i.ref_kf_id + shift) for i in items)

    keyframe = replace(entry.keyframe, id=entry.keyframe.id + shift, session=entry.keyframe.session + session_shift)
    return MapEntry(keyframe, moved(entry.pairs), moved(entry.candidates), moved(entry.gated))
