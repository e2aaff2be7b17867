"""A front-end with the tiny MegaLoc, and models that are almost it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
from model_helpers import save
from onnx import numpy_helper

from vslam_features.artifacts.card import METADATA_KEY, read_card, sidecar_path
from vslam_features.artifacts.store import model_path

NAME = "megaloc-tiny"
SETTINGS = {
    "features.name": "sift",
    "features.max_keypoints": 150,
    "matcher.name": "nearest",
    "retrieval.name": "megaloc",
    "retrieval.options.model": NAME,
    "retrieval.exclude_s": 3.5,
    "keyframes.every": 1,
    "runtime.threads": 1,
    "threads": 1,
}


def model_file(precision: str = "fp32") -> Path:
    """The exported file in the cache of now."""
    return model_path(NAME, precision)


def other_preprocessing(kernel: str = "area", precision: str = "fp32") -> None:
    """A card beside the file, which comes before its own: another resize kernel."""
    path = model_file(precision)
    card = read_card(path)
    changed = replace(card, preprocessing=replace(card.preprocessing, kernel=kernel))
    sidecar_path(path).write_text(changed.to_json())  # JSON is YAML


def other_weights(precision: str = "fp32", **fields) -> None:
    """The same network with noise on its largest tensor, in place of the file; ``fields`` of its card change."""
    path = model_file(precision)
    card, model = replace(read_card(path), **fields), onnx.load(path)
    largest = max(model.graph.initializer, key=lambda t: np.prod(t.dims))
    values = numpy_helper.to_array(largest)
    noise = np.random.default_rng(0).normal(0, values.std(), values.shape)
    largest.CopyFrom(numpy_helper.from_array((values + noise).astype(values.dtype), largest.name))
    assert METADATA_KEY in {p.key for p in model.metadata_props}
    save(model, card, path)
