"""The exportable MegaLoc: the same numbers as the network, and the graph of the published export note."""

import collections

import numpy as np
import onnxruntime as ort
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

from vslam_features.errors import DataError  # noqa: E402
from vslam_features.export.megaloc import Exportable  # noqa: E402
from vslam_features.networks.megaloc import MEGALOC, MEGALOC_TINY, randomised  # noqa: E402

# What the note has for the released size, 12 blocks, exported by torch.export with opset 18.
PUBLISHED = (
    "Add 92, MatMul 72, Mul 60, Reshape 53, Transpose 50, Slice 38, LayerNormalization 25, Div 16, Softmax 12, Erf 12, "
    "Sub 7, ReduceLogSumExp 6, Unsqueeze 6, Conv 5, ReduceL2 4, Clip 4, Expand 4, Concat 3, Relu 3, Gemm 3, Gather 1, "
    "Exp 1, Einsum 1"
)
OF_RELEASED = collections.Counter({i.split()[0]: int(i.split()[1]) for i in PUBLISHED.split(", ")})
# A block: six products with four biases, two residuals, two norms; q, k, v as slices; GELU by Erf; two LayerScales.
OF_A_BLOCK = collections.Counter(
    Add=7, MatMul=6, Mul=5, Reshape=4, Transpose=4, Slice=3, LayerNormalization=2, Div=1, Softmax=1, Erf=1
)
# Counts are those of this exporter; others fold more or less, with the same operators.
SAME_EXPORTER = torch.__version__.startswith("2.13.")


def images(count: int, seed: int = 0) -> torch.Tensor:
    width, height = MEGALOC_TINY.image_size
    return torch.randn(count, 3, height, width, generator=torch.Generator().manual_seed(seed))


def graph_of(module, image: torch.Tensor):
    program = torch.onnx.export(module, (image,), dynamo=True, opset_version=18, optimize=True, verbose=False)
    return program, collections.Counter(node.op_type for node in program.model.graph)


def assert_published(found: collections.Counter, depth: int):
    expected = OF_RELEASED.copy()
    for _ in range(12 - depth):
        expected.subtract(OF_A_BLOCK)
    assert set(found) == set(expected) and len(found) == 23
    assert found["Gather"] == 1
    if SAME_EXPORTER:
        assert found == expected and found.total() == 478 - 34 * (12 - depth)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_wrapper_computes_what_the_network_does(count, seed):
    model = randomised(MEGALOC_TINY, seed)
    with torch.no_grad():
        expected, got = model(images(count, seed)), Exportable(model)(images(count, seed))
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=0)


def test_the_wrapper_shares_the_parameters():
    model = randomised(MEGALOC_TINY, 0)
    wrapper = Exportable(model)
    assert {p.data_ptr() for p in wrapper.parameters()} == {p.data_ptr() for p in model.parameters()}
    assert set(wrapper.state_dict()) == {*model.state_dict(), "positions"}
    assert not wrapper.training


def test_the_wrapper_takes_its_size_only():
    wrapper = Exportable(randomised(MEGALOC_TINY, 0))
    for shape in [(1, 3, 70, 56), (1, 3, 56, 84), (1, 1, 56, 70), (3, 56, 70)]:
        with pytest.raises(DataError, match=r"megaloc-tiny, expected \(B, 3, 56, 70\)"):
            wrapper(torch.zeros(shape))


def test_the_graph_is_the_published_one_and_computes_the_descriptor(tmp_path):
    model = randomised(MEGALOC_TINY, 0)
    program, found = graph_of(Exportable(model), images(1))
    assert_published(found, MEGALOC_TINY.depth)
    program.save(tmp_path / "tiny.onnx")
    session = ort.InferenceSession(tmp_path / "tiny.onnx", providers=["CPUExecutionProvider"])
    for seed in range(3):
        image = images(1, seed)
        with torch.no_grad():
            expected = model(image).numpy()
        got = session.run(None, {session.get_inputs()[0].name: image.numpy()})[0]
        np.testing.assert_allclose(got, expected, atol=5e-6)  # kernels of two libraries, of any processor


def test_without_the_rewrites_the_graph_has_what_they_are_for():
    _, found = graph_of(randomised(MEGALOC_TINY, 0), images(1))
    assert found["Resize"] == 1 and found["Einsum"] == 0
    assert found["ScatterND"] + found["ScatterElements"] == 2
    assert found["Gather"] >= 3 * MEGALOC_TINY.depth


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_graph_of_the_released_size_is_the_published_one():
    width, height = MEGALOC.image_size
    _, found = graph_of(Exportable(randomised(MEGALOC, 0)), torch.zeros(1, 3, height, width))
    assert_published(found, 12)
