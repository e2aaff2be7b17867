"""Inputs of the parity gate for engines, which are compiled for ranges of shapes and keep memory between runs.

The pairs that ship are small and of one size. An engine may be right on 256
keypoints and wrong on 2048, for its kernels were chosen for another size; and
right until its buffers have grown, where a recorded graph still points to the
old ones, or launches with the inputs that it was recorded with. So the largest
inputs that it takes are run as well, and then the first pair again, so often
that its graph is recorded and launched, once with other values. And the last
pair, turned: golden outputs know no covisibility, a reference does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np

from ..runtimes.engine_file import read_header
from .card import ModelCard
from .cases import Case, Tensors, matching

LARGEST = "largest"
_FEWER = 0.8  # rows of the second image: equal numbers would hide an engine that takes one for the other
_ROLL = 17
_CELLS = 64  # of a map on each side at most: attention over more than 4096 takes a CPU gigabytes


def largest_inputs(path: Path, card: ModelCard) -> dict[str, list[int]]:
    """The largest shape of an engine's inputs that vary (of ``max_keypoints`` its value), by our tensor names.

    Raises ModelFileError where the file is no engine.
    """
    ours = {theirs: name for name, theirs in card.inputs.items()}
    return {ours.get(name, name): shapes[-1] for name, shapes in read_header(path).facts.profiles.items()}


def engine_cases(card: ModelCard, shipped: Sequence[Case], largest: Mapping[str, Sequence[int]]) -> list[Case]:
    """Cases to run after those that ship: the largest inputs, the first pair again and turned, the last one turned.

    Args:
        shipped: of ``card``.
        largest: shape of the largest input by our tensor name (of ``max_keypoints`` its value). One that is not named
            does not vary. What is no larger than in ``shipped`` makes no case.
    """
    if not shipped:
        return []
    kind = _matching if card.role == "matcher" else _pictures
    case = kind(shipped, largest, card)
    first = shipped[0]
    turned = [Case(f"{c.name} turned", tuple(map(_turned, c.runs))) for c in (first, shipped[-1])]
    again = [replace(first, name=f"{first.name} again"), turned[0], replace(first, name=f"{first.name} once more")]
    return [*([case] if case else []), *again, turned[1]]


def _turned(inputs: Tensors) -> Tensors:
    """Inputs of the same shapes that have other outputs: a mirrored picture, or keypoints in another order."""
    if "image" in inputs:
        return {**inputs, "image": np.ascontiguousarray(inputs["image"][..., ::-1])}
    rows = [n for n in ("keypoints0", "descriptors0") if inputs[n].ndim == 2]
    return {**inputs, **{n: np.roll(inputs[n], 1, axis=0) for n in rows}}


def _matching(shipped: Sequence[Case], largest: Mapping[str, Sequence[int]], card: ModelCard) -> Case | None:
    """Features of all pairs as those of one, at most so many as the engine takes; of maps more points on one pair."""
    most = [max(largest.get(f"keypoints{i}", (0,))) for i in (0, 1)]
    pairs = [case.runs[0] for case in shipped]
    if any(not m or m <= len(pairs[0][f"keypoints{i}"]) for i, m in enumerate(most)):
        return None
    most[1] = int(most[1] * _FEWER)
    dense = pairs[0]["descriptors0"].ndim == 3
    if dense:
        names = [f"descriptors{i}" for i in (0, 1)]
        maps = [() if card.layouts.get(n, "chw") != "chw" else largest.get(n, ()) for n in names]
        sides = [_points(pairs[0], i, m, maps[i]) for i, m in enumerate(most)]
    else:
        sides = [_rows(pairs, i, m) for i, m in enumerate(most)]
    # What a pair has besides, such as where it may stop, goes for all of them.
    return Case(LARGEST, ({**pairs[0], **matching(sides)},))


def _rows(pairs: Sequence[Tensors], side: int, most: int):
    """Keypoints, descriptors and size of a picture that shows what all pairs show, as often as it takes.

    At each repetition descriptors are rolled, on both sides alike: they are as similar to each other as they were, and
    unlike those before.
    """
    keypoints, descriptors = (np.concatenate([p[f"{n}{side}"] for p in pairs]) for n in ("keypoints", "descriptors"))
    times = range(-(-most // len(keypoints)))
    rolled = np.concatenate([np.roll(descriptors, _ROLL * i, axis=1) for i in times])
    size = np.max([p[f"image_size{side}"] for p in pairs], axis=0)
    return np.tile(keypoints, (len(times), 1))[:most], rolled[:most], size


def _points(pair: Tensors, side: int, most: int, largest: Sequence[int]):
    """Points all over the picture of a pair, and its map, enlarged where the engine takes larger ones."""
    size, values = pair[f"image_size{side}"], pair[f"descriptors{side}"]
    points = np.random.default_rng([70, side]).uniform(0, size - 1, (most, 2))
    if len(largest) > 2 and largest[-3] == len(values):
        height, width = (max(n, min(m, _CELLS)) for n, m in zip(values.shape[1:], largest[-2:]))
        values = np.stack([cv2.resize(v, (width, height), interpolation=cv2.INTER_LINEAR) for v in values])
    return points, values, size


def _pictures(shipped: Sequence[Case], largest: Mapping[str, Sequence[int]], card: ModelCard) -> Case | None:
    """The pictures of the first pair, enlarged."""
    case = shipped[0]
    image, runs = largest.get("image", ()), []
    most = tuple(image[-3:-1] if card.layouts.get("image") == "hwc" else image[-2:])
    for inputs in case.runs:
        height, width = inputs["image"].shape[-2:]
        if len(image) > 2 and (most[0] > height or most[1] > width):
            big = [cv2.resize(p, most[::-1], interpolation=cv2.INTER_LINEAR) for p in inputs["image"][0]]
            inputs = {**inputs, "image": np.stack(big)[None].astype(np.float32)}
        if "max_keypoints" in inputs and max(largest.get("max_keypoints", (0,))) > inputs["max_keypoints"].max():
            inputs = {**inputs, "max_keypoints": np.array([max(largest["max_keypoints"])], np.int64)}
        runs.append(inputs)
    changed = any(new is not old for new, old in zip(runs, case.runs))
    return Case(LARGEST, tuple(runs)) if changed else None
