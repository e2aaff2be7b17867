"""Early stopping: the stop rule, the plain graph where it does not stop, NaN, half precision."""

import itertools
from functools import partial

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
ir = pytest.importorskip("onnx_ir")
pytest.importorskip("onnxruntime")
pytest.importorskip("spox")

from early_stop_helpers import (  # noqa: E402
    DECAYS,
    EVERY,
    MATCHER,
    ONE,
    PLAIN,
    SHIPPED,
    THRESHOLDS,
    feed,
    openvino_runner,
    ort_session,
    pairs,
    patched,
)
from graph_helpers import FLOAT, LEVELS, graph, run  # noqa: E402
from onnx import helper  # noqa: E402

from vslam_features.graph import fp16, rules  # noqa: E402

LONG = pytest.mark.endurance


def check_against_numpy(run_once, layers):
    """All pairs, thresholds and decays against the reference in float64; which layers it stopped after."""
    stops = []
    for pair in pairs():
        for threshold in THRESHOLDS:
            for decay in DECAYS:
                matches, scores, covisibility, stopped, seen = MATCHER.match(pair, threshold, decay, layers)
                got = run_once(feed(pair, threshold, decay))
                assert got[3] == stopped
                np.testing.assert_array_equal(got[0], matches)
                np.testing.assert_allclose(got[1], scores, atol=1e-4)
                np.testing.assert_allclose(got[2], covisibility, atol=1e-4)
                np.testing.assert_allclose(got[4], seen, atol=1e-4)
                np.testing.assert_array_equal(got[4] == -1, [0 < stopped < k for k in layers])
                stops.append(stopped)
    return stops


# -- the rule ------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [SHIPPED, EVERY, ONE], ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_stop_layer_and_matches_are_those_of_the_reference(level, layers):
    session = ort_session(patched(PLAIN, layers)[0], level)
    stops = check_against_numpy(lambda inputs: session.run(None, inputs), layers)
    assert set(stops) == {0, *layers}, "each check must have stopped a pair"
    assert np.mean(np.array(stops) == 0) > 0.3, "and many must have passed"


@pytest.mark.parametrize("layers", [SHIPPED, pytest.param(EVERY, marks=LONG), pytest.param(ONE, marks=LONG)], ids=str)
def test_openvino_stops_where_the_reference_does(layers):
    stops = check_against_numpy(openvino_runner(patched(PLAIN, layers)[0]), layers)
    assert set(stops) == {0, *layers}


def test_the_reference_finds_matches_and_is_the_same_in_both_precisions():
    found = 0
    for pair in pairs():
        for decay in DECAYS:
            double, single = (MATCHER.match(pair, 0.25, decay, SHIPPED, dtype) for dtype in (np.float64, np.float32))
            np.testing.assert_array_equal(double[0], single[0])
            assert double[3] == single[3]
            found += (double[0] >= 0).sum()
    assert found > 50


@pytest.mark.parametrize("level", LEVELS)
def test_without_a_stop_the_results_are_those_of_the_plain_graph_bit_for_bit(level):
    plain = ort_session(PLAIN, level)
    for layers in (SHIPPED, EVERY, ONE):
        session = ort_session(patched(PLAIN, layers)[0], level)
        for pair in pairs():
            for threshold, decay in ((0.8, 1), (0.3, 1), (0, 0), (0, 0.5)):
                got = session.run(None, feed(pair, threshold, decay))
                for a, b in zip(got, plain.run(None, feed(pair, threshold))[:3]):
                    np.testing.assert_array_equal(a, b)
                assert got[3] == 0


def test_openvino_without_a_stop_gives_the_results_of_the_plain_graph():
    plain, stopping = openvino_runner(PLAIN), openvino_runner(patched(PLAIN, SHIPPED)[0])
    for pair in pairs():
        for threshold, decay in ((0.8, 1), (0, 0)):
            for a, b in zip(stopping(feed(pair, threshold, decay)), plain(feed(pair, threshold))[:3]):
                np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("layers", [(2,), (2, 3)], ids=str)
def test_a_score_of_zero_does_not_stop_without_a_threshold(layers):
    text = """(float[M,4] x) => (int64[M] matches0, float[M] mscores0, float covisibility_score, float score_2,
            float score_3) {
        mean = ReduceMean <keepdims = 0> (x)
        score_2 = Mul(mean, zero)
        score_3 = Mul(score_2, mean)
        y = Tanh(x)
        matches0 = ArgMax <axis = 1, keepdims = 0> (y)
        mscores0 = ReduceMax <keepdims = 0> (y, axis)
        covisibility_score = Mul(score_3, mean)
    }"""
    model = graph(text, {"zero": np.float32(0), "axis": np.array([1], np.int64)})
    proto, _ = patched(model, layers, 4, {2: "score_2", 3: "score_3"}, like=None)
    x = np.random.default_rng(0).random((3, 4), np.float32)
    for threshold, decay, stopped in ((0, 0, 0), (0.5, 1, 0), (0.5, 0.5, 2)):
        assert run(proto, {"x": x} | feed({}, threshold, decay))[3] == stopped


def runners(proto):
    for level in LEVELS:
        yield partial(ort_session(proto, level).run, None)
    yield openvino_runner(proto)


