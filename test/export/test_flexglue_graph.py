"""The exported FlexGlue matcher, every layer checked, against torch: random weights, ONNX Runtime and OpenVINO."""

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
onnx = pytest.importorskip("onnx")
ir = pytest.importorskip("onnx_ir")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

from early_stop_helpers import openvino_runner, ort_session  # noqa: E402
from flexglue_helpers import (  # noqa: E402
    DECAYS,
    EVERY,
    SEED,
    THRESHOLDS,
    by_torch,
    exchanged,
    feed,
    matched,
    pairs,
    pictures,
)

from vslam_features.export.flexglue import INPUTS, OUTPUTS, export_scored, keep_in_matcher, without_scores  # noqa: E402
from vslam_features.graph.early_stop import add_early_stop  # noqa: E402
from vslam_features.graph.fp16 import to_half  # noqa: E402
from vslam_features.networks.flexglue import FLEXGLUE_TINY  # noqa: E402
from vslam_features.networks.flexglue_weights import randomised  # noqa: E402

pytestmark = pytest.mark.timeout(600)  # the first test exports
LEVELS = ("ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL")
STOPPING = (*OUTPUTS, "stopped_after_layer", "layer_scores")
SCORES = {k: f"score_{k}" for k in EVERY}


@pytest.fixture(scope="module")
def network():
    torch.set_num_threads(1)
    return randomised(FLEXGLUE_TINY, SEED)


@pytest.fixture(scope="module")
def scored(network):
    """The graph with a score after each layer."""
    return export_scored(network.matcher)


@pytest.fixture(scope="module")
def plain(scored):
    return proved(without_scores(scored))


@pytest.fixture(scope="module")
def stopping(scored):
    return proved(add_early_stop(scored, SCORES, EVERY, 9, force=True).model)


@pytest.fixture(scope="module")
def inputs(network):
    return pairs(network)


@pytest.fixture(scope="module")
def cases(network, inputs):
    """Inputs and what torch says of them, for every pair, threshold and decay; no score is near a limit."""
    found = []
    for pair in inputs:
        scores = np.array(by_torch(network, pair).layer_scores)
        for threshold in THRESHOLDS:
            for decay in DECAYS:
                scalars = limits_of(threshold, decay)
                limits = threshold * (1.0 - decay) ** np.arange(8, -1, -1)
                assert (np.abs(scores - limits)[limits > 0] > 1e-3).all()
                found.append((pair | scalars, by_torch(network, pair | scalars, EVERY)))
    stops = {reference.stopped_after_layer for _, reference in found}
    assert stops == {0, *EVERY}
    assert {bool((r.matches0 >= 0).any()) for _, r in found if not r.stopped_after_layer} == {True, False}
    return found


def proved(model):
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    onnx.shape_inference.infer_shapes(proto, check_type=True, strict_mode=True, data_prop=True)
    return proto


def limits_of(threshold, decay):
    """The two scalars as inputs."""
    given = {"min_covisibility": threshold, "early_stop_decay": decay}
    return {name: np.array(value, np.float32) for name, value in given.items()}


def run(session, inputs, names=STOPPING):
    return dict(zip(names, session.run(list(names), inputs)))


def assert_same(found, reference):
    """Matches and stop identical, scores to 1e-4."""
    assert found["matches0"].dtype == np.int64 and found["mscores0"].dtype == np.float32
    np.testing.assert_array_equal(found["matches0"], reference.matches0)
    assert found["stopped_after_layer"] == reference.stopped_after_layer
    np.testing.assert_allclose(found["mscores0"], reference.mscores0, atol=1e-4)
    np.testing.assert_allclose(found["covisibility_score"], reference.covisibility_score, atol=1e-4)
    ran = reference.layer_scores[:8]
    np.testing.assert_allclose(found["layer_scores"], [*ran, *[-1] * (8 - len(ran))], atol=1e-4)


@pytest.mark.parametrize("level", LEVELS)
def test_onnx_runtime_does_what_torch_does(level, stopping, cases):
    session = ort_session(stopping, level)
    for inputs, reference in cases:
        assert_same(run(session, inputs), reference)


def test_openvino_does_what_torch_does(stopping, cases):
    runner = openvino_runner(stopping)
    names = [output.name for output in stopping.graph.output]
    for inputs, reference in cases:
        assert_same(dict(zip(names, runner(inputs))), reference)


@pytest.mark.parametrize("level", LEVELS)
def test_without_a_stop_it_is_the_plain_matcher_bit_for_bit(level, plain, stopping, inputs):
    before, after = ort_session(plain, level), ort_session(stopping, level)
    for pair in inputs[:3]:
        for threshold, decay in ((0.9, 1), (0, 0), (0, 0.5)):
            scalars = limits_of(threshold, decay)
            expected = run(before, pair | {"min_covisibility": scalars["min_covisibility"]}, OUTPUTS)
            found = run(after, pair | scalars)
            assert found["stopped_after_layer"] == 0
            for name in OUTPUTS:
                np.testing.assert_array_equal(found[name], expected[name])


@pytest.mark.parametrize("where", ["head 2", "head 9", "descriptors"])
def test_nan_comes_out_as_nan_and_matches_nothing(where, network, scored, inputs):
    model, pair = scored.clone(), dict(inputs[0])
    if where == "descriptors":
        pair["descriptors1"] = pair["descriptors1"].copy()
        pair["descriptors1"][3, 4, 5] = np.nan
    else:
        name = f"heads.{int(where[-1]) - 1}.pooled.bias"
        model.graph.initializers[name].const_value = ir.tensor(np.full(1, np.nan, np.float32), name=name)
    layers = (2, 4, 6, 8)
    session = ort_session(ir.to_proto(add_early_stop(model, SCORES, layers, 9).model))
    for decay in (0, 0.5, 1):
        found = run(session, pair | limits_of(0.01, decay))
        assert np.isnan(found["covisibility_score"])
        assert found["stopped_after_layer"] == (0 if where == "head 9" else 2)
        if where != "head 9":  # of which no check knows: the session finds the NaN among the outputs
            assert (found["matches0"] == -1).all()


