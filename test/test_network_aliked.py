"""ALIKED as an ONNX graph, with seeded random weights: its contract, and its parts against independent references."""

import cv2
import numpy as np
import pytest

from vslam_features.errors import ConfigError, WeightsError

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
pytest.importorskip("spox")

import spox.opset.ai.onnx.v18 as op  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402
from spox import Tensor, argument  # noqa: E402

from vslam_features.networks import aliked  # noqa: E402
from vslam_features.networks.deformable import deformed_taps  # noqa: E402
from vslam_features.networks.dkd import detect, suppress  # noqa: E402
from vslam_features.networks.layers import finish  # noqa: E402
from vslam_features.networks.sddh import Pyramid  # noqa: E402
from vslam_features.runtimes.ov import shared_core  # noqa: E402

SMALL = aliked.AlikedSizes(channels=(4, 8, 8, 16), dim=16, positions=4)
OUTPUTS = ("keypoints", "scores", "descriptors")
RNG = np.random.default_rng


@pytest.fixture(scope="module")
def weights() -> dict[str, np.ndarray]:
    """Random weights that keep the scale of the signal from block to block."""
    rng, tensors = RNG(0), {}
    for name, shape in aliked.shapes(SMALL).items():
        if len(shape) >= 3:
            value = rng.normal(0, np.sqrt(1 / np.prod(shape[1:])), shape)
        elif name.endswith((".weight", ".running_var")):
            value = rng.uniform(0.5, 1.5, shape)
        else:
            value = rng.normal(0, 0.2, shape)
        tensors[name] = value.astype(np.float32)
    tensors["score_head.6.weight"] *= 5  # scores on both sides of the threshold
    return tensors


