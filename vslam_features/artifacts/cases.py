"""Inputs that the parity gate runs a model on, by our tensor names."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import DataError, ImageError, ModelError
from ..images import read_image
from . import golden, incidents, saved_pairs
from .card import ModelCard
from .npz import read_arrays

logger = logging.getLogger(__name__)

MAX_KEYPOINTS = 256
_IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".pgm", ".ppm")

Tensors = dict[str, np.ndarray]
Extract = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class Case:
    """A pair. ``runs``: inputs of each run (one a view; of matchers one); ``expected``: their outputs, where known."""

    name: str
    runs: tuple[Tensors, ...]
    expected: tuple[Tensors, ...] | None = None


def shipped_cases(card: ModelCard, dim: int = 64) -> list[Case]:
    """The pairs that ship, with golden outputs where these belong to the model's weights.

    Args:
        dim: length of the descriptors that a matcher takes, for a matcher of unknown features: it gets seeded points
            of a 3-D scene in two views.
    """
    found = golden.golden_for(card)
    if card.role == "matcher":
        source = (found.meta.get("features") if found else card.features_model) or ""
        inputs = _golden_features(source) if source else {}
        if not inputs:
            return [_seeded_matching(seed, dim) for seed in range(8)]
        if found is None:
            return [Case(name, (tensors,)) for name, tensors in inputs.items()]
        return [Case(name, (inputs[name],), outputs) for name, outputs in found.outputs.items()]
    pictures = {p.name: p.images for p in golden.pairs()}
    if found is None:
        return [Case(name, _image_runs(card, images, MAX_KEYPOINTS)) for name, images in pictures.items()]
    count = int(found.meta.get("max_keypoints", MAX_KEYPOINTS))
    return [Case(name, _image_runs(card, pictures[name], count), out) for name, out in found.outputs.items()]


def image_cases(
    card: ModelCard,
    paths: Sequence[Path],
    extract: Extract | None = None,
    max_pairs: int = 8,
    max_keypoints: int = 1024,
) -> list[Case]:
    """Pairs of a user's pictures: of each file with the next, at most ``max_pairs``, spread over the list.

    Args:
        paths: image files, or folders of them (in the order of their names).
        extract: for matchers: uint8 image -> keypoints (N, 2) f32 and descriptors (N, D) f32.
    Raises:
        ImageError: a file is no image. DataError: fewer than two, or a matcher without ``extract``.
    """
    files = picture_files(paths)
    if card.role == "matcher" and extract is None:
        raise DataError(f"{card.name}: a matcher needs features of the pictures, and none can be extracted")
    first = sorted({round(i) for i in np.linspace(0, len(files) - 2, min(max_pairs, len(files) - 1))})
    cases = []
    for i in first:
        images = tuple(read_image(f) for f in files[i : i + 2])
        name = f"{files[i].stem} {files[i + 1].stem}"
        if card.role == "matcher":
            cases.append(Case(name, (matching([(*extract(image), image.shape[1::-1]) for image in images]),)))
        else:
            cases.append(Case(name, _image_runs(card, images, max_keypoints)))
    return cases


def saved_cases(paths: Sequence[Path], card: ModelCard | None = None) -> list[Case]:
    """Saved inputs: incidents, collected pairs, other ``.npz`` files of inputs by name, or folders of all these.

    Args:
        card: of the model that is to take them.
    Raises:
        DataError: a file cannot be read, or is a pair of features that the model does not match, naming it; or there
            is none.
    """
    cases = []
    for file in saved_files(paths):
        pair = saved_pairs.parse(file, read_arrays(file))
        if pair is not None and card is not None:
            pair.require_taken(card, str(file))
        cases.append(Case(file.stem, (incidents.load_inputs(file) if pair is None else pair.inputs,)))
    return cases


def saved_files(paths: Sequence[Path]) -> list[Path]:
    """The ``.npz`` files that are named, and those in folders by their names. Raises DataError where there is none."""
    files = [f for path in map(Path, paths) for f in (sorted(path.glob("*.npz")) if path.is_dir() else [path])]
    if not files:
        raise DataError(f"--inputs: no .npz files in {[str(p) for p in paths]}")
    return files


def picture_files(paths: Sequence[Path]) -> list[Path]:
    """The pictures that are named, and those of folders by their names.

    Raises ImageError where a path is neither, DataError where they are fewer than two.
    """
    files = [f for path in map(Path, paths) for f in _image_files(path)]
    if len(files) < 2:
        raise DataError(f"--images: expected two pictures at least, got {len(files)} in {[str(p) for p in paths]}")
    return files


def _image_files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(f for f in path.iterdir() if f.suffix.lower() in _IMAGES)
    if not path.is_file():
        raise ImageError(f"{path}: no such picture or folder")
    return [path]


def _image_runs(card: ModelCard, images, max_keypoints: int) -> tuple[Tensors, ...]:
    extra = {"max_keypoints": np.array([max_keypoints], np.int64)} if card.role == "features" else {}
    return tuple({"image": card.preprocessing.apply(image), **extra} for image in images)


def matching(sides) -> Tensors:
    """A matcher's inputs of (keypoints, descriptors, (width, height)) of both images."""
    inputs = {}
    for i, (keypoints, descriptors, size) in enumerate(sides):
        inputs[f"keypoints{i}"] = np.ascontiguousarray(keypoints, np.float32)
        inputs[f"descriptors{i}"] = np.ascontiguousarray(descriptors, np.float32)
        inputs[f"image_size{i}"] = np.array(size, np.float32)
    return inputs


def _golden_features(name: str) -> dict[str, Tensors]:
    """Pair -> a matcher's inputs, of the true features of a model that ship; empty where none do."""
    try:
        found = golden.load(name)
    except ModelError as error:
        logger.warning("%s", error)
        return {}
    if found is None:
        return {}
    sizes = {p.name: [image.shape[1::-1] for image in p.images] for p in golden.pairs()}
    return {
        pair: matching([(view["keypoints"], view["descriptors"], size) for view, size in zip(views, sizes[pair])])
        for pair, views in found.outputs.items()
    }


def _seeded_matching(seed: int, dim: int) -> Case:
    """Points of a 3-D scene in two views, with noisy unit descriptors and a third of distractors.

    From pair to pair the views move apart; M and N differ.
    """
    rng = np.random.default_rng([20, seed])
    width, height, focal, n = 640, 480, 400.0, 150
    points = rng.uniform((-3, -2, 4), (3, 2, 9), (n, 3))
    angle, base = np.radians(2.0 * seed), np.array([0.12 * seed, 0.02, 0.05 * seed])
    turn = np.array([[np.cos(angle), 0, np.sin(angle)], [0, 1, 0], [-np.sin(angle), 0, np.cos(angle)]])
    true, sides = rng.normal(size=(n, dim)), []
    for local, extra in ((points, 40), (points @ turn.T + base, 61)):
        pixels = focal * local[:, :2] / local[:, 2:] + [(width - 1) / 2, (height - 1) / 2]
        seen = np.flatnonzero(((pixels > 0) & (pixels < [width - 1, height - 1])).all(axis=1))
        keypoints = np.vstack([pixels[seen], rng.uniform(0, [width - 1, height - 1], (extra, 2))])
        descriptors = np.vstack([true[seen] + 0.2 * rng.normal(size=(len(seen), dim)), rng.normal(size=(extra, dim))])
        descriptors /= np.linalg.norm(descriptors, axis=1, keepdims=True)
        order = rng.permutation(len(keypoints))
        sides.append((keypoints[order], descriptors[order].astype(np.float16), (width, height)))
    return Case(f"seeded-{seed}", (matching(sides),))
