"""Configuration as ROS parameters, in process."""

import math

import pytest

pytest.importorskip("rclpy")

import rclpy
from rclpy.node import Node
from rclpy.parameter import Parameter

from vslam_features.config import Config, parameters
from vslam_features.errors import ConfigError
from vslam_features.ros.parameters import Parameters


@pytest.fixture
def make(domain):
    """make(name=value, ...) -> (node, Parameters); double underscores stand for dots."""
    context, nodes = rclpy.Context(), []
    rclpy.init(context=context)
    active = []

    def build(**overrides):
        given = [Parameter(name.replace("__", "."), value=value) for name, value in overrides.items()]
        node = Node(
            "frontend", context=context, parameter_overrides=given, automatically_declare_parameters_from_overrides=True
        )
        nodes.append(node)
        node.is_active = active
        return node, Parameters(node, active=lambda: bool(active))

    yield build
    for node in nodes:
        node.destroy_node()
    context.try_shutdown()


def test_every_parameter_is_declared_and_described(make):
    node, p = make()
    assert p.config() == Config() and p.autostart
    for leaf in parameters():
        d = node.describe_parameter(leaf.name)
        assert d.description == leaf.doc
        assert node.get_parameter(leaf.name).value == leaf.default
        ranges = [*d.floating_point_range, *d.integer_range]
        finite = math.isfinite(leaf.low) and math.isfinite(leaf.high)
        assert [(r.from_value, r.to_value) for r in ranges] == ([(leaf.low, leaf.high)] if finite else [])
        assert all(choice in d.additional_constraints for choice in leaf.choices)


def test_overrides_are_taken_and_converted(make):
    _, p = make(
        geometry__threshold_px=2, rectified=True, features__name="orb", features__options__levels=3, autostart=False
    )
    config = p.config()
    assert config.geometry.threshold_px == 2.0 and config.rectified == "yes"
    assert config.features.options["levels"] == 3 and not p.autostart


def test_all_problems_are_told_at_once_and_can_be_corrected(make):
    node, p = make(
        features__name="surf",
        features__options__hessian=1.0,
        matcher__name="nearest",
        matcher__options__ratoi=0.5,
        autostart="no",
    )
    with pytest.raises(ConfigError) as error:
        p.config()
    text = str(error.value)
    assert "'surf' is not one of aliked, flexglue, orb, sift, xfeat" in text and "hessian" in text
    assert "did you mean matcher.options.ratio" in text and "autostart: expected true or false" in text


def test_a_name_that_only_begins_like_one_of_ros_is_unknown(make):
    with pytest.raises(ConfigError, match="unknown parameter 'use_sim_times'"):
        make(use_sim_times=True)[1].config()


def test_another_plugin_drops_the_problems_of_the_first(make):
    node, p = make(features__name="surf", features__options__hessian=1.0)
    with pytest.raises(ConfigError):
        p.config()
    assert node.set_parameters([Parameter("features.name", value="orb")])[0].successful
    assert p.config().features.name == "orb"


def test_a_corrected_value_clears_its_problem(make):
    node, p = make(keyframes__every=-5)
    with pytest.raises(ConfigError, match="keyframes.every"):
        p.config()
    assert node.set_parameters([Parameter("keyframes.every", value=2)])[0].successful
    assert p.config().keyframes.every == 2


def test_changes(make):
    node, p = make(features__name="sift")

    def change(**values):
        pairs = [Parameter(n.replace("__", "."), value=v) for n, v in values.items()]
        return node.set_parameters_atomically(pairs)

    assert change(geometry__threshold_px=3).successful and p.config().geometry.threshold_px == 3.0
    assert change(rectified=False).successful and p.config().rectified == "no"
    result = change(matcher__options__ratio="high")
    assert not result.successful
    result = change(retrieval__name="netvlad", retrieval__top_k=3)
    assert not result.successful and "vlad" in result.reason
    assert p.config().retrieval.top_k == Config().retrieval.top_k, "all or nothing"
    node.is_active.append(True)
    result = change(retrieval__top_k=3)
    assert not result.successful and "deactivate" in result.reason
    assert change(use_sim_time=False).successful
    assert change(map_path="a.vmap").successful and p.config().map_path == "a.vmap"
    result = change(map_path="b.vmap", mode="localization")
    assert not result.successful and result.reason.startswith("mode cannot change while the node is active")
    node.is_active.clear()


