"""LightGlue as an ONNX graph, with seeded random weights: against a direct NumPy LightGlue, and its contract."""

import math

import numpy as np
import pytest

from vslam_features.errors import ConfigError, WeightsError

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
pytest.importorskip("spox")

import spox.opset.ai.onnx.v18 as op  # noqa: E402
from spox import Tensor, argument  # noqa: E402

from vslam_features.networks import lightglue  # noqa: E402
from vslam_features.networks.layers import Layers, finish  # noqa: E402
from vslam_features.networks.lightglue import LIGHTERGLUE, LIGHTGLUE_ALIKED, LightGlueSizes  # noqa: E402
from vslam_features.runtimes.ov import shared_core  # noqa: E402

OUTPUTS = ["matches0", "mscores0"]
ONE_HEAD = LightGlueSizes(input_dim=8, dim=16, heads=1, layers=2)
TWO_HEADS = LightGlueSizes(input_dim=8, dim=16, heads=2, layers=3)


def random_weights(sizes: LightGlueSizes, seed: int = 3) -> dict[str, np.ndarray]:
    """Random weights that keep the scale of the states, with similarities that tell points apart."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in lightglue.shapes(sizes, scores=True).items():
        if "posenc" in name:
            value = rng.normal(0, 1, shape)
        elif "ffn.1.weight" in name:
            value = rng.uniform(0.5, 1.5, shape)
        else:
            value = rng.normal(0, shape[-1] ** -0.5 if len(shape) == 2 else 0.1, shape)
        tensors[name] = value.astype(np.float32)
    tensors[f"log_assignment.{sizes.layers - 1}.final_proj.weight"] *= 2
    return tensors


def random_pair(m: int, n: int, dim: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Two images that see the same points as far as their numbers allow, in another order and with noise."""
    rng = np.random.default_rng(seed)
    most = max(m, n)
    keypoints, descriptors = rng.uniform(0, [640, 480], (most, 2)), rng.normal(size=(most, dim))
    inputs = {}
    for i, (count, size) in enumerate([(m, (640, 480)), (n, (500, 700))]):
        order = rng.permutation(most)[:count]
        inputs[f"keypoints{i}"] = keypoints[order] * (np.array(size) / (640, 480)) + rng.normal(size=(count, 2))
        inputs[f"descriptors{i}"] = descriptors[order] + 0.1 * rng.normal(size=(count, dim))
        inputs[f"descriptors{i}"] /= np.linalg.norm(inputs[f"descriptors{i}"], axis=1, keepdims=True) / 2
        inputs[f"image_size{i}"] = np.array(size)
    return {name: value.astype(np.float32) for name, value in inputs.items()}


def on_onnxruntime(model: onnx.ModelProto):
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return lambda inputs: session.run(OUTPUTS, inputs)


@pytest.fixture(scope="module", params=[ONE_HEAD, TWO_HEADS], ids=["one head", "two heads"])
def sizes(request) -> LightGlueSizes:
    return request.param


@pytest.fixture(scope="module")
def weights(sizes) -> dict[str, np.ndarray]:
    return random_weights(sizes)


@pytest.fixture(scope="module")
def model(weights, sizes) -> onnx.ModelProto:
    return lightglue.build(weights, sizes)


@pytest.fixture(scope="module")
def match(model):
    return on_onnxruntime(model)


