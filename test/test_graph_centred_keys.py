"""Keys less their mean: the same attention, rounded less; and where it is left alone."""

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
ir = pytest.importorskip("onnx_ir")
pytest.importorskip("onnxruntime")
pytest.importorskip("spox")

from attention_graphs import BETWEEN, feed, patched, plain  # noqa: E402
from graph_helpers import count, graph, run  # noqa: E402


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
