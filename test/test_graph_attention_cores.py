"""Which nodes of a graph are the cores of attention, and which are not."""

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
ir = pytest.importorskip("onnx_ir")
pytest.importorskip("onnxruntime")
pytest.importorskip("spox")

from attention_graphs import BF16, patched, small_lightglue  # noqa: E402
from graph_helpers import all_nodes, count, graph, types_of  # noqa: E402
from matcher_graph import Matcher  # noqa: E402

from vslam_features.errors import ModelFileError  # noqa: E402
from vslam_features.graph import fp16, rules  # noqa: E402
from vslam_features.graph.bf16_attention import attention_in_bf16  # noqa: E402
from vslam_features.graph.early_stop import add_early_stop  # noqa: E402


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
