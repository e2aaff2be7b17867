"""Attention in BF16: what is a core and what is not, the casts, and the twin that a CPU runs."""

import re

import ml_dtypes
import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
ir = pytest.importorskip("onnx_ir")
pytest.importorskip("onnxruntime")
pytest.importorskip("spox")

from graph_helpers import FLOAT, HALF, LEVELS, all_nodes, constants, count, graph, run, types_of  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from matcher_graph import Matcher  # noqa: E402
from onnx import TensorProto, helper  # noqa: E402

from vslam_features.errors import ConfigError, ModelFileError  # noqa: E402
from vslam_features.graph import fp16, rules  # noqa: E402
from vslam_features.graph.bf16_attention import Bf16Attention, attention_in_bf16  # noqa: E402
from vslam_features.graph.early_stop import add_early_stop  # noqa: E402
from vslam_features.networks import lightglue  # noqa: E402
from vslam_features.networks.lightglue import LightGlueSizes  # noqa: E402

BF16 = TensorProto.BFLOAT16
EPS = 2.0**-8  # largest relative rounding error of BF16: half a unit of the last of 8 bits, twice for comfort


def patched(model: onnx.ModelProto, **options) -> tuple[onnx.ModelProto, Bf16Attention]:
    """The copy, proved to be standard."""
    done = attention_in_bf16(ir.from_proto(model), **options)
    proto = ir.to_proto(done.model)
    onnx.checker.check_model(proto, full_check=True)
    return onnx.shape_inference.infer_shapes(proto, check_type=True, strict_mode=True, data_prop=True), done


def plain(rank: int, between: str = "", tokens=(5, 7), width: int = 16, kind: str = "float") -> onnx.ModelProto:
    """``between``: nodes from ``l``, the product, to ``s``, what the softmax takes; constants c (scalar), m (mask)."""
    lead = {2: (), 3: (3,), 4: (2, 3)}[rank]
    shape = {n: ",".join(map(str, (*lead, t, width))) for n, t in zip("qkv", (tokens[0], tokens[1], tokens[1]))}
    perm = [*range(rank - 2), rank - 1, rank - 2]
    signature = ", ".join(f"{kind}[{shape[n]}] {n}" for n in "qkv")
    text = f"""({signature}) => ({kind}[{shape["q"]}] y) {{
        t = Transpose<perm={perm}>(k)  l = MatMul(q, t)  {between or "s = Identity(l)"}
        w = Softmax<axis=-1>(s)  y = MatMul(w, v) }}"""
    dtype = {"float": np.float32, "float16": np.float16, "double": np.float64}[kind]
    mask = np.where(np.random.default_rng(1).uniform(size=tokens) < 0.3, np.finfo(dtype).min, 0)
    mask[:, 0] = 0
    made = {"c": np.array(0.3), "m": mask, "low": np.array(-75.0)}
    used = {name: value.astype(dtype) for name, value in made.items() if re.search(rf"[( ]{name}[,)]", between)}
    return graph(text, used | ({"axes": np.array([-1])} if "axes" in text else {}))