def test_any_numbers_of_keypoints(plain, network):
    session, found = ort_session(plain), pictures()
    shapes = {value.name: [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]
              for value in (*plain.graph.input, *plain.graph.output)}  # fmt: skip
    assert (shapes["keypoints0"], shapes["keypoints1"]) == (["M", 2], ["N", 2])
    assert shapes["descriptors0"] == [64, 20, 24] and shapes["image_size1"] == [2] and shapes["min_covisibility"] == []
    assert (shapes["matches0"], shapes["mscores0"], shapes["covisibility_score"]) == (["M"], ["M"], [])
    for counts in ((1, 1), (1, 300), (300, 1), (257, 512), (2, 2)):
        pair = feed(network, (found["cup_0"], found["cup_1"]), counts=counts)
        reference = by_torch(network, pair)
        got = run(session, pair, OUTPUTS)
        np.testing.assert_array_equal(got["matches0"], reference.matches0)
        assert len(got["mscores0"]) == counts[0]


def test_images_of_other_sizes_in_one_session(plain, network):
    """848 x 480 and 544 x 640 in turn, as where the camera changes; the same as in a session of their own."""
    import cv2

    source, session = pictures(), ort_session(plain)
    sizes = ((848, 480), (544, 640), (848, 480), (544, 640))
    views = [cv2.resize(source[name], size) for name, size in zip(("cup_0", "cup_1", "cat_0", "cat_1"), sizes)]
    for i, j in ((0, 2), (0, 1), (1, 3), (1, 0)):
        pair = feed(network, (views[i], views[j]), seed=i)
        got, own = run(session, pair, OUTPUTS), run(ort_session(plain), pair, OUTPUTS)
        reference = by_torch(network, pair)
        np.testing.assert_array_equal(got["matches0"], reference.matches0)
        for name in OUTPUTS:
            np.testing.assert_array_equal(got[name], own[name])
    assert (pair["keypoints1"].max(axis=0) > [700, 400]).all()  # the second image is the large one


def test_exchanging_the_images_exchanges_the_matches(plain, inputs):
    session, seen = ort_session(plain), 0
    for pair in inputs:
        one, other = (run(session, p, OUTPUTS) for p in (pair, exchanged(pair)))
        there, back = matched(one["matches0"]), matched(other["matches0"])
        assert there == {(i, j) for j, i in back}
        np.testing.assert_allclose(one["covisibility_score"], other["covisibility_score"], atol=1e-5)
        seen += len(there)
    assert seen > 40


def test_the_readout_sums_along_the_last_axis_over_the_sides_of_the_map(plain):
    """Four CumSum, as in the released graph: x and y in both directions. TensorRT 10.3 miscomputes them."""
    inferred = onnx.shape_inference.infer_shapes(plain, data_prop=True).graph
    values = {v.name: v for v in (*inferred.value_info, *inferred.output)}
    constants = {t.name: onnx.numpy_helper.to_array(t) for t in plain.graph.initializer}
    sums = [node for node in plain.graph.node if node.op_type == "CumSum"]
    shapes = [[d.dim_value for d in values[n.input[0]].type.tensor_type.shape.dim] for n in sums]
    assert sorted(shape[-1] for shape in shapes) == [20, 20, 24, 24]
    for node, shape in zip(sums, shapes):
        assert int(constants[node.input[1]]) in (-1, len(shape) - 1)


def test_half_precision_keeps_positions_heads_and_readout_in_float32(scored, network, inputs):
    """Early stops after half precision: types stay strict, stops and matches those of torch where scores are clear."""
    half = to_half(scored, keep_in_matcher(9))
    wide = {n.op_type for n in half.model.graph for v in n.outputs if v.dtype == ir.DataType.FLOAT}
    narrow = {n.op_type for n in half.model.graph for v in n.outputs if v.dtype == ir.DataType.FLOAT16}
    assert {"GridSample", "CumSum", "Sigmoid", "ReduceMean", "Exp"} <= wide
    assert not narrow & {"GridSample", "CumSum", "Sigmoid", "ReduceMean", "Exp"} and {"MatMul", "Softmax"} <= narrow
    model = proved(add_early_stop(half.model, SCORES, EVERY, 9, force=True).model)
    session = ort_session(model)
    for pair in inputs[:3]:
        for threshold, decay in ((0.6, 0), (0.9, 0.2), (0.3, 1)):
            scalars = limits_of(threshold, decay)
            reference = by_torch(network, pair | scalars, EVERY)
            found = run(session, pair | scalars)
            limits = np.float32(threshold) * (1 - decay) ** np.arange(8, 0, -1)
            ran = np.array(reference.layer_scores[:8])
            assert (np.abs(ran - limits[: len(ran)]) > 2e-3).all()
            assert found["stopped_after_layer"] == reference.stopped_after_layer
            np.testing.assert_allclose(found["covisibility_score"], reference.covisibility_score, atol=0.02)
            assert (found["matches0"] == reference.matches0.numpy()).mean() >= 0.9


def test_inputs_are_those_of_the_contract(stopping):
    assert [v.name for v in stopping.graph.input] == [*INPUTS, "early_stop_decay"]
    assert [v.name for v in stopping.graph.output][:3] == list(OUTPUTS)
    assert Path(stopping.producer_name).name == "pytorch" and not stopping.doc_string