@pytest.mark.parametrize("layers", [SHIPPED, ONE], ids=str)
def test_a_score_that_is_nan_ends_the_run_and_is_seen(layers):
    pair = MATCHER.pair(20, 20, 3)
    pair["descriptors0"][4, 2] = np.nan
    for run_once in runners(patched(PLAIN, layers)[0]):
        for threshold, decay in itertools.product((0, 0.95), DECAYS):
            matches, scores, covisibility, stopped, seen = run_once(feed(pair, threshold, decay))
            assert np.isnan(covisibility) and stopped == layers[0]
            np.testing.assert_array_equal(matches, np.full(20, -1))
            np.testing.assert_array_equal(scores, np.zeros(20))
            np.testing.assert_array_equal(seen, [np.nan, *[-1] * len(layers[1:])])


@pytest.mark.parametrize(
    "layer", [SHIPPED[0], pytest.param(SHIPPED[1], marks=LONG), pytest.param(SHIPPED[2], marks=LONG), SHIPPED[3]]
)
def test_a_nan_of_one_score_ends_the_run_there(layer):
    model = onnx.ModelProto()
    model.CopyFrom(PLAIN)
    node = next(n for n in model.graph.node if f"score_{layer}" in n.output)
    node.output[0] = "whole"
    model.graph.initializer.append(helper.make_tensor("not_a_number", FLOAT, [], [np.nan]))
    model.graph.node.append(helper.make_node("Add", ["whole", "not_a_number"], [f"score_{layer}"]))
    before = [k for k in SHIPPED if k < layer]
    ended = 0
    for run_once in runners(patched(model, SHIPPED)[0]):
        for pair, threshold, decay in itertools.product(pairs(), (0, 0.8), DECAYS):
            got, expected = run_once(feed(pair, threshold, decay)), MATCHER.match(pair, threshold, decay, before)
            if not expected[3]:  # none of the layers before stopped it
                expected = np.full(len(got[0]), -1), np.zeros(len(got[0])), np.nan, layer, [*expected[4], np.nan]
                ended += 1
            assert got[3] == expected[3]
            np.testing.assert_array_equal(got[0], expected[0])
            np.testing.assert_array_equal(got[1], expected[1])
            np.testing.assert_allclose(got[2], expected[2], atol=1e-4)
            np.testing.assert_allclose(got[4], [*expected[4], *[-1] * 4][:4], atol=1e-4)
    assert ended > 50


@pytest.mark.parametrize("layers", [(2,), (2, 3)], ids=str)
def test_scores_of_infinity_are_large_and_small(layers):
    text = """(float[M,4] x) => (int64[M] matches0, float[M] mscores0, float covisibility_score, float score_2,
            float score_3) {
        mean = ReduceMean <keepdims = 0> (x)
        score_2 = Mul(mean, large)
        y = Tanh(x)
        score_3 = ReduceMax <keepdims = 0> (y)
        matches0 = ArgMax <axis = 1, keepdims = 0> (y)
        mscores0 = ReduceMax <keepdims = 0> (y, axis)
        covisibility_score = Mul(score_3, mean)
    }"""
    model = graph(text, {"large": np.float32(np.inf), "axis": np.array([1], np.int64)})
    proto, _ = patched(model, layers, 4, {2: "score_2", 3: "score_3"}, like=None)
    for run_once in runners(proto):
        for sign in (1, -1):
            got = run_once({"x": np.full((3, 4), sign, np.float32)} | feed({}, 0.1, 0.5))
            assert got[3] == (0 if sign > 0 else 2) and got[4][0] == sign * np.inf


# -- half precision ------------------------------------------------------------------------------


@pytest.mark.parametrize("outputs", [True, False], ids=["outputs", "inner"])
def test_half_precision_comes_first(outputs):
    keep = rules.by_op("ArgMax")
    half = fp16.to_half(ir.from_proto(MATCHER.graph(score_outputs=outputs)), keep)
    plain = ir.to_proto(half.model)
    types = {v.name: v.dtype for node in half.model.graph for v in node.outputs}
    assert types["score_2"] == (ir.DataType.FLOAT if outputs else ir.DataType.FLOAT16)
    proto, _ = patched(plain, SHIPPED)
    stopping, whole = ort_session(proto), ort_session(plain)
    stops = set()
    for pair, threshold, decay in itertools.product(pairs(), THRESHOLDS, (0, 0.2)):
        got = stopping.run(None, feed(pair, threshold, decay))
        assert got[2].dtype == got[4].dtype == np.float32
        expected = MATCHER.match(pair, threshold, decay, SHIPPED)
        scores = MATCHER.scores(pair)[0]
        if min(abs(scores[k - 1] - threshold * (1 - decay) ** (9 - k)) for k in SHIPPED) > 0.005:  # of half precision
            assert got[3] == expected[3]
            np.testing.assert_allclose(got[2], expected[2], atol=0.02)
            np.testing.assert_allclose(got[4], expected[4], atol=0.02)
            stops.add(expected[3])
        never = stopping.run(None, feed(pair, threshold, 1))
        plain = whole.run(None, feed(pair, threshold))
        np.testing.assert_array_equal(never[0], plain[0])
        # Not bit for bit: the CPU computes in float32 and rounds to half precision at the edges of branches.
        np.testing.assert_allclose(never[1], plain[1], atol=5e-3)
    assert len(stops) >= 3
