"""Images or keyframes that are matched in pairs, their features, and what is known of their overlap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from ..camera import Camera
from ..config import Config
from ..errors import ConfigError, DataError
from ..features.base import store_descriptors
from ..maps.reader import MapReader
from ..types import Features, Frame
from .gain import Overlap
from .image_source import ImageSource
from .loop_truth import LoopTruth
from .open_source import open_source

_CACHED = 256


@dataclass(frozen=True)
class Views:
    """Images with features, in order.

    Args:
        names: one each. places: in what was given, unreadable images counted; ``total``: how many there are.
        scenes: number of the folder that each is of.
        get: features as a keyframe keeps them, and camera, of the view of an index.
        notes: what was left out.
    """

    names: tuple[str, ...]
    places: tuple[int, ...]
    total: int
    scenes: tuple[int, ...]
    get: Callable[[int], tuple[Features, Camera | None]]
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.names)


def views_of_images(
    folders: Sequence[Path],
    config: Config,
    extract: Callable[[Frame], Features],
    camera: Camera | tuple | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Views:
    """Features of all images of the folders, each in natural order.

    Raises:
        BagError: a folder has no images. ConfigError: it is there twice, or holds a recording.
    """
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise ConfigError(f"--images {' '.join(map(str, folders))}: a folder is there twice; name each once")
    sources = [open_source(folder, config, camera=camera) for folder in folders]
    for source in sources:
        if not isinstance(source, ImageSource):
            raise ConfigError(f"--images {source.path}: is a recording, expected a folder of images; make a map of it")
    labels = [source.name for source in sources]
    if len(set(labels)) < len(labels):
        labels = [str(source.path) for source in sources]
    total, found, notes = sum(map(len, sources)), [], []
    for scene, (label, source) in enumerate(zip(labels, sources)):
        before = sum(map(len, sources[:scene]))
        for frame in source:
            name = source.files[source.position].stem
            features = store_descriptors(extract(frame), config.features.fp16)
            place = before + source.position
            found.append((f"{label}/{name}" if len(sources) > 1 else name, place, scene, (features, frame.camera)))
            progress(place + 1, total)
        notes += [
            f"{source.path}: {source.reason}: {text}" for texts in source.skipped.examples.values() for text in texts
        ]
    if len(found) < 2:
        raise ConfigError(f"--images {' '.join(map(str, folders))}: {len(found)} readable images; pairs need two")
    names, places, scenes, kept = zip(*found)
    return Views(_distinct(names, sources, places), places, total, scenes, kept.__getitem__, tuple(notes))


def views_of_map(reader: MapReader) -> Views:
    """Keyframes of a map, named by their ids. Raises ConfigError where there are fewer than two."""
    count = len(reader.headers())
    if count < 2:
        raise ConfigError(f"--map {reader.path}: {count} keyframes; pairs need two")

    @lru_cache(maxsize=_CACHED)
    def get(kf_id: int) -> tuple[Features, Camera | None]:
        keyframe = reader.keyframe(kf_id)
        return keyframe.features, keyframe.camera

    ids = tuple(range(count))
    return Views(tuple(map(str, ids)), ids, count, (0,) * count, get)


def descriptor_length(features: Features) -> int:
    """D, or of a dense map C."""
    return features.descriptors.shape[1 if features.descriptors.ndim == 2 else 0]


def choose_pairs(count: int, most: int = 0, seed: int = 0) -> np.ndarray:
    """(P, 2) int64, later and earlier of ``count`` views: all pairs, or ``most`` of them.

    Those come evenly from the list of all pairs: one at random of each of ``most`` parts.
    """
    total = count * (count - 1) // 2
    if most and most < total:
        edges = np.arange(most + 1) * total // most  # no part is empty
        which = np.random.default_rng(seed).integers(edges[:-1], edges[1:])
    else:
        which = np.arange(total)
    later = np.arange(count, dtype=np.int64)
    first = later * (later - 1) // 2  # pair of each view with the first one
    row = np.searchsorted(first, which, side="right") - 1
    return np.stack([row, which - first[row]], axis=1)


def overlaps(views: Views, pairs: np.ndarray, truth: Path | None = None, scenes: bool = False) -> list[Overlap]:
    """What is known of each pair.

    Args:
        truth: loop matrix of all images, see :meth:`LoopTruth.load`; either of its triangles may be filled.
        scenes: no image of a folder overlaps one of another folder.
    Raises:
        DataError: the matrix cannot be read, is of other images, or marks images of two scenes.
    """
    known = np.full(len(pairs), Overlap.UNKNOWN, object)
    scene, place = np.array(views.scenes), np.array(views.places)
    if scenes:
        known[scene[pairs[:, 0]] != scene[pairs[:, 1]]] = Overlap.APART
    if truth is not None:
        matrix = LoopTruth.load(truth).revisit
        if len(matrix) != views.total:
            raise DataError(
                f"--truth {truth}: is of {len(matrix)} images, there are {views.total}; give the matrix whose rows "
                "and columns are these, in order"
            )
        marked = matrix[place[pairs[:, 0]], place[pairs[:, 1]]]
        if (wrong := np.flatnonzero(marked & (known == Overlap.APART))).size:
            names = " and ".join(views.names[i] for i in pairs[wrong[0]])
            raise DataError(
                f"--truth {truth}: marks {names}, which --scenes says cannot overlap; leave out one of them"
            )
        known[marked] = Overlap.MARKED
    return list(known)


def _distinct(names: Sequence[str], sources: Sequence[ImageSource], places: Sequence[int]) -> tuple[str, ...]:
    """The names; with their suffixes where ``a.png`` and ``a.jpg`` would be one."""
    if len(set(names)) == len(names):
        return tuple(names)
    files = [file for source in sources for file in source.files]
    return tuple(f"{name}{files[place].suffix}" for name, place in zip(names, places))
