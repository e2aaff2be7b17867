"""The large arrays of keyframes, packed in another thread while those of the keyframe before are written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from ..half import exact_half
from ..types import Keyframe
from .arrays import Packed, pack
from .tables import FEATURES, GLOBAL_DESCRIPTORS


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


def packed_ahead(keyframes: Sequence[Keyframe]) -> Iterator[PackedKeyframe]:
    """Each keyframe packed, in order; the checksums of the next are computed while the caller writes one.

    Raises DataError at the keyframe that has an array which a map does not take.
    """
    if len(keyframes) == 1:
        yield pack_keyframe(keyframes[0])
        return
    pool = ThreadPoolExecutor(1, thread_name_prefix="map packer")
    try:
        try:
            packed = pool.map(pack_keyframe, keyframes)
        except RuntimeError:  # no thread is to be had, as while the interpreter ends and a map is closed
            packed = map(pack_keyframe, keyframes)
        yield from packed
    finally:
        pool.shutdown(cancel_futures=True)
