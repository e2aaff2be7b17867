"""A matcher that stops early and is wrong: lies, NaN, empty results, and the second opinion of the fallback."""

from dataclasses import replace

import numpy as np
import pytest
from matcher_graph import Matcher as Network
from model_helpers import (
    _tiny_cache,  # noqa: F401 (fixtures)
    own_cache,  # noqa: F401
    save,
    tiny,  # noqa: F401
    tiny_config,
)
from stop_helpers import CARD, NETWORK, early_stop_model, lying, matcher_of, sides, stopping

from vslam_features.config import GeometryConfig
from vslam_features.errors import BackendError
from vslam_features.frontend import FrontEnd
from vslam_features.geometry import Verifier
from vslam_features.matching.verified import VerifiedMatcher
from vslam_features.replay.scenes import make_scene
from vslam_features.runtimes.base import TensorSpec
from vslam_features.types import Status

# -- lies ----------------------------------------------------------------------------------------

LIES = {
    "a stop with matches": {"stopped_after_layer": np.array(2)},
    "a layer that is not checked": {"stopped_after_layer": np.array(5)},
    "a score beyond 1": {"covisibility_score": np.array(1.5, np.float32)},
    "a layer that did not run": {"layer_scores": np.array([0.9, 0.9, 0.9, -1], np.float32)},
    "scores below their limits": {"layer_scores": np.array([0.9, 0.9, 0.9, 0.1], np.float32)},
}


@pytest.mark.parametrize("changes", LIES.values(), ids=LIES)
def test_a_lie_is_a_fault(changes, tmp_path):
    _, (a, b) = sides(40, 30, 0)
    (tmp_path / "fallback").mkdir()
    fallback = save(early_stop_model(), CARD, tmp_path / "fallback/glue.onnx")
    expected = matcher_of(tmp_path, least=0.15, decay=0.0).match(a, b)
    assert expected.status is None and len(expected.pairs)
    with pytest.raises(BackendError):
        lying(matcher_of(tmp_path, least=0.15, decay=0.0), lambda o, i: {**o, **changes}).match(a, b)
    matcher = lying(matcher_of(tmp_path, least=0.15, decay=0.0, fallback=fallback), lambda o, i: {**o, **changes})
    found = matcher.match(a, b)
    assert np.array_equal(found.pairs, expected.pairs) and found.layer_scores == expected.layer_scores
    counts = matcher.engine.counts
    assert found.recovered and (counts.errors, counts.recovered, counts.incidents) == (1, 1, 1)


@pytest.mark.parametrize("layer", [2, 6, 9])
def test_a_nan_score_is_neither_a_stop_nor_a_match(layer, tmp_path):
    network = Network(seed=7)
    network.bias[layer] = np.nan
    for least, decay in ((0.0, 1.0), (0.3, 0.5)):
        matcher = matcher_of(tmp_path, stopping(network), least=least, decay=decay)
        _, (a, b) = sides(40, 30, 2)
        result = VerifiedMatcher(matcher, Verifier(GeometryConfig())).match(a, b)
        assert (result.status, len(result), result.stopped_after_layer) == (Status.NON_FINITE, 0, 0)
        assert matcher.engine.counts.non_finite == 1


def test_nan_of_a_runtime_is_made_good_by_the_fallback(tmp_path):
    (tmp_path / "fallback").mkdir()
    fallback = save(early_stop_model(), CARD, tmp_path / "fallback/glue.onnx")
    matcher = matcher_of(tmp_path, least=0.95, decay=0.0, fallback=fallback, nan_calls="1")
    _, (a, b) = sides(40, 30, 1)
    first, second = matcher.match(a, b), matcher.match(a, b)
    assert "not finite" in first.recovered and not second.recovered
    assert first.status is second.status is Status.STOPPED_EARLY and first.layer_scores == second.layer_scores


def test_a_runtime_that_finds_nothing_says_no_stop(tmp_path):
    """In the fake runtime: an empty result without a reason, which the guard of empty results is there for."""
    found = matcher_of(tmp_path, zero_calls="all").match(*sides(40, 30, 0)[1])
    assert (found.status, found.stopped_after_layer, found.covisibility) == (Status.NO_MATCHES, 0, 0.0)


# -- the second opinion ----------------------------------------------------------------------------


def blind(outputs, inputs):
    """A broken model: it sees nothing in common anywhere, and says so without a contradiction."""
    n = len(inputs["descriptors0"])
    scores = np.array([0.01, -1, -1, -1], np.float32)
    return {
        "matches0": np.full(n, -1, np.int64), "mscores0": np.zeros(n, np.float32), "covisibility_score": scores[0],
        "stopped_after_layer": np.array(2, np.int64), "layer_scores": scores,
    }  # fmt: skip


