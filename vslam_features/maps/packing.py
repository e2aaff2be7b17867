"""What belongs to writing keyframes and needs no database, done in another thread while that is busy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import numpy as np

from ..half import exact_half
from ..types import Keyframe
from .arrays import Packed, pack
from .tables import FEATURES, GLOBAL_DESCRIPTORS
from .threads import started

T = TypeVar("T")


class PackedKeyframe(NamedTuple):
    """Arrays by the columns of ``features``, and the global descriptor."""

    features: dict[str, Packed | None]
    global_descriptor: Packed | None


def pack_keyframe(keyframe: Keyframe) -> PackedKeyframe:
    """Raises DataError for an array that a map does not take."""
    f, descriptor = keyframe.features, keyframe.global_descriptor
    arrays = {
        "keypoints": f.keypoints,
        "scores": np.asarray(f.scores, np.float32),
        "descriptors": f.descriptors,
        "thumbnail": keyframe.thumbnail,
    }
    column = GLOBAL_DESCRIPTORS.array["descriptor"]
    return PackedKeyframe(
        {name: None if array is None else pack(FEATURES.array[name], array) for name, array in arrays.items()},
        None if descriptor is None else pack(column, exact_half(np.asarray(descriptor))),
    )


class Packer:
    """Packs keyframes in order: the checksums of the next are computed while the caller writes one.

    Args:
        keyframes: of one transaction. A single one is packed in the caller's thread, and needs no other.
    """

    def __init__(self, keyframes: Sequence[Keyframe]):
        self._left = iter(keyframes)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="map packer") if len(keyframes) > 1 else None
        self._ahead = self._begin()

    def __enter__(self) -> Packer:
        return self

    def __exit__(self, *_) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def take(self) -> PackedKeyframe:
        """The next keyframe. Raises DataError where it has an array which a map does not take."""
        packed = self._ahead()
        self._ahead = self._begin()
        return packed

    def beside(self, work: Callable[[], None]) -> None:
        """Have something done that nobody waits for, before the next keyframe but one is packed."""
        self._submit(work)

    def _begin(self) -> Callable[[], PackedKeyframe] | None:
        keyframe = next(self._left, None)
        return None if keyframe is None else self._submit(lambda: pack_keyframe(keyframe))

    def _submit(self, work: Callable[[], T]) -> Callable[[], T]:
        return work if self._pool is None else started(self._pool, work)