def feed(model: onnx.ModelProto, seed=0, size=1.0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    found = {}
    for value in model.graph.input:
        shape = [d.dim_value for d in value.type.tensor_type.shape.dim]
        dtype = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        found[value.name] = rng.normal(0, size, shape).astype(dtype)
    return found


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


BETWEEN = {
    "nothing": "",
    "mul": "s = Mul(l, c)",
    "div, other side": "i = Identity(l) s = Div(i, c)",
    "mask": "a = Mul(l, c) s = Add(a, m)",
    "mask first": "a = Div(l, c) s = Add(m, a)",
    "floor": "h = ReduceMax(l, axes) f = Add(h, low) s = Max(l, f)",
    "reshapes": "u = Unsqueeze(l, axes) s = Squeeze(u, axes)",
}


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


# -- what is a core ------------------------------------------------------------------------------


def small_lightglue(heads: int, precision: str = "fp32", scores: bool = False) -> tuple[onnx.ModelProto, int]:
    sizes = LightGlueSizes(input_dim=8, dim=16 * heads, heads=heads, layers=2)
    rng = np.random.default_rng(heads)
    shapes = lightglue.shapes(sizes, scores)
    weights = {name: rng.normal(0, 0.2, shape).astype(np.float32) for name, shape in shapes.items()}
    return lightglue.build(weights, sizes, precision, scores), sizes.layers


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_our_lightglue_has_four_cores_a_layer(heads, precision):
    plain_model, layers = small_lightglue(heads, precision)
    for emulate in (False, True):
        model, done = patched(plain_model, emulate=emulate)
        assert len(done.cores) == 4 * layers
        assert {core.softmax.op_type for core in done.cores} == {"Softmax"}
        assert count(model, "LogSoftmax") == count(plain_model, "LogSoftmax") == 2
    for node in all_nodes(patched(plain_model)[0].graph):
        kinds = set(types_of(patched(plain_model)[0], node.name)) if node.op_type == "LogSoftmax" else set()
        assert BF16 not in kinds, "the assignment keeps its digits"


def test_a_matcher_that_stops_early_has_its_cores_in_the_branches():
    plain_model, layers = small_lightglue(1, scores=True)
    scores = {k: f"score_{k}" for k in range(1, layers + 1)}
    stopping = add_early_stop(ir.from_proto(plain_model), scores, [1], layers, like=("keypoints0", 0), force=True)
    _, done = patched(ir.to_proto(stopping.model))
    assert len(done.cores) == 4 * layers
    first = attention_in_bf16(ir.from_proto(plain_model)).model
    proto = ir.to_proto(add_early_stop(first, scores, [1], layers, like=("keypoints0", 0), force=True).model)
    onnx.checker.check_model(proto, full_check=True)
    onnx.shape_inference.infer_shapes(proto, check_type=True, strict_mode=True, data_prop=True)


def test_the_readout_of_a_matcher_is_none():
    """A layer of four attentions; its two Softmax of the assignment are read by a Mul, and one is over axis 0."""
    matcher = Matcher(layers=2)
    _, done = patched(matcher.graph())
    assert len(done.cores) == 8
    half = ir.to_proto(fp16.to_half(ir.from_proto(matcher.graph()), rules.by_op("ArgMax")).model)
    assert len(patched(half)[1].cores) == 8


NONE = {
    "a classifier": (
        "(float[5,16] x, float[9,16] v) => (float[5,16] y) { l = MatMul(x, W)  w = Softmax(l)  y = MatMul(w, v) }",
        {"W": (16, 9)}, "no MatMul of computed values before it"),
    "a position by a constant grid": (
        "(float[5,16] q, float[16,9] k) => (float[5,16] y) { l = MatMul(q, k)  w = Softmax(l)  y = MatMul(w, W) }",
        {"W": (9, 16)}, "no MatMul with computed values"),
    "a position by keypoints": (
        "(float[5,16] q, float[16,9] k, float[9,2] p) => (float[5,2] y) "
        "{ l = MatMul(q, k)  w = Softmax(l)  y = MatMul(w, p) }",
        {}, "no MatMul with computed values, at least 8 wide"),
    "a grid made of a shape": (
        "(float[5,16] q, float[16,9] k) => (float[5,9] y) { l = MatMul(q, k)  w = Softmax(l)  h = Shape(k) "
        "g = ConstantOfShape(h) t = Transpose(g)  u = MatMul(t, W)  y = MatMul(w, u) }",
        {"W": (16, 9)}, "no MatMul with computed values"),
    "another axis": (
        "(float[5,16] q, float[16,9] k, float[9,16] v) => (float[5,16] y) "
        "{ l = MatMul(q, k)  w = Softmax<axis=0>(l)  y = MatMul(w, v) }",
        {}, "it is over axis 0, not the last"),
    "five axes": (
        "(float[1,1,1,5,16] q, float[1,1,1,16,9] k, float[1,1,1,9,16] v) => (float[1,1,1,5,16] y) "
        "{ l = MatMul(q, k)  w = Softmax(l)  y = MatMul(w, v) }",
        {}, "it has 5 axes"),
    "nothing after it": (
        "(float[5,16] q, float[16,9] k) => (float[5,9] w) { l = MatMul(q, k)  w = Softmax(l) }",
        {}, "no MatMul with computed values"),
    "another function between": (
        "(float[5,16] q, float[16,9] k, float[9,16] v) => (float[5,16] y) "
        "{ l = MatMul(q, k)  e = Exp(l)  w = Softmax(e)  y = MatMul(w, v) }",
        {}, "no MatMul of computed values before it"),
}  # fmt: skip


@pytest.mark.parametrize("case", NONE)
def test_a_softmax_that_is_no_attention_is_told_with_what_was_looked_for(case):
    text, weights, reason = NONE[case]
    rng = np.random.default_rng(0)
    model = graph(text, {name: rng.normal(size=shape).astype(np.float32) for name, shape in weights.items()})
    with pytest.raises(ModelFileError, match=f"no core of attention. Looked for: Softmax.*MatMul.*'w': {reason}"):
        patched(model)


def test_a_graph_without_softmax_is_told_so():
    with pytest.raises(ModelFileError, match="Looked for: Softmax.*It has 0 other Softmax nodes$"):
        patched(graph("(float[5] x) => (float[5] y) { y = Neg(x) }"))


def test_an_opset_whose_operators_take_no_bf16_is_refused():
    text = "(float[5,16] q, float[16,9] k, float[9,16] v) => (float[5,16] y) "
    text += "{ l = MatMul(q, k)  w = Softmax<axis=-1>(l)  y = MatMul(w, v) }"
    with pytest.raises(ModelFileError, match="MatMul of opset 12 does not take BF16"):
        patched(graph(text, opset=12))
    masked = text.replace("w = Softmax<axis=-1>(l)", "s = Where(m, l, c) w = Softmax<axis=-1>(s)")
    masked = masked.replace("float[9,16] v", "float[9,16] v, bool[5,9] m")
    c = {"c": np.array(-1e9, np.float32)}
    with pytest.raises(ModelFileError, match="Where of opset 15 does not take BF16"):
        patched(graph(masked, c, opset=15))
    assert len(patched(graph(masked, c, opset=16))[1].cores) == 1


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


# -- keys less their mean ------------------------------------------------------------------------


@pytest.mark.parametrize("between", [b for n, b in BETWEEN.items() if n != "reshapes"])
@pytest.mark.parametrize("kind", ["float", "float16"])
def test_centred_keys_give_the_same_attention_where_logits_were_too_large_to_differ(between, kind):
    """All keys have 8 in common, so that logits are near 100 and their differences are lost without it."""
    plain_model = plain(3, between, kind=kind)
    values = feed(plain_model)
    values["k"] += 8
    values["q"] += 1
    exact = [v.astype(np.float64) for v in run(plain(3, between), {n: v.astype("f4") for n, v in values.items()})][0]
    errors = []
    for centre in (False, True):
        model, done = patched(plain_model, emulate=True, centre_keys=centre)
        assert done.centred == (1 if centre else None)
        errors.append(np.abs(run(model, values)[0] - exact).max())
    assert errors[1] < errors[0] / 3 and errors[1] < 0.15, errors
    model, done = patched(plain_model, centre_keys=True)
    assert done.patch == "bf16-attention centred"
    assert patched(model, centre_keys=True)[1].done == 1


def test_centred_keys_before_opset_18():
    text = """(float16[5,16] q, float16[16,7] k, float16[7,16] v) => (float16[5,16] y) {
        l = MatMul(q, k)  w = Softmax(l)  y = MatMul(w, v) }"""
    model, done = patched(graph(text, opset=17), centre_keys=True)
    assert done.centred == 1 and count(model, "ReduceMean") == 1


SIGNATURE = "(float[5,16] q, float[16,7] k, float[7,16] v, float[7] e) => (float[5,16] y"
NOT_CENTRED = {
    "a scale for each key": f"{SIGNATURE}) {{ l = MatMul(q, k)  s = Mul(l, e)  w = Softmax(s)  y = MatMul(w, v) }}",
    "a floor": f"{SIGNATURE}) {{ l = MatMul(q, k)  s = Max(l, e)  w = Softmax(s)  y = MatMul(w, v) }}",
    "a floor of another scale": f"{SIGNATURE}) {{ l = MatMul(q, k)  s = Mul(l, c)  h = ReduceMax(l, a)  m = Max(s, h) "
    "w = Softmax(m)  y = MatMul(w, v) }",
    "a ceiling": f"{SIGNATURE}) {{ l = MatMul(q, k)  s = Tanh(l)  w = Softmax(s)  y = MatMul(w, v) }}",
    "others read it": f"{SIGNATURE}, float[5,7] l) {{ l = MatMul(q, k)  w = Softmax(l)  y = MatMul(w, v) }}",
    "both directions": f"{SIGNATURE}, float[7,16] z) {{ l = MatMul(q, k)  w = Softmax(l)  y = MatMul(w, v) "
    "r = Transpose(l)  x = Softmax(r)  z = MatMul(x, q) }",
}


@pytest.mark.parametrize("case", NOT_CENTRED)
def test_keys_are_left_where_their_mean_would_change_the_result(case):
    made = {"c": np.array(0.5, np.float32), "a": np.array([-1])}
    model = graph(NOT_CENTRED[case], made if "(l, c)" in NOT_CENTRED[case] else {})
    done = patched(model, centre_keys=True)[1]
    assert len(done.cores) in (1, 2) and done.centred == 0 and done.patch == "bf16-attention"


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
