"""Attention in BF16: the casts, which cores get them, and the twin that a CPU runs."""

import ml_dtypes
import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
ir = pytest.importorskip("onnx_ir")
pytest.importorskip("onnxruntime")
pytest.importorskip("spox")

from attention_graphs import BETWEEN, BF16, feed, patched, plain, small_lightglue  # noqa: E402
from graph_helpers import FLOAT, HALF, LEVELS, all_nodes, constants, count, graph, run, types_of  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from onnx import TensorProto, helper  # noqa: E402

from vslam_features.errors import ConfigError, ModelFileError  # noqa: E402
from vslam_features.graph.bf16_attention import attention_in_bf16, attention_in_float32  # noqa: E402

EPS = 2.0**-8  # largest relative rounding error of BF16: half a unit of the last of 8 bits, twice for comfort


def rounded(x: np.ndarray) -> np.ndarray:
    """To BF16 and back, nearest, ties to even: by the bits, without a library."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    bits = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16
    return bits.astype(np.uint32).view(np.float32)


def softmax(x: np.ndarray) -> np.ndarray:
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def test_the_rounding_of_the_reference_is_that_of_ml_dtypes():
    x = np.random.default_rng(0).normal(size=5000).astype(np.float32) * 10.0 ** np.arange(-20, 30, 0.01)[:5000]
    x = x.astype(np.float32)
    np.testing.assert_array_equal(rounded(x), x.astype(ml_dtypes.bfloat16).astype(np.float32))


# -- the casts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("between", BETWEEN.values(), ids=BETWEEN)
@pytest.mark.parametrize("rank", [2, 3, 4])
@pytest.mark.parametrize("kind", ["float", "float16"])
def test_all_of_a_core_is_in_bf16_and_nothing_else(rank, between, kind):
    model, done = patched(plain(rank, between, kind=kind))
    assert [core.logits[-2:] for core in done.cores] == [(5, 7)] and (done.spared, done.done) == (0, 0)
    assert done.cores[0].heads == (1 if rank == 2 else 3)
    outside = {"t", *(n.name for n in model.graph.node if n.op_type == "Cast")}
    for node in model.graph.node:
        found = {t for t in types_of(model, node.name) if t in (FLOAT, HALF, BF16)}
        if node.name not in outside:
            assert found == {BF16}, node.name
        elif node.op_type == "Cast":
            assert found == {BF16, FLOAT if kind == "float" else HALF}
    assert count(model, "Cast") == 4, "three values in, one out"
    assert [o.name for o in model.graph.output] == ["y"]
    assert model.graph.output[0].type.tensor_type.elem_type == (FLOAT if kind == "float" else HALF)


def test_a_mask_of_the_least_float_stays_finite():
    model, _ = patched(plain(2, BETWEEN["mask"]))
    mask = next(array for array in constants(model).values() if array.shape == (5, 7))
    assert mask.dtype == ml_dtypes.bfloat16 and np.isfinite(mask.astype(np.float32)).all()
    assert float(mask.astype(np.float32).min()) == float(ml_dtypes.finfo(ml_dtypes.bfloat16).min)
    assert len(constants(model)) == 2, "the plain ones are gone"


def test_a_constant_that_others_read_stays_for_them():
    text = """(float[5,16] q, float[7,16] k, float[7,16] v) => (float[5,16] y, float[5,16] z) {
        t = Transpose(k)  l = MatMul(q, t)  s = Mul(l, c)  w = Softmax(s)  y = MatMul(w, v)  z = Mul(q, c) }"""
    model, _ = patched(graph(text, {"c": np.array(0.3, np.float32)}))
    assert sorted(array.dtype.name for array in constants(model).values()) == ["bfloat16", "float32"]


def test_what_others_read_of_a_core_has_its_type_and_name():
    text = """(float[5,16] q, float[7,16] k, float[7,16] v) => (float[5,16] y, float[5,7] w, float[5] h) {
        t = Transpose(k)  l = MatMul(q, t)  w = Softmax(l)  y = MatMul(w, v)  h = ReduceSum<keepdims=0>(l, a) }"""
    plain_model = graph(text, {"a": np.array([1])})
    for emulate in (False, True):
        model, _ = patched(plain_model, emulate=emulate)
        assert [o.name for o in model.graph.output] == ["y", "w", "h"]
        assert {o.type.tensor_type.elem_type for o in model.graph.output} == {FLOAT}
    inputs = feed(plain_model)
    for a, b in zip(run(plain_model, inputs), run(model, inputs)):
        np.testing.assert_allclose(a, b, atol=0.1)
        assert not np.array_equal(a, b)


def test_products_shared_by_both_directions_are_cast_once():
    """As LightGlue's authors wrote the attention between images."""
    text = """(float[5,16] q, float[7,16] k, float[7,16] v, float[5,16] u) => (float[5,16] y, float[7,16] z) {
        t = Transpose(k)  l = MatMul(q, t)  s = Mul(l, c)  w = Softmax(s)  y = MatMul(w, v)
        r = Transpose(s)  x = Softmax(r)  z = MatMul(x, u) }"""
    model, done = patched(graph(text, {"c": np.array(0.25, np.float32)}))
    assert [core.logits for core in done.cores] == [(5, 7), (7, 5)]
    assert count(model, "Cast") == 6  # q, k, v, u; y, z


