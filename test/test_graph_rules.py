"""Rules that say which nodes of a graph a pass leaves alone."""

import pytest

pytest.importorskip("onnx")
ir = pytest.importorskip("onnx_ir")

from graph_helpers import graph  # noqa: E402

from vslam_features.errors import ConfigError  # noqa: E402
from vslam_features.graph import rules  # noqa: E402

# Two normalisations; one branch after the last, one beside it; a body that reads a value from outside.
TEXT = """(float[2] x, bool c) => (float[2] y, float[2] z) {
    first = LayerNormalization(x, x)
    side = Tanh(first)
    last = LayerNormalization(first, x)
    out = If(c) <then_branch = t () => (float[2] a) { a0 = Neg(last)  a = Abs(a0) },
                 else_branch = e () => (float[2] b) { b0 = Exp(side)  b = Log(b0) }>
    y = Add(out, x)
    z = Mul(side, x)
}"""


@pytest.fixture
def names():
    found = ir.from_proto(graph(TEXT)).graph
    return lambda rule: {node.name for node in rule(found)}


def test_downstream_goes_through_bodies_and_leaves_what_is_beside(names):
    assert names(rules.downstream_of_last()) == {"last", "out", "a0", "a", "y"}
    assert names(rules.downstream_of_last("Exp")) == {"b0", "b", "out", "y"}
    assert names(rules.downstream_of_last("Mul")) == {"z"}


def test_downstream_of_inputs(names):
    assert names(rules.downstream_of("c")) == {"out", "y"}
    assert names(rules.downstream_of("x")) == names(rules.by_name("*"))
    assert names(rules.downstream_of("x", "c")) == names(rules.by_name("*"))


def test_back_to_a_type_ends_there_and_goes_into_bodies(names):
    assert names(rules.back_to("LayerNormalization", "z")) == {"z", "side", "first"}
    assert names(rules.back_to("Tanh", "z")) == {"z", "side"}
    everything = {"y", "out", "a", "a0", "b", "b0", "side", "last", "first"}
    assert names(rules.back_to("LayerNormalization", "y")) == everything
    assert names(rules.back_to("If", "y", "z")) == {"y", "out", "z", "side", "first"}


def test_upstream_goes_into_bodies(names):
    assert names(rules.upstream_of(rules.by_name("last"))) == {"last", "first"}
    everything_but_z = {"y", "out", "a", "a0", "b", "b0", "last", "side", "first"}
    assert names(rules.upstream_of(rules.by_op("Add"))) == everything_but_z
    assert names(rules.upstream_of(rules.by_op("Log"))) == {"b", "b0", "side", "first"}


def test_names_and_types_and_their_union(names):
    assert names(rules.by_name("a*")) == {"a", "a0"}
    assert names(rules.by_op("LayerNormalization", "Log")) == {"first", "last", "b"}
    assert names(rules.union(rules.by_name("?"), rules.by_op("If"))) == {"a", "b", "y", "z", "out"}
    assert names(rules.union()) == set()


def test_a_node_without_a_name_has_that_of_its_output():
    model = graph(TEXT)
    model.graph.node[0].name = ""
    assert [n.op_type for n in rules.by_name("first")(ir.from_proto(model).graph)] == ["LayerNormalization"]


@pytest.mark.parametrize(
    "rule, what",
    [
        (rules.by_name("backbone/*"), r"named like 'backbone/\*'.*LayerNormalization 'first'"),
        (rules.by_op("Tanh", "Conv"), "of type Conv"),
        (rules.downstream_of_last("Softmax"), "of type Softmax"),
        (rules.union(rules.by_op("Tanh"), rules.by_name("nothing")), "nothing"),
        (rules.upstream_of(rules.by_op("Cos")), "of type Cos"),
        (rules.downstream_of("x", "other"), "that reads an input 'other'"),
        (rules.back_to("Tanh", "z", "other"), "that computes 'other'"),
    ],
)
def test_a_rule_that_finds_nothing_says_so(rule, what, names):
    with pytest.raises(ConfigError, match=f"graph 'g' has no node .*{what}"):
        names(rule)
