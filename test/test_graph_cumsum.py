"""CumSum as a product with a triangular matrix: the sums of NumPy, whatever the flags, axis, type and rank."""

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
ir = pytest.importorskip("onnx_ir")
pytest.importorskip("onnxruntime")

from graph_helpers import FLOAT, LEVELS, all_nodes, constants, count, graph, run, types_of  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

from vslam_features.errors import ConfigError, ModelFileError  # noqa: E402
from vslam_features.graph.cumsum import MatMulSums, cumsum_to_matmul, triangle  # noqa: E402

TYPES = {np.float16: TensorProto.FLOAT16, np.float32: FLOAT, np.float64: TensorProto.DOUBLE}


def summed(x: np.ndarray, axis: int, exclusive: bool, reverse: bool) -> np.ndarray:
    """By numpy.cumsum, in float64."""
    x = x.astype(np.float64)
    x = np.flip(x, axis) if reverse else x
    sums = np.cumsum(x, axis=axis)
    sums = sums - x if exclusive else sums
    return np.flip(sums, axis) if reverse else sums


def model_of(shape, axis: int, dtype=np.float32, exclusive=False, reverse=False, kind="initializer"):
    """One CumSum. ``kind``: of what holds the axis."""
    value = numpy_helper.from_array(np.array(axis, np.int32 if kind == "int32" else np.int64), "axis")
    nodes = [helper.make_node("CumSum", ["x", "axis"], ["y"], "sum", exclusive=int(exclusive), reverse=int(reverse))]
    if kind == "constant":
        nodes.insert(0, helper.make_node("Constant", [], ["axis"], "axis", value=value))
    made = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TYPES[dtype], shape)],
        [helper.make_tensor_value_info("y", TYPES[dtype], shape)],
        [] if kind == "constant" else [value],
    )
    return helper.make_model(made, ir_version=8, opset_imports=[helper.make_opsetid("", 18)])


def patched(model: onnx.ModelProto, **options) -> tuple[onnx.ModelProto, MatMulSums]:
    """The copy, proved to be standard."""
    done = cumsum_to_matmul(ir.from_proto(model), **options)
    proto = ir.to_proto(done.model)
    onnx.checker.check_model(proto, full_check=True)
    return onnx.shape_inference.infer_shapes(proto, check_type=True, strict_mode=True, data_prop=True), done


@st.composite
def sums(draw):
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    axis = draw(st.integers(-len(shape), len(shape) - 1))
    return shape, axis, draw(st.sampled_from(list(TYPES))), draw(st.booleans()), draw(st.booleans())


@settings(max_examples=120, deadline=None)
@given(sums(), st.sampled_from(["initializer", "constant", "int32"]), st.integers(0, 2**32 - 1))
def test_the_sums_are_those_of_numpy(kind, holder, seed):
    shape, axis, dtype, exclusive, reverse = kind
    model, done = patched(model_of(shape, axis, dtype, exclusive, reverse, holder))
    assert [node.op_type for node in model.graph.node] in (["MatMul"], ["Transpose", "MatMul", "Transpose"])
    assert len(constants(model)) == 1, "one matrix, and the axis is gone"
    assert done.sums[0].axis == axis % len(shape) and done.sums[0].size == shape[axis]
    x = np.random.default_rng(seed).normal(size=shape).astype(dtype)
    (got,) = run(model, {"x": x})
    assert got.dtype == dtype and types_of(model, model.graph.node[-1].name)[-1] == TYPES[dtype]
    tolerance = {np.float16: 0.01, np.float32: 1e-5, np.float64: 1e-13}[dtype]
    np.testing.assert_allclose(got, summed(x, axis, exclusive, reverse), atol=tolerance, rtol=tolerance)


@settings(max_examples=40, deadline=None)
@given(sums(), st.sampled_from(LEVELS), st.integers(0, 2**32 - 1))
def test_whole_numbers_give_what_onnx_runtime_gave_before_bit_for_bit(kind, level, seed):
    shape, axis, dtype, exclusive, reverse = kind
    dtype = np.float32 if dtype == np.float16 else dtype  # which ONNX Runtime's CPU has no CumSum of
    plain = model_of(shape, axis, dtype, exclusive, reverse)
    x = np.random.default_rng(seed).integers(-99, 99, shape).astype(dtype)
    np.testing.assert_array_equal(*(run(model, {"x": x}, level)[0] for model in (plain, patched(plain)[0])))