class Direct:
    """The network word for word after the paper and upstream's layout of the weights, in float64."""

    def __init__(self, weights: dict[str, np.ndarray], sizes: LightGlueSizes):
        self.weights = {name: value.astype(np.float64) for name, value in weights.items()}
        self.sizes = sizes

    def linear(self, name, x):
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def attend(self, q, k, v):
        logits = q @ k.T / math.sqrt(q.shape[1])
        e = np.exp(logits - logits.max(1, keepdims=True))
        return e / e.sum(1, keepdims=True) @ v

    def update(self, name, projection, x, messages):
        h = self.linear(f"{name}.ffn.0", np.hstack([x, self.linear(f"{name}.{projection}", np.hstack(messages))]))
        h = (h - h.mean(1, keepdims=True)) / np.sqrt(h.var(1, keepdims=True) + 1e-5)
        h = h * self.weights[f"{name}.ffn.1.weight"] + self.weights[f"{name}.ffn.1.bias"]
        gelu = h * 0.5 * (1 + np.vectorize(math.erf)(h / math.sqrt(2)))
        return x + self.linear(f"{name}.ffn.3", gelu)

    def self_block(self, name, x, angle):
        heads = range(self.sizes.heads)
        qkv = self.linear(f"{name}.Wqkv", x).reshape(len(x), self.sizes.heads, -1, 3)

        def turn(t):
            z = (t[:, ::2] + 1j * t[:, 1::2]) * np.exp(1j * angle)
            return np.stack([z.real, z.imag], 2).reshape(t.shape)

        messages = [self.attend(turn(qkv[:, h, :, 0]), turn(qkv[:, h, :, 1]), qkv[:, h, :, 2]) for h in heads]
        return self.update(name, "out_proj", x, messages)

    def cross_block(self, name, x0, x1):
        (k0, v0), (k1, v1) = (
            [np.split(self.linear(f"{name}.{to}", x), self.sizes.heads, axis=1) for to in ("to_qk", "to_v")]
            for x in (x0, x1)
        )
        heads = range(self.sizes.heads)
        return (
            self.update(name, "to_out", x0, [self.attend(k0[h], k1[h], v1[h]) for h in heads]),
            self.update(name, "to_out", x1, [self.attend(k1[h], k0[h], v0[h]) for h in heads]),
        )

    def states(self, inputs):
        """Of the points of both images, after each layer."""
        x, angles = [], []
        for i in "01":
            size = inputs[f"image_size{i}"].astype(np.float64)
            position = (inputs[f"keypoints{i}"] - size / 2) / (size.max() / 2)
            angles.append(position @ self.weights["posenc.Wr.weight"].T)
            x.append(self.linear("input_proj", inputs[f"descriptors{i}"].astype(np.float64)))
        for layer in range(self.sizes.layers):
            x = [self.self_block(f"transformers.{layer}.self_attn", *each) for each in zip(x, angles)]
            x = self.cross_block(f"transformers.{layer}.cross_attn", *x)
            yield x

    def covisibility(self, inputs, count=16):
        """After each layer: the product of the largest matchabilities of an image, of the image where it is smaller."""
        for layer, x in enumerate(self.states(inputs)):
            head = f"log_assignment.{layer}.matchability"
            matchable = [1 / (1 + np.exp(-self.linear(head, each)[:, 0])) for each in x]
            yield min(np.prod(sorted(each)[-count:]) for each in matchable)

    def probabilities(self, inputs):
        """Probability (M, N) that two points match."""
        *_, x = self.states(inputs)
        head = f"log_assignment.{self.sizes.layers - 1}"
        p0, p1 = (self.linear(f"{head}.final_proj", each) for each in x)
        z0, z1 = (1 / (1 + np.exp(-self.linear(f"{head}.matchability", each))) for each in x)
        e = np.exp(p0 @ p1.T / math.sqrt(self.sizes.dim))
        return z0 * z1.T * (e / e.sum(1, keepdims=True)) * (e / e.sum(0))


