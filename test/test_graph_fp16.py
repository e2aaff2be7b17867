"""The pass to half precision: types as ONNX wants them, results near float32, numbers that float16 has not."""

import logging

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

onnx = pytest.importorskip("onnx")
ir = pytest.importorskip("onnx_ir")
ort = pytest.importorskip("onnxruntime")

from graph_helpers import (  # noqa: E402
    FLOAT,
    HALF,
    LEVELS,
    Builder,
    all_nodes,
    bodies,
    constants,
    count,
    graph,
    half_of,
    run,
    types,
    types_of,
)
from model_helpers import DEFAULTS, learned, weights_file  # noqa: E402, F401

from vslam_features.artifacts.card import METADATA_KEY, read_card  # noqa: E402
from vslam_features.artifacts.cases import shipped_cases  # noqa: E402
from vslam_features.artifacts.catalogue import find_entry  # noqa: E402
from vslam_features.artifacts.gate import run_gate  # noqa: E402
from vslam_features.artifacts.store import model_path  # noqa: E402
from vslam_features.graph import fp16, rules  # noqa: E402
from vslam_features.networks.recipes import build_model  # noqa: E402

INPUTS = {"x": np.linspace(-2, 2, 12, dtype=np.float32).reshape(3, 4)}
CHAIN = """(float[3,4] x) => (float[3,4] r) {
    p = MatMul(x, w)
    q = LayerNormalization(p, s, s)
    h = Tanh(q)
    r = Mul(h, s)
}"""
WEIGHTS = {
    "w": np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32),
    "s": np.array([1, 0.9, 1.1, 1.3], np.float32),
}


# -- types and Casts -----------------------------------------------------------------------------


def test_a_chain_computes_in_half_precision_between_two_casts():
    model, half = half_of(graph(CHAIN, WEIGHTS))
    assert [types(model.graph)[n] for n in "xr"] == [FLOAT, FLOAT]
    assert types_of(model, "h") == [HALF] * 2 and types_of(model, "p") == [HALF] * 3
    assert half.casts == count(model, "Cast") == 2 and half.blocked == half.wide == half.below_range == 0
    assert {name: a.dtype for name, a in constants(model).items()} == {"w": np.float16, "s": np.float16}
    np.testing.assert_allclose(run(model, INPUTS)[0], run(graph(CHAIN, WEIGHTS), INPUTS)[0], atol=5e-3)


def test_what_is_downstream_of_the_last_normalisation_stays():
    model, half = half_of(graph(CHAIN, WEIGHTS), rules.downstream_of_last())
    assert half.blocked == 3 and half.casts == 2
    assert types_of(model, "p") == [HALF] * 3
    for name in "qhr":
        assert set(types_of(model, name)) == {FLOAT}, name
    np.testing.assert_array_equal(constants(model)["s"], WEIGHTS["s"])


def test_a_constant_in_both_precisions_is_kept_once_in_each():
    text = """(float[3,4] x) => (float[3,4] r) {
        a = Mul(x, s)  b = Add(a, s)  c = Sub(b, s)  r = Div(c, s)
    }"""
    only = {"s": WEIGHTS["s"]}
    model, half = half_of(graph(text, only), rules.union(rules.by_name("c"), rules.by_op("Div")))
    stored = constants(model)
    assert sorted(a.dtype.name for a in stored.values()) == ["float16", "float32"]
    assert half.blocked == 2 and half.casts == 2
    np.testing.assert_array_equal(stored["s"], WEIGHTS["s"])


def test_a_value_that_two_float32_nodes_read_is_cast_once():
    text = """(float[3,4] x) => (float[3,4] r, float[3,4] a) {
        a = Tanh(x)  b = Neg(a)  c = Abs(a)  r = Add(b, c)
    }"""
    model, half = half_of(graph(text), rules.union(rules.by_op("Neg"), rules.by_op("Abs")))
    assert half.casts == 5  # x; a for both and the output; b; c; r
    assert [o.name for o in model.graph.output] == ["r", "a"]
    np.testing.assert_allclose(run(model, INPUTS)[1], np.tanh(INPUTS["x"]), atol=1e-3)


