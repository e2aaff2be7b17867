"""When a matcher stops: the rule of FlexGlue (onnx/export.py ``--early_stop_layers``, https://github.com/cvg/FlexGlue).

After a checked layer k of L a pair is rejected where its covisibility score is below
``min_covisibility * (1 - early_stop_decay) ** (L - k)``. Graphs compute it themselves (``graph/early_stop.py``); this
is for what looks at their scores: the contract, the gate, and people.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from .card import ModelCard

NEVER = {"min_covisibility": 0.0, "early_stop_decay": 1.0}
"""Inputs with which a matcher rejects nothing: what holds where a caller gives none."""


def stop_limits(checked: Sequence[int], layers: int, min_covisibility: float, decay: float) -> np.ndarray:
    """(K,) f32, the score that each checked layer asks for, in float32 as graphs compute it.

    Args:
        checked: the K layers, ascending. layers: L.
        min_covisibility, decay: in [0, 1].
    """
    kept = np.float32(1) - np.float32(decay)
    return np.float32(min_covisibility) * kept ** np.asarray([layers - k for k in checked], np.float32)


def stopped_after(
    scores: np.ndarray, checked: Sequence[int], layers: int, min_covisibility: float, decay: float
) -> np.ndarray:
    """(P,) int64, the layer after which each pair stops; 0: it does not.

    Args:
        scores: (P, K) covisibility scores after the checked layers of runs without a stop.
        checked, layers, min_covisibility, decay: as of :func:`stop_limits`.
    """
    below = np.asarray(scores, np.float32) < stop_limits(checked, layers, min_covisibility, decay)
    return np.where(below.any(axis=1), np.asarray(checked, np.int64)[below.argmax(axis=1)], 0)


def limits_of_run(card: ModelCard, inputs: Mapping[str, np.ndarray]) -> np.ndarray | None:
    """``stop_limits`` of a run by its inputs; None where the card does not say which of how many layers are checked."""
    if not card.early_stop_layers or card.layers <= max(card.early_stop_layers):
        return None
    given = [float(np.ravel(inputs.get(name, never))[0]) for name, never in NEVER.items()]
    return stop_limits(card.early_stop_layers, card.layers, *given)
