"""The surgery of early stopping: signature, where nodes and initialisers go, what never runs, refusals."""

import json

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
ir = pytest.importorskip("onnx_ir")
pytest.importorskip("onnxruntime")
pytest.importorskip("spox")

from early_stop_helpers import (  # noqa: E402
    DECAYS,
    MATCHER,
    PLAIN,
    SCORES,
    SHIPPED,
    SIZES,
    THRESHOLDS,
    feed,
    ort_session,
    pairs,
    patched,
    scopes,
)
from graph_helpers import FLOAT, run  # noqa: E402
from matcher_graph import Matcher  # noqa: E402
from onnx import TensorProto, helper  # noqa: E402

from vslam_features.errors import ConfigError, ModelFileError  # noqa: E402
from vslam_features.graph.early_stop import add_early_stop  # noqa: E402

# -- what the graph looks like -------------------------------------------------------------------


def test_signature():
    proto, _ = patched(PLAIN, SHIPPED)
    assert [v.name for v in proto.graph.input] == [v.name for v in PLAIN.graph.input] + ["early_stop_decay"]
    names = [v.name for v in proto.graph.output]
    assert names == ["matches0", "mscores0", "covisibility_score", "stopped_after_layer", "layer_scores"]
    types = [v.type.tensor_type.elem_type for v in proto.graph.output]
    assert types == [TensorProto.INT64, FLOAT, FLOAT, TensorProto.INT64, FLOAT]
    assert [len(v.type.tensor_type.shape.dim) for v in proto.graph.output] == [1, 1, 0, 0, 1]
    assert proto.graph.output[4].type.tensor_type.shape.dim[0].dim_value == len(SHIPPED)


def test_the_threshold_becomes_an_input_where_there_is_none():
    matcher = Matcher(layers=3)
    proto, _ = patched(matcher.graph(min_covisibility=False), (2,), 3)
    assert [v.name for v in proto.graph.input][2:] == ["min_covisibility", "early_stop_decay"]
    pair = matcher.pair(10, 12, 0)
    score = matcher.scores(pair)[0][1]
    assert run(proto, feed(pair, score + 0.01, 0))[3] == 2
    matches, _, _, stopped, _ = run(proto, feed(pair, score - 0.01, 0))
    assert stopped == 0
    np.testing.assert_array_equal(matches, matcher.match(pair, 0, 0)[0])


@pytest.mark.parametrize("outputs", [True, False], ids=["outputs", "inner"])
@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_scores_may_be_inner_values_and_have_an_axis(shape, outputs):
    matcher = Matcher(layers=4, seed=1, score_shape=shape)
    model = matcher.graph(score_outputs=outputs)
    proto, _ = patched(model, (2, 3), 4)
    stops = set()
    for seed in range(8):
        pair = matcher.pair(10, 12, seed)
        for threshold in THRESHOLDS:
            expected = matcher.match(pair, threshold, 0.2, (2, 3))
            got = run(proto, feed(pair, threshold, 0.2))
            assert got[2].shape == shape and got[3].shape == () and got[3] == expected[3]
            np.testing.assert_allclose(got[2].item(), expected[2], atol=1e-4)
            stops.add(expected[3])
    assert stops == {0, 2, 3}


def test_the_length_follows_from_the_name_of_a_dimension():
    model = onnx.ModelProto()
    model.CopyFrom(PLAIN)
    for name in ("matches0", "mscores0"):
        output = next(v for v in model.graph.output if v.name == name)
        output.type.tensor_type.shape.dim[0].dim_param = "M"
    proto, _ = patched(model, SHIPPED, like=None)
    assert proto.graph.output[0].type.tensor_type.shape.dim[0].dim_param == "M"
    session = ort_session(proto)
    for m, n in SIZES:
        matches, scores, _, stopped, _ = session.run(None, feed(MATCHER.pair(m, n, 0), 10, 0))
        assert stopped == 2 and matches.dtype == np.int64 and scores.dtype == np.float32
        np.testing.assert_array_equal(matches, np.full(m, -1))
        np.testing.assert_array_equal(scores, np.zeros(m))


def test_each_initialiser_is_where_it_is_first_read():
    proto, done = patched(PLAIN, SHIPPED)
    placed = [(i, t, onnx.numpy_helper.to_array(t)) for i, scope in enumerate(scopes(proto)) for t in scope.initializer]
    assert len({t.name for _, t, _ in placed}) == len(placed) > 91
    for name, weight in MATCHER.weights.items():
        where = [i for i, _, array in placed if array.shape == weight.shape and np.array_equal(array, weight)]
        if name in ("in", "shared"):  # the latter is read by all layers
            assert where == [0], name
            continue
        layer, kind = name.split(".")[0], name.split(".")[1]
        first = next(i for i, last in enumerate((*SHIPPED, 9)) if int(layer) <= last)
        read = kind != "score" or int(layer) in (*SHIPPED, 9)  # heads that are not checked are gone
        assert where == ([first] if read else []), name
    for i, layer in enumerate(SHIPPED, 1):
        assert done.skipped(layer)[1] == sum(array.nbytes for at, _, array in placed if at >= i)
    assert [stage.after_layer for stage in done.stages] == [0, *SHIPPED]


