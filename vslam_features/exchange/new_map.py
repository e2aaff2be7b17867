"""A map made by an import: whole under its name, or not there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ..errors import MapFileError
from ..maps.lock import WriterLock
from ..maps.placing import placed_file
from ..maps.writer import MapWriter
from ..types import Keyframe, MapModels


@contextlib.contextmanager
def new_map(target: Path, models: MapModels, *, overwrite: bool) -> Iterator[MapWriter]:
    """A writer for the map that becomes ``target`` when the block ends well.

    Raises MapError where the target is there (and not ``overwrite``), is written by somebody, or cannot be written.
    """
    target = Path(target)
    with contextlib.ExitStack() as stack:
        part = stack.enter_context(placed_file(target, replace=overwrite))
        if os.path.lexists(target):  # who writes to it would go on with a file that has no name any more
            stack.callback(WriterLock(target).release)
        with MapWriter(part, models, create=True) as writer:
            yield writer


def unit_length(descriptor: np.ndarray) -> np.ndarray:
    """A global descriptor as maps hold it: of length 1. One that is (within 1 %), or that is zero, stays as it is."""
    d = descriptor.astype(np.float64)
    norm = np.linalg.norm(d)
    return descriptor if norm == 0 or abs(norm - 1) <= 1e-2 else (d / norm).astype(np.float32)


class Alike:
    """Sees to it that all keyframes of a map can be compared, also with ``like``, a keyframe of another map."""

    def __init__(self, like: Keyframe | None = None):
        self._whose = "the first image" if like is None else "the map whose models it names"
        self._descriptors = None if like is None else like.features.descriptors
        place = None if like is None else like.global_descriptor
        self._global_length = None if place is None else place.size

    def require(self, keyframe: Keyframe, features_at: str, global_at: str) -> None:
        """Raises MapFileError where descriptors are not as those of the first keyframe, or of ``like``.

        ``features_at``, ``global_at``: where they were read, for the message.
        """
        found, place = keyframe.features.descriptors, keyframe.global_descriptor
        first = self._descriptors = found if self._descriptors is None else self._descriptors
        if _kind(found) != _kind(first):
            raise MapFileError(f"{features_at}: descriptors are {_told(found)}, those of {self._whose} {_told(first)}")
        if place is not None:
            length = self._global_length = self._global_length or place.size
            if place.size != length:
                raise MapFileError(
                    f"{global_at}: the global descriptor has {place.size} numbers, that of {self._whose} {length}"
                )


def _kind(descriptors: np.ndarray) -> tuple:
    bits = descriptors.dtype == np.uint8
    return bits, descriptors.shape if descriptors.ndim == 3 else descriptors.shape[1]


def _told(descriptors: np.ndarray) -> str:
    if descriptors.ndim == 3:
        return f"dense ({', '.join(map(str, descriptors.shape))})"
    return f"of length {descriptors.shape[1]}" + (" in uint8" if descriptors.dtype == np.uint8 else "")
