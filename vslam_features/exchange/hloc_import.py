"""Makes a map of hloc's files. Their layout: :mod:`.hloc` and ``docs/map_exchange.md``."""

from __future__ import annotations

import contextlib
import hashlib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..config import GeometryConfig
from ..errors import DataError, MapFileError
from ..geometry import Verifier
from ..half import exact_half
from ..types import Features, Keyframe, MapEntry, MapModels, Matches, ModelIdentity, PairKind, PairResult
from .hdf5 import Hdf5File, open_hdf5
from .names import Progress, imported_model
from .new_map import Alike, new_map, unit_length

PLACE = "global_descriptor"
SECOND_NS = 1_000_000_000
"""Images of hloc have no stamps: the map counts seconds."""


def import_hloc(
    features: Path,
    target: Path,
    *,
    global_descriptors: Path | None = None,
    matches: Path | None = None,
    images: Sequence[str] | None = None,
    model: ModelIdentity | None = None,
    global_model: ModelIdentity | None = None,
    like: Keyframe | None = None,
    progress: Progress | None = None,
    overwrite: bool = False,
) -> int:
    """Make a map of hloc's files and return the number of keyframes. Descriptors become fp16 where that is exact.

    A keyframe's ``frame_id`` is the name of its image, its stamp its place in the order in seconds.

    Args:
        features, global_descriptors, matches: HDF5 files. Matches are verified (uncalibrated), as hloc's are not. An
            image may lack a global descriptor, as a keyframe may.
        images: names of those to take, in the order of the map; all, by name, where none are given.
        model, global_model: identities of what computed them. Without one the map gets an identity of its own, which
            nothing can be matched with.
        like: a keyframe of those models, whose descriptors have the shape that these must have.
    Raises:
        MapFileError: something is missing, damaged or not what hloc writes; the message names the file and the group.
        MapError: the target is there (and not ``overwrite``) or cannot be written. No target is left in either case.
        PluginError: h5py is not installed.
    """
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(open_hdf5(Path(features)))
        places = stack.enter_context(open_hdf5(Path(global_descriptors))) if global_descriptors is not None else None
        names = _names(source, images)
        if places is not None and not any(places.has(name, PLACE) for name in names):
            raise MapFileError(
                f"{places.path}: no group {names[0]!r} with a dataset {PLACE!r}, nor of another image: it is of other "
                "images; name the right file, or leave it out"
            )
        first = _features(source, names[0], ModelIdentity("features", "", "", ""))
        digest = hashlib.sha256(first.keypoints.tobytes() + first.descriptors.tobytes()).hexdigest()
        models = MapModels(
            model or imported_model("features", Path(features).stem, digest),
            (global_model or imported_model("global", places.path.stem, digest)) if places is not None else None,
        )
        pairs = _Pairs(stack.enter_context(open_hdf5(Path(matches))), names) if matches is not None else None
        writer = stack.enter_context(new_map(Path(target), models, overwrite=overwrite))
        keypoints: list[np.ndarray] = []
        alike = Alike(like)
        for kf_id, name in enumerate(names):
            found = _features(source, name, models.features)
            place = unit_length(places.array(name, PLACE, "f", 1)) if places and places.has(name, PLACE) else None
            keyframe = Keyframe(kf_id, kf_id * SECOND_NS, name, found, global_descriptor=place)
            at = f", group {name}"
            alike.require(keyframe, f"{source.path}{at}", f"{places.path if places else ''}{at}")
            keypoints.append(found.keypoints)
            writer.append(MapEntry(keyframe, pairs.of(kf_id, keypoints) if pairs is not None else ()))
            if progress is not None:
                progress(kf_id + 1, len(names))
        return len(names)


def _names(source: Hdf5File, images: Sequence[str] | None) -> list[str]:
    there = source.groups_with("keypoints")
    if images is None:
        if not there:
            raise MapFileError(f"{source.path}: no group with a dataset 'keypoints': no features of hloc")
        return there
    missing = sorted(set(images) - set(there))
    if missing:
        raise MapFileError(
            f"{source.path}: no group {missing[0]!r} ({len(missing)} of {len(images)} images are missing)"
        )
    if not images or len(set(images)) != len(images):
        raise MapFileError(f"{source.path}: the list of images is empty, or names one twice")
    return list(images)