def session(model: onnx.ModelProto):
    """Function from inputs by name to a list of outputs, in ONNX Runtime."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    run = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return lambda **inputs: run.run(None, inputs)


def graph(outputs: dict, **inputs):
    return session(finish("part", inputs, outputs))


def extractor(model: onnx.ModelProto):
    run = session(model)
    return lambda image, count: run(image=image, max_keypoints=np.array([count]))


@pytest.fixture(scope="module")
def model(weights) -> onnx.ModelProto:
    return aliked.build(weights, SMALL)


@pytest.fixture(scope="module")
def extract(model):
    return extractor(model)


def textured(height: int, width: int, channels: int = 3, seed: int = 1) -> np.ndarray:
    noise = RNG(seed).random((height, width, channels)).astype(np.float32)
    smooth = cv2.GaussianBlur(noise, (0, 0), 1.5).reshape(height, width, channels)
    smooth = (smooth - smooth.min()) / (np.ptp(smooth) + 1e-6)
    return np.ascontiguousarray(smooth.transpose(2, 0, 1)[None])


# --- contract ---------------------------------------------------------------------------------------------------------


def assert_contract(image: np.ndarray, count: int, keypoints, scores, descriptors):
    height, width = image.shape[2:]
    rows = min(count, height * width)
    assert (keypoints.shape, scores.shape, descriptors.shape) == ((rows, 2), (rows,), (rows, SMALL.dim))
    assert all(np.isfinite(a).all() for a in (keypoints, scores, descriptors))
    assert (np.diff(scores) <= 0).all() and scores.min() >= 0 and scores.max() <= 1
    assert (keypoints >= 0).all() and (keypoints <= [width - 1, height - 1]).all()
    np.testing.assert_allclose(np.linalg.norm(descriptors, axis=1), 1, atol=1e-5)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("height, width", [(1, 1), (2, 3), (4, 70), (33, 31), (64, 96), (101, 67)])
def test_images_of_any_size(extract, height, width, channels):
    image = textured(height, width, channels)
    for count in (40, 5000):
        found = extract(image, count)
        assert_contract(image, count, *found)
        assert (found[1] > 0).any() == (min(height, width) > 4)  # smaller images are all border


def test_blank_images_give_finite_rows(extract):
    for value in (0.0, 0.5, 1.0):
        image = np.full((1, 3, 50, 41), value, np.float32)
        assert_contract(image, 300, *extract(image, 300))


def test_grey_is_three_equal_channels(extract):
    grey = textured(50, 70, 1)
    for one, three in zip(extract(grey, 100), extract(np.repeat(grey, 3, axis=1), 100)):
        np.testing.assert_array_equal(one, three)


def test_fewer_keypoints_are_the_best_of_more(extract):
    image = textured(96, 128)
    many, few = extract(image, 1000)[0], extract(image, 30)[0]
    assert {tuple(p) for p in few} < {tuple(p) for p in many}


def test_padding_moves_no_keypoint(extract):
    """An image of 64 x 96 and the same with its border repeated, which is what the graph does inside."""
    image = textured(60, 90)
    padded = np.pad(image, ((0, 0), (0, 0), (2, 2), (3, 3)), mode="edge")
    inside, (keypoints, scores, _) = extract(image, 50)[0][:20], extract(padded, 500)
    keypoints = keypoints[scores > 0] - [3, 2]
    distance = np.linalg.norm(inside[:, None] - keypoints[None], axis=2).min(axis=1)
    assert (distance < 1e-3).all()


def test_standard_operators_only(model):
    assert {o.version for o in model.opset_import} == {18}
    assert not {n.op_type for n in model.graph.node} & {"If", "Loop", "Scan", "NonZero", "DeformConv"}
    assert [d.dim_param for d in model.graph.input[0].type.tensor_type.shape.dim] == ["", "C", "H", "W"]


def test_all_channels_are_known_when_it_is_built(model):
    """Those of colour images: TensorRT takes no convolution of a dynamic number of channels."""
    fixed = onnx.ModelProto()
    fixed.CopyFrom(model)
    fixed.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 3
    graph_ = onnx.shape_inference.infer_shapes(fixed, strict_mode=True, data_prop=True).graph
    shapes = {v.name: v.type.tensor_type.shape.dim for v in (*graph_.input, *graph_.value_info)}
    weights = {w.name: w.dims for w in graph_.initializer}
    convolutions = [node for node in graph_.node if node.op_type == "Conv"]
    assert len(convolutions) > 20
    for node in convolutions:
        groups = next((a.i for a in node.attribute if a.name == "group"), 1)
        assert shapes[node.input[0]][1].dim_value == weights[node.input[1]][1] * groups, node.name


def test_openvino_agrees(model, extract):
    pytest.importorskip("openvino")
    core, hints = shared_core(), {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
    compiled = core.compile_model(core.read_model(model.SerializeToString()), "CPU", hints)
    for image in (textured(101, 67), textured(32, 32, 1), textured(1, 1)):
        theirs = compiled({"image": image, "max_keypoints": np.array([200])})
        theirs = [theirs[name] for name in OUTPUTS]
        assert_contract(image, 200, *theirs)
        mine = extract(image, 200)
        np.testing.assert_allclose(theirs[1], mine[1], atol=1e-4)
        real = mine[1] > 0
        for name, a, b in zip(OUTPUTS, mine, theirs):
            np.testing.assert_allclose(a[real], b[real], atol=1e-3, err_msg=name)


def test_half_precision_is_close(weights, extract):
    half = extractor(aliked.build(weights, SMALL, "fp16"))
    image = textured(96, 128)
    mine, theirs = extract(image, 200), half(image, 200)
    assert_contract(image, 200, *theirs)
    distance = np.linalg.norm(mine[0][:, None] - theirs[0][None], axis=2)
    near = distance.min(axis=1) < 0.1
    assert near.mean() > 0.9
    cosine = (mine[2] * theirs[2][distance.argmin(axis=1)]).sum(axis=1)[near]
    assert np.median(cosine) > 0.999


# --- weights ----------------------------------------------------------------------------------------------------------


def test_parameters_are_as_many_as_published():
    """Millions of parameters: Table II of the paper."""
    for sizes, published in (aliked.N16, 0.677), (aliked.T16, 0.192):
        count = sum(np.prod(s) for name, s in aliked.shapes(sizes).items() if "running" not in name)
        assert count / 1e6 == pytest.approx(published, abs=5e-4)


def test_weights_that_do_not_fit_are_named(weights):
    missing = {k: v for k, v in weights.items() if k != "desc_head.agg_weights"}
    with pytest.raises(WeightsError, match=r"no tensor 'desc_head.agg_weights'.*\(4, 16, 16\)"):
        aliked.build(missing, SMALL)
    with pytest.raises(WeightsError, match=r"'block1.conv1.weight' has shape \(4, 3, 3, 3\), expected \(16, 3, 3, 3\)"):
        aliked.build(weights, aliked.N16)


def test_unknown_precision(weights):
    with pytest.raises(ConfigError, match="'int4'.*'fp16'"):
        aliked.build(weights, SMALL, "int4")


# --- parts ------------------------------------------------------------------------------------------------------------


def test_deformable_convolution_is_that_of_onnx():
    """Against the standard's own implementation of DeformConv; offsets reach far outside the image."""
    rng = RNG(2)
    x = rng.normal(size=(1, 3, 9, 7)).astype(np.float32)
    offsets = rng.normal(0, 3, (1, 18, 9, 7)).astype(np.float32)
    kernel = rng.normal(size=(5, 3, 3, 3)).astype(np.float32)
    make, info = onnx.helper, onnx.helper.make_tensor_value_info
    node = make.make_node("DeformConv", ["x", "w", "o"], ["y"], kernel_shape=[3, 3], pads=[1, 1, 1, 1])
    values = [info(n, onnx.TensorProto.FLOAT, None) for n in "xwoy"]
    standard = make.make_model(
        make.make_graph([node], "deform", values[:3], values[3:]), opset_imports=[make.make_opsetid("", 19)]
    )
    (expected,) = ReferenceEvaluator(standard).run(None, {"x": x, "w": kernel, "o": offsets})

    image, shift = argument(Tensor(np.float32, (1, 3, "h", "w"))), argument(Tensor(np.float32, (1, 18, "h", "w")))
    taps = deformed_taps(image, shift)
    y = op.conv(taps, op.const(kernel.reshape(5, -1, 1, 1)))
    (result,) = graph({"y": y}, x=image, o=shift)(x=x, o=offsets)
    np.testing.assert_allclose(result, expected, atol=1e-4)


