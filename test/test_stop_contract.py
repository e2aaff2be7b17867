"""The rule of early stopping, and what a matcher says of its stop against itself and the rule."""

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stop_outputs import CARD, SIDES, STOPPED, WENT, model, outputs, scalars

from vslam_features.artifacts.card import ModelCard
from vslam_features.artifacts.contract import breaches
from vslam_features.artifacts.stop_rule import limits_of_run, stop_limits, stopped_after

# -- the rule ------------------------------------------------------------------------------------


def test_limits_are_those_of_the_formula():
    """0.8 and 0.5, as published for ETH3D, of 9 layers: 0.8 / 2^7, / 2^5, / 2^3, / 2."""
    assert stop_limits((2, 4, 6, 8), 9, 0.8, 0.5) == pytest.approx([0.00625, 0.025, 0.1, 0.4], rel=1e-6)
    assert not stop_limits((2, 8), 9, 1.0, 1.0).any() and (stop_limits((2, 8), 9, 0.3, 0.0) == np.float32(0.3)).all()
    scores = [[0.01, 0.02, 0.5, 0.5], [0.001, 0, 0, 0], [0.1, 0.1, 0.1, 0.39], [0.1, 0.1, 0.11, 0.41]]
    assert stopped_after(scores, (2, 4, 6, 8), 9, 0.8, 0.5).tolist() == [4, 2, 8, 0]


def test_limits_of_a_run_come_from_its_inputs_and_card():
    assert limits_of_run(CARD, scalars(0.8, 0.5)) == pytest.approx([0.00625, 0.025, 0.1, 0.4], rel=1e-6)
    assert not limits_of_run(CARD, {}).any()  # nothing given: nothing stops
    assert limits_of_run(replace(CARD, early_stop_layers=()), {}) is None
    assert limits_of_run(replace(CARD, layers=0), {}) is None


# -- the contract --------------------------------------------------------------------------------

UNIT = st.floats(0, 1, width=32)


@given(st.lists(UNIT, min_size=4, max_size=4), UNIT, UNIT, UNIT)
def test_whatever_stops_by_the_rule_keeps_the_contract(scores, final, least, decay):
    given_ = {**SIDES, **scalars(least, decay)}
    assert breaches(CARD, given_, model(scores, final)(given_)) == []


@pytest.mark.parametrize("left_out", [("layer_scores",), ("covisibility_score",), ("stopped_after_layer",), ()])
@pytest.mark.parametrize("given_", [scalars(0.8, 0), scalars(0, 1), {}])
def test_outputs_that_are_not_there_are_not_asked_for(left_out, given_):
    got = {n: v for n, v in model([0.9, 0.5, 0.9, 0.9])(given_).items() if n not in left_out}
    assert breaches(CARD, {**SIDES, **given_}, got) == []
    if "layer_scores" not in left_out:
        del got["layer_scores"]
    assert breaches(ModelCard("matcher", "of others", ""), {**SIDES, **given_}, got) == []


MATCHES = {n: WENT[n] for n in ("matches0", "mscores0")}