def _features(source: Hdf5File, name: str, model: ModelIdentity) -> Features:
    where = f"{source.path}, group {name}"
    keypoints = source.array(name, "keypoints", "f", 2).astype(np.float32)  # hloc stores them as fp16 too
    n = len(keypoints)
    descriptors = source.array(name, "descriptors", "fu", 2).T
    scores = source.array(name, "scores", "f", 1) if source.has(name, "scores") else np.ones(n)
    size = source.array(name, "image_size", "iuf", 1)
    if size.shape != (2,) or not ((size >= 1) & (size < 1 << 20) & (size == np.rint(size))).all():
        raise MapFileError(f"{where}: image_size: (width, height) was expected, got {size.tolist()[:4]}")
    if descriptors.dtype.kind == "u" and descriptors.dtype != np.uint8:
        raise MapFileError(f"{where}: descriptors: floats or uint8 were expected, got {descriptors.dtype}")
    if len(descriptors) != n:
        raise MapFileError(f"{where}: descriptors: (D, {n}) was expected, got {descriptors.T.shape}")
    try:
        return Features(
            keypoints,
            scores.astype(np.float32),
            np.ascontiguousarray(exact_half(descriptors)),
            (int(size[0]), int(size[1])),
            model,
        )
    except DataError as error:
        raise MapFileError(f"{where}: {error}") from error


class _Pairs:
    """The pairs of a file of matches, by the later of the two images."""

    def __init__(self, file: Hdf5File, names: list[str]):
        self._file, self._verifier = file, Verifier(GeometryConfig())
        ids = {name.replace("/", "-"): kf_id for kf_id, name in enumerate(names)}
        if len(ids) < len(names):
            raise MapFileError(
                f"{file.path}: names of images that differ in '/' and '-' only cannot be told apart in it"
            )
        self._of: dict[int, list[tuple[int, int, str]]] = defaultdict(list)
        for group in file.groups_with("matches0"):
            found = _split(group, ids)
            if found is not None and found[0] != found[1]:  # of images that are not taken, else
                self._of[max(found)].append((*found, group))

    def of(self, kf_id: int, keypoints: list[np.ndarray]) -> tuple[PairResult, ...]:
        """Pairs of an image with those before it, whose keypoints are given."""
        return tuple(self._pair(*pair, keypoints) for pair in sorted(self._of[kf_id]))

    def _pair(self, id0: int, id1: int, group: str, keypoints: list[np.ndarray]) -> PairResult:
        where = f"{self._file.path}, group {group}"
        matches0 = self._file.array(group, "matches0", "iu", 1).astype(np.int64)
        scores0 = self._file.array(group, "matching_scores0", "f", 1).astype(np.float32)
        n0, n1 = len(keypoints[id0]), len(keypoints[id1])
        if matches0.shape != (n0,) or scores0.shape != (n0,):
            raise MapFileError(
                f"{where}: ({n0},) were expected, got matches0 {matches0.shape}, matching_scores0 {scores0.shape}"
            )
        if ((matches0 < -1) | (matches0 >= n1)).any():
            raise MapFileError(f"{where}: matches0: a partner that is not among {n1} keypoints")
        index = np.flatnonzero(matches0 >= 0)
        pairs = np.column_stack([index, matches0[index]]).astype(np.int32)
        if id0 < id1:
            pairs = np.ascontiguousarray(pairs[:, ::-1])
        kf_id, ref = max(id0, id1), min(id0, id1)
        found = self._verifier.verify(keypoints[kf_id][pairs[:, 0]], keypoints[ref][pairs[:, 1]], None, None)
        scores = np.clip(scores0[index], 0, 1)
        matches = Matches(pairs, scores, found.inliers, found.status, model=found.model, runtime="hloc")
        kind = PairKind.TRACK if kf_id == ref + 1 else PairKind.LOOP
        return PairResult(kind, kf_id, ref, ref * SECOND_NS, matches)


def _split(group: str, ids: dict[str, int]) -> tuple[int, int] | None:
    """Ids of the images of a pair's group, also in hloc's older form, which joins the names by '_'."""
    ends = [i for i, c in enumerate(group) if c in "/_"]
    for end in ends:
        if group[:end] in ids and group[end + 1 :] in ids:
            return ids[group[:end]], ids[group[end + 1 :]]
    return None
