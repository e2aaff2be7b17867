"""Imports maps of tinynav: shelves of numpy dicts, one entry a keyframe, keyed by the stamp in nanoseconds.

The layout, as ``TinyNavDB`` writes it, is described in ``docs/map_exchange.md``. Pickles in it are read as data.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..camera import Camera
from ..errors import CameraError, DataError, MapFileError
from ..half import exact_half
from ..images import thumbnail
from ..types import Features, Keyframe, MapEntry, MapModels, ModelIdentity, Pose
from .array_pickle import native, read_array_pickle
from .names import Progress, imported_model
from .new_map import Alike, new_map, unit_length
from .npy_file import read_npy
from .shelf import Shelf, find_shelf, open_shelf, shelf_name

FRAME_ID, POSE_FRAME_ID = "camera", "world"
_OUTSIDE_PX = 1.0


def import_legacy(
    source: Path,
    target: Path,
    *,
    model: ModelIdentity | None = None,
    global_model: ModelIdentity | None = None,
    image_size: tuple[int, int] | None = None,
    like: Keyframe | None = None,
    progress: Progress | None = None,
    overwrite: bool = False,
) -> int:
    """Make a map of a tinynav map and return the number of keyframes. Descriptors become fp16 where that is exact.

    Args:
        source: the folder of the map, or its shelf ``features`` (by that name or one of its files).
        model, global_model: identities of what computed the features and the embeddings. Without one the map gets an
            identity of its own, which nothing can be matched with.
        like: a keyframe of those models, whose descriptors have the shape that these must have.
        image_size: (width, height), where the map holds neither images nor depths that tell it.
    Raises:
        MapFileError: something is missing, damaged, or not what the layout says; the message names the file and entry.
        MapError: the target is there (and not ``overwrite``) or cannot be written. No target is left in either case.
    """
    source = Path(source)
    name = source / "features" if source.is_dir() else shelf_name(source)
    folder = name.parent
    with contextlib.ExitStack() as stack:
        features = stack.enter_context(open_shelf(name))
        others = {n: stack.enter_context(open_shelf(folder / n)) for n in _OTHERS if find_shelf(folder / n)}
        tiny = _TinyNav(folder, features, others, image_size)
        models = MapModels(
            model or imported_model("features", "tinynav", tiny.content),
            (global_model or imported_model("global", "tinynav", tiny.content)) if "embeddings" in others else None,
        )
        writer = stack.enter_context(new_map(Path(target), models, overwrite=overwrite))
        alike = Alike(like)
        for kf_id, stamp in enumerate(tiny.stamps):
            keyframe = tiny.keyframe(kf_id, stamp, models.features)
            at = f", entry {stamp}"
            embeddings = others["embeddings"].path if "embeddings" in others else ""
            alike.require(keyframe, f"{features.path}{at}", f"{embeddings}{at}")
            writer.append(MapEntry(keyframe))
            if progress is not None:
                progress(kf_id + 1, len(tiny.stamps))
        return len(tiny.stamps)


_OTHERS = ("embeddings", "infra1_images", "depths")


class _TinyNav:
    """A map's parts, opened. ``stamps``: of its keyframes, ascending. ``content``: tells it from other maps."""

    def __init__(self, folder: Path, features: Shelf, others: Mapping[str, Shelf], image_size):
        self._folder, self._features, self._others = folder, features, others
        self.stamps = sorted(_stamp(features, key) for key in features.keys())
        if not self.stamps:
            raise MapFileError(f"{features.path}: the shelf is empty")
        self.content = hashlib.sha256(features[str(self.stamps[0])]).hexdigest()
        self._poses = self._read_poses()
        self._size = image_size or self._find_size()
        self._camera = self._read_camera()

    def keyframe(self, kf_id: int, stamp: int, model: ModelIdentity) -> Keyframe:
        key = str(stamp)
        where = f"{self._features.path}, entry {key}"
        found = _unpickled(self._features, key)
        if not isinstance(found, dict):
            raise MapFileError(f"{where}: a {type(found).__name__}, expected a dict with 'kpts' and 'descps'")
        try:
            features = _features(found, self._size, model)
        except DataError as error:
            raise MapFileError(f"{where}: {error}") from error
        pose, embedding, small = self._poses.get(stamp), None, None
        if key in self._others.get("embeddings", ()):
            embedding = self._array("embeddings", key, 1)
            if not embedding.any():
                raise MapFileError(f"{self._others['embeddings'].path}, entry {key}: the embedding is zero")
            embedding = unit_length(embedding)
        if key in self._others.get("infra1_images", ()):
            small = thumbnail(self._image(key))
        return Keyframe(kf_id, stamp, FRAME_ID, features, self._camera, pose, embedding, small)

    def _array(self, shelf: str, key: str, axes: int) -> np.ndarray:
        """A float array without axes of length 1 in front; f32 unless it was f16."""
        where = f"{self._others[shelf].path}, entry {key}"
        found = _unpickled(self._others[shelf], key)
        if not isinstance(found, np.ndarray) or found.dtype.kind != "f":
            raise MapFileError(f"{where}: a float array was expected, got {_what(found)}")
        try:
            return _float(_squeezed(found, axes))
        except DataError as error:
            raise MapFileError(f"{where}: {error}") from error

    def _image(self, key: str) -> np.ndarray:
        shelf = self._others["infra1_images"]
        found = _unpickled(shelf, key)
        if not isinstance(found, np.ndarray) or found.dtype != np.uint8 or found.shape != self._size[::-1]:
            expected = f"uint8 {self._size[::-1]}"
            raise MapFileError(f"{shelf.path}, entry {key}: an image {expected} was expected, got {_what(found)}")
        return found

    def _find_size(self) -> tuple[int, int]:
        for name in ("infra1_images", "depths"):
            shelf, key = self._others.get(name), str(self.stamps[0])
            if shelf is not None and key in shelf:
                found = _unpickled(shelf, key)
                if not isinstance(found, np.ndarray) or found.ndim != 2 or not found.size:
                    raise MapFileError(f"{shelf.path}, entry {key}: (H, W) was expected, got {_what(found)}")
                return found.shape[1], found.shape[0]
        raise MapFileError(
            f"{self._folder}: no shelf 'infra1_images' or 'depths' tells the size of the images; "
            "give image_size (--image-size 640x480)"
        )

    def _read_camera(self) -> Camera | None:
        path = self._folder / "intrinsics.npy"
        if not path.exists():
            return None
        try:
            return Camera(*self._size, read_npy(path), rectified=True)  # stereo: rectified before it is matched
        except CameraError as error:
            raise MapFileError(f"{path}: {error}") from error

    def _read_poses(self) -> dict[int, Pose]:
        path = self._folder / "poses.npy"
        if not path.exists():
            return {}
        found = read_npy(path)
        if not isinstance(found, dict):
            raise MapFileError(f"{path}: a dict of stamps and poses was expected, got {_what(found)}")
        return {stamp: _pose(path, stamp, matrix) for stamp, matrix in found.items()}