def test_the_matrices_are_those_of_the_definition():
    assert triangle(3, False, False).tolist() == [[1, 1, 1], [0, 1, 1], [0, 0, 1]]
    assert triangle(3, True, False).tolist() == [[0, 1, 1], [0, 0, 1], [0, 0, 0]]
    assert triangle(3, False, True).tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert triangle(3, True, True).tolist() == [[0, 0, 0], [1, 0, 0], [1, 1, 0]]


def test_names_stay_and_others_read_the_sums():
    model = graph("(float[2,4] x) => (float[2,4] y, float[2,4] z) { y = CumSum(x, a) z = Neg(y) }", {"a": np.array(-1)})
    changed, _ = patched(model)
    assert [o.name for o in changed.graph.output] == ["y", "z"] and "a" not in constants(changed)
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    y, z = run(changed, {"x": x})
    np.testing.assert_array_equal(y, np.cumsum(x, axis=1))
    np.testing.assert_array_equal(z, -y)


def test_equal_matrices_are_shared_and_the_others_are_not():
    text = """(float[2,4] x, double[4] d) => (float[2,4] y, float[2,4] z, float[2,4] u, float[2,4] r, double[4] e) {
        y = CumSum(x, a)  z = CumSum(y, b)  u = CumSum<exclusive=1>(x, b)  r = CumSum<reverse=1>(x, c)
        e = CumSum(d, c) }"""
    model, done = patched(graph(text, {"a": np.array(1), "b": np.array(-1), "c": np.array(0)}))
    sizes = sorted((t.dtype.name, t.shape) for t in constants(model).values())
    assert sizes == [("float32", (2, 2)), ("float32", (4, 4)), ("float32", (4, 4)), ("float64", (4, 4))]
    assert done.constant_bytes == 4 * 4 + 2 * 16 * 4 + 16 * 8
    assert [(s.name, s.size, s.exclusive, s.reverse) for s in done.sums] == [
        ("y", 4, False, False), ("z", 4, False, False), ("u", 4, True, False), ("r", 2, False, True),
        ("e", 4, False, False)]  # fmt: skip


def nested() -> onnx.ModelProto:
    """A CumSum in both branches of an If, another in a Loop, all of the same matrix."""
    info = helper.make_tensor_value_info
    branches = {}
    for name, other in (("then_branch", "Neg"), ("else_branch", "Identity")):
        nodes = [helper.make_node("CumSum", ["x", "a"], [f"{name}_s"], f"{name}_s")]
        nodes.append(helper.make_node(other, [f"{name}_s"], [f"{name}_y"], f"{name}_y"))
        branches[name] = helper.make_graph(nodes, name, [], [info(f"{name}_y", FLOAT, [2, 4])])
    body = helper.make_graph(
        [
            helper.make_node("CumSum", ["carried", "a"], ["summed"], "summed"),
            helper.make_node("Identity", ["on"], ["stay"], "stay"),
        ],
        "body",
        [info("i", TensorProto.INT64, []), info("on", TensorProto.BOOL, []), info("carried", FLOAT, [2, 4])],
        [info("stay", TensorProto.BOOL, []), info("summed", FLOAT, [2, 4])],
    )
    nodes = [
        helper.make_node("If", ["flag"], ["branched"], "if", **branches),
        helper.make_node("Loop", ["twice", "", "branched"], ["y"], "loop", body=body),
    ]
    made = helper.make_graph(
        nodes,
        "g",
        [info("x", FLOAT, [2, 4]), info("flag", TensorProto.BOOL, [])],
        [info("y", FLOAT, [2, 4])],
        [numpy_helper.from_array(np.array(1), "a"), numpy_helper.from_array(np.array(2), "twice")],
    )
    return helper.make_model(made, ir_version=8, opset_imports=[helper.make_opsetid("", 18)])


def test_branches_and_loops_share_a_matrix_of_the_main_graph():
    model, done = patched(nested())
    assert len(done.sums) == 3 and count(model, "CumSum") == 0 and count(model, "MatMul") == 3
    assert sum(array.shape == (4, 4) for array in constants(model).values()) == 1
    assert not any(a.g.initializer for n in all_nodes(model.graph) for a in n.attribute)
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    for flag in (True, False):
        once = np.cumsum(x, 1) * (-1 if flag else 1)
        expected = np.cumsum(np.cumsum(once, 1), 1)
        for level in LEVELS:
            np.testing.assert_array_equal(run(model, {"x": x, "flag": np.array(flag)}, level)[0], expected)