def test_a_rule_that_keeps_everything_changes_nothing():
    source = graph(CHAIN, WEIGHTS)
    model, half = half_of(source, rules.by_name("*"), half_weights=False)
    assert (half.blocked, half.casts) == (4, 0)
    assert list(model.graph.node) == list(ir.to_proto(ir.from_proto(source)).graph.node)
    for name, array in constants(model).items():
        np.testing.assert_array_equal(array, WEIGHTS[name])


def test_large_constants_of_float32_nodes_are_stored_in_half_precision_where_wanted():
    text = "(float[3,64] x) => (float[3,64] r) { p = MatMul(x, w)  r = Add(p, b) }"
    rng = np.random.default_rng(1)
    weights = {"w": rng.normal(size=(64, 64)).astype(np.float32), "b": rng.normal(size=64).astype(np.float32)}
    x = {"x": rng.normal(size=(3, 64)).astype(np.float32)}
    small, half = half_of(graph(text, weights), rules.by_name("*"))
    exact, _ = half_of(graph(text, weights), rules.by_name("*"), half_weights=False)
    assert half.casts == 1 and set(types_of(small, "p")) == {FLOAT}
    assert small.ByteSize() < 0.6 * exact.ByteSize()
    np.testing.assert_array_equal(constants(small)["w"], weights["w"].astype(np.float16))
    np.testing.assert_array_equal(constants(small)["b"], weights["b"])
    rounded = weights["w"].astype(np.float16).astype(np.float64)
    np.testing.assert_allclose(run(small, x)[0], x["x"] @ rounded + weights["b"], atol=1e-5)
    np.testing.assert_allclose(run(exact, x)[0], x["x"] @ weights["w"] + weights["b"], atol=1e-5)


def test_the_source_and_all_that_is_said_of_it_stay():
    source = graph(CHAIN, WEIGHTS)
    source.doc_string, source.producer_name, source.graph.doc_string = "of a model", "someone", "of a graph"
    onnx.helper.set_model_props(source, {"key": "value"})
    source.graph.node[0].doc_string = "of a node"
    loaded = ir.from_proto(source)
    before = ir.to_proto(loaded).SerializeToString(deterministic=True)
    model = ir.to_proto(fp16.to_half(loaded, rules.union()).model)
    assert ir.to_proto(loaded).SerializeToString(deterministic=True) == before
    for name in ("doc_string", "producer_name", "opset_import", "metadata_props", "ir_version"):
        assert getattr(model, name) == getattr(source, name), name
    assert (model.graph.name, model.graph.doc_string) == ("g", "of a graph")
    assert [n.doc_string for n in model.graph.node if n.name == "p"] == ["of a node"]


# -- operators that cannot, or should not --------------------------------------------------------


@pytest.mark.parametrize(
    "nodes, floats, halves",
    [
        ('a = Resize<mode="nearest">(x, e, c) r = Neg(a)', {"c"}, {"a"}),
        ("a = Range(c, x0, c) s = ReduceSum<keepdims=0>(a) r = Mul(x, s)", {"a"}, {"s"}),
        ("a = Shape(x) f = ConstantOfShape<value = float[1] {0.5}>(a) r = Add(x, f)", {"f"}, set()),
        ("a = RandomNormalLike(x) z = Mul(a, zero) r = Add(x, z)", {"a"}, {"z"}),
        ("a = NonZero(x) f = Cast<to=1>(a) s = ReduceMax<keepdims=0>(f) r = Mul(x, s)", set(), {"s"}),
        ("t, i = TopK<axis=1>(x, k) f = Cast<to=1>(i) r = Add(t, f)", set(), {"t"}),
        ("q = QuantizeLinear(x, c1) d = DequantizeLinear(q, c1) r = Neg(d)", {"d"}, set()),
        ("g = com.microsoft.Gelu(x) r = Neg(g)", set(), set()),
        ("o = OneHot<axis=-1>(k, d1, v) a = ReduceSum<keepdims=0>(o) r = Mul(x, a)", {"d1"}, {"o", "a"}),
        ("a = Pow(x, ex) r = Sqrt(a)", set(), {"a", "ex"}),
        ("m = Greater(x, zero) r = Where(m, x, zero)", set(), set()),
    ],
)
@pytest.mark.parametrize("opset", [18, 21])
def test_operators_keep_what_their_schema_wants(nodes, floats, halves, opset):
    weights = {
        "c": np.array([1.0, 1.0], np.float32), "c1": np.float32(0.05), "zero": np.float32(0), "two": np.float32(2),
        "ex": np.float32(2),
        "k": np.array([2], np.int64), "d1": np.float32(5000), "v": np.array([0, 1], np.float32),
        "x0": np.float32(9), "e": np.zeros(0, np.float32),
    }  # fmt: skip
    if "Range" in nodes:
        weights["c"] = np.float32(1)
    text = f"(float[3,4] x) => (float[P,Q] r) {{ y = Mul(x, two) {nodes.replace('(x', '(y')} }}"
    source = graph(text, {n: a for n, a in weights.items() if n in nodes or n == "two"}, opset)
    model, _ = half_of(source)
    assert types_of(model, "y") == [HALF] * 3
    known = types(model.graph)
    assert {n for n in floats if known[n] != FLOAT} == set()
    assert {n for n in halves if known[n] != HALF} == set()
    for level in LEVELS:
        np.testing.assert_allclose(
            run(model, INPUTS, level)[0], run(source, INPUTS)[0], atol=0.06 if "Quant" in nodes else 5e-3, rtol=2e-3
        )