@pytest.mark.parametrize("emulate", [False, True])
def test_branches_of_if_are_looked_into(emulate):
    """The product is outside, what follows in one branch; the other has a core of its own."""
    info = helper.make_tensor_value_info
    then = helper.make_graph(
        [helper.make_node("Softmax", ["l"], ["w"], "w"), helper.make_node("MatMul", ["w", "v"], ["a"], "a")],
        *("then", [], [info("a", FLOAT, [5, 16])]),
    )
    other = helper.make_graph(
        [
            helper.make_node("MatMul", ["q", "t"], ["m"], "m"),
            helper.make_node("Softmax", ["m"], ["x"], "x"),
            helper.make_node("MatMul", ["x", "v"], ["b"], "b"),
        ],
        *("else", [], [info("b", FLOAT, [5, 16])]),
    )
    nodes = [
        helper.make_node("Transpose", ["k"], ["t"], "t"),
        helper.make_node("MatMul", ["q", "t"], ["l"], "l"),
        helper.make_node("If", ["flag"], ["y"], "y", then_branch=then, else_branch=other),
    ]
    inputs = [info("q", FLOAT, [5, 16]), info("k", FLOAT, [7, 16]), info("v", FLOAT, [7, 16])]
    made = helper.make_graph(nodes, "g", [*inputs, info("flag", TensorProto.BOOL, [])], [info("y", FLOAT, [5, 16])])
    plain_model = helper.make_model(made, ir_version=8, opset_imports=[helper.make_opsetid("", 18)])
    model, done = patched(plain_model, emulate=emulate)
    assert len(done.cores) == 2
    if emulate:
        values = feed(plain_model)
        for flag in (True, False):
            values["flag"] = np.array(flag)
            for level in LEVELS:
                got, expected = run(model, values, level)[0], run(plain_model, values)[0]
                assert 0 < np.abs(got - expected).max() < 0.05
    else:
        ours = [n for n in all_nodes(model.graph) if n.op_type in ("MatMul", "Softmax")]
        assert all(types_of(model, n.name)[0] == BF16 for n in ours)


def test_the_attention_of_opset_23_is_a_core():
    text = """(float[1,2,5,16] q, float[1,2,7,16] k, float[1,2,7,16] v, float[5,7] m) => (float[1,2,5,16] y) {
        y = Attention(q, k, v, m) }"""
    plain_model = graph(text, opset=23)
    plain_model.ir_version = 10
    model, done = patched(plain_model)
    assert [core.logits for core in done.cores] == [(2, 5, 7)]
    assert types_of(model, "y") == [BF16] * 5 and count(model, "Cast") == 5
    twin, _ = patched(plain_model, emulate=True)
    values = feed(plain_model)
    got, expected = run(twin, values)[0], run(plain_model, values)[0]
    assert 0 < np.abs(got - expected).max() < 0.05
    assert patched(model)[1].done == 1 == patched(twin, emulate=True)[1].done