def mutual(probabilities: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    best0, best1, rows = probabilities.argmax(1), probabilities.argmax(0), np.arange(len(probabilities))
    both = best1[best0] == rows
    return np.where(both, best0, -1), np.where(both, probabilities.max(1), 0)


@pytest.mark.parametrize("m, n", [(60, 45), (45, 60), (1, 7), (7, 1), (1, 1), (127, 200)])
def test_equals_the_direct_network(match, weights, sizes, m, n):
    inputs = random_pair(m, n, sizes.input_dim)
    matches, scores = match(inputs)
    expected, expected_scores = mutual(Direct(weights, sizes).probabilities(inputs))
    assert matches.dtype == np.int64 and matches.shape == (m,)
    assert scores.dtype == np.float32 and scores.shape == (m,)
    np.testing.assert_array_equal(matches, expected)
    np.testing.assert_allclose(scores, expected_scores, rtol=1e-3, atol=1e-6)
    assert (matches >= 0).any()


@pytest.fixture(scope="module")
def scored(weights, sizes) -> onnx.ModelProto:
    return lightglue.build(weights, sizes, scores=True)


def scores_of(outputs: dict, sizes) -> list[float]:
    assert all(outputs[f"score_{k}"].shape == () for k in range(1, sizes.layers + 1))
    return [float(outputs[f"score_{k}"]) for k in range(1, sizes.layers + 1)]


def all_outputs(model: onnx.ModelProto, inputs: dict) -> dict[str, np.ndarray]:
    names = [output.name for output in model.graph.output]
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return dict(zip(names, session.run(names, inputs)))


@pytest.mark.parametrize("m, n", [(60, 45), (45, 60), (9, 40), (1, 7), (1, 1), (127, 200)])
def test_covisibility_after_each_layer_is_that_of_the_direct_network(scored, match, weights, sizes, m, n):
    inputs = random_pair(m, n, sizes.input_dim)
    outputs = all_outputs(scored, inputs)
    expected = list(Direct(weights, sizes).covisibility(inputs))
    np.testing.assert_allclose(scores_of(outputs, sizes), expected, rtol=1e-3)
    assert outputs["covisibility_score"] == outputs[f"score_{sizes.layers}"]
    assert 0 < min(expected) and max(expected) < 1 and len(set(expected)) == sizes.layers
    for name, plain in zip(OUTPUTS, match(inputs)):
        np.testing.assert_array_equal(outputs[name], plain)


def test_covisibility_of_swapped_images_is_the_same(scored, sizes):
    inputs = random_pair(50, 30, sizes.input_dim)
    swapped = {name[:-1] + str(1 - int(name[-1])): value for name, value in inputs.items()}
    ours, theirs = (scores_of(all_outputs(scored, i), sizes) for i in (inputs, swapped))
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)