def score_map(height: int, width: int, *peaks: tuple[float, float, float]) -> np.ndarray:
    """Bumps (x, y, height) on a floor of 0.01."""
    y, x = np.mgrid[:height, :width]
    bumps = [h * np.exp(-((x - px) ** 2 + (y - py) ** 2) / 2) for px, py, h in peaks]
    return (0.01 + np.max(bumps, axis=0)).astype(np.float32)[None, None]


@pytest.fixture(scope="module")
def detector():
    scores, count = argument(Tensor(np.float32, (1, 1, "h", "w"))), argument(Tensor(np.int64, (1,)))
    found = detect(scores, count, threshold=0.2)
    run = graph({"xy": found.xy, "score": found.scores}, scores=scores, count=count)
    return lambda scores, count=10: run(scores=scores, count=np.array([count]))


def test_detection_finds_the_peaks_it_should(detector):
    peaks = [(10.3, 8.2, 0.5), (20.0, 15.4, 0.9), (30, 8, 0.15), (1, 12, 0.8), (25, 22, 0.8)]
    xy, score = detector(score_map(24, 40, *peaks))
    assert (score > 0).sum() == 2  # the third is too low, the last two lie in the border of two pixels
    np.testing.assert_allclose(xy[:2], [(20.0, 15.4), (10.3, 8.2)], atol=0.15)  # soft-argmax is a little short
    np.testing.assert_allclose(score[:2], [0.9, 0.5], rtol=0.15)  # interpolated between pixels, so below the peak