@pytest.mark.parametrize(
    "good, changes, words",
    [
        (STOPPED, MATCHES, "stopped after layer 4, and yet 12 keypoints have a match or a score"),
        (STOPPED, {"matches0": np.eye(1, 12, 3, dtype=np.int64)[0] - 1}, "yet 1 keypoints have a match or a score"),
        (STOPPED, {"mscores0": np.full(12, -0.1, np.float32)}, "yet 12 keypoints have a match or a score"),
        (STOPPED, {"stopped_after_layer": np.array(3)}, r"stopped_after_layer is 3, the card's .* are \[2, 4, 6, 8\]"),
        (STOPPED, {"stopped_after_layer": np.array(-1)}, "stopped_after_layer is -1"),
        (STOPPED, {"stopped_after_layer": np.array(4.0)}, "stopped_after_layer is float64, expected a whole number"),
        (STOPPED, {"stopped_after_layer": np.array([4, 4])}, r"stopped_after_layer has shape \(2,\), expected one"),
        (STOPPED, {"stopped_after_layer": np.array(6)}, "layer_scores are .* and yet it stopped after layer 6"),
        (STOPPED, {"stopped_after_layer": np.array(2)}, "layer_scores are .* and yet it stopped after layer 2"),
        (WENT, {"layer_scores": STOPPED["layer_scores"]}, "layer_scores are .* and yet it stopped after layer 0"),
        (STOPPED, {"covisibility_score": np.array(0.9, np.float32)}, "yet covisibility_score is 0.9000"),
        (STOPPED, {"covisibility_score": np.array(0.6), "layer_scores": np.array([0.9, 0.6, -1, -1])},
         "stopped after layer 4 at score 0.6000, its limit is 0.5000"),
        (STOPPED, {"layer_scores": np.array([0.4, 0.3, -1, -1])}, "went on after layer 2 at score 0.4000, .* 0.5000"),
        (WENT, {"layer_scores": np.array([0.9, 0.9, 0.9, 0.4])}, "went on after layer 8 at score 0.4000"),
        (WENT, {"covisibility_score": np.array(1.1)}, "covisibility_score is 1.1000, expected 0 to 1"),
        (WENT, {"covisibility_score": np.array(-1.0)}, "covisibility_score is -1.0000, expected 0 to 1"),
        (WENT, {"covisibility_score": np.ones(12)}, r"covisibility_score has shape \(12,\), expected one value"),
        (WENT, {"layer_scores": np.array([0.9, 1.2, 0.9, 0.9])}, "layer_scores are .*, expected 0 to 1, or -1"),
        (WENT, {"layer_scores": np.array([0.9, -0.5, 0.9, 0.9])}, "layer_scores are .*, expected 0 to 1, or -1"),
        (WENT, {"layer_scores": np.ones(3)}, r"layer_scores has shape \(3,\), the card's early_stop_layers are \["),
    ],
)  # fmt: skip
def test_contradictions(good, changes, words):
    inputs = {**SIDES, **scalars(0.5, 0)}
    assert breaches(CARD, inputs, good) == []
    (problem,) = breaches(CARD, inputs, {**good, **changes})
    assert re.search(words, problem), problem


@pytest.mark.parametrize("inputs", [{}, scalars(0, 0), scalars(1, 1)])
def test_what_may_never_stop_must_not(inputs):
    none = outputs(2, 0.0, [0.0, -1, -1, -1], matched=False)
    assert "stopped after layer 2" in breaches(CARD, {**SIDES, **inputs}, none)[0]


@pytest.mark.parametrize("name", ["covisibility_score", "layer_scores"])
def test_a_nan_score_is_left_to_what_looks_for_nan(name):
    bad = np.full_like(STOPPED[name], np.nan)
    assert breaches(CARD, {**SIDES, **scalars(0.5, 0)}, {**STOPPED, name: bad}) == []


@given(st.lists(UNIT, min_size=4, max_size=4), UNIT, UNIT)
def test_half_precision_of_the_rule_breaks_nothing(scores, least, decay):
    """A graph that computes limits and scores in float16."""
    half = np.float16
    given_ = {**SIDES, **scalars(least, decay)}
    scores = [half(s) for s in scores]
    kept = half(1) - half(decay)
    limits = [half(half(least) * half(kept ** half(9 - k))) for k in CARD.early_stop_layers]
    below = [s < limit for s, limit in zip(scores, limits)]
    if any(below):
        i = below.index(True)
        got = outputs(CARD.early_stop_layers[i], scores[i], [*scores[: i + 1], *[-1] * (3 - i)], matched=False)
    else:
        got = outputs(0, 0.9, scores, matched=True)
    assert breaches(CARD, given_, got) == []