def test_openvino_computes_the_same_covisibility(scored, sizes):
    pytest.importorskip("openvino")
    core = shared_core()
    model = core.compile_model(core.read_model(scored.SerializeToString()), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    for m, n in [(60, 45), (5, 70), (1, 1)]:
        inputs = random_pair(m, n, sizes.input_dim)
        found = model(inputs)
        expected = all_outputs(scored, inputs)
        for k in range(1, sizes.layers + 1):
            np.testing.assert_allclose(found[f"score_{k}"], expected[f"score_{k}"], rtol=1e-3)


@pytest.mark.parametrize("place", [0, 59])
def test_nan_at_any_keypoint_makes_the_covisibility_nan(scored, sizes, place):
    inputs = random_pair(60, 45, sizes.input_dim)
    inputs["descriptors0"][place] = np.nan
    assert np.isnan(scores_of(all_outputs(scored, inputs), sizes)).all()


def test_nan_counts_where_it_is_not_among_the_most_matchable(sizes):
    """Of one keypoint only, which TopK may leave out."""
    x = argument(Tensor(np.float32, (40, sizes.dim)))
    weights = {"head.matchability.weight": np.ones((1, sizes.dim)), "head.matchability.bias": np.zeros(1)}
    score = lightglue._covisibility(Layers(weights), "head", x, lightglue._Pair(op.const(np.array([20]))))
    model = finish("covisibility", {"x": x}, {"score": score})
    states = np.random.default_rng(0).normal(size=(40, sizes.dim)).astype(np.float32)
    assert 0 < all_outputs(model, {"x": states})["score"] < 1
    for place in (0, 19, 20, 39):
        broken = states.copy()
        broken[place, 0] = np.nan
        assert np.isnan(all_outputs(model, {"x": broken})["score"])


def test_weights_without_heads_of_every_layer_give_no_scores(weights, sizes):
    lacking = {name: value for name, value in weights.items() if not name.startswith("log_assignment.0.matchability")}
    with pytest.raises(WeightsError, match="no tensor 'log_assignment.0.matchability.weight'"):
        lightglue.build(lacking, sizes, scores=True)
    lightglue.build(lacking, sizes)


@pytest.mark.slow
@pytest.mark.parametrize("m, n", [(512, 2048), (1024, 1024), (2048, 127)])
def test_large_and_unequal_numbers_of_points(match, sizes, m, n):
    matches, scores = match(random_pair(m, n, sizes.input_dim))
    assert matches.shape == scores.shape == (m,)
    assert np.isfinite(scores).all() and matches.max() < n


def test_no_point_of_image_1_has_two_matches(match, sizes):
    matches, scores = match(random_pair(80, 50, sizes.input_dim))
    found = matches[matches >= 0]
    assert len(np.unique(found)) == len(found) >= 10
    assert ((scores > 0) == (matches >= 0)).all() and scores.max() <= 1


def test_identical_points_have_one_match_between_them(match, sizes):
    inputs = random_pair(40, 40, sizes.input_dim)
    for name in ("keypoints0", "descriptors0", "keypoints1", "descriptors1"):
        inputs[name][20:] = inputs[name][:20]
    matches, _ = match(inputs)
    found = matches[matches >= 0]
    assert len(np.unique(found)) == len(found) >= 3


def test_order_of_points_does_not_matter(match, sizes):
    inputs = random_pair(70, 50, sizes.input_dim)
    matches, scores = match(inputs)
    rng = np.random.default_rng(1)
    order0, order1 = rng.permutation(70), rng.permutation(50)
    for name in ("keypoints", "descriptors"):
        inputs[f"{name}0"], inputs[f"{name}1"] = inputs[f"{name}0"][order0], inputs[f"{name}1"][order1]
    permuted, permuted_scores = match(inputs)
    back = np.where(permuted >= 0, order1[permuted], -1)
    np.testing.assert_array_equal(back, matches[order0])
    np.testing.assert_allclose(permuted_scores, scores[order0], rtol=1e-3)


def test_swapped_images_give_the_same_matches(match, sizes):
    inputs = random_pair(70, 50, sizes.input_dim)
    swapped = {name[:-1] + str(1 - int(name[-1])): value for name, value in inputs.items()}
    matches, _ = match(inputs)
    back, _ = match(swapped)
    pairs = {(i, j) for i, j in enumerate(matches) if j >= 0}
    assert pairs == {(i, j) for j, i in enumerate(back) if i >= 0}


def test_only_position_in_halves_of_the_longer_side_matters(match, sizes):
    inputs = random_pair(30, 30, sizes.input_dim)
    matches, scores = match(inputs)
    inputs["keypoints1"] *= 2
    inputs["image_size1"] *= 2
    doubled, doubled_scores = match(inputs)
    np.testing.assert_array_equal(doubled, matches)
    np.testing.assert_allclose(doubled_scores, scores, rtol=1e-3)
    inputs["image_size1"] *= 2
    assert np.abs(match(inputs)[1] - scores).max() > 1e-3


def test_logits_of_hundreds_stay_finite_and_exact(weights, sizes):
    """As in the trained networks; softmax of them underflows."""
    weights = dict(weights)
    for name in ("transformers.1.cross_attn.to_qk.weight", "transformers.0.self_attn.Wqkv.weight"):
        weights[name] = weights[name] * 12
    inputs = random_pair(64, 48, sizes.input_dim)
    matches, scores = on_onnxruntime(lightglue.build(weights, sizes))(inputs)
    expected, expected_scores = mutual(Direct(weights, sizes).probabilities(inputs))
    np.testing.assert_array_equal(matches, expected)
    np.testing.assert_allclose(scores, expected_scores, rtol=5e-3)


def test_openvino_equals_onnxruntime(model, match, sizes):
    pytest.importorskip("openvino")
    core = shared_core()
    compiled = core.compile_model(
        core.read_model(model.SerializeToString()),
        "CPU",
        {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1},
    )
    for m, n in [(60, 45), (1, 7), (33, 1)]:
        inputs = random_pair(m, n, sizes.input_dim)
        expected, expected_scores = match(inputs)
        got = compiled(inputs)
        np.testing.assert_array_equal(got["matches0"], expected)
        np.testing.assert_allclose(got["mscores0"], expected_scores, rtol=1e-3)


def test_half_precision_is_close(weights, match, sizes):
    model = lightglue.build(weights, sizes, "fp16")
    halves = [t for t in model.graph.initializer if t.data_type == onnx.TensorProto.FLOAT16]
    assert len(halves) > 10 * sizes.layers
    inputs = random_pair(90, 70, sizes.input_dim)
    matches, scores = on_onnxruntime(model)(inputs)
    expected, expected_scores = match(inputs)
    assert scores.dtype == np.float32
    assert (matches == expected).mean() > 0.95
    same = (matches == expected) & (matches >= 0)
    np.testing.assert_allclose(scores[same], expected_scores[same], rtol=0.05, atol=0.01)


def test_graph_is_plain_and_standard(model):
    """What TensorRT and OpenVINO read: one operator set, no control flow, every shape inferred."""
    assert {(o.domain, o.version) for o in model.opset_import} == {("", 18)}
    assert not {n.op_type for n in model.graph.node} & {"If", "Loop", "Scan", "NonZero", "ScatterND", "ScatterElements"}
    onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    dims = {
        v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim]
        for v in [*model.graph.input, *model.graph.output]
    }
    assert dims["keypoints0"] == ["M", 2] and dims["keypoints1"] == ["N", 2]
    assert dims["descriptors0"][0] == "M" and dims["descriptors1"][0] == "N"
    assert dims["image_size0"] == dims["image_size1"] == [2]
    assert len(dims["matches0"]) == len(dims["mscores0"]) == 1