def _stamp(shelf: Shelf, key: str) -> int:
    if not (key.isdigit() and len(key) <= 19 and str(int(key)) == key and int(key) < 1 << 63):
        raise MapFileError(f"{shelf.path}: the key {key[:40]!r} is no stamp in nanoseconds")
    return int(key)


def _unpickled(shelf: Shelf, key: str) -> Any:
    try:
        return read_array_pickle(shelf[key])
    except MapFileError as error:
        raise error if str(shelf.path) in str(error) else MapFileError(f"{shelf.path}, entry {key}: {error}") from error


def _features(found: dict, size: tuple[int, int], model: ModelIdentity) -> Features:
    """Raises DataError for what the layout does not allow."""
    missing = [name for name in ("kpts", "descps") if not isinstance(found.get(name), np.ndarray)]
    if missing:
        names = ", ".join(sorted(map(str, found)))[:200]
        raise DataError(f"no array {' and '.join(map(repr, missing))}; it has {names or 'nothing'}")
    keypoints = _float(_squeezed(found["kpts"], 2), "kpts").astype(np.float32, copy=False)
    if keypoints.shape[1] != 2:
        raise DataError(f"kpts: (1, N, 2) was expected, got {found['kpts'].shape}")
    n = len(keypoints)
    descriptors = _descriptors(found["descps"], n)
    scores = _row(found.get("scores"), n, "scores", np.ones(n, np.float32))
    keep = _row(found.get("mask"), n, "mask", np.ones(n, bool)) > 0
    if not keep.all():  # the extractor fills up to a fixed number
        keypoints, scores = keypoints[keep], scores[keep]
        descriptors = descriptors[keep] if descriptors.ndim == 2 else descriptors
    beyond = (keypoints < -_OUTSIDE_PX) | (keypoints > np.array(size) - 1 + _OUTSIDE_PX)
    if beyond.any():
        raise DataError(f"keypoints outside of an image of {size[0]}x{size[1]}: it is of another size")
    descriptors = np.ascontiguousarray(exact_half(descriptors))
    return Features(np.ascontiguousarray(keypoints), scores.astype(np.float32), descriptors, size, model)