def test_position_is_the_soft_argmax(detector):
    scores = score_map(24, 40, (10.3, 8.2, 0.5))
    weight = np.exp(scores[0, 0, 6:11, 8:13].astype(float) / 0.1)
    y, x = np.mgrid[6:11, 8:13]
    expected = np.array([(weight * x).sum(), (weight * y).sum()]) / weight.sum()
    (xy, *_), (score, *_) = detector(scores)
    np.testing.assert_allclose(xy, expected, atol=1e-5)
    (fx, fy), (x, y) = np.modf(expected)
    corners = scores[0, 0, int(y) : int(y) + 2, int(x) : int(x) + 2]
    assert score == pytest.approx([1 - fy, fy] @ corners @ [1 - fx, fx], abs=1e-5)


def test_without_a_score_above_the_threshold_the_mean_decides(detector):
    xy, score = detector(score_map(24, 40, (10, 8, 0.15), (20, 15, 0.1)))
    np.testing.assert_allclose(xy[:2], [(10, 8), (20, 15)], atol=1e-3)
    assert (score[:2] > 0.1).all() and (score[2:] < 0.02).all()


def test_suppression_brings_back_what_a_suppressed_pixel_hid():
    line = np.zeros(15, np.float32)
    line[2], line[4], line[6] = 0.9, 0.8, 0.7  # the second is suppressed; it alone hides the third
    line[11] = 0.3
    scores = argument(Tensor(np.float32, (1, 1, "h", "w")))
    (kept,) = graph({"kept": suppress(scores)}, scores=scores)(scores=line[None, None, None])
    np.testing.assert_array_equal(np.flatnonzero(kept), [2, 6, 11])


def test_suppression_keeps_no_two_close_and_leaves_no_peak_out():
    values = RNG(3).random((1, 1, 40, 50)).astype(np.float32)
    scores = argument(Tensor(np.float32, (1, 1, "h", "w")))
    (kept,) = graph({"kept": suppress(scores)}, scores=scores)(scores=values)
    y, x = np.nonzero(kept[0, 0])
    apart = np.maximum(abs(y[:, None] - y), abs(x[:, None] - x))
    assert (apart[~np.eye(len(y), dtype=bool)] > 2).all()
    around = np.lib.stride_tricks.sliding_window_view(np.pad(values[0, 0], 2, constant_values=-1), (5, 5))
    assert kept[0, 0][values[0, 0] == around.max(axis=(2, 3))].all()


@pytest.mark.parametrize("side", [2, 3])
def test_sparse_features_are_those_of_the_full_map(side):
    """Against the standard's own Resize to full resolution, then normalised over channels."""
    rng = RNG(4)
    maps = [rng.normal(size=(1, 3, 32 // s, 64 // s)).astype(np.float32) for s in (1, 2, 8, 32)]
    full = [maps[0]]
    for level, step in zip(maps[1:], (2, 8, 32)):
        x = argument(Tensor(np.float32, level.shape))
        scales = op.const(np.array([1, 1, step, step], np.float32))
        y = op.resize(x, scales=scales, mode="linear", coordinate_transformation_mode="align_corners")
        full += ReferenceEvaluator(finish("up", {"x": x}, {"y": y})).run(None, {"x": level})
    full = np.concatenate(full, axis=1)[0]
    full /= np.linalg.norm(full, axis=0)

    first_y, first_x = (v.reshape(-1, 1) for v in np.indices((27 - side + 1, 58 - side + 1)))
    ys, xs = first_y + np.arange(side), first_x + np.arange(side)
    levels = [argument(Tensor(np.float32, (1, 3, f"h{i}", f"w{i}"))) for i in range(4)]
    pyramid = Pyramid(levels, size=op.const(np.array([58, 27])), offset=op.const(np.array([3, 2])))
    features, scale = pyramid.at(op.const(xs.astype(np.float32)), op.const(ys.astype(np.float32)))
    run = graph({"f": op.mul(features, scale)}, **{f"x{i}": v for i, v in enumerate(levels)})
    (sparse,) = run(**{f"x{i}": v for i, v in enumerate(maps)})
    expected = full[:, 2 + ys[:, :, None], 3 + xs[:, None]]  # (12, P, k, k)
    np.testing.assert_allclose(sparse, expected.reshape(12, -1, side * side).transpose(1, 2, 0), atol=1e-4)
