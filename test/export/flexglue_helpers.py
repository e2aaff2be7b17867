"""The tiny FlexGlue on pictures that ship: pairs, their inputs, and what torch says of them."""

from __future__ import annotations

import numpy as np
import torch

from vslam_features.artifacts import golden
from vslam_features.export.descriptors import imagenet
from vslam_features.networks.flexglue import FLEXGLUE_TINY, FlexGlue, Matching

SEED = 0  # of random weights: stops after every layer, and no score within 1e-3 of a limit of the tests
DECAYS, THRESHOLDS = (0, 0.2, 0.5, 1), (0, 0.3, 0.6, 0.9)
EVERY = tuple(range(1, 9))
PAIRS = (("cup_0", "cup_1"), ("two-places_0", "two-places_1"), ("stars-dim_0", "room-wide_1"), ("cat_0", "cat_0"))
STEPS = imagenet(*FLEXGLUE_TINY.image_size)


def pictures() -> dict[str, np.ndarray]:
    """Name -> picture, of all that ship."""
    return {f"{pair.name}_{i}": image for pair in golden.pairs() for i, image in enumerate(pair.images)}


def feed(network: FlexGlue, images, points=None, counts=(120, 90), seed=0, **scalars) -> dict[str, np.ndarray]:
    """Inputs of the graph by name; keypoints (N, 2) of each image, or seeded ones."""
    rng = np.random.default_rng(seed)
    made = {"min_covisibility": np.array(0, np.float32)}
    for i, (image, count) in enumerate(zip(images, counts)):
        height, width = image.shape[:2]
        where = rng.uniform(0, [width - 1, height - 1], (count, 2)) if points is None else points[i]
        made[f"keypoints{i}"] = np.ascontiguousarray(where, np.float32)
        made[f"descriptors{i}"] = network.describe(torch.from_numpy(STEPS.apply(image))).numpy()
        made[f"image_size{i}"] = np.array([width, height], np.float32)
    return made | {name: np.array(value, np.float32) for name, value in scalars.items()}


def pairs(network: FlexGlue) -> list[dict[str, np.ndarray]]:
    """Inputs of ``PAIRS``; of a picture with itself the keypoints are the same, in another order and not all."""
    found, made = pictures(), []
    for seed, (a, b) in enumerate(PAIRS):
        pair = feed(network, (found[a], found[b]), counts=(260, 210), seed=seed)
        if a == b:
            pair["keypoints1"] = np.random.default_rng(seed).permutation(pair["keypoints0"])[:210]
        made.append(pair)
    return made


def exchanged(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same pair, the images the other way round."""
    other = {"0": "1", "1": "0"}
    return {name[:-1] + other[name[-1]] if name[-1] in other else name: value for name, value in inputs.items()}


def by_torch(network: FlexGlue, inputs: dict[str, np.ndarray], layers=()) -> Matching:
    """The reference."""
    tensors = {name: torch.from_numpy(value) for name, value in inputs.items() if value.ndim}
    scalars = {name: float(value) for name, value in inputs.items() if not value.ndim}
    return network.match(**tensors, **scalars, layers=layers)


def matched(matches0) -> set[tuple[int, int]]:
    """Pairs of indices."""
    return {(i, int(j)) for i, j in enumerate(matches0) if j >= 0}


def moved(image: np.ndarray, degrees: float = 4.0, share: float = 0.75):
    """Two overlapping views of a picture, and the function that takes pixels of the first to the second.

    The first is its top left part, the second one of the same size, turned and moved by an eighth and a tenth.
    """
    import cv2

    height, width = image.shape[:2]
    size = int(width * share), int(height * share)
    matrix = cv2.getRotationMatrix2D((width / 2, height / 2), degrees, 1.0)
    matrix[:, 2] -= (width // 8, height // 10)
    second = cv2.warpAffine(image, matrix, size, borderMode=cv2.BORDER_REFLECT)
    first = np.ascontiguousarray(image[: size[1], : size[0]])
    return (first, second), lambda points: points @ matrix[:, :2].T + matrix[:, 2]


def keypoints_of(views, forward, step: int = 17, seed: int = 0):
    """A grid in the first view and, shuffled, what of it is in the second: points of both, and true partner or -1."""
    height, width = views[0].shape[:2]
    x, y = np.meshgrid(np.arange(step // 2, width, step), np.arange(step // 2, height, step))
    first = np.stack((x.ravel(), y.ravel()), axis=1).astype(np.float64)
    second = forward(first)
    inside = np.flatnonzero(((second >= 0) & (second <= [width - 1, height - 1])).all(axis=1))
    order = np.random.default_rng(seed).permutation(inside)
    truth = np.full(len(first), -1)
    truth[order] = np.arange(len(order))
    return (first, second[order]), truth