def test_a_graph_whose_types_are_unknown_stays_as_it_is_there():
    """Of a custom operator's result nothing is known; what reads it cannot change."""
    text = "(float[3,4] x) => (float[3,4] r) { y = Neg(x)  a = com.nobody.Magic(y)  r = Add(a, y) }"
    source = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 18, "com.nobody" : 1]> g {text}')
    half = fp16.to_half(ir.from_proto(source), rules.union())
    kinds = {node.op_type: [v.dtype for v in node.inputs] for node in half.model.graph}
    assert kinds["Magic"] == [ir.DataType.FLOAT] and kinds["Add"] == [None, ir.DataType.FLOAT]
    assert kinds["Neg"] == [ir.DataType.FLOAT16]


# -- numbers that float16 has not ----------------------------------------------------------------


@given(hnp.arrays(np.float32, st.integers(1, 40), elements=st.floats(-65504, 65504, width=32)))
@settings(max_examples=60, deadline=None)
def test_constants_are_rounded_as_numpy_rounds_and_none_becomes_zero(values):
    model, half = half_of(graph("(float[1] x) => (float[N] r) { r = Mul(x, w) }", {"w": values}))
    got = constants(model)["w"]
    below = (values != 0) & (np.abs(values) < 2.0**-24)
    np.testing.assert_array_equal(got[~below], values[~below].astype(np.float16))
    np.testing.assert_array_equal(got[below], np.copysign(2.0**-24, values[below]))
    assert half.below_range == below.sum() and half.below_range_constants == below.any()
    assert half.smallest == (np.abs(values[below]).min() if below.any() else 0)


def test_constants_below_the_range_are_told_in_one_line(caplog):
    lines = " ".join(f"v{i + 1} = Add(v{i}, t{i})" for i in range(70))
    tiny = {f"t{i}": np.array([1e-12, 1, -1e-9], np.float32) for i in range(70)}
    with caplog.at_level(logging.WARNING):
        _, half = half_of(graph(f"(float[3] v0) => (float[3] v70) {{ {lines} }}", tiny))
    assert [r.getMessage().count("140 values of 70 constants") for r in caplog.records] == [1]
    assert half.smallest == pytest.approx(1e-12)


def test_a_guard_against_division_by_zero_still_guards():
    text = "(float[3,4] x) => (float[3,4] r) { n = ReduceL2<keepdims=1>(x)  m = Max(n, eps)  r = Div(x, m) }"
    model, _ = half_of(graph(text, {"eps": np.float32(1e-12)}))
    np.testing.assert_array_equal(run(model, {"x": np.zeros((3, 4), np.float32)})[0], 0)


@pytest.mark.parametrize("huge", [-1e9, 65505.0, -3.4e38])
def test_a_mask_beyond_the_range_stays_finite_up_to_the_softmax(huge):
    text = """(float[3,4] x, bool[4] m) => (float[3,4] r) {
        a = MatMul(x, w)  b = Where(m, a, huge)  c = Add(b, s)  d = Softmax(c)  r = MatMul(d, w)
    }"""
    source = graph(text, {**WEIGHTS, "huge": np.float32(huge)})
    model, half = half_of(source)
    assert half.wide == 3  # Where, Add, Softmax
    for name in "cd":
        assert set(types_of(model, name)) == {FLOAT}
    assert types_of(model, "a") == types_of(model, "r") == [HALF] * 3
    assert all(np.isfinite(a).all() for a in constants(model).values())
    assert constants(model)["huge"] == np.float32(huge)
    inputs = {**INPUTS, "m": np.array([True, False, True, True])}
    np.testing.assert_allclose(run(model, inputs)[0], run(source, inputs)[0], atol=5e-3)