def test_a_wrong_stop_is_found_out_by_the_fallback(tmp_path):
    (tmp_path / "fallback").mkdir()
    fallback = save(early_stop_model(), CARD, tmp_path / "fallback/glue.onnx")
    _, (a, b) = sides(40, 30, 2)
    matcher = lying(matcher_of(tmp_path, least=0.5, decay=0.2, fallback=fallback), blind)
    assert matcher.match(a, b).status is Status.STOPPED_EARLY
    second = matcher.match_again(a, b, "they look alike")
    assert len(second.pairs) and second.recovered == "they look alike" and second.stopped_after_layer == 0
    assert [k for k, _ in second.layer_scores] == [2, 4, 6, 8]
    counts = matcher.engine.counts
    assert (counts.empty, counts.empty_agreed, counts.incidents) == (1, 0, 1) and matcher.suspect


def test_a_stop_by_the_rule_is_right_whatever_later_layers_say(tmp_path):
    """The rule loses some pairs that would pass in the end. That is what it costs, and no fault of the engine."""
    (tmp_path / "fallback").mkdir()
    fallback = save(early_stop_model(), CARD, tmp_path / "fallback/glue.onnx")
    pair, (a, b) = sides(40, 30, 0)
    matches, _, covisibility, *_ = NETWORK.match(pair, 0.9, 1.0)
    assert covisibility > 0.95 and (matches >= 0).any() and NETWORK.match(pair, 0.9, 0.0, (2, 4, 6, 8))[3] == 2
    matcher = matcher_of(tmp_path, least=0.9, decay=0.0, fallback=fallback)
    for _ in range(3):
        assert matcher.match(a, b).status is Status.STOPPED_EARLY
        assert matcher.match_again(a, b, "a model that has lately found none") is None
    counts = matcher.engine.counts
    assert (counts.empty, counts.empty_agreed, counts.incidents) == (0, 3, 0) and not matcher.suspect


def test_scores_of_the_fallback_are_of_the_layers_that_it_checks(tmp_path):
    """Its file may be an older one of the same weights."""
    (tmp_path / "fallback").mkdir()
    other = replace(CARD, early_stop_layers=(3, 5))
    fallback = save(stopping(NETWORK, (3, 5)), other, tmp_path / "fallback/glue.onnx")
    pair, (a, b) = sides(40, 30, 0)
    expected = NETWORK.match(pair, 0.0, 1.0, (3, 5))[4]
    found = matcher_of(tmp_path, fallback=fallback, nan_calls="1").match(a, b)
    assert found.recovered and [k for k, _ in found.layer_scores] == [3, 5]
    assert [s for _, s in found.layer_scores] == pytest.approx(expected.tolist(), abs=1e-4)


def test_a_stop_that_the_whole_model_confirms_is_right(tmp_path):
    """Asked to reject nothing, the fallback finds matches all the same."""
    (tmp_path / "fallback").mkdir()
    fallback = save(early_stop_model(), CARD, tmp_path / "fallback/glue.onnx")
    pair, (a, b) = sides(40, 30, 7)
    matches, _, covisibility, *_ = NETWORK.match(pair, 0.0, 1.0)
    assert covisibility < 0.9 and (matches >= 0).any()
    matcher = matcher_of(tmp_path, least=0.9, decay=0.0, fallback=fallback)
    assert matcher.match(a, b).status is Status.STOPPED_EARLY
    assert matcher.match_again(a, b, "they look alike") is None
    assert matcher.engine.counts.empty_agreed == 1 and not matcher.suspect
    found = matcher.match_again(a, b, "they look alike", overlapping=True)
    assert len(found.pairs) and found.status is None and matcher.suspect


@pytest.mark.usefixtures("tiny")
def test_wrong_stops_between_look_alike_keyframes_are_asked_of_the_fallback():
    made = make_scene("room", width=320, height=240, fps=5.0)
    front_end = FrontEnd(tiny_config())

    def stop(outputs, inputs):
        n = len(inputs["descriptors0"])
        return {"matches0": np.full(n, -1), "mscores0": np.zeros(n, np.float32), "stopped_after_layer": np.array(2)}

    spec = TensorSpec(np.dtype(np.int64), ())
    lying(front_end.matcher.matcher, stop, stopped_after_layer=spec)
    pairs = [p.matches for i in range(5) for p in front_end.process(made.frame(i))[0].pairs]
    assert [p.status for p in pairs] == [Status.FAULT_RECOVERED] * 4
    assert "no match (stopped_early) between keyframes 0 and 1, whose images look alike" in pairs[0].detail
    assert front_end.matcher.matcher.engine.counts.empty == 4
