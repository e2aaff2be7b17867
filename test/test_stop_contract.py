"""What a matcher says of its stop against itself and the rule; the gate's check that it stops where it must."""

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vslam_features.artifacts.card import ModelCard
from vslam_features.artifacts.cases import Case
from vslam_features.artifacts.compare import compare
from vslam_features.artifacts.comparison import LIMITS
from vslam_features.artifacts.contract import breaches
from vslam_features.artifacts.gate import run_gate
from vslam_features.artifacts.stop_rule import limits_of_run, stop_limits, stopped_after
from vslam_features.errors import BackendError, NonFiniteError

CARD = ModelCard("matcher", "glue", "", layers=9, early_stop_layers=(2, 4, 6, 8))
SIDES = {f"keypoints{i}": np.zeros((12, 2), np.float32) for i in (0, 1)}
CHECKED = np.array(CARD.early_stop_layers)


def scalars(least, decay):
    return {"min_covisibility": np.array(least, np.float32), "early_stop_decay": np.array(decay, np.float32)}


def model(all_scores, final=0.9):
    """A matcher of 12 keypoints that scores its checked layers so, and stops by the rule as it is written down."""

    def run(inputs):
        least, decay = (float(inputs.get(n, d)) for n, d in (("min_covisibility", 0), ("early_stop_decay", 1)))
        scores = np.full(4, -1, np.float32)
        for i, layer in enumerate((2, 4, 6, 8)):
            scores[i] = all_scores[i]
            if scores[i] < np.float32(least * (1 - decay) ** (9 - layer)):
                return outputs(layer, scores[i], scores, matched=False)
        return outputs(0, np.float32(final), scores, matched=True)

    return run


def outputs(stopped, covisibility, scores, matched):
    found = np.arange(12) if matched else np.full(12, -1)
    return {
        "matches0": found.astype(np.int64),
        "mscores0": np.full(12, 0.9 if matched else 0, np.float32),
        "covisibility_score": np.array(covisibility, np.float32),
        "stopped_after_layer": np.array(stopped, np.int64),
        "layer_scores": np.array(scores, np.float32),
    }


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


RUNS = (0.9, 0.8, 0.7, 0.6)
STOPPED = outputs(4, 0.3, [0.9, 0.3, -1, -1], matched=False)
WENT = outputs(0, 0.9, RUNS, matched=True)
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
        got = outputs(CHECKED[i], scores[i], [*scores[: i + 1], *[-1] * (3 - i)], matched=False)
    else:
        got = outputs(0, 0.9, scores, matched=True)
    assert breaches(CARD, given_, got) == []


# -- comparison with a reference ---------------------------------------------------------------------


def compared(e, g, inputs=None, precision="fp32"):
    return compare(CARD, [{**SIDES, **(inputs or scalars(0.5, 0))}], [e], [g], LIMITS[precision])


def test_equal_stops_are_equal():
    for run in (STOPPED, WENT):
        result = compared(run, run)
        assert result.problems == [] and result.tensors["layer_scores"].rms == 0


def test_another_stop_than_the_reference_is_a_problem():
    assert "stopped after layer 4, the reference did not stop" in compared(WENT, STOPPED).problems
    assert "did not stop, the reference stopped after layer 4" in compared(STOPPED, WENT).problems
    early = outputs(2, 0.1, [0.1, -1, -1, -1], matched=False)
    assert compared(STOPPED, early).problems[0] == "stopped after layer 2, the reference stopped after layer 4"


def test_a_score_at_its_limit_may_fall_on_either_side():
    """0.5 on both sides, 0.001 apart; with fp32 limits 0.002 is the border."""
    below, above = outputs(8, 0.4996, [0.9, 0.8, 0.7, 0.4996], False), outputs(0, 0.9, [0.9, 0.8, 0.7, 0.5003], True)
    for pair in ((below, above), (above, below)):
        result = compared(*pair)
        assert result.problems == [] and not result.evidence


def test_layer_scores_off_the_reference_are_told():
    off = {**WENT, "layer_scores": WENT["layer_scores"] * np.float32(0.97)}
    (problem,) = compared(WENT, off).problems
    assert problem.startswith("layer_scores is 3.00% RMS off the reference")
    assert compared(WENT, off, precision="bf16").problems == []


def test_golden_outputs_know_no_stop():
    golden = {n: v for n, v in WENT.items() if n in ("matches0", "mscores0")}
    assert compared(golden, WENT, SIDES).problems == [] and compared(golden, WENT, SIDES).evidence


# -- the gate ------------------------------------------------------------------------------------

SCORES = [(0.5, 0.4, 0.7, 0.9), (0.9, 0.95, 0.3, 0.8), (0.2, 0.5, 0.8, 0.9), (0.99, 0.9, 0.8, 0.05)]
CASES = [Case(str(i), ({**SIDES, "case": np.array(i)},), (model(s)(SIDES),)) for i, s in enumerate(SCORES)]


def gate(fault=lambda got, inputs: got, card=CARD):
    seen = []

    def run(inputs):
        got = fault(model(SCORES[int(inputs["case"])])(inputs), inputs)
        seen.append(int(got["stopped_after_layer"]) if "stopped_after_layer" in got else None)
        return got

    return run_gate(run, CASES, card), seen


def test_the_gate_sees_each_pair_stop_early_and_late():
    report, seen = gate()
    assert report.passed, report.reasons
    assert [seen[i : i + 3] for i in (0, 3, 6, 9)] == [[0, 2, 4], [0, 2, 6], [0, 2, 0], [0, 2, 8]]


def test_a_model_that_stops_nowhere_is_not_run_again():
    for card in (replace(CARD, early_stop_layers=()), replace(CARD, layers=0)):
        _, seen = gate(lambda got, inputs: {n: v for n, v in got.items() if n != "layer_scores"}, card)
        assert len(seen) == len(CASES)


def limited(inputs):
    return float(inputs.get("early_stop_decay", 1)) < 1


FAULTS = {
    "never stops": (
        lambda got, inputs: model(SCORES[int(inputs["case"])])(SIDES) if limited(inputs) else got,
        "with min_covisibility 1 and early_stop_decay 0.000: went on after layer 2",
    ),
    "keeps its matches": (
        lambda got, inputs: {**got, "matches0": np.arange(12)},
        "with min_covisibility 1 and early_stop_decay 0.000: stopped after layer 2, and yet 12 keypoints",
    ),
    "says another layer": (
        lambda got, inputs: {**got, "stopped_after_layer": np.array(8)} if got["stopped_after_layer"] == 4 else got,
        "and yet it stopped after layer 8",
    ),
    "scores otherwise where it may stop": (
        lambda got, inputs: model([0.99, 0.99, 0.99, 0.99])(inputs) if limited(inputs) else got,
        "early_stop_decay 0.131: its scores stop it after layer 4, it stopped after 0 (0: not at all)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault, words", FAULTS.values(), ids=FAULTS)
def test_the_gate_finds_a_wrong_stop(fault, words):
    report, _ = gate(fault)
    assert not report.passed and any(words in reason for reason in report.reasons), report.reasons


@pytest.mark.parametrize("error", [BackendError("no such branch"), NonFiniteError("1 of 1 in 'x'", {})])
def test_the_gate_finds_a_stop_that_fails(error):
    def fault(got, inputs):
        if limited(inputs) and got["stopped_after_layer"]:
            raise error
        return got

    report, _ = gate(fault)
    assert any(f"early_stop_decay 0.000 the model failed: {error}" in reason for reason in report.reasons)
