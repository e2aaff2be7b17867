"""XFeat as an ONNX graph, with seeded random weights: against a direct NumPy XFeat, and its contract."""

import numpy as np
import pytest

from vslam_features.errors import ConfigError, WeightsError

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
pytest.importorskip("spox")

from vslam_features.networks import xfeat  # noqa: E402
from vslam_features.runtimes.ov import shared_core  # noqa: E402

OUTPUTS = ["keypoints", "scores", "descriptors"]


@pytest.fixture(scope="module")
def weights() -> dict[str, np.ndarray]:
    """Random weights that keep the scale of the signal, with logits so far apart that there are keypoints."""
    rng = np.random.default_rng(7)
    tensors = {}
    for name, shape in xfeat.shapes().items():
        if name.endswith("running_var"):
            value = rng.uniform(0.5, 1.5, shape)
        elif len(shape) == 4:
            value = rng.normal(0, np.sqrt(2 / np.prod(shape[1:])), shape)
        else:
            value = rng.normal(0, 0.2, shape)
        tensors[name] = value.astype(np.float32)
    tensors["keypoint_head.3.weight"] *= 2
    return tensors


def picture(height: int, width: int, channels: int = 1, seed: int = 0) -> np.ndarray:
    """An image (1, C, H, W) of blotches of all sizes."""
    rng = np.random.default_rng(seed)
    image = np.zeros((height, width, channels))
    for step in (1, 4, 16):
        coarse = rng.normal(0, step**0.5, (height // step + 2, width // step + 2, channels))
        image += coarse.repeat(step, 0).repeat(step, 1)[:height, :width]
    image = (image - image.min()) / max(np.ptp(image), 1e-9)
    return np.ascontiguousarray(image.transpose(2, 0, 1)[None], np.float32)


def on_onnxruntime(model: onnx.ModelProto):
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return lambda image, count=1000: session.run(OUTPUTS, {"image": image, "max_keypoints": np.array([count])})


@pytest.fixture(scope="module")
def model(weights) -> onnx.ModelProto:
    return xfeat.build(weights)


@pytest.fixture(scope="module")
def extract(model):
    return on_onnxruntime(model)


def points(outputs) -> dict[tuple[float, float], tuple[float, np.ndarray]]:
    """Keypoint -> score and descriptor, of the rows that are keypoints."""
    return {tuple(xy): (score, row) for xy, score, row in zip(outputs[0].tolist(), *outputs[1:]) if score > 0}


# The network in NumPy, as its paper and its weights define it: no folding, no tricks, one loop a position.


def conv(w: dict, x: np.ndarray, name: str, stride: int = 1) -> np.ndarray:
    """Convolution (O, I, k, k) of ``x`` (I, H, W) with zeros around it."""
    kernel = w[name + ".weight"].astype(np.float64)
    k = kernel.shape[-1]
    x = np.pad(x, ((0, 0), (k // 2, k // 2), (k // 2, k // 2)))
    windows = np.lib.stride_tricks.sliding_window_view(x, (k, k), axis=(1, 2))[:, ::stride, ::stride]
    y = np.einsum("ihwab,oiab->ohw", windows, kernel, optimize=True)
    return y + w[name + ".bias"][:, None, None] if name + ".bias" in w else y


def layers(w: dict, x: np.ndarray, block: str, *strides: int) -> np.ndarray:
    for i, stride in enumerate(strides):
        mean, var = (w[f"{block}.{i}.layer.1.running_{s}"][:, None, None] for s in ("mean", "var"))
        x = np.maximum((conv(w, x, f"{block}.{i}.layer.0", stride) - mean) / np.sqrt(var + 1e-5), 0)
    return x


def enlarged(x: np.ndarray, factor: int) -> np.ndarray:
    """Bilinear, pixel centres at halves, border repeated."""
    for axis in (1, 2):
        n = x.shape[axis]
        position = np.clip((np.arange(n * factor) + 0.5) / factor - 0.5, 0, n - 1)
        low = np.minimum(position.astype(int), n - 1)
        t = (position - low).reshape((-1, 1) if axis == 1 else -1)
        x = x.take(low, axis) * (1 - t) + x.take(np.minimum(low + 1, n - 1), axis) * t
    return x


def interpolate(x: np.ndarray, at: np.ndarray, kernel, radius: int) -> np.ndarray:
    """``x`` (C, h, w) at pixel ``at`` (x, y) of the image: g = 2 at / (size - 1) - 1, then align_corners=False."""
    size = np.array([x.shape[2], x.shape[1]])
    u, v = (2 * at / (8 * size - 1) * size - 1) / 2
    total = np.zeros(len(x))
    for j in range(int(np.floor(v)) - radius + 1, int(np.floor(v)) + radius + 1):
        for i in range(int(np.floor(u)) - radius + 1, int(np.floor(u)) + radius + 1):
            if 0 <= j < size[1] and 0 <= i < size[0]:
                total += kernel(abs(u - i)) * kernel(abs(v - j)) * x[:, j, i]
    return total


def cubic(d: float, a: float = -0.75) -> float:
    """Keys' kernel."""
    if d <= 1:
        return (a + 2) * d**3 - (a + 3) * d**2 + 1
    return a * d**3 - 5 * a * d**2 + 8 * a * d - 4 * a if d < 2 else 0.0


def reference(w: dict, image: np.ndarray) -> dict[tuple[float, float], tuple[float, np.ndarray]]:
    """Keypoint -> score and descriptor, of an image (1, C, H, W) whose sides are multiples of 32."""
    x = image[0].astype(np.float64).mean(0)
    height, width = x.shape
    x = ((x - x.mean()) / np.sqrt(x.var() + 1e-5))[None]
    pooled = x.reshape(1, height // 4, 4, width // 4, 4).mean((2, 4))
    y = layers(w, x, "block1", 1, 2, 1, 2) + conv(w, pooled, "skip1.1")
    x3 = layers(w, layers(w, y, "block2", 1, 1), "block3", 2, 1, 1)
    x4 = layers(w, x3, "block4", 2, 1, 1)
    x5 = layers(w, x4, "block5", 2, 1, 1, 1)
    fused = layers(w, x3 + enlarged(x4, 2) + enlarged(x5, 4), "block_fusion", 1, 1)
    features = conv(w, fused, "block_fusion.2")
    reliability = 1 / (1 + np.exp(-conv(w, layers(w, features, "heatmap_head", 1, 1), "heatmap_head.2")))
    unfolded = x[0].reshape(height // 8, 8, width // 8, 8).transpose(1, 3, 0, 2).reshape(64, height // 8, width // 8)
    logits = np.exp(conv(w, layers(w, unfolded, "keypoint_head", 1, 1, 1), "keypoint_head.3"))
    probability = (logits / logits.sum(0))[:64].reshape(8, 8, height // 8, width // 8)
    probability = probability.transpose(2, 0, 3, 1).reshape(height, width)

    features = features / np.linalg.norm(features, axis=0)
    found = {}
    for y, x in np.argwhere(probability > 0.05):
        window = probability[max(y - 2, 0) : y + 3, max(x - 2, 0) : x + 3]
        if window.max() > probability[y, x] or x == width - 1 or y == height - 1 or x == y == 0:
            continue
        at = np.array([x, y], float)
        score = probability[y, x] * interpolate(reliability, at, lambda d: max(1 - d, 0), 1)[0]
        descriptor = interpolate(features, at, cubic, 2)
        found[tuple(at.tolist())] = score, descriptor / np.linalg.norm(descriptor)
    return found


@pytest.mark.parametrize(("height", "width", "channels"), [(64, 96, 1), (96, 32, 3)])
def test_equals_the_network_written_in_numpy(extract, weights, height, width, channels):
    image = picture(height, width, channels)
    expected, got = reference(weights, image), points(extract(image))
    assert len(expected) > 20
    assert got.keys() == expected.keys()
    for at, (score, descriptor) in expected.items():
        assert got[at][0] == pytest.approx(score, rel=1e-4)
        np.testing.assert_allclose(got[at][1], descriptor, atol=1e-5)


def test_the_pixels_that_upstream_leaves_out(weights):
    """A maximum at (0, 0) or in the last row or column is no keypoint; the first row and column hold some."""
    tensors = {**weights, "keypoint_head.3.weight": np.zeros((65, 64, 1, 1), np.float32)}
    for pixel, left_out in ((0, [(0, 0)]), (4, []), (63, [(31, 7), (31, 15), (31, 23), (31, 31)])):
        bias = np.full(65, -9, np.float32)
        bias[pixel] = 9  # the same pixel of each cell
        extract = on_onnxruntime(xfeat.build({**tensors, "keypoint_head.3.bias": bias}))
        row, column = divmod(pixel, 8)
        cells = {(8.0 * i + column, 8.0 * j + row) for i in range(4) for j in range(4)}
        left_out = set(left_out) | {(y, x) for x, y in left_out}
        assert points(extract(picture(32, 32))).keys() == cells - left_out


@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 70), (2, 2), (31, 33), (97, 130), (64, 96)])
@pytest.mark.parametrize("count", [1, 50, 20_000])
def test_contract_at_any_size(extract, height, width, count):
    image = picture(height, width)
    keypoints, scores, descriptors = extract(image, count)
    n = min(count, height * width)
    assert (keypoints.shape, scores.shape, descriptors.shape) == ((n, 2), (n,), (n, 64))
    assert keypoints.dtype == scores.dtype == descriptors.dtype == np.float32
    assert (np.diff(scores) <= 0).all() and (scores >= 0).all()
    assert (keypoints >= 0).all() and (keypoints <= (width - 1, height - 1)).all()
    np.testing.assert_allclose(np.linalg.norm(descriptors, axis=1), 1, atol=1e-5)
    kept = keypoints[scores > 0]
    assert len(set(map(tuple, kept))) == len(kept)
    if count == 20_000 and height > 30:
        assert len(kept) > 10
        distance = np.abs(kept[:, None] - kept[None]).max(-1) + 5 * np.eye(len(kept))
        assert distance.min() > 2  # of two in a window of 5 the lesser is suppressed


def test_fewer_keypoints_are_the_first_of_more(extract):
    image = picture(97, 130)
    few, many = extract(image, 40), extract(image, 1000)
    for a, b in zip(few, many):
        np.testing.assert_allclose(a, b[:40], atol=1e-6)


@pytest.mark.parametrize("axis", [2, 3])
def test_continuation_leaves_what_is_far_from_it(extract, axis):
    """520 pixels, continued to 544, give the keypoints of 480 up to where the network sees one of the two ends.

    The image repeats itself every 40 pixels, so that both have the same mean and deviation.
    """
    period = picture(*((40, 64) if axis == 2 else (64, 40)), seed=3)
    whole, odd = (points(extract(np.concatenate([period] * n, axis), 9999)) for n in (12, 13))
    reach = 215  # half the receptive field of a descriptor
    inner = {at for at in whole if at[3 - axis] < 480 - reach}
    assert len(inner) > 50
    assert {at for at in odd if at[3 - axis] < 480 - reach} == inner
    for at in inner:  # upstream's division by the size less one moves where they are sampled by 1/100 of a cell
        assert whole[at][0] == pytest.approx(odd[at][0], rel=5e-2)
        assert whole[at][1] @ odd[at][1] > 0.99


def test_what_lies_beyond_the_image_suppresses_nothing(weights):
    """Two pixels of each cell in one window: the lesser is a keypoint only where the greater is not in the image."""
    bias = np.full(65, -9, np.float32)
    bias[8 + 4], bias[8 + 6] = 8, 9  # columns 4 and 6 of row 1
    head = {"keypoint_head.3.weight": np.zeros((65, 64, 1, 1), np.float32), "keypoint_head.3.bias": bias}
    extract = on_onnxruntime(xfeat.build({**weights, **head}))
    rows = (1.0, 9.0, 17.0, 25.0)
    assert points(extract(picture(32, 32))).keys() == {(x, y) for x in (6.0, 14.0, 22.0, 30.0) for y in rows}
    assert points(extract(picture(32, 30))).keys() == {(x, y) for x in (6.0, 14.0, 22.0, 28.0) for y in rows}


def test_statistics_are_those_of_the_real_pixels(extract):
    """Contrast and brightness change nothing, whatever is added to fill whole cells."""
    image = picture(45, 70)
    bright = points(extract(image * np.float32(0.5) + np.float32(0.5), 999))
    plain = points(extract(image, 999))
    assert plain.keys() == bright.keys()
    for at, (score, descriptor) in plain.items():
        assert bright[at][0] == pytest.approx(score, rel=1e-2)
        np.testing.assert_allclose(bright[at][1], descriptor, atol=1e-2)


@pytest.mark.parametrize("value", [0, 0.3, 1])
def test_a_blank_image_gives_no_nan(extract, value):
    for outputs in extract(np.full((1, 3, 50, 70), value, np.float32), 500):
        assert np.isfinite(outputs).all()


def test_colour_is_averaged(extract):
    grey = picture(64, 96)
    a, b = points(extract(grey)), points(extract(np.repeat(grey, 3, axis=1)))
    assert a.keys() == b.keys()
    for at in a:
        np.testing.assert_allclose(a[at][1], b[at][1], atol=1e-5)


def test_fp16_is_close(weights, extract):
    model = xfeat.build(weights, "fp16")
    image = picture(97, 130)
    half, full = points(on_onnxruntime(model)(image)), points(extract(image))
    common = half.keys() & full.keys()
    assert len(common) > 0.95 * max(len(half), len(full))
    assert max(abs(half[at][0] - full[at][0]) for at in common) < 0.02
    assert min(half[at][1] @ full[at][1] for at in common) > 0.999
    halves = [t for t in model.graph.initializer if t.data_type == onnx.TensorProto.FLOAT16]
    assert sum(np.prod(t.dims) for t in halves) > 600_000
    types = {v.type.tensor_type.elem_type for v in [*model.graph.input, *model.graph.output]}
    assert types == {onnx.TensorProto.FLOAT, onnx.TensorProto.INT64}


@pytest.mark.parametrize(("height", "width"), [(1, 1), (31, 33), (97, 130), (64, 96)])
def test_openvino_agrees(model, extract, height, width):
    pytest.importorskip("openvino")
    core, hints = shared_core(), {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
    compiled = core.compile_model(core.read_model(model.SerializeToString()), "CPU", hints)
    image = picture(height, width)
    result = compiled({"image": image, "max_keypoints": np.array([3000])})
    a, b = points(extract(image, 3000)), points([result[name] for name in OUTPUTS])
    assert result["scores"].shape == (min(3000, height * width),)
    assert a.keys() == b.keys()
    for at in a:
        assert a[at][0] == pytest.approx(b[at][0], abs=1e-4)
        np.testing.assert_allclose(a[at][1], b[at][1], atol=1e-4)


def test_static_graph(model):
    """What a compiling runtime needs: one operator set, no control flow, no shape from the content."""
    assert {(o.domain, o.version) for o in model.opset_import} == {("", 18)}
    kinds = {node.op_type for node in model.graph.node}
    assert not kinds & {"If", "Loop", "Scan", "NonZero", "Unique", "Compress", "NonMaxSuppression"}
    assert all(len(node.output) == 1 for node in model.graph.node if node.op_type == "MaxPool")
    assert [v.name for v in model.graph.output] == OUTPUTS


def test_errors_name_the_tensor(weights):
    name = "block4.1.layer.0.weight"
    with pytest.raises(WeightsError, match=f"no tensor '{name}'"):
        xfeat.build({k: v for k, v in weights.items() if k != name})
    with pytest.raises(WeightsError, match=rf"'{name}' has shape \(64, 32, 3, 3\), expected \(64, 64, 3, 3\)"):
        xfeat.build({**weights, name: np.zeros((64, 32, 3, 3), np.float32)})
    with pytest.raises(ConfigError, match="'int8', expected 'fp32' or 'fp16'"):
        xfeat.build(weights, "int8")
