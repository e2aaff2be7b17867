"""What a model computed against what its reference computed, one pair at a time.

A match that is there or not is a difference only where its score is not near
the host's threshold; ``compare_keypoints.py`` says what holds for keypoints.
"""

from __future__ import annotations

import numpy as np

from .card import ModelCard
from .compare_keypoints import compare_keypoints
from .compare_maps import compare_maps
from .comparison import EVIDENCE, PAIR_FACTOR, Comparison, Limits, check_counts, figures_of, non_finite, row_cosine
from .contract import are_maps, breaches
from .stop_contract import NOT_RUN
from .stop_rule import limits_of_run

MATCH_THRESHOLD = 0.1  # the host's, on ``mscores0``
# Match scores above this are compared: those between are on the steep part of a sigmoid, where rounding errors grow.
CONFIDENT = 0.8


def compare(card: ModelCard, runs, expected, got, limits: Limits) -> Comparison:
    """Compare a model's outputs on a pair with its reference's.

    Args:
        card: the model's.
        runs: inputs of each run. expected, got: outputs of each, by our tensor names.
    """
    role, result = card.role, Comparison(nan=sum(non_finite(outputs) for outputs in got))
    for inputs, e, g in zip(runs, expected, got):
        result.problems += breaches(card, inputs, g) or _shape_problems(role, e, g)
    if result.problems:
        return result
    if result.nan:
        if role == "matcher":  # NaN in what matches depend on leaves none of them
            result.matches = int(matched(expected[0]).sum()), int(matched(got[0]).sum())
        values = sum(v.size for outputs in got for v in outputs.values())
        result.problems.append(f"{result.nan} of {values} values are NaN or infinite")
        return result
    if role == "features" and are_maps(expected[0]):
        compare_maps(result, expected, got, limits)
    elif role == "features":
        compare_keypoints(result, expected, got, limits)
    elif role == "matcher":
        if _went_as_far(result, limits_of_run(card, runs[0]), card.early_stop_layers, expected[0], got[0], limits):
            _matches(result, expected[0], got[0], limits)
    else:
        _globals(result, expected, got, limits)
    most = PAIR_FACTOR * limits.rms
    result.problems += [
        f"{name} is {figures.rms:.2%} RMS off the reference, on a pair at most {most:.1%}"
        for name, figures in result.tensors.items()
        if not figures.rms <= most
    ]
    return result


def matched(outputs: dict[str, np.ndarray]) -> np.ndarray:
    """Bool (M,): keypoints that a matcher matched, by the host's rule."""
    return (outputs["matches0"] >= 0) & (outputs["mscores0"] > MATCH_THRESHOLD)


def _shape_problems(role: str, expected, got) -> list[str]:
    """Where what the contract leaves open differs: lengths of descriptors."""
    name = {"features": "descriptors", "global": "descriptor"}.get(role)
    if name is None or got[name].shape[-1:] == expected[name].shape[-1:]:
        return []
    return [f"{name} has shape {got[name].shape}, the reference {expected[name].shape}"]


def _went_as_far(result: Comparison, stop_limits, checked, e, g, limits: Limits) -> bool:
    """Whether both stopped after the same layer, or neither did; the scores of layers that ran in both are compared.

    Where they did not, that is a problem unless the score that decided is at its limit.
    """
    if "layer_scores" in e and "layer_scores" in g and e["layer_scores"].shape == g["layer_scores"].shape:
        ran = (e["layer_scores"] != NOT_RUN) & (g["layer_scores"] != NOT_RUN)
        if ran.any():
            figures = figures_of(e["layer_scores"][ran], g["layer_scores"][ran], floor=0.1)
            result.tensors["layer_scores"] = figures
    if not ("stopped_after_layer" in e and "stopped_after_layer" in g):
        return True
    stops = [int(outputs["stopped_after_layer"].flat[0]) for outputs in (e, g)]
    if stops[0] == stops[1]:
        return True
    first = min(layer for layer in stops if layer)
    decided = (e, g)[stops.index(first)].get("covisibility_score")
    known = stop_limits is not None and decided is not None and first in checked  # a reference may check other layers
    at = float(stop_limits[checked.index(first)]) if known else None
    if at is None or abs(float(decided.flat[0]) - at) > limits.border:
        words = [f"stopped after layer {layer}" if layer else "did not stop" for layer in stops]
        result.problems.append(f"{words[1]}, the reference {words[0]}")
    return False


def _matches(result: Comparison, e, g, limits: Limits) -> None:
    is_e, is_g = matched(e), matched(g)
    result.matches = int(is_e.sum()), int(is_g.sum())
    result.evidence = result.matches[0] >= EVIDENCE
    same = is_e & is_g & (e["matches0"] == g["matches0"])
    certain = np.maximum(np.where(is_e, e["mscores0"], 0), np.where(is_g, g["mscores0"], 0))
    unsure = (is_e != is_g) & (certain <= MATCH_THRESHOLD + limits.border)
    check_counts(result, limits, int(unsure.sum()))
    either = (is_e | is_g) & ~unsure
    if either.any():
        result.agreement = float(same[either].mean())
        wrong = int((either & ~same).sum())
        if wrong > limits.slack and result.agreement < limits.agreement and not result.zero:
            result.problems.append(f"{result.agreement:.1%} of matches agree, at least {limits.agreement:.0%}")
    if same.sum() >= EVIDENCE:  # all of them, coarsely: a model need not have a single score that is confident
        off, most = float(np.abs(e["mscores0"] - g["mscores0"])[same].mean()), PAIR_FACTOR * limits.border
        if off > most:
            result.problems.append(f"scores of equal matches are {off:.3f} off on average, at most {most:.3f}")
    same &= e["mscores0"] > CONFIDENT
    if result.evidence and same.any():
        result.tensors["mscores0"] = figures_of(e["mscores0"][same], g["mscores0"][same])
    if "covisibility_score" in e and "covisibility_score" in g:
        a, b = np.ravel(e["covisibility_score"]), np.ravel(g["covisibility_score"])
        # One probability: what counts is how far it is off, not how small it is (fp16, places that differ: 0.008).
        result.tensors["covisibility_score"] = figures_of(a, b, floor=0.5)


def _globals(result: Comparison, expected, got, limits: Limits) -> None:
    e, g = ([np.ravel(o["descriptor"]).astype(np.float64) for o in outputs] for outputs in (expected, got))
    result.evidence = all(np.linalg.norm(d) > 0 for d in e)
    cosines = [float(row_cosine(a[None], b[None])[0]) for a, b in zip(e, g)]
    result.cosine = min(cosines)
    if result.cosine < limits.cosine:
        result.problems.append(f"cosine to the reference {result.cosine:.6f}, at least {limits.cosine}")
    for name, length in (("first", np.linalg.norm(g[0])), ("second", np.linalg.norm(g[-1]))):
        if abs(length - np.linalg.norm(e[0 if name == "first" else -1])) > 10 * limits.rms:
            result.problems.append(f"the {name} descriptor has length {length:.4f}")
            break
    result.tensors["descriptor"] = figures_of(np.concatenate(e), np.concatenate(g))
    if len(e) == 2:
        result.similarity = tuple(float(row_cosine(d[0][None], d[1][None])[0]) for d in (e, g))
        # A reference that says the same of every picture proves nothing.
        result.evidence &= result.similarity[0] < 1 - 1e-6
