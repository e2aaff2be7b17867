"""Scores of layers are found by a pattern; where it does not fit, patterns that would are named."""

import numpy as np
import pytest

pytest.importorskip("onnx")
ir = pytest.importorskip("onnx_ir")
pytest.importorskip("onnxruntime")

from graph_helpers import graph  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from vslam_features.errors import ConfigError  # noqa: E402
from vslam_features.graph.score_names import find_scores, score_patterns  # noqa: E402

PATTERNS = ("score_{}", "/layers.{}/Sigmoid_output_0", "v{}", "matcher.2.layer{}.score", "{}", "{}/a/{}")


def model(names, large=("wide_1", "wide_2"), whole=("count_1", "count_2")):
    """A float of one element for each name; values of other sizes and types besides."""
    result = graph("(float[3] x) => (float y) { y = ReduceMean <keepdims = 0> (x) }", {"one": np.float32(1)})
    for name, op, inputs in (
        *((n, "Mul", ["y", "one"]) for n in names),
        *((n, "Mul", ["x", "one"]) for n in large),
        *((n, "Size", ["x"]) for n in whole),
    ):
        node = result.graph.node.add()
        node.op_type, node.name = op, f"node of {name}"
        node.input.extend(inputs)
        node.output.append(name)
    return ir.from_proto(result)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(PATTERNS), st.integers(0, 1), st.integers(2, 12), st.sampled_from(PATTERNS))
def test_the_pattern_that_is_proposed_finds_all_scores(pattern, first, count, other):
    names = [pattern.replace("{}", str(first + i)) for i in range(count)]
    others = [other.replace("{}", str(k)) for k in (40, 47)] if other != pattern else []
    made = model([*names, *others])
    proposed = pattern.replace("{}", "{layer}" if first else "{index}")
    assert next(iter(score_patterns(made))) == proposed
    assert find_scores(made, proposed, count) == dict(enumerate(names, 1))
    assert find_scores(made, proposed, count - 1) == dict(enumerate(names[:-1], 1))
    with pytest.raises(ConfigError) as error:
        find_scores(made, "other_{layer}", count)
    assert f"'{proposed}' for {first} to {first + count - 1}" in str(error.value)
    assert "wide" not in str(error.value) and "count" not in str(error.value)


def test_layers_without_a_score_are_left_out():
    assert find_scores(model(["s_2", "s_4"]), "s_{layer}", 6) == {2: "s_2", 4: "s_4"}


@pytest.mark.parametrize("first, wrong, right", [(1, "{index}", "{layer}"), (0, "{layer}", "{index}")])
def test_names_that_count_from_the_other_number_are_refused(first, wrong, right):
    """Else layer 1's score would be taken for layer 2's, and checked as if it were."""
    made = model([f"s_{first + i}" for i in range(5)])
    with pytest.raises(ConfigError, match=f"counts them from {first}: write 's_{right}'"):
        find_scores(made, f"s_{wrong}", 6)
    assert find_scores(model(["s_1", "s_3"]), "s_{index}", 6) == {2: "s_1", 4: "s_3"}  # of layers 2 and 4 alone


@pytest.mark.parametrize("pattern", ["score", "", "score_{}", "score_{k}"])
def test_a_pattern_has_the_number_in_it(pattern):
    with pytest.raises(ConfigError, match=r"\{layer\}.*\{index\}"):
        find_scores(model(["score_1", "score_2"]), pattern, 2)


def test_a_graph_without_any_says_so():
    with pytest.raises(ConfigError, match="nor any values of one float.*export it with the scores"):
        find_scores(model(["score_1"]), "s{layer}", 3)