def test_what_a_stop_skips_never_runs(tmp_path):
    """By ONNX Runtime's profile: names of nodes that ran, of branches too."""
    model = onnx.ModelProto()
    model.CopyFrom(PLAIN)
    for i, node in enumerate(model.graph.node):
        node.name = f"plain_{i}"
    proto, done = patched(model, SHIPPED)
    parts = [{n.name for n in scope.node if n.name.startswith("plain_")} for scope in scopes(proto)]
    assert [len(part) for part in parts] == [stage.nodes for stage in done.stages]
    scores = MATCHER.scores(pairs()[0])[0]
    seen = set()
    for threshold, decay in [(10, 0), (10, 1), *((t, d) for t in THRESHOLDS for d in DECAYS)]:
        session = ort_session(proto, "ORT_DISABLE_ALL", tmp_path / "profile")
        stopped = int(session.run(None, feed(pairs()[0], threshold, decay))[3])
        with open(session.end_profiling()) as file:
            events = [event["name"] for event in json.load(file) if event["cat"] == "Node"]
        ran = {name.removesuffix("_kernel_time") for name in events if name.endswith("_kernel_time")}
        depth = len(parts) if stopped == 0 else SHIPPED.index(stopped) + 1
        expected = set().union(*parts[:depth])
        assert {name for name in ran if name.startswith("plain_")} == expected, (stopped, scores)
        if stopped:
            assert len(model.graph.node) - len(expected) >= done.skipped(stopped)[0]
        seen.add(stopped)
    assert len(seen) >= 3


# -- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "options", "error", "words"),
    [
        ((), {}, ConfigError, r"\[\].*1 to 8"),
        ((4, 2), {}, ConfigError, r"\[4, 2\].*ascending"),
        ((2, 2), {}, ConfigError, "ascending"),
        ((0, 2), {}, ConfigError, "ascending"),
        ((2, 9), {}, ConfigError, "1 to 8"),
        ((1, 2), {"force": False}, ConfigError, "layer 1.*force"),
        ((2, 3), {"scores": {2: "score_2"}}, ConfigError, r"\[3\].*\[2\]"),
        ((2,), {"scores": {2: "nothing"}}, ConfigError, "'nothing'.*layer 2"),
        ((2,), {"scores": {2: "matches0"}}, ConfigError, "'matches0'.*INT64"),
        ((2,), {"scores": {2: "mscores0"}}, ConfigError, "'mscores0'.*one element"),
        ((2, 4), {"scores": SCORES | {2: "score_4", 4: "score_2"}}, ConfigError, "'score_2' of layer 4.*fewer"),
        ((2, 4), {"scores": SCORES | {4: "score_2"}}, ConfigError, "after the score of layer 2"),
        ((2,), {"matches": "matches"}, ConfigError, "output 'matches'.*'matches0'"),
        ((2,), {"match_scores": "matches0"}, ModelFileError, "'matches0'.*floats"),
        ((2,), {"matches": "mscores0"}, ModelFileError, "'mscores0'.*integers"),
        ((2,), {"covisibility": "mscores0"}, ConfigError, "'mscores0'.*one element"),
        ((2,), {"min_covisibility": "descriptors0"}, ModelFileError, "'descriptors0'.*one float"),
        ((2,), {"min_covisibility": "score_3"}, ModelFileError, "'score_3'.*no input"),
        ((2,), {"like": None}, ConfigError, "like="),
        ((2,), {"like": ("keypoints0", 0)}, ConfigError, "'keypoints0'.*descriptors0"),
        ((2,), {"like": ("descriptors0", 2)}, ConfigError, "axis 2"),
    ],
)
def test_refusals_say_what_is_wrong(layers, options, error, words):
    with pytest.raises(error, match=words):
        patched(PLAIN, layers, **options)


def test_a_graph_that_stops_early_is_refused():
    proto, _ = patched(PLAIN, SHIPPED)
    with pytest.raises(ModelFileError, match="already"):
        patched(proto, SHIPPED)


@pytest.mark.parametrize("name", ["stopped_after_layer", "layer_scores"])
def test_names_that_are_added_must_be_free(name):
    with pytest.raises(ModelFileError, match=name):
        patched(with_output(name, "score_1"), SHIPPED)


def test_a_graph_of_an_old_opset_is_refused():
    model = onnx.ModelProto()
    model.CopyFrom(PLAIN)
    model.opset_import[0].version = 11
    with pytest.raises(ModelFileError, match="opset 11, expected 12 or newer"):
        add_early_stop(ir.from_proto(model), SCORES, [2], 9, like=("descriptors0", 0))


def with_output(name, source):
    model = onnx.ModelProto()
    model.CopyFrom(PLAIN)
    model.graph.node.append(helper.make_node("Neg", [source], [name]))
    model.graph.output.append(helper.make_tensor_value_info(name, FLOAT, None))
    return model


@pytest.mark.parametrize("source", ["mscores0", "descriptors0"])
def test_an_output_that_comes_after_the_first_check_is_refused(source):
    with pytest.raises(ModelFileError, match="'more' has no value where the matcher stops"):
        patched(with_output("more", source), SHIPPED)


def test_an_output_that_the_first_check_needs_stays():
    model = onnx.ModelProto()
    model.CopyFrom(PLAIN)
    source = next(n for n in model.graph.node if "score_2" in n.output).input[0]
    model.graph.output.insert(0, helper.make_tensor_value_info(source, FLOAT, []))
    proto, _ = patched(model, SHIPPED)
    assert [v.name for v in proto.graph.output][:2] == [source, "matches0"]
    for decay, stopped in ((0, 2), (1, 0)):
        early, _, _, score, layer, _ = run(proto, feed(pairs()[0], 10, decay))
        assert layer == stopped
        np.testing.assert_allclose(early, MATCHER.scores(pairs()[0])[0][1], atol=1e-4)


def test_the_model_given_stays_as_it_is():
    model = ir.from_proto(PLAIN)
    before = ir.to_proto(model).SerializeToString()
    add_early_stop(model, SCORES, [2], 9, like=("descriptors0", 0))
    assert ir.to_proto(model).SerializeToString() == before
