"""EfficientNet-Lite0 as an ONNX graph, with seeded random weights: its contract, and its pooling against NumPy."""

import numpy as np
import pytest

from vslam_features.errors import ConfigError, WeightsError

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
pytest.importorskip("spox")

from spox import Tensor, argument  # noqa: E402

from vslam_features.networks import efficientnet as net  # noqa: E402
from vslam_features.networks.layers import Layers, finish  # noqa: E402
from vslam_features.runtimes.ov import shared_core  # noqa: E402


@pytest.fixture(scope="module")
def weights() -> dict[str, np.ndarray]:
    """Random weights that keep the scale of the signal from block to block."""
    rng = np.random.default_rng(0)
    tensors = {}
    for name, shape in net.shapes().items():
        if len(shape) == 4:
            value = rng.normal(0, np.sqrt(2 / np.prod(shape[1:])), shape)
        elif name.endswith((".weight", ".running_var")):
            value = rng.uniform(0.5, 1.5, shape)
        else:
            value = rng.normal(0, 0.2, shape)
        tensors[name] = value.astype(np.float32)
    return tensors


def session(model: onnx.ModelProto) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def image_argument():
    return argument(Tensor(np.float32, (1, "C", "H", "W")))


@pytest.fixture(scope="module")
def model(weights) -> onnx.ModelProto:
    return net.build(weights)


@pytest.fixture(scope="module")
def describe(model):
    run = session(model)
    return lambda image: run.run(["descriptor"], {"image": image})[0]


@pytest.fixture(scope="module")
def backbone(weights):
    image = image_argument()
    run = session(finish("backbone", {"image": image}, {"features": net.features(Layers(weights), image)}))
    return lambda image: run.run(["features"], {"image": image})[0]


@pytest.fixture(scope="module")
def pooled():
    x = argument(Tensor(np.float32, (1, net.CHANNELS, "h", "w")))
    run = session(finish("pool", {"features": x}, {"descriptor": net.pool(x)}))
    return lambda features: run.run(["descriptor"], {"features": features})[0]


