"""The self-check of exports: what passes, what fails, what is told; peaks of values inside of a graph."""

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from vslam_features.errors import ExportError
from vslam_features.export.self_check import Check, SelfCheck

ir = pytest.importorskip("onnx_ir")

from vslam_features.export.graph_table import GraphFacts, graph_table  # noqa: E402
from vslam_features.graph.peaks import half_values, peak_name, with_peaks  # noqa: E402


def unit(*shape, seed=0):
    rows = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=5), st.booleans())
def test_a_check_passes_only_where_every_figure_is_within_the_limit(values, least):
    passed = all(np.isfinite(v) and (v >= 0.5 if least else v <= 0.5) for v in values)
    assert Check("x", tuple(values), 0.5, least).passed is passed
    assert Check("x", tuple(values)).passed is bool(np.isfinite(values).all())


def test_figures_are_those_of_their_formulas():
    a, b = unit(3, 50), unit(3, 50, seed=1)
    check = SelfCheck(["p", "q", "r"])
    check.differ("difference", a, b)
    check.agree("cosine", a, b)
    check.describe(a)
    difference, cosine, length, distinct = check.checks
    np.testing.assert_allclose(difference.values, [max(abs(x - y) for x, y in zip(*rows)) for rows in zip(a, b)])
    np.testing.assert_allclose(cosine.values, [np.dot(x, y) for x, y in zip(a, b)], atol=1e-6)
    np.testing.assert_allclose(check.similarity, a @ a.T, atol=1e-6)
    assert max(length.values) < 1e-6 and not difference.passed and not cosine.passed and distinct.passed
    assert distinct.values == pytest.approx([min(a[0] @ a[1], a[0] @ a[2], a[1] @ a[2])])


@pytest.mark.parametrize(
    "spoil, said",
    [
        (lambda d: d * 1.001, "length, off 1"),
        (lambda d: np.repeat(d[:1], 3, axis=0), "least cosine between two images"),
        (lambda d: np.where(np.arange(50) == 7, np.nan, d), "length, off 1: NaN"),
        (lambda d: np.where(np.arange(50) == 7, np.inf, d), "length, off 1: NaN"),
    ],
)
def test_descriptors_that_mean_nothing_fail(spoil, said):
    check = SelfCheck(["p", "q", "r"])
    check.describe(spoil(unit(3, 50)))
    with pytest.raises(ExportError, match="no file was kept: .*" + said) as caught:
        check.require()
    assert "FAILED" in str(caught.value) and "cosine between images" in str(caught.value)


def test_pictures_that_are_all_alike_are_told_what_to_do_about():
    check = SelfCheck(["p", "q"])
    check.describe(np.repeat(unit(1, 50), 2, axis=0))
    with pytest.raises(ExportError, match="least cosine between two images: 1 .*name pictures of different places"):
        check.require()


def test_the_table_and_the_texts():
    a = unit(2, 50)
    check = SelfCheck(["left", "right"])
    check.differ("ONNX against torch", a + np.float32(3e-7), a)
    check.agree("fp16", a, a)
    check.agree("recorded", a, -a, None)
    check.describe(a)
    check.require()
    lines = check.table().splitlines()
    assert lines[0].split() == ["left", "right", "limit"]
    assert lines[1].split() == ["ONNX", "against", "torch", "3.0e-07", "3.0e-07", "<=", "1.0e-06", "ok"]
    assert lines[2].split() == ["fp16", "1", "1", ">=", "0.9999", "ok"]
    assert not lines[3].endswith(("ok", "FAILED"))
    texts = check.texts()
    assert texts["ONNX against torch"] == "3.0e-07 (<= 1.0e-06)" and texts["fp16"] == "1 (>= 0.9999)"
    assert texts["images"] == "2" and all(isinstance(v, str) for v in texts.values())


def model(rows: np.ndarray) -> ir.Model:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["m"]), helper.make_node("Relu", ["m"], ["y"])]
    ends = [[helper.make_tensor_value_info(n, TensorProto.FLOAT, [2, 3])] for n in ("x", "y")]
    graph = helper.make_graph(nodes, "g", *ends, [onnx.numpy_helper.from_array(rows, "w")])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    return ir.from_proto(onnx.shape_inference.infer_shapes(proto))


def test_peaks_are_the_largest_magnitudes_and_the_model_stays_as_it_was():
    rows = np.diag([1, -200, 3]).astype(np.float32)
    made = model(rows)
    before = ir.to_proto(made).SerializeToString(deterministic=True)
    probe = ir.to_proto(with_peaks(made, {"x", "m", "y", "none"}))
    assert ir.to_proto(made).SerializeToString(deterministic=True) == before
    onnx.checker.check_model(probe, full_check=True)
    x = np.array([[1, 2, 3], [-4, 0, 0]], np.float32)
    outputs = ReferenceEvaluator(probe).run(None, {"x": x})
    found = dict(zip([o.name for o in probe.graph.output], map(float, outputs)))
    assert found == {peak_name("x"): 4, peak_name("m"): 400, peak_name("y"): 9}


def test_the_values_of_a_graph_in_half_precision_have_the_names_of_the_model():
    from vslam_features.graph.fp16 import to_half

    made = model(np.eye(3, dtype=np.float32))
    half = to_half(made, lambda graph: set()).model
    # x is cast to half precision, y back under its old name, by which the model has what was y in half precision.
    assert {"x", "m", "y"} <= half_values(half)
    watched = with_peaks(made, half_values(half)).graph.outputs
    assert {v.name for v in watched} == {peak_name("x"), peak_name("m"), peak_name("y")}


def test_a_table_of_graphs(tmp_path):
    made = model(np.eye(3, dtype=np.float32))
    (tmp_path / "m").write_bytes(bytes(3 << 19))
    facts = GraphFacts.of(made, tmp_path / "m")
    assert facts == GraphFacts(2, 1, 1.5, {"MatMul": 1, "Relu": 1})
    other = GraphFacts(7, 2, 3.0, {"MatMul": 4, "Resize": 3})
    rows = [line.split() for line in graph_table({"ours": facts, "raw": other}).splitlines()]
    assert rows[0] == ["ours", "raw"] and ["nodes", "2", "7"] in rows and ["file,", "MiB", "1.5", "3.0"] in rows
    assert ["Relu", "1", "-"] in rows and ["Resize", "-", "3"] in rows and ["MatMul", "1", "4"] in rows
