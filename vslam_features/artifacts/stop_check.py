"""Whether a matcher stops where its own scores say that it must."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from ..errors import VslamFeaturesError
from .card import ModelCard
from .comparison import Limits
from .contract import breaches
from .stop_rule import NEVER, stop_limits, stopped_after

Tensors = Mapping[str, np.ndarray]


def check_stops(run: Callable, card: ModelCard, inputs: Tensors, plain: Tensors, limits: Limits) -> list[str]:
    """Run a matcher so that it stops after its first checked layer, and so that it stops as late as the pair allows.

    What a layer scores does not depend on where the matcher may stop, so the scores of the run without a stop tell
    where those with one end. What a stop returns must keep the contract.

    Args:
        run: the model, inputs to outputs by our tensor names.
        inputs: of a pair. Nothing is run where they say themselves where to stop.
        plain: outputs without a stop.
        limits: ``border`` of them: scores this near to their limit may fall on either side.
    Returns:
        Problems, in words; of a model that tells no scores of its layers none.
    """
    checked, scores = card.early_stop_layers, plain.get("layer_scores")
    if not checked or card.layers <= max(checked) or scores is None or set(inputs) & set(NEVER):
        return []
    problems = []
    for decay in (0.0, _late(scores, checked, card.layers)):
        given = {"min_covisibility": np.array(1, np.float32), "early_stop_decay": np.array(decay, np.float32)}
        where = f"with min_covisibility 1 and early_stop_decay {decay:.3f}"
        try:
            got = run({**inputs, **given})
        except VslamFeaturesError as error:
            problems.append(f"{where} the model failed: {str(error).strip().splitlines()[0]}")
            continue
        broken = breaches(card, {**inputs, **given}, got)
        problems += [f"{where}: {problem}" for problem in broken]
        expected = int(stopped_after(scores[None], checked, card.layers, 1.0, decay)[0])
        layer = int(got["stopped_after_layer"].flat[0]) if "stopped_after_layer" in got else expected
        asked = stop_limits(checked, card.layers, 1.0, decay)
        if not broken and layer != expected and (np.abs(scores - asked) > limits.border).all():
            problems.append(
                f"{where}: its scores stop it after layer {expected}, it stopped after {layer} (0: not at all)"
            )
    return problems


def _late(scores: np.ndarray, checked: tuple[int, ...], layers: int) -> float:
    """The decay that stops a pair as late as any does; where it can only be after the first checked layer, not at all.

    With min_covisibility 1 the pair stops after the first layer k whose score ** (1 / (L - k)) is below 1 - decay.
    """
    roots = np.clip(scores.astype(np.float64), 0, 1) ** (1.0 / (layers - np.asarray(checked)))
    lows = np.unique(np.minimum.accumulate(roots))
    return float(1 - (lows[0] + lows[1]) / 2) if len(lows) > 1 else float(1 - lows[0] / 2)
