"""Which of a file's tensors may be which of ours: by the words in their names, their types and their shapes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ..runtimes.base import TensorSpec

# Parts of names that people give to such tensors.
_WORDS = {
    "image": ("image", "img", "pixel", "picture", "input"),
    "max_keypoints": ("max", "top", "limit", "num"),
    "keypoints": ("keypoint", "kpt", "kp", "point", "pts", "coord"),
    "descriptors": ("desc", "feat", "map", "emb", "token"),
    "image_size": ("size", "wh", "shape", "resol"),
    "min_covisibility": ("covis", "thr"),
    "early_stop_decay": ("decay",),
    "scores": ("score", "conf", "prob"),
    "descriptor": ("desc", "global", "emb", "feat"),
    "matches0": ("match", "ind", "idx"),
    "mscores0": ("score", "conf", "prob"),
    "covisibility_score": ("covis", "overlap"),
    "stopped_after_layer": ("stop", "exit"),
    "layer_scores": ("layer",),
}
_SIDES = {"a": 0, "b": 1, "left": 0, "right": 1, "src": 0, "dst": 1, "query": 0, "ref": 1, "first": 0, "second": 1}


@dataclass(frozen=True)
class Guess:
    """One of our tensors may be one of the file's. ``sure``: the name says so too, and it is the only such one."""

    ours: str
    theirs: str
    sure: bool


def guesses(wanted: Iterable[str], specs: dict[str, TensorSpec]) -> list[Guess]:
    """The best guess for each of our names that anything fits; each tensor of the file is used once."""
    wanted, names = list(wanted), list(specs)
    sides = _sides(names)
    scored = []
    for i, ours in enumerate(wanted):
        kind, side = (ours[:-1], int(ours[-1])) if ours[-1] in "01" and f"{ours[:-1]}1" in wanted else (ours, None)
        for j, theirs in enumerate(names):
            shape = _fit(kind, specs[theirs])
            if not shape:
                continue
            word = any(w in theirs.lower() for w in _WORDS[kind])
            aside = 0 if side is None or sides[theirs] is None else 1 if sides[theirs] == side else -3
            sure = word and (side is None or aside == 1)
            scored.append(
                (10 * (theirs == ours and aside >= 0) + 4 * word + 2 * shape + aside, -i, -j, Guess(ours, theirs, sure))
            )
    found: dict[str, Guess] = {}
    for *_, guess in sorted(scored, key=lambda s: s[:3], reverse=True):
        if guess.ours not in found and guess.theirs not in {g.theirs for g in found.values()}:
            found[guess.ours] = guess
    return [found[ours] for ours in wanted if ours in found]


def _sides(names: list[str]) -> dict[str, int | None]:
    """Of which image each tensor is, by its name: 0 and 1 or 1 and 2 at its end, a and b, left and right ..."""
    parts = {name: re.findall(r"[a-z]+|\d+", name.lower()) for name in names}
    numbers = {p[-1] for p in parts.values() if p and p[-1].isdigit()}
    first = {frozenset("01"): 0, frozenset("12"): 1}.get(frozenset(numbers))
    if first is None:
        return {name: next((_SIDES[p] for p in reversed(told) if p in _SIDES), None) for name, told in parts.items()}
    return {name: int(p[-1]) - first if p and p[-1].isdigit() else None for name, p in parts.items()}


def _fit(kind: str, spec: TensorSpec) -> int:
    """0: it cannot be; 1: its type and shape allow it; 2: they speak for it."""
    floats, whole = spec.dtype.kind == "f", spec.dtype.kind in "iu"
    numbers = whole if kind in ("matches0", "stopped_after_layer", "max_keypoints") else floats
    if spec.shape is None or not numbers:
        return int(numbers)
    single = all(s == 1 for s in spec.shape)
    if kind in ("min_covisibility", "early_stop_decay", "max_keypoints", "covisibility_score", "stopped_after_layer"):
        return 2 * single
    if kind == "image":
        rank = len(spec.shape)
        channels = rank in (3, 4) and {1, 3} & {spec.shape[-3], spec.shape[-1]}
        return 2 if channels else int(rank == 4)
    if kind == "descriptors":
        shape = without_batch(spec.shape, 2)
        return 0 if len(shape) not in (2, 3) or shape[-1] == 2 else 2 if len(shape) == 3 or shape[-1] else 1
    if kind == "keypoints":
        shape = without_batch(spec.shape, 2)
        return {2: 2, None: 1}.get(shape[-1], 0) // (1 if shape[0] is None else 2) if len(shape) == 2 else 0
    shape = without_batch(spec.shape, 1)
    if len(shape) != 1 or single:
        return 0
    if kind == "image_size":
        return 2 * (shape == (2,))
    return 2 if (shape[0] is None) == (kind in ("matches0", "mscores0", "scores")) else 1


def without_batch(shape: tuple[int | None, ...], least: int) -> tuple[int | None, ...]:
    """A shape without a batch axis, of 1 or any length, where ``least`` axes or more are behind it."""
    if len(shape) > least and (shape[0] == 1 or (shape[0] is None and shape != (None,) * least)):
        return shape[1:]
    return shape
