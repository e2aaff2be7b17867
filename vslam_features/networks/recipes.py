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
    """How a model is made, and what its card says beyond the registry.

    ``build(weights, precision)``; ``scored``: the same with a covisibility score a layer, ``score_1`` and so on.
    """

    build: Build
    preprocessing: Preprocessing = field(default_factory=Preprocessing)
    layers: int = 0
    scored: Build | None = None


def _lightglue(sizes: lightglue.LightGlueSizes) -> Recipe:
    return Recipe(
        lambda w, p: lightglue.build(w, sizes, p),
        layers=sizes.layers,
        scored=lambda w, p: lightglue.build(w, sizes, p, scores=True),
    )


RECIPES: dict[str, Recipe] = {
    "xfeat": Recipe(xfeat.build),
    "aliked-n16": Recipe(lambda w, p: aliked.build(w, aliked.N16, p), Preprocessing("rgb")),
    "aliked-t16": Recipe(lambda w, p: aliked.build(w, aliked.T16, p), Preprocessing("rgb")),
    "lighterglue": _lightglue(lightglue.LIGHTERGLUE),
    "lightglue-aliked": _lightglue(lightglue.LIGHTGLUE_ALIKED),
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
    tensors, changed = read_tensors(weights), {}
    if entry.early_stop_layers:
        model, patch = _stopping(entry, recipe, tensors, precision)
        changed = {"early_stop_layers": entry.early_stop_layers, "patches": (patch,)}
    else:
        model = recipe.build(tensors, precision)
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
        **changed,
        tools={
            "vslam_features": __version__,
            "networks": revision(bool(entry.early_stop_layers)),
            **{name: version(name) for name in ("onnx", "spox", *(["onnx-ir"] if changed else []))},
        },
    )
    onnx.helper.set_model_props(model, {METADATA_KEY: card.to_json()})
    target = target or model_path(entry.name, precision)
    return place(target, model.SerializeToString(deterministic=True))


def _stopping(
    entry: ModelEntry, recipe: Recipe, weights: dict[str, np.ndarray], precision: str
) -> tuple[onnx.ModelProto, str]:
    """The matcher that stops after layers of the registry's choice, and what was done to its graph."""
    import onnx_ir as ir

    from ..graph.early_stop import add_early_stop

    if recipe.scored is None:
        raise ConfigError(
            f"model '{entry.name}': recipe '{entry.recipe}' gives no covisibility score a layer; leave out "
            "'early_stop_layers'"
        )
    plain = ir.from_proto(recipe.scored(weights, precision))
    scores = {layer: f"score_{layer}" for layer in range(1, recipe.layers + 1)}
    made = add_early_stop(plain, scores, entry.early_stop_layers, recipe.layers, like=("keypoints0", 0))
    model = ir.to_proto(made.model)
    onnx.checker.check_model(model, full_check=True)
    return onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True), made.patch
