"""A tiny matcher that stops early, its plain twin, and pictures of several scenes for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import onnx
import onnx_ir as ir
import spox.opset.ai.onnx.v18 as op
from helpers import image
from model_helpers import DIM, build, card, save, tiny_config
from spox import Tensor, argument

from vslam_features.artifacts.card import ModelCard
from vslam_features.config import Config
from vslam_features.graph.early_stop import add_early_stop

LAYERS, CHECKED = 5, (2, 4)
STOPS = replace(card("matcher", "tiny-stop", features_model="tiny-features"), layers=LAYERS, early_stop_layers=CHECKED)
PLAIN = replace(STOPS, name="tiny-plain", early_stop_layers=())
SCORES = {layer: f"score_{layer}" for layer in range(1, LAYERS + 1)}
_LEAST = 0.9  # cosine


def layer_scores(descriptors0: np.ndarray, descriptors1: np.ndarray) -> list[float]:
    """Of each layer: the share of the keypoints seen so far that look like some keypoint of the other image.

    Layer k of L sees the first k / L of them.
    """
    alike = (descriptors0 @ descriptors1.T).max(axis=1) > _LEAST
    ends = [len(alike) * layer // LAYERS for layer in SCORES]
    return [alike[:end].sum() / max(end, 1) for end in ends]


def layered_model() -> onnx.ModelProto:
    """A matcher of mutual nearest neighbours with the above scores as outputs; each layer compares its keypoints."""
    inputs = {}
    for side, rows in enumerate("MN"):
        inputs[f"keypoints{side}"] = argument(Tensor(np.float32, (rows, 2)))
        inputs[f"descriptors{side}"] = argument(Tensor(np.float32, (rows, DIM)))
        inputs[f"image_size{side}"] = argument(Tensor(np.float32, (2,)))
    d0, other = inputs["descriptors0"], op.transpose(inputs["descriptors1"], perm=[1, 0])
    count, least = op.shape(d0, start=0, end=1), op.const(np.float32(_LEAST))
    seen, start, parts, outputs = op.const(np.float32(0)), op.const([0]), [], {}
    for layer, name in SCORES.items():
        end = op.div(op.mul(count, op.const([layer])), op.const([LAYERS]))
        cosine = op.matmul(op.slice(d0, start, end, op.const([0])), other)
        parts.append(cosine)
        alike = op.cast(op.greater(op.reduce_max(cosine, op.const([1]), keepdims=0), least), to=np.float32)
        seen = op.add(seen, op.reduce_sum(alike, keepdims=0))
        outputs[name] = op.div(seen, op.squeeze(op.cast(op.max([end, op.const([1])]), to=np.float32)))
        start = end
    cosine = op.concat(parts, axis=0)
    forth, back = (op.arg_max(cosine, axis=axis, keepdims=0) for axis in (1, 0))
    best = op.reduce_max(cosine, op.const([1]), keepdims=0)
    rows = op.range(op.const(0), op.squeeze(count), op.const(1))
    mutual = op.and_(op.equal(op.gather(back, forth), rows), op.greater(best, least))
    results = {
        "matches0": op.where(mutual, forth, op.const(-1)),
        "mscores0": op.where(mutual, best, op.const(np.float32(0))),
        "covisibility_score": op.identity(outputs[SCORES[LAYERS]]),
    }
    return build(inputs, results | outputs)


def place_matchers(stops: ModelCard = STOPS) -> None:
    """Both into the cache; ``stops``: card of the one that stops."""
    plain = layered_model()
    stopping = add_early_stop(ir.from_proto(plain), SCORES, CHECKED, LAYERS, like=("descriptors0", 0))
    save(ir.to_proto(stopping.model), stops)
    for output in [output for output in plain.graph.output if output.name in SCORES.values()]:
        plain.graph.output.remove(output)
    save(plain, PLAIN)


def write_scene(folder: Path, seed: int, count: int) -> Path:
    """Pictures that look at one place, each from a little further to the right."""
    folder.mkdir(parents=True)
    place = image(160, 240 + 12 * count, seed)
    for i in range(count):
        cv2.imwrite(str(folder / f"{i}.png"), place[:, 12 * i : 12 * i + 240])
    return folder


def tiny_pair_config(**values) -> Config:
    """Features and the matcher that stops; loops are off."""
    return tiny_config(
        features__max_keypoints=150,
        loops__enabled=False,
        matcher__options__model=STOPS.name,
        matcher__options__min_score=0.0,
    ).with_values(**values)