# -- which of them -------------------------------------------------------------------------------


def two_cores() -> onnx.ModelProto:
    return graph("""(float[5,16] q, float[7,16] k, float[64,16] n) => (float[5,16] y) {
        t = Transpose(k)  l = MatMul(q, t)  w = Softmax(l)  u = MatMul(w, k)
        r = Transpose(n)  m = MatMul(u, r)  x = Softmax(m)  y = MatMul(x, n) }""")


def test_small_cores_are_spared():
    model, done = patched(two_cores(), min_tokens=64)
    assert [core.keys for core in done.cores] == [64] and done.spared == 1
    assert done.patch == "bf16-attention from 64 tokens"
    assert types_of(model, "w") == [FLOAT] * 2 and types_of(model, "x") == [BF16] * 2
    with pytest.raises(ConfigError, match="2 cores.*64 tokens at most, not 65"):
        patched(two_cores(), min_tokens=65)
    again, rest = patched(model)
    assert (len(rest.cores), rest.done, count(again, "Softmax")) == (1, 1, 2)
    assert patched(model, min_tokens=64)[1].done == 1


def test_tokens_that_the_graph_does_not_fix_are_not_spared():
    text = "(float[M,16] q, float[16,N] k, float[N,16] v) => (float[M,16] y) "
    done = patched(graph(text + "{ l = MatMul(q, k)  w = Softmax(l)  y = MatMul(w, v) }"), min_tokens=4096)[1]
    assert len(done.cores) == 1 and done.cores[0].keys == "N"


@pytest.mark.parametrize("emulate", [False, True])
def test_the_second_time_nothing_is_left_and_the_graph_that_was_given_stays(emulate):
    model = ir.from_proto(small_lightglue(2)[0])
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    once = attention_in_bf16(model, emulate=emulate)
    again = attention_in_bf16(once.model, emulate=emulate)
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before
    assert (again.cores, again.done) == ((), 8)
    first, second = (ir.to_proto(done.model) for done in (once, again))  # of which shapes are inferred anew
    assert list(first.graph.node) == list(second.graph.node)
    assert {n: a.tobytes() for n, a in constants(first).items()} == {
        n: a.tobytes() for n, a in constants(second).items()
    }


def test_neither_is_made_of_the_other():
    real, twin = (patched(plain(3), emulate=emulate)[0] for emulate in (False, True))
    with pytest.raises(ModelFileError, match="emulates BF16 for a CPU.*not to be built from"):
        patched(twin)
    with pytest.raises(ModelFileError, match="computes in BF16 already"):
        patched(real, emulate=True)


# -- the twin ------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([2, 3, 4]), st.sampled_from(LEVELS), st.sampled_from([0.3, 1.0, 3.0]), st.integers(0, 2**32 - 1),
    st.sampled_from(["float", "float16"]),
)  # fmt: skip
def test_the_twin_rounds_what_goes_into_each_operator_and_what_comes_out(rank, level, size, seed, kind):
    plain_model = plain(rank, "s = Mul(l, c)", kind=kind)
    values = feed(plain_model, seed, size)
    q, k, v = (rounded(values[name].astype(np.float32)) for name in "qkv")
    logits = rounded(q @ np.swapaxes(k, -1, -2))
    weights = rounded(softmax(rounded(logits * rounded(np.float32(0.3)))))
    expected = rounded(weights @ v)
    (got,) = run(patched(plain_model, emulate=True)[0], values, level)
    assert got.dtype == values["q"].dtype
    # The order of sums may move a value across a rounding border: a step of BF16 in a logit, a weight or the result.
    np.testing.assert_allclose(got.astype(np.float32), expected, atol=8 * EPS * size * max(1, np.abs(logits).max()))
    (exact,) = run(plain_model, values)
    assert not np.array_equal(got, exact), "optimisation must not remove the rounding"


