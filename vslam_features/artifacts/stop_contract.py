"""Whether what a matcher says of covisibility and of its stop agrees with itself, its matches and the rule."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from .card import ModelCard
from .stop_rule import limits_of_run

NOT_RUN = -1.0
"""In ``layer_scores``: of layers that did not run."""

_MARGIN = 1e-3  # of scores in half precision
# How far limits that a graph computed may be off: in bfloat16 (1 - decay) and its powers are.
_LIMIT_SHARE, _LIMIT_MARGIN = 0.03, 2e-3
_OPTIONAL = ("covisibility_score", "stopped_after_layer", "layer_scores")


def stop_breaches(card: ModelCard, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]) -> list[str]:
    """How a matcher's outputs contradict themselves, in words; empty where they do not, or where a score is NaN.

    Each of ``covisibility_score``, ``stopped_after_layer`` and ``layer_scores`` is looked at where it is there, and
    the rule where the card says which of how many layers are checked.

    Args:
        inputs: with the two scalars of the rule; without, nothing may stop.
        outputs: ``matches0`` and ``mscores0`` keep the contract.
    """
    there = {name: outputs[name] for name in _OPTIONAL if name in outputs}
    if not all(np.isfinite(value).all() for value in there.values()):
        return []
    problem = _values(card, **there)
    if problem or "stopped_after_layer" not in there:
        return problem
    stopped = int(there["stopped_after_layer"].flat[0])
    kept = int(((outputs["matches0"] >= 0) | (np.nan_to_num(outputs["mscores0"]) != 0)).sum())
    if stopped and kept:
        return [f"stopped after layer {stopped}, and yet {kept} keypoints have a match or a score"]
    checked = card.early_stop_layers
    scores = dict(zip(checked, map(float, there.get("layer_scores", ()))))
    for layer, score in scores.items():
        if (score == NOT_RUN) != (0 < stopped < layer):
            return [f"layer_scores are {scores}, and yet it stopped after layer {stopped} (0: it did not)"]
    if stopped and "covisibility_score" in there:
        covisibility = float(there["covisibility_score"].flat[0])
        if abs(scores.setdefault(stopped, covisibility) - covisibility) > _MARGIN:
            return [f"stopped after layer {stopped} of {scores}, and yet covisibility_score is {covisibility:.4f}"]
    limits = limits_of_run(card, inputs)
    return [] if limits is None else _rule(stopped, scores, dict(zip(checked, map(float, limits))))


def _values(card: ModelCard, covisibility_score=None, stopped_after_layer=None, layer_scores=None) -> list[str]:
    """Shapes, types and ranges."""
    for name, value in (("covisibility_score", covisibility_score), ("stopped_after_layer", stopped_after_layer)):
        if value is not None and value.size != 1:
            return [f"{name} has shape {value.shape}, expected one value"]
    checked = list(card.early_stop_layers)
    if covisibility_score is not None and not -_MARGIN <= covisibility_score.flat[0] <= 1 + _MARGIN:
        return [f"covisibility_score is {covisibility_score.flat[0]:.4f}, expected 0 to 1"]
    if stopped_after_layer is not None:
        if stopped_after_layer.dtype.kind not in "iu":
            return [f"stopped_after_layer is {stopped_after_layer.dtype}, expected a whole number"]
        layer = int(stopped_after_layer.flat[0])
        if layer < 0 or (layer and checked and layer not in checked):
            return [f"stopped_after_layer is {layer}, the card's early_stop_layers are {checked}"]
    if layer_scores is not None:
        if layer_scores.shape != (len(checked),):
            return [f"layer_scores has shape {layer_scores.shape}, the card's early_stop_layers are {checked}"]
        if ((layer_scores != NOT_RUN) & ((layer_scores < -_MARGIN) | (layer_scores > 1 + _MARGIN))).any():
            return [f"layer_scores are {layer_scores.tolist()}, expected 0 to 1, or -1 of layers that did not run"]
    return []


def _rule(stopped: int, scores: dict[int, float], limits: dict[int, float]) -> list[str]:
    """``scores``: by layer, -1 where it did not run; ``limits``: by layer."""
    for layer, score in scores.items():
        limit = limits[layer]
        margin = _LIMIT_SHARE * limit + _LIMIT_MARGIN
        if layer == stopped and not score < (limit + margin if limit > 0 else 0):
            return [f"stopped after layer {layer} at score {score:.4f}, its limit is {limit:.4f}"]
        if layer != stopped and score != NOT_RUN and score < limit - margin:
            return [f"went on after layer {layer} at score {score:.4f}, its limit is {limit:.4f}"]
    return []