def test_options_follow_the_plugin(make):
    node, p = make(features__name="sift", features__options__edge_threshold=12.0)
    assert p.config().features.options["edge_threshold"] == 12.0
    assert node.set_parameters([Parameter("features.name", value="orb")])[0].successful
    assert set(p.config().features.options) == {"fast_threshold", "levels"}
    assert node.has_parameter("features.options.levels") and not node.has_parameter("features.options.edge_threshold")
    assert node.set_parameters([Parameter("features.options.levels", value=5)])[0].successful
    assert p.config().features.options["levels"] == 5


def test_options_of_a_runtime_are_declared_and_described(make):
    node, p = make(runtime__name="fake", runtime__options__nan_calls="3", runtime__options__delay_ms=5)
    config = p.config()
    assert (config.runtime.options["nan_calls"], config.runtime.options["delay_ms"]) == ("3", 5.0)
    assert node.get_parameter("runtime.options.nan_calls").value == "3"
    assert node.describe_parameter("runtime.options.nan_calls").description == "Calls whose float outputs hold NaN."
    assert node.get_parameter("runtime.options.inner").value == "onnxruntime"
    assert not node.has_parameter("runtime.options.cpu_arena")
    with pytest.raises(ConfigError, match="unknown parameter 'runtime.options.spinn'.*did you mean.*spin"):
        make(runtime__options__spinn=True)[1].config()


def test_options_of_another_runtime_start_anew(make):
    node, p = make(runtime__options__spin=True)
    assert p.config().runtime.options["spin"] is True
    assert node.set_parameters([Parameter("runtime.name", value="fake")])[0].successful
    assert p.config().runtime.options["nan_calls"] == "" and not node.has_parameter("runtime.options.spin")
    assert node.set_parameters([Parameter("runtime.options.nan_calls", value="2")])[0].successful
    assert p.config().runtime.options["nan_calls"] == "2"
    assert node.set_parameters([Parameter("runtime.name", value="onnxruntime")])[0].successful
    assert p.config().runtime.options["spin"] is False and node.get_parameter("runtime.options.spin").value is False


def test_the_model_of_another_plugin_is_its_own(make):
    node, p = make(features__options__model="mine.onnx")
    assert node.set_parameters([Parameter("features.name", value="aliked")])[0].successful
    for _ in range(2):  # as at configure and again at activate
        config = p.config()
        assert config.features == Config.from_flat({"features.name": "aliked"}).features
        assert (config.matcher.name, config.matcher.options["model"]) == ("lightglue", "lightglue-aliked-early-stop")
    shown = {n: node.get_parameter(n).value for n in ("features.options.model", "matcher.name")}
    assert shown == {"features.options.model": config.features.options["model"], "matcher.name": "lightglue"}


def test_a_plugin_and_its_options_may_come_at_once(make):
    node, p = make()
    both = [Parameter("features.name", value="aliked"), Parameter("features.options.model", value="aliked-t16")]
    assert node.set_parameters_atomically(both).successful
    assert [p.config().features.options["model"] for _ in range(2)] == ["aliked-t16"] * 2


@pytest.mark.parametrize("at_start", [True, False])
def test_the_matcher_follows_the_features_unless_it_was_chosen(make, at_start):
    node, p = make(**({"features__name": "sift"} if at_start else {}))
    if not at_start:
        assert node.set_parameters([Parameter("features.name", value="sift")])[0].successful
    assert p.config().matcher.name == node.get_parameter("matcher.name").value == "nearest"
    names = [Parameter("matcher.name", value="nearest"), Parameter("features.name", value="xfeat")]
    assert all(result.successful for result in node.set_parameters(names))
    assert p.config().matcher.name == "nearest"
