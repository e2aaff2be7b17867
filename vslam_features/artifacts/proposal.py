"""A card for a model file that has none: what can be told from its inputs and outputs, and what cannot."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import yaml

from ..runtimes.base import Session, TensorSpec
from .contract import MAPS, TENSORS
from .guesses import Guess, guesses, without_batch
from .layouts import KEYPOINTS
from .tensors import INPUTS, OPTIONAL

_OUTPUTS = {
    "features": TENSORS["features"],
    "global": TENSORS["global"],
    "matcher": (*TENSORS["matcher"], "covisibility_score", "stopped_after_layer", "layer_scores"),
}


def propose(path: Path, session: Session) -> str:
    """The text of a sidecar card (YAML), with a comment where something is uncertain or missing.

    Empty where the tensors are those of no role: then neither an image goes in nor two sets of keypoints.
    """
    role, kept = _role(session)
    if role is None:
        return ""
    inputs = guesses(INPUTS[role], session.inputs)
    lines = [
        f"role: {role}",
        f"name: {_text(re.sub('[^A-Za-z0-9._-]+', '-', path.stem).strip('-.') or 'model')}",
        "licence: LicenseRef-unknown  # the file does not say: look where you have it from",
        *_precision(path, session),
        *_bound("inputs", inputs, session.inputs, INPUTS[role].keys() - OPTIONAL - {g.ours for g in inputs}),
        *_bound("outputs", kept, session.outputs, _missing(role, kept)),
        *_layouts(role, inputs, kept, session),
        *(_of_matcher(inputs, kept) if role == "matcher" else _preprocessing(inputs, session)),
    ]
    return "\n".join(lines) + "\n"


def _role(session: Session) -> tuple[str | None, list[Guess]]:
    """What the file is, and its outputs."""
    names = {g.ours for g in guesses(INPUTS["matcher"], session.inputs)}
    if {"keypoints0", "keypoints1", "descriptors0", "descriptors1"} <= names:
        return "matcher", guesses(_OUTPUTS["matcher"], session.outputs)
    if "image" not in {g.ours for g in guesses(INPUTS["features"], session.inputs)}:
        return None, []
    points = guesses(_OUTPUTS["features"], session.outputs)
    if "keypoints" in {g.ours for g in points}:
        return "features", points
    maps = [g for g in guesses(MAPS, session.outputs) if _is_map(session.outputs[g.theirs])]
    return ("features", maps) if maps else ("global", guesses(_OUTPUTS["global"], session.outputs))


def _is_map(spec: TensorSpec) -> bool:
    return spec.shape is not None and (len(without_batch(spec.shape, 2)) == 3 or _tokens(spec))


def _tokens(spec: TensorSpec) -> bool:
    """Whether a tensor may be the cells of a map in a row: so many and no other number."""
    shape = without_batch(spec.shape, 2)
    return len(shape) == 2 and None not in shape and shape[0] > shape[1] // 4


def _missing(role: str, found: list[Guess]) -> list[str]:
    names = {g.ours for g in found}
    wanted = MAPS if role == "features" and "keypoints" not in names else TENSORS[role]
    return [n for n in wanted if n not in names]


def _precision(path: Path, session: Session) -> list[str]:
    half = any(s.dtype == np.float16 for s in (*session.inputs.values(), *session.outputs.values()))
    if half or re.search("fp16|float16|half", path.stem.lower()):
        return [f"precision: fp16  # by {'the types of its tensors' if half else 'the name of the file'}"]
    return ["precision: fp32  # uncertain: the weights inside may be of another"]


def _bound(kind: str, found: list[Guess], specs: dict[str, TensorSpec], missing: Iterable[str]) -> list[str]:
    """The field ``inputs`` or ``outputs``, and comments on what is in neither."""
    lines = [f"{kind}:"] if found else []
    for g in found:
        unsure = "" if g.sure or g.ours == g.theirs else "; uncertain: by its type, shape and place"
        lines.append(f"  {g.ours}: {_text(g.theirs)}  # {told(specs[g.theirs])}{unsure}")
    lines += [f"  # nothing fits our {name}" for name in sorted(missing)]
    others = [f"{name!r} ({told(spec)})" for name, spec in specs.items() if name not in {g.theirs for g in found}]
    if others:
        meaning = "which the file cannot be run without" if kind == "inputs" else "which are not used"
        lines.append(f"  # none of ours, {meaning}: {', '.join(others)}")
    return lines


def _layouts(role: str, inputs: list[Guess], outputs: list[Guess], session: Session) -> list[str]:
    lines = []
    for g, specs in [(g, session.inputs) for g in inputs] + [(g, session.outputs) for g in outputs]:
        shape = specs[g.theirs].shape
        if g.ours == "image" and shape and shape[-1] in (1, 3) and shape[-3] not in (1, 3):
            lines.append("  image: hwc")
        sparse = role == "features" and "keypoints" in {o.ours for o in outputs}
        if g.ours.startswith("descriptors") and shape and not sparse:
            core = without_batch(shape, 2)
            if len(core) == 3 and None not in core:
                square = [core[1] == core[2], core[0] == core[1]]  # of chw, of hwc
                hwc = square == [False, True] or (square == [False, False] and core[2] > core[0])
                unsure = "" if any(square) and not all(square) else "  # uncertain: which axis are the channels?"
                lines.append(f"  {g.ours}: {'hwc' if hwc else 'chw'}{unsure}")
            elif _tokens(specs[g.theirs]):
                lines.append(f"  {g.ours}: tokens  # uncertain: {core[0]} cells of a map, or descriptors of keypoints?")
    return ["layouts:", *lines] if lines else []


def _of_matcher(inputs: list[Guess], outputs: list[Guess]) -> list[str]:
    sized = {"image_size0", "image_size1"} <= {g.ours for g in inputs}
    guess = "pixels" if sized else "signed"
    why = "" if sized else "it takes no size of the images, so that pixels of theirs are unlikely; "
    return [
        f"keypoints: {guess}  # uncertain, the file does not say: {why}one of {', '.join(KEYPOINTS)}",
        '# features_model: ""  # the name in the card of the features that it matches, which verify it; without: any',
        "# preprocessing: {width: 512, height: 512, kernel: antialias}  # of those features, for model_pixels",
        *_stops({g.ours for g in (*inputs, *outputs)}),
    ]


def _stops(names: set[str]) -> list[str]:
    """What a matcher that stops early is not asked to tell."""
    if not names & {"early_stop_decay", "stopped_after_layer", "layer_scores"}:
        return []
    return [
        "# layers: 9  # missing, the file does not say: how many it has",
        "# early_stop_layers: [2, 4, 6, 8]  # missing: after which it may stop; without both no stop can be checked",
    ]


def _preprocessing(inputs: list[Guess], session: Session) -> list[str]:
    shape = next((session.inputs[g.theirs].shape for g in inputs if g.ours == "image"), None)
    lines, channels, sides = ["preprocessing:"], None, (None, None)
    if shape is not None:
        last = shape[-1] in (1, 3) and shape[-3] not in (1, 3)
        channels, sides = (shape[-1], shape[-3:-1]) if last else (shape[-3], shape[-2:])
    lines.append(f"  channels: {({1: 'grey', 3: 'rgb'}).get(channels, 'any')}")
    if None not in sides:
        lines += [f"  width: {sides[1]}", f"  height: {sides[0]}"]
        lines.append("  kernel: antialias  # uncertain: the one that it was trained with")
    if channels in (1, 3):
        lines.append("  # mean and std, a number a channel: where it was not trained on images in [0, 1]")
    return lines


def told(spec: TensorSpec) -> str:
    """Type and shape, as ``models info`` shows them."""
    shape = "?" if spec.shape is None else "x".join("N" if n is None else str(n) for n in spec.shape) or "scalar"
    return f"{spec.dtype} {shape}"


def _text(value: str) -> str:
    """As YAML reads it back: in quotes where it could be anything but a text."""
    plain = re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]*", value) and yaml.safe_load(value) == value
    return value if plain else json.dumps(value)
