"""The gate of a matcher that stops early: comparison with its reference, and the check that it stops where it must."""

from dataclasses import replace

import numpy as np
import pytest
from stop_outputs import CARD, SIDES, STOPPED, WENT, model, outputs, scalars

from vslam_features.artifacts.cases import Case
from vslam_features.artifacts.compare import compare
from vslam_features.artifacts.comparison import LIMITS
from vslam_features.artifacts.gate import run_gate
from vslam_features.artifacts.records import card_id
from vslam_features.errors import BackendError, NonFiniteError

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
    other = outputs(3, 0.1, [0.1, -1], matched=False)  # of a reference that checks layers 3 and 5
    assert compared(other, STOPPED).problems == ["stopped after layer 4, the reference stopped after layer 3"]


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


def cut(got):
    return {name: got[name][:2] for name in ("matches0", "mscores0")}


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
    "returns another number of matches": (
        lambda got, inputs: {**got, **cut(got)} if got["stopped_after_layer"] else got,
        "early_stop_decay 0.000: matches0 has shape (2,), expected (12,)",
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


@pytest.mark.parametrize("change", [{"layers": 12}, {"early_stop_layers": (2, 4, 6, 7)}, {"early_stop_layers": ()}])
def test_a_record_holds_for_one_rule(change):
    """A card whose layers were corrected is judged anew, and so is one that was spoiled."""
    assert card_id(replace(CARD, **change)) != card_id(CARD)