def test_weights_are_stored_once(model, weights):
    stored = sum(np.prod(t.dims) for t in model.graph.initializer)
    assert stored < 1.1 * sum(value.size for value in weights.values())


def test_prefix_of_lighterglue_is_understood(weights, sizes, match):
    prefixed = {f"matcher.{name}": value for name, value in weights.items()} | {"extractor.x": np.zeros(3)}
    inputs = random_pair(20, 20, sizes.input_dim)
    np.testing.assert_array_equal(on_onnxruntime(lightglue.build(prefixed, sizes))(inputs)[1], match(inputs)[1])


def test_missing_and_misshapen_tensors_are_named(weights, sizes):
    name = "transformers.1.cross_attn.to_v.weight"
    with pytest.raises(WeightsError, match=name):
        lightglue.build({k: v for k, v in weights.items() if k != name}, sizes)
    with pytest.raises(WeightsError, match=rf"{name}.*\(16, 15\).*\(16, 16\)"):
        lightglue.build(weights | {name: np.zeros((16, 15), np.float32)}, sizes)
    with pytest.raises(ConfigError, match="int8"):
        lightglue.build(weights, sizes, "int8")


def test_table_of_tensors_is_that_of_the_published_models():
    aliked, xfeat = lightglue.shapes(LIGHTGLUE_ALIKED), lightglue.shapes(LIGHTERGLUE)
    assert len(aliked) == 3 + 9 * 22 + 4 and len(xfeat) == 3 + 6 * 22 + 4
    assert aliked["transformers.8.self_attn.Wqkv.weight"] == (768, 256)
    assert aliked["posenc.Wr.weight"] == (32, 2) and xfeat["posenc.Wr.weight"] == (48, 2)
    assert xfeat["input_proj.weight"] == (96, 64) and xfeat["log_assignment.5.matchability.weight"] == (1, 96)