def test_the_twin_of_small_logits_is_the_reference_bit_for_bit():
    """Quarters and halves: all sums are exact, so that nothing depends on their order; one key a query is far ahead."""
    plain_model = plain(3)
    rng = np.random.default_rng(0)
    values = {n: rng.integers(-8, 9, value.shape).astype(np.float32) / 4 for n, value in feed(plain_model).items()}
    logits = rounded(values["q"] @ np.swapaxes(values["k"], -1, -2))
    weights = rounded(softmax(logits))
    expected = weights.astype(np.float64) @ values["v"]
    (got,) = run(patched(plain_model, emulate=True)[0], values)
    np.testing.assert_allclose(got, expected, rtol=EPS, atol=1e-3)


def test_emulated_lightglue_is_within_the_error_of_bf16():
    plain_model, _ = small_lightglue(2)
    twin, _ = patched(plain_model, emulate=True)
    rng = np.random.default_rng(0)
    values = {}
    for i, n in enumerate((30, 40)):
        values |= {
            f"keypoints{i}": rng.uniform(0, 400, (n, 2)).astype(np.float32),
            f"descriptors{i}": rng.normal(size=(n, 8)).astype(np.float32),
            f"image_size{i}": np.array([400, 400], np.float32),
        }
    exact, got = run(plain_model, values), run(twin, values)
    assert (exact[0] == got[0]).mean() > 0.9 and (exact[0] >= 0).sum() > 5
    same = (exact[0] == got[0]) & (exact[0] >= 0)
    assert 0 < np.abs(exact[1] - got[1])[same].max() < 0.05


# -- in float32 ------------------------------------------------------------------------------------


def in_float32(model: onnx.ModelProto) -> tuple[onnx.ModelProto, int]:
    """The copy, proved to be standard."""
    made, count_of = attention_in_float32(ir.from_proto(model))
    proto = ir.to_proto(made)
    onnx.checker.check_model(proto, full_check=True)
    return onnx.shape_inference.infer_shapes(proto, check_type=True, strict_mode=True, data_prop=True), count_of


@pytest.mark.parametrize("between", BETWEEN.values(), ids=BETWEEN)
@pytest.mark.parametrize("rank", [2, 3, 4])
def test_all_of_a_core_is_in_float32_and_nothing_else(rank, between):
    model, changed = in_float32(plain(rank, between, kind="float16"))
    assert changed == 1
    for node in model.graph.node:
        found = {t for t in types_of(model, node.name) if t in (FLOAT, HALF, BF16)}
        wanted = {FLOAT, HALF} if node.op_type == "Cast" else {HALF} if node.name == "t" else {FLOAT}
        assert found == wanted, node.name
    assert count(model, "Cast") == 4, "three values in, one out"
    assert [o.name for o in model.graph.output] == ["y"]


@pytest.mark.parametrize("between", ["nothing", "mask"])
def test_float32_does_not_overflow_where_half_precision_does(between):
    """Products beyond 65504, the largest number of half precision; float64 says what is right."""
    model = plain(3, BETWEEN[between], tokens=(50, 70), width=64, kind="float16")
    inputs = feed(model, size=60.0)
    q, k, v = (inputs[n].astype(np.float64) for n in "qkv")
    logits = q @ k.transpose(0, 2, 1)
    assert np.abs(logits).max() > 65504, "infinite in half precision"
    if between == "mask":
        made = constants(model)
        logits = logits * float(made["c"]) + made["m"].astype(np.float64)
    got = run(in_float32(model)[0], inputs)[0]
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got, softmax(logits) @ v, rtol=2e-3, atol=0.1)


def test_cores_in_float32_or_bf16_stay():
    for model in (plain(3), in_float32(plain(3, kind="float16"))[0], patched(plain(3, kind="float16"))[0]):
        made, changed = in_float32(model)
        assert changed == 0 and [n.op_type for n in made.graph.node] == [n.op_type for n in model.graph.node]