def test_functions_of_the_model_are_looked_into():
    call = helper.make_node("Sums", ["x"], ["y"], "call", domain="local")
    inner = [
        helper.make_node("Constant", [], ["a"], value=numpy_helper.from_array(np.array(1))),
        helper.make_node("CumSum", ["v", "a"], ["w"]),
    ]
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("local", 1)]
    function = helper.make_function("local", "Sums", ["v"], ["w"], inner, opsets[:1])
    info = [helper.make_tensor_value_info(name, FLOAT, [2, 4]) for name in "xy"]
    made = helper.make_graph([call], "g", info[:1], info[1:])
    model, done = patched(helper.make_model(made, functions=[function], ir_version=8, opset_imports=opsets))
    assert len(done.sums) == 1 and not model.functions
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    np.testing.assert_array_equal(run(model, {"x": x})[0], np.cumsum(x, 1))


def test_the_second_time_nothing_is_left_and_the_graph_that_was_given_stays():
    model = ir.from_proto(nested())
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    once = cumsum_to_matmul(model)
    again = cumsum_to_matmul(once.model)
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before
    assert (again.sums, again.constant_bytes) == ((), 0)
    first, second = (ir.to_proto(done.model).SerializeToString(deterministic=True) for done in (once, again))
    assert first == second


# -- refusals ------------------------------------------------------------------------------------


def test_4096_values_are_refused_with_the_price_and_the_limit_can_be_raised():
    model = model_of([1, 4096], 1)
    with pytest.raises(ConfigError, match=r"'sum'.*4096 values, at most 1024.*64 MiB.*15 times.*--max-size"):
        patched(model)
    assert patched(model, max_size=4096)[1].constant_bytes == 4096 * 4096 * 4
    assert patched(model_of([1, 1024], 1))[1].constant_bytes == 2**22
    with pytest.raises(ConfigError, match="at most 1023"):
        patched(model_of([1, 1024], 1), max_size=1023)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("(float[2,N] x) => (float[2,N] y) { y = CumSum(x, a) }", r"axis 1 of 'x'.*no fixed length"),
        ("(float[2,4] x, int64 a) => (float[2,4] y) { y = CumSum(x, a) }", "its axis 'a' is computed while it runs"),
        ("(int64[2,4] x) => (int64[2,4] y) { y = CumSum(x, a) }", "it sums INT64.*no product of integers"),
        ("(int32[2,4] x) => (int32[2,4] y) { y = CumSum(x, a) }", "it sums INT32"),
    ],
)
def test_what_cannot_be_a_constant_product_is_refused_by_name(text, words):
    model = graph(text, {} if "int64 a" in text else {"a": np.array(1)})
    with pytest.raises(ModelFileError, match=f"CumSum 'y' cannot be a MatMul: {words}"):
        cumsum_to_matmul(ir.from_proto(model))


def test_an_axis_that_callers_may_replace_is_no_constant():
    model = graph("(float[2,4] x, int64 a) => (float[2,4] y) { y = CumSum(x, a) }", {"a": np.array(1)})
    with pytest.raises(ModelFileError, match="axis 'a' is computed"):
        cumsum_to_matmul(ir.from_proto(model))


def test_an_axis_that_there_is_not_is_refused():
    model = ir.from_proto(graph("(float[2,4] x) => (float[2,4] y) { y = CumSum(x, a) }", {"a": np.array(2)}))
    with pytest.raises(ModelFileError, match="its axis is 2, expected one from -2 to 1"):
        cumsum_to_matmul(model)


def test_a_refusal_changes_nothing():
    text = "(float[2,4] x, float[2,N] l) => (float[2,4] y, float[2,N] z) { y = CumSum(x, a) z = CumSum(l, a) }"
    model = ir.from_proto(graph(text, {"a": np.array(1)}))
    with pytest.raises(ModelFileError, match="'z'"):
        cumsum_to_matmul(model)
    assert [node.op_type for node in model.graph] == ["CumSum", "CumSum"]
