"""Which keyframes a map takes: known before one gets an id, since nothing that follows could pass it."""

from __future__ import annotations

import math

from ..errors import DataError
from ..types import Keyframe, MapModels
from .arrays import finite
from .rows import checksum
from .tables import FEATURES, KEYFRAMES


def require_storable(keyframe: Keyframe, models: MapModels) -> None:
    """Raises DataError for a keyframe that no map of these models takes."""
    f, pose = keyframe.features, keyframe.pose
    if f.model != models.features:
        raise DataError(f"a map of {models.features} takes no features of {f.model}")
    for name, array in (("scores", f.scores), ("descriptors", f.descriptors)):
        if not finite(array):
            raise DataError(f"{name} of {f.model} are not finite: the keyframe is not stored")
    for name, array in (("descriptors", f.descriptors), ("thumbnail", keyframe.thumbnail)):
        column = FEATURES.array[name]
        if array is not None and not (array.dtype.name in column.dtypes and column.fits(array.shape)):
            raise DataError(f"{name} of {array.dtype} {array.shape}: no map takes such, the keyframe is not stored")
    if not math.isfinite(f.pixel_scale):
        raise DataError(f"pixel_scale {f.pixel_scale} of {f.model}: the keyframe is not stored")
    texts = [keyframe.frame_id, f.recovered, *([pose.frame_id] if pose is not None else [])]
    checksum(KEYFRAMES, [int(keyframe.stamp_ns), *texts])  # raises for what has no bytes