def picture(height: int, width: int, channels: int = 3, seed: int = 0) -> np.ndarray:
    """(1, C, H, W) f32 in 0..1: rectangles of random brightness."""
    rng = np.random.default_rng(seed)
    image = np.full((1, channels, height, width), 0.5, np.float32)
    for _ in range(30):
        y, x = rng.integers(0, height), rng.integers(0, width)
        image[:, :, y : y + height // 4 + 1, x : x + width // 4 + 1] = rng.random((1, channels, 1, 1))
    return image


def root_by_eigenvalues(features: np.ndarray, root) -> np.ndarray:
    """The descriptor by its definition, ``root`` a function of the eigenvalues of a second moment of trace 1."""
    x = net.projection().astype(np.float64) @ features.reshape(net.CHANNELS, -1)
    moment = x @ x.T
    values, vectors = np.linalg.eigh(moment / np.trace(moment))
    m = (vectors * root(np.maximum(values, 0))) @ vectors.T
    flat = [m[i, j] * (1 if i == j else 2**0.5) for i in range(len(m)) for j in range(i, len(m))]
    return np.array(flat) / np.linalg.norm(flat)


def newton_schulz(values: np.ndarray) -> np.ndarray:
    """What the iterations make of one eigenvalue."""
    y, z = values, np.ones_like(values)
    for _ in range(net.ITERATIONS):
        step = 1.5 - 0.5 * z * y
        y, z = y * step, z * step
    return y


# -- contract --------------------------------------------------------------------------------------


def test_interface_and_opset(model):
    graph = model.graph
    assert [(v.name, v.type.tensor_type.elem_type) for v in graph.input] == [("image", onnx.TensorProto.FLOAT)]
    dims = graph.input[0].type.tensor_type.shape.dim
    assert dims[0].dim_value == 1
    assert all(d.dim_param for d in dims[1:])
    (output,) = graph.output
    assert output.name == "descriptor"
    assert [d.dim_value for d in output.type.tensor_type.shape.dim] == [net.DIM] == [2080]
    assert {(o.domain, o.version) for o in model.opset_import} == {("", 18)}
    onnx.checker.check_model(model, full_check=True)
    assert not {n.op_type for n in graph.node} & {"If", "Loop", "NonZero"}


@pytest.mark.parametrize("height, width", [(256, 320), (255, 319), (33, 97), (1, 1), (17, 16), (480, 640)])
def test_any_size_gives_features_of_ceil_size_and_a_unit_vector(describe, backbone, height, width):
    image = picture(height, width)
    assert backbone(image).shape == (1, 112, -(-height // net.STRIDE), -(-width // net.STRIDE))
    d = describe(image)
    assert d.dtype == np.float32
    assert d.shape == (net.DIM,)
    assert np.linalg.norm(d) == pytest.approx(1, abs=1e-5)


def test_grey_is_the_colour_image_of_equal_channels(describe):
    grey = picture(64, 80, channels=1)
    np.testing.assert_allclose(describe(grey), describe(np.repeat(grey, 3, axis=1)), atol=1e-6)


@pytest.mark.parametrize("value", [0, 0.5, 1])
def test_blank_image_is_finite_and_of_unit_length(describe, value):
    d = describe(np.full((1, 3, 64, 80), value, np.float32))
    assert np.isfinite(d).all()
    assert np.linalg.norm(d) == pytest.approx(1, abs=1e-5)


def test_other_images_differ(describe):
    a, b = (describe(picture(128, 160, seed=seed)) for seed in (0, 1))
    assert a @ b < 0.999


# -- backbone --------------------------------------------------------------------------------------


def convolved(x, w, b, stride, groups):
    """Convolution with TensorFlow's 'same' padding by its definition: x (C, H, W), w (O, C / groups, k, k)."""
    k, out = w.shape[-1], [-(-n // stride) for n in x.shape[1:]]
    total = [max((o - 1) * stride + k - n, 0) for o, n in zip(out, x.shape[1:])]
    x = np.pad(x, [(0, 0)] + [(t // 2, t - t // 2) for t in total])
    windows = np.lib.stride_tricks.sliding_window_view(x, (k, k), axis=(1, 2))[:, ::stride, ::stride]
    windows = windows[:, : out[0], : out[1]].reshape(groups, -1, *out, k, k)
    y = np.einsum("gcyxij,gocij->goyx", windows, w.reshape(groups, -1, *w.shape[1:]), optimize=True)
    return y.reshape(-1, *out) + b[:, None, None]


@pytest.mark.parametrize("height, width", [(48, 64), (45, 61), (47, 35)])
def test_features_equal_a_network_in_numpy(weights, backbone, height, width):
    """Even and odd sizes pad differently at each stride."""
    t = {name: value.astype(np.float64) for name, value in weights.items()}

    def layer(x, conv, norm, stride=1, groups=1):
        y = convolved(x, t[conv + ".weight"], np.zeros(len(t[conv + ".weight"])), stride, groups)
        mean, var, scale, bias = (t[f"{norm}.{s}"] for s in ("running_mean", "running_var", "weight", "bias"))
        y = (y - mean[:, None, None]) / np.sqrt(var[:, None, None] + 1e-3)
        return y * scale[:, None, None] + bias[:, None, None]

    # Stride of each depthwise convolution, from the published table.
    strides = [1, 2, 1, 2, 1, 2, 1, 1, 1, 1, 1]
    image = picture(height, width)
    x = (image[0].astype(np.float64) * 255 - 127) / 128
    x = layer(x, "_conv_stem", "_bn0", stride=2).clip(0, 6)
    for i, stride in enumerate(strides):
        y, name = x, f"_blocks.{i}."
        if i > 0:
            y = layer(y, name + "_expand_conv", name + "_bn0").clip(0, 6)
        y = layer(y, name + "_depthwise_conv", name + "_bn1", stride, groups=len(y)).clip(0, 6)
        y = layer(y, name + "_project_conv", name + "_bn2")
        x = x + y if x.shape == y.shape else y
    got = backbone(image)[0]
    assert np.abs(got - x).max() <= 1e-4 * np.abs(x).max()


# -- pooling ---------------------------------------------------------------------------------------


def test_projection_is_orthonormal_and_always_the_same():
    p = net.projection().astype(np.float64)
    np.testing.assert_allclose(p @ p.T, np.eye(64), atol=1e-6)
    # Signs by RandomState(0), a stream that NumPy keeps; the first row is +-1/sqrt(112).
    signs = np.sign(p[0, :12]).astype(int).tolist()
    assert signs == [-1, 1, 1, -1, 1, 1, 1, 1, 1, 1, 1, -1]


def test_descriptor_is_the_pooled_features(describe, backbone, pooled):
    image = picture(96, 128)
    expected = root_by_eigenvalues(backbone(image), newton_schulz)
    np.testing.assert_allclose(pooled(backbone(image)), expected, atol=1e-5)
    np.testing.assert_allclose(describe(image), expected, atol=1e-5)


def test_pooling_is_the_matrix_root_where_it_has_converged(pooled):
    """Six directions of strength 1 to 3: eigenvalues of a few per cent and more, and zeros."""
    rng = np.random.default_rng(1)
    positions = np.linspace(1, 3, 6)[:, None] * rng.normal(size=(6, 1200))
    features = (np.linalg.qr(rng.normal(size=(112, 6)))[0] @ positions).reshape(1, 112, 30, 40).astype(np.float32)
    expected = root_by_eigenvalues(features, np.sqrt)
    assert np.linalg.norm(root_by_eigenvalues(features, lambda v: v) - expected) > 0.2
    assert np.linalg.norm(pooled(features) - expected) < 2e-3


def test_pooling_ignores_order_and_scale(pooled):
    rng = np.random.default_rng(2)
    features = rng.normal(size=(1, 112, 8, 10)).astype(np.float32)
    shuffled = features.reshape(112, 80)[:, rng.permutation(80)].reshape(features.shape)
    np.testing.assert_allclose(pooled(features), pooled(shuffled * 37), atol=1e-5)


@pytest.mark.parametrize("value", [0.0, 1e-25])
def test_features_of_nothing_give_zeros(pooled, value):
    assert not pooled(np.full((1, 112, 4, 5), value, np.float32)).any()


def test_one_position_is_enough(pooled):
    d = pooled(np.random.default_rng(3).normal(size=(1, 112, 1, 1)).astype(np.float32))
    assert np.linalg.norm(d) == pytest.approx(1, abs=1e-5)


# -- runtimes and precisions -----------------------------------------------------------------------


@pytest.mark.parametrize("height, width", [(256, 320), (101, 75)])
def test_openvino_equals_onnx_runtime(model, describe, height, width):
    pytest.importorskip("openvino")
    core = shared_core()
    compiled = core.compile_model(
        core.read_model(model.SerializeToString()),
        "CPU",
        {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1},
    )
    image = picture(height, width)
    np.testing.assert_allclose(compiled({"image": image})["descriptor"], describe(image), atol=1e-5)


def test_fp16_is_close_and_half_as_large(weights, model, describe):
    half = net.build(weights, "fp16")
    image = picture(256, 320)
    d = session(half).run(["descriptor"], {"image": image})[0]
    assert d.dtype == np.float32
    assert d @ describe(image) > 0.9995
    assert half.ByteSize() < 0.6 * model.ByteSize()


# -- refusals --------------------------------------------------------------------------------------


def test_refusals(weights):
    with pytest.raises(ConfigError, match="int8.*fp32"):
        net.build(weights, "int8")
    name = "_blocks.10._project_conv.weight"
    with pytest.raises(WeightsError, match=rf"no tensor '{name}'.*\(112, 672, 1, 1\)"):
        net.build({k: v for k, v in weights.items() if k != name})
    with pytest.raises(WeightsError, match=rf"'{name}' has shape \(1, 672, 1, 1\), expected \(112, 672, 1, 1\)"):
        net.build(weights | {name: weights[name][:1]})


def test_weights_beyond_the_last_block_are_ignored(weights, model):
    more = weights | {"_fc.weight": np.zeros((1000, 1280), np.float32)}
    assert net.build(more).SerializeToString(deterministic=True) == model.SerializeToString(deterministic=True)