def _descriptors(array: np.ndarray, n: int) -> np.ndarray:
    """(N, D), or a dense map as (C, h, w) from (C, h, w), (h, w, C) or (h * h, C)."""
    d = _float(array[0] if array.ndim in (3, 4) and len(array) == 1 else array, "descps")
    if d.ndim == 2 and len(d) == n:
        return d
    side = math.isqrt(len(d)) if d.ndim == 2 else 0
    if d.ndim == 2 and side and side * side == len(d):
        return d.reshape(side, side, -1).transpose(2, 0, 1)
    if d.ndim == 3 and d.shape[2] > max(d.shape[:2]):
        return d.transpose(2, 0, 1)
    if d.ndim == 3 and d.shape[0] > max(d.shape[1:]):
        return d
    raise DataError(f"descps: {array.shape} are neither the descriptors of {n} keypoints nor a dense map")


def _squeezed(array: np.ndarray, axes: int) -> np.ndarray:
    if array.ndim == axes + 1 and array.shape[0] == 1:
        array = array[0]
    if array.ndim != axes:
        raise DataError(f"{axes} axes were expected, got {array.shape}")
    return array


def _row(array: Any, n: int, name: str, default: np.ndarray) -> np.ndarray:
    if array is None:
        return default
    if not isinstance(array, np.ndarray) or array.size != n or array.dtype.kind not in "fbiu":
        raise DataError(f"{name}: {n} numbers were expected, got {_what(array)}")
    flat = native(array).reshape(n)
    return _float(flat, name) if flat.dtype.kind == "f" else flat


def _float(array: np.ndarray, name: str = "array") -> np.ndarray:
    """f16 or f32, finite."""
    if array.dtype.kind != "f":
        raise DataError(f"{name}: floats were expected, got {array.dtype}")
    array = native(array)
    with np.errstate(over="ignore"):
        array = array.astype(np.float32) if array.dtype == np.float64 else array
    if not np.isfinite(array).all():
        raise DataError(f"{name}: not finite")
    return array


def _pose(path: Path, stamp: Any, matrix: Any) -> Pose:
    """Camera in the world, from a (4, 4) matrix."""
    if type(stamp) is not int or not isinstance(matrix, np.ndarray) or matrix.dtype.kind != "f":
        raise MapFileError(
            f"{path}, entry {stamp!r:.40}: a stamp with a (4, 4) matrix was expected, got {_what(matrix)}"
        )
    with np.errstate(all="ignore"):  # what is not finite is not close
        T = native(matrix).astype(np.float64)
        rigid = T.shape == (4, 4) and np.allclose(T[:3, :3].T @ T[:3, :3], np.eye(3), atol=1e-3)
        rigid = rigid and np.linalg.det(T[:3, :3]) > 0 and np.isfinite(T[:3, 3]).all()
        if not rigid or not np.allclose(T[3], (0, 0, 0, 1)):
            raise MapFileError(f"{path}, entry {stamp}: no rigid transform")
    return Pose(T[:3, :3], T[:3, 3], POSE_FRAME_ID)


def _what(value: Any) -> str:
    return f"{value.dtype} {value.shape}" if isinstance(value, np.ndarray) else type(value).__name__