def test_infinite_constants_are_half_numbers():
    text = "(float[3,4] x, bool[4] m) => (float[3,4] r) { b = Where(m, x, no)  r = Softmax(b) }"
    model, half = half_of(graph(text, {"no": np.float32(-np.inf)}))
    assert half.wide == 0 and types_of(model, "r") == [HALF, HALF]
    assert run(model, {**INPUTS, "m": np.array([True, False, True, True])})[0][:, 1].max() == 0


def test_limits_beyond_the_range_keep_only_their_own_node():
    text = "(float[3,4] x) => (float[3,4] r) { a = Clip(x, low, high)  b = Neg(a)  r = Mul(b, s) }"
    limits = {"low": np.float32(0), "high": np.float32(np.finfo(np.float32).max)}
    model, half = half_of(graph(text, {**limits, **WEIGHTS}))
    assert half.wide == 1 and set(types_of(model, "a")) == {FLOAT} and types_of(model, "b") == [HALF, HALF]
    np.testing.assert_allclose(run(model, INPUTS)[0], -np.maximum(INPUTS["x"], 0) * WEIGHTS["s"], atol=4e-3)
    lifted = {"low": np.float32(1e6), "high": np.float32(2e6)}
    model, half = half_of(graph(text, {**lifted, **WEIGHTS}))
    assert half.wide == 3 and half.casts == 0
    np.testing.assert_allclose(run(model, INPUTS)[0], np.broadcast_to(-1e6 * WEIGHTS["s"], (3, 4)))


def test_what_is_filled_or_looped_beyond_the_range_stays_finite():
    text = """(float[3,4] x) => (float[3,4] r) {
        n = Shape(x)  f = ConstantOfShape<value = float[1] {1e6}>(n)
        l = Loop(two, , f) <body = b (int64 i, bool on, float[3,4] z) => (bool stay, float[3,4] y) {
            stay = Identity(on)  y = Add(z, z) }>
        r = Mul(l, x)
    }"""
    model, half = half_of(graph(text, {"two": np.int64(2)}))
    assert half.casts == 0
    np.testing.assert_allclose(run(model, INPUTS)[0], 4e6 * INPUTS["x"])


def test_a_value_that_grows_from_turn_to_turn_of_a_loop_stays_finite():
    """Only the end of the body has the constant, and its beginning reads the result in the next turn."""
    text = """(float[3,4] x) => (float[3,4] r) {
        f = Mul(x, tiny)
        l = Loop(two, , f) <body = b (int64 i, bool on, float[3,4] z) => (bool stay, float[3,4] y) {
            stay = Identity(on)  u = Neg(z)  y = Mul(u, big) }>
        r = Mul(l, tiny)
    }"""
    scales = {"two": np.int64(2), "tiny": np.float32(1e-4), "big": np.float32(1e6)}
    model, _ = half_of(graph(text, scales))
    assert set(types_of(model, "u")) == {FLOAT}
    assert types_of(model, "f") == [HALF] * 3
    np.testing.assert_allclose(run(model, INPUTS)[0], 1e4 * INPUTS["x"], rtol=2e-3, atol=1)


@pytest.mark.parametrize("number", [np.int64(100_000), np.int32(-100_000), np.float64(1e6)])
def test_a_constant_of_another_type_beyond_the_range_is_cast_to_float32(number):
    text = "(float[3,4] x) => (float[3,4] r) { c = Cast<to=1>(k)  d = Mul(c, x)  r = Div(d, c) }"
    model, half = half_of(graph(text, {"k": number}))
    assert types_of(model, "c")[-1] == FLOAT and set(types_of(model, "d")) == {FLOAT} and half.wide == 2
    _, half = half_of(graph(text, {"k": number.dtype.type(100)}))
    assert half.wide == 0


