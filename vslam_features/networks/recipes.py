"""Recipes of the models in the registry: weights to an ONNX file with its card."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import numpy as np
import onnx

from .. import __version__
from ..artifacts.cache import place, sha256_of
from ..artifacts.card import METADATA_KEY, ModelCard
from ..artifacts.catalogue import ModelEntry
from ..artifacts.preprocessing import Preprocessing
from ..artifacts.store import model_path
from ..errors import ConfigError
from . import aliked, efficientnet, lightglue, revision, xfeat
from .weights import read_tensors

Build = Callable[[dict[str, np.ndarray], str], onnx.ModelProto]


@dataclass(frozen=True)
class Recipe:
    """How a model is made: ``build(weights, precision)``, and what its card says beyond the registry."""

    build: Build
    preprocessing: Preprocessing = field(default_factory=Preprocessing)
    layers: int = 0


RECIPES: dict[str, Recipe] = {
    "xfeat": Recipe(xfeat.build),
    "aliked-n16": Recipe(lambda w, p: aliked.build(w, aliked.N16, p), Preprocessing("rgb")),
    "aliked-t16": Recipe(lambda w, p: aliked.build(w, aliked.T16, p), Preprocessing("rgb")),
    "lighterglue": Recipe(
        lambda w, p: lightglue.build(w, lightglue.LIGHTERGLUE, p), layers=lightglue.LIGHTERGLUE.layers
    ),
    "lightglue-aliked": Recipe(
        lambda w, p: lightglue.build(w, lightglue.LIGHTGLUE_ALIKED, p), layers=lightglue.LIGHTGLUE_ALIKED.layers
    ),
    "effnet_cov": Recipe(efficientnet.build, Preprocessing("rgb", 320, 256, "area")),
}


def build_model(entry: ModelEntry, weights: Path, precision: str = "fp32", target: Path | None = None) -> Path:
    """Write the ONNX file of a model into the cache (or to ``target``), whole or not at all.

    Raises:
        ConfigError: the recipe is unknown. WeightsError: the weights cannot be read or do not fit the network.
    """
    recipe = RECIPES.get(entry.recipe)
    if recipe is None:
        raise ConfigError(f"model '{entry.name}': unknown recipe '{entry.recipe}'; there are: {', '.join(RECIPES)}")
    model = recipe.build(read_tensors(weights), precision)
    card = ModelCard(
        role=entry.role,
        name=entry.name,
        licence=entry.licence,
        source_sha256=sha256_of(weights),
        precision=precision,
        version=entry.version,
        features_model=entry.features_model,
        preprocessing=recipe.preprocessing,
        layers=recipe.layers,
        tools={
            "vslam_features": __version__,
            "networks": revision(),
            **{name: version(name) for name in ("onnx", "spox")},
        },
    )
    onnx.helper.set_model_props(model, {METADATA_KEY: card.to_json()})
    target = target or model_path(entry.name, precision)
    return place(target, model.SerializeToString(deterministic=True))
