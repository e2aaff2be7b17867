"""Early stopping of graphs of any form: values used across stages, shared constants, bodies, optional inputs."""

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
ir = pytest.importorskip("onnx_ir")
pytest.importorskip("onnxruntime")
pytest.importorskip("spox")

from early_stop_helpers import DECAYS, feed, ort_session, patched, scopes  # noqa: E402
from graph_helpers import FLOAT, LEVELS, Builder, graph, run  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from onnx import TensorProto, helper  # noqa: E402


class Shared(Builder):
    """Random graphs in which nodes of different stages read the same constants."""

    def __init__(self, seed):
        super().__init__(seed)
        self._known = {}

    def constant(self, value, dtype=np.float32):
        array = np.asarray(value, dtype)
        key = (array.shape, array.dtype.str, array.tobytes())
        if key not in self._known:
            self._known[key] = super().constant(value, dtype)
        return self._known[key]

    def _matmul(self, a, b):
        weight = np.random.default_rng(int(self.rng.integers(3))).normal(0, 0.4, (4, 4))
        return self._limited(self.node("MatMul", a, self.constant(weight)))

    def score(self, value):
        mean = self.node("ReduceMean", self.values[value % len(self.values)], keepdims=0)
        return self.node("Sigmoid", self.node("Mul", mean, self.constant(2)))

    def by_need(self, heads):
        """Values in the order of what they need, as those of layers are."""
        makers = {name: node for node in self.nodes for name in node.output}

        def needed(name):
            if name not in makers:
                return set()
            node = makers[name]
            inner = [i for attribute in node.attribute for n in attribute.g.node for i in n.input]
            return {node.output[0]}.union(*(needed(i) for i in (*node.input, *inner)))

        return sorted(heads, key=lambda value: len(needed(self.values[value % len(self.values)])))

    def matcher(self, heads, last):
        """The score of layer k is that of value ``heads[k - 1]``."""
        names = [self.node("Identity", self.score(value)) for value in self.by_need(heads)]
        last = self.values[last % len(self.values)]
        both = self.node("Mul", self.node("Tanh", last), self.values[-1])
        outputs = {
            self.node("ArgMax", both, axis=1, keepdims=0): (TensorProto.INT64, [3]),
            self.node("ReduceMax", both, self.constant([1], np.int64), keepdims=0): (FLOAT, [3]),
            self.score(-1): (FLOAT, []),
        } | {name: (FLOAT, []) for name in names}
        inputs = [helper.make_tensor_value_info(n, FLOAT, [3, 4]) for n in "xy"]
        inputs.append(helper.make_tensor_value_info("flag", TensorProto.BOOL, []))
        infos = [helper.make_tensor_value_info(n, *signature) for n, signature in outputs.items()]
        made = helper.make_graph(self.nodes, "random", inputs, infos, self.initializers)
        return helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), list(outputs)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**16),
    st.lists(
        st.tuples(st.sampled_from(Builder.KINDS), st.integers(0, 50), st.integers(0, 50)), min_size=2, max_size=14
    ),
    st.lists(st.integers(0, 50), min_size=2, max_size=5),
    st.booleans(),
    st.data(),
)
def test_random_graphs(seed, steps, heads, flag, data):
    builder = Shared(seed)
    for step in steps:
        builder.add(*step)
    model, outputs = builder.matcher(heads, data.draw(st.integers(0, 50)))
    num_layers = len(heads) + 1
    layers = data.draw(st.lists(st.integers(1, num_layers - 1), min_size=1, unique=True).map(sorted))
    names = dict(zip(("matches", "match_scores", "covisibility"), outputs))
    scores = dict(enumerate(outputs[3:], 1))
    proto, done = patched(model, layers, num_layers, scores, like=None, **names)
    assert sum(stage.nodes for stage in done.stages) <= len(model.graph.node)
    rng = np.random.default_rng(seed)
    inputs = {n: rng.normal(size=(3, 4)).astype(np.float32) for n in "xy"} | {"flag": np.array(flag)}
    plain = run(model, inputs, LEVELS[0])
    sessions = [ort_session(proto, level) for level in (LEVELS[0], LEVELS[-1])]
    for threshold in (0, 0.4, 0.6, 1.1):
        for decay in DECAYS:
            limits = [(k, np.float32(threshold) * np.float32(1 - decay) ** np.float32(num_layers - k)) for k in layers]
            if any(0 < abs(plain[2 + k] - limit) < 1e-5 for k, limit in limits):
                continue  # on the edge of the rule
            stop = next((k for k, limit in limits if plain[2 + k] < limit), 0)
            expected = [np.full(3, -1), np.zeros(3), plain[2 + stop]] if stop else plain[:3]
            seen = [-1 if 0 < stop < k else plain[2 + k] for k in layers]
            for i, session in enumerate(sessions):
                got = session.run(None, inputs | feed({}, threshold, decay))
                assert got[3] == stop
                np.testing.assert_allclose(got[4], seen, atol=1e-4)
                if i == 0:
                    for a, b in zip(got, expected):
                        np.testing.assert_array_equal(a, b)
                else:
                    np.testing.assert_allclose(got[1], expected[1], atol=1e-4)
                    np.testing.assert_allclose(got[2], expected[2], atol=1e-4)