def test_what_is_clipped_may_be_a_constant_beyond_the_range():
    text = "(float[3,4] x) => (float[3,4] r) { c = Clip(k, , high)  r = Mul(c, x) }"
    model, _ = half_of(graph(text, {"k": np.float32([1e6, 1, 2e6, -1e6]), "high": np.float32(2)}))
    np.testing.assert_allclose(run(model, INPUTS)[0], np.float32([2, 1, 2, -1e6]) * INPUTS["x"], rtol=2e-3)


# -- any graph -----------------------------------------------------------------------------------

STEPS = st.lists(
    st.tuples(st.sampled_from(Builder.KINDS), st.integers(0, 99), st.integers(0, 99)), min_size=1, max_size=9
)


def built(seed: int, steps) -> onnx.ModelProto:
    builder = Builder(seed)
    for kind, i, j in steps:
        builder.add(kind, i, j)
    return builder.model()


@given(seed=st.integers(0, 2**32 - 1), steps=STEPS, data=st.data())
@settings(max_examples=100, deadline=None)
def test_any_graph_is_valid_near_and_keeps_what_the_rule_says(seed, steps, data):
    source = built(seed, steps)
    names = [node.name for node in all_nodes(source.graph)]
    kept = data.draw(st.sets(st.sampled_from(names), max_size=4), label="kept")
    rng = np.random.default_rng(seed)
    inputs = {n: rng.uniform(-2, 2, (3, 4)).astype(np.float32) for n in "xy"} | {"flag": np.array(bool(seed % 2))}
    keep = rules.union(*(rules.by_name(name) for name in kept))
    model, half = half_of(source, keep)

    known = types(model.graph)
    nodes = {node.name: node for node in all_nodes(model.graph)}
    inside = {n.name for name in kept for body in bodies(nodes[name]) for n in all_nodes(body)} if kept else set()
    assert half.blocked == len(kept | inside)
    for name in kept | inside:
        values = [v for v in (*nodes[name].input, *nodes[name].output) if v]
        assert HALF not in {known[v] for v in values}, name
    for node in nodes.values():
        if node.op_type in ("MatMul", "LayerNormalization", "Sigmoid") and node.name not in kept | inside:
            assert known[node.output[0]] == HALF, node.name
    assert all(np.isfinite(a).all() for a in constants(model).values())

    expected = run(source, inputs)
    for level in ("ORT_DISABLE_ALL", "ORT_ENABLE_ALL"):
        for e, g in zip(expected, run(model, inputs, level)):
            assert g.dtype == np.float32
            np.testing.assert_allclose(g, e, atol=0.03)


@given(seed=st.integers(0, 2**32 - 1), steps=STEPS)
@settings(max_examples=30, deadline=None)
def test_a_graph_in_half_precision_stays_as_it_is(seed, steps):
    once, first = half_of(built(seed, steps))
    again, second = half_of(once)
    assert second.casts == first.casts and second.below_range == 0
    assert list(again.graph.node) == list(once.graph.node)
    assert [(t.name, t.data_type) for t in again.graph.initializer] == [
        (t.name, t.data_type) for t in once.graph.initializer
    ]


# -- the package's models ------------------------------------------------------------------------

POSITIONS = rules.upstream_of(rules.by_op("Cos", "Sin"))  # in pixels, which half precision has only to 0.5


@pytest.mark.parametrize(
    "name, keep, most",
    [
        ("effnet_cov", rules.downstream_of_last("Conv"), 0.52),
        ("lighterglue", rules.union(POSITIONS, rules.downstream_of_last()), 0.53),
    ],
)
def test_models_of_the_package_pass_their_gate_in_half_precision(learned, name, keep, most):  # noqa: F811
    """Against the golden outputs of the authors' code, within the limits of docs/models.md for fp16."""
    path = model_path(name, "fp32")
    if name not in DEFAULTS:
        build_model(find_entry(name), weights_file(learned, name), "fp32")
    source, card = onnx.load(path), read_card(path)
    model, half = half_of(source, keep)
    assert half.casts <= 11 and half.wide == 0
    assert model.ByteSize() < most * source.ByteSize()
    assert [p.key for p in model.metadata_props] == [METADATA_KEY]
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]
    report = run_gate(
        lambda inputs: dict(zip(names, session.run(names, inputs))), shipped_cases(card), card, precision="fp16"
    )
    assert report.passed and report.reference == "golden", report.reasons
    assert all(0 < t.rms < 0.005 for t in report.tensors)  # docs/models.md: fp16 files stay within 0.5 %