def test_a_node_with_bodies_moves_with_what_it_reads():
    weights = {name: np.full(4, value, np.float32) for name, value in (("a", 1), ("b", 2), ("c", 3))}
    text = """(float[M,4] x, bool flag) =>
              (int64[M] matches0, float[M] mscores0, float covisibility_score, float score_2) {
        mean = ReduceMean <keepdims = 0> (x)
        score_2 = Sigmoid(mean)
        y = Mul(x, a)
        z = If (flag) <
            then_branch = t () => (float[M,4] t_out) { t_out = Mul(y, b) },
            else_branch = e () => (float[M,4] e_out) { e_out = Add(y, c) }>
        matches0 = ArgMax <axis = 1, keepdims = 0> (z)
        axis = Constant <value = int64[1] {1}> ()
        mscores0 = ReduceMax <keepdims = 0> (z, axis)
        covisibility_score = Identity(score_2)
    }"""
    model = graph(text, weights)
    proto, done = patched(model, (2,), 3, {2: "score_2"}, like=None)
    assert not proto.graph.initializer and {t.name for t in scopes(proto)[1].initializer} == set("abc")
    assert [stage.nodes for stage in done.stages] == [2, 6] and done.skipped(2) == (6, 3 * 16 + 8)
    x = np.arange(8, dtype=np.float32).reshape(2, 4) / 8
    for flag, z in ((True, x * 2), (False, x + 3)):
        inputs = {"x": x, "flag": np.array(flag)}
        for level in LEVELS:
            got = run(proto, inputs | feed({}, 0.9, 1), level)
            np.testing.assert_array_equal(got[1], z.max(1))
            np.testing.assert_array_equal(run(proto, inputs | feed({}, 0.9, 0), level)[1], [0, 0])


def test_results_may_be_there_before_the_last_part():
    text = """(float[M,4] x) => (int64[M] matches0, float[M] mscores0, float covisibility_score, float score_2) {
        matches0 = ArgMax <axis = 1, keepdims = 0> (x)
        axis = Constant <value = int64[1] {1}> ()
        mscores0 = ReduceMax <keepdims = 0> (x, axis)
        mean = ReduceMean <keepdims = 0> (mscores0)
        score_2 = Sigmoid(mean)
        covisibility_score = Mul(score_2, mean)
    }"""
    model = graph(text)
    proto, done = patched(model, (2,), 3, {2: "score_2"}, like=None)
    assert [stage.nodes for stage in done.stages] == [4, 2]
    x = np.random.default_rng(0).random((5, 4), np.float32)
    plain = run(model, {"x": x})
    for level in LEVELS:
        for a, b in zip(run(proto, {"x": x} | feed({}, 0.9, 1), level), plain[:3]):
            np.testing.assert_array_equal(a, b)
        matches, scores, covisibility, stopped, seen = run(proto, {"x": x} | feed({}, 0.9, 0), level)
        assert stopped == 2 and seen == covisibility == plain[3] and (matches == -1).all() and not scores.any()
