"""config.py: reading, writing, and what is refused with which words."""

import dataclasses
import math

import cv2
import numpy as np
import pytest
import yaml
from helpers import plugin_distribution
from hypothesis import given
from hypothesis import strategies as st

from vslam_features import registry
from vslam_features.config import Config, parameters
from vslam_features.errors import ConfigError
from vslam_features.frontend import FrontEnd
from vslam_features.parameter_file import flatten

LEAVES = {p.name: p for p in parameters()}
NUMBERS = [p for p in LEAVES.values() if type(p.default) in (int, float)]


def load(tmp_path, text: str) -> Config:
    path = tmp_path / "given.yaml"
    path.write_text(text, encoding="utf-8")
    return Config.load(path)


def values_of(p):
    """Values that a parameter may have."""
    if type(p.default) is bool:
        return st.booleans()
    if p.choices:
        return st.sampled_from(p.choices)
    if type(p.default) is str:
        return st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), max_size=20)
    if type(p.default) is int:
        return st.integers(int(p.low), int(min(p.high, 2**40)))
    return st.floats(p.low, p.high, allow_nan=False)


FREE = {n: p for n, p in LEAVES.items() if not n.endswith(".name") and ".options." not in n}


# -- round trips -------------------------------------------------------------------------------


@given(st.fixed_dictionaries({}, optional={n: values_of(p) for n, p in FREE.items()}))
def test_any_valid_configuration_survives_yaml_flat_and_ros_form(changes):
    changes["loops.consensus_window"] = 100  # at least loops.consensus
    config = Config.from_flat(changes)
    assert {n: config.flat()[n] for n in changes} == changes
    assert Config.from_flat(config.flat()) == config
    text = config.to_yaml()
    assert Config.from_flat(flatten(yaml.safe_load(text))) == config
    ros = yaml.safe_dump({"/**": {"ros__parameters": yaml.safe_load(text)}})
    assert Config.from_flat(flatten(yaml.safe_load(ros)["/**"]["ros__parameters"])) == config


def test_files_plain_ros_dotted_and_empty(tmp_path):
    expected = Config().with_values(matcher__options__min_score=0.7, keyframes__every=1)
    plain = "matcher: {options: {min_score: 0.7}}\nkeyframes: {every: 1}\n"
    assert load(tmp_path, plain) == expected
    assert load(tmp_path, "/**:\n  ros__parameters:\n    " + plain.replace("\n", "\n    ")) == expected
    assert (
        load(tmp_path, "/robot/frontend:\n  ros__parameters: {matcher.options.min_score: 0.7, keyframes.every: 1}")
        == expected
    )
    assert load(tmp_path, "") == load(tmp_path, "# nothing\n") == load(tmp_path, "/**: {ros__parameters: }") == Config()
    assert load(tmp_path, "matcher:\nfeatures: {options: }\nkeyframes: {}\n") == Config()
    assert load(tmp_path, expected.to_yaml()) == expected


NODE_LEVEL = (
    "autostart: true, use_sim_time: true, qos_overrides: {/tf: {publisher: {depth: 1}}}, qos_overrides./x.depth: 1"
)


def test_what_belongs_to_the_node_is_left_out_of_ros_files_only(tmp_path):
    assert load(tmp_path, f"/**: {{ros__parameters: {{threads: 2, {NODE_LEVEL}}}}}") == Config(threads=2)
    with pytest.raises(ConfigError, match="unknown parameter 'autostart'.*'use_sim_time'.*'qos_overrides./tf"):
        load(tmp_path, f"{{threads: 2, {NODE_LEVEL}}}")


@pytest.mark.parametrize(
    "sections, expected",
    [
        (["/**", "frontend"], (2, 0.5)),
        (["frontend", "/**"], (2, 0.5)),
        (["/**", "/frontend"], (2, 0.5)),
        (["/**/frontend", "/*"], (2, 0.5)),
        (["/**", "/robot/frontend"], (2, 0.5)),
        (["player", "/**"], (2, None)),
        (["/robot/frontend", "player"], (1, None)),
        (["other"], (1, None)),
    ],
)
def test_the_sections_of_the_front_end_are_merged_in_file_order(tmp_path, sections, expected):
    text = "".join(f"{name}: {{ros__parameters: {{threads: {i + 1}}}}}\n" for i, name in enumerate(sections))
    if expected[1]:
        text = text.replace("{threads: 1}", "{threads: 1, sync_slop_s: 0.5}")
    config = load(tmp_path, text)
    assert (config.threads, config.sync_slop_s) == (expected[0], expected[1] or Config().sync_slop_s)


def test_namespaces_may_be_nested_keys(tmp_path):
    assert load(tmp_path, "robot: {frontend: {ros__parameters: {threads: 3}}}").threads == 3


@pytest.mark.parametrize("names", [("a", "b"), ("/r1/frontend", "/r2/frontend"), ("a", "b", "/frontend_2")])
def test_sections_of_several_nodes_that_could_be_meant_are_named(tmp_path, names):
    text = "".join(f"{name}: {{ros__parameters: {{threads: 1}}}}\n" for name in names)
    with pytest.raises(ConfigError, match="given.yaml: expected parameters of one front end.*") as error:
        load(tmp_path, text)
    assert all(name.strip("/") in str(error.value) for name in names)


def test_parameters_list_every_leaf_with_words_and_bounds():
    flat = Config().flat()
    assert list(LEAVES) == list(flat)
    for name, p in LEAVES.items():
        assert p.default == flat[name]
        assert p.doc.endswith("."), name
        if type(p.default) in (int, float):
            assert math.isfinite(p.low) and math.isfinite(p.high), name
    assert set(LEAVES["features.name"].choices) == set(registry.names("features"))


def test_image_max_value():
    assert Config().image_max_value == 0
    assert Config.from_flat({"image_max_value": 4095}).image_max_value == 4095
    for bad in (-1, 65536, 10.0, "1023"):
        with pytest.raises(ConfigError, match="image_max_value"):
            Config.from_flat({"image_max_value": bad})


# -- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["feature.name", "features.nam", "features", "features.options", "threads.x", "flat.options.x", "load.options.x",
     "__class__.options.x", ".options.x", "", ".", "geometry.options.x"],
)  # fmt: skip
def test_unknown_names_are_refused_with_the_list(name):
    with pytest.raises(ConfigError, match=f"unknown parameter '{name}'.* config/default.yaml lists all names"):
        Config.from_flat({name: 1})


@pytest.mark.parametrize(
    "name, meant",
    [("features.nam", "features.name"), ("max_keypoints", "features.max_keypoints"),
     ("keyframe.evry", "keyframes.every"),
     ("every", "keyframes.every"), ("loops.min_inlier", "loops.min_inliers")],
)  # fmt: skip
def test_the_closest_names_are_suggested(name, meant):
    with pytest.raises(ConfigError, match=f"'{name}' .did you mean .*{meant}") as error:
        Config.from_flat({name: 1})
    assert len(str(error.value)) < 250


@pytest.mark.parametrize("p", NUMBERS, ids=lambda p: p.name)
def test_numbers_out_of_range(p):
    kind = type(p.default)
    for bad in (p.high + 1, p.low - 1):
        with pytest.raises(ConfigError, match=rf"{p.name}: .* is outside"):
            Config.from_flat({p.name: kind(bad)})
    assert p.low <= p.default <= p.high


def test_a_consensus_that_cannot_be_reached():
    with pytest.raises(
        ConfigError, match="loops.consensus: 4 keyframes can never agree within loops.consensus_window 3"
    ):
        Config.from_flat({"loops.consensus": 4})
    assert Config.from_flat({"loops.consensus": 4, "loops.consensus_window": 4}).loops.consensus == 4


@pytest.mark.parametrize(
    "bad", [math.nan, math.inf, -math.inf, 10**400, -(10**400)], ids=["nan", "inf", "-inf", "huge", "-huge"]
)
def test_no_number_at_all(bad):
    with pytest.raises(ConfigError, match="geometry.threshold_px"):
        Config.from_flat({"geometry.threshold_px": bad})


@pytest.mark.parametrize(
    "name, bad",
    [("features.max_keypoints", 3.0), ("features.max_keypoints", True), ("features.max_keypoints", "3"),
     ("loops.enabled", 1), ("loops.enabled", "true"), ("geometry.threshold_px", "1"), ("geometry.threshold_px", False),
     ("features.fp16", 16), ("features.name", None), ("threads", [1]), ("threads", None), ("map_path", 3)],
)  # fmt: skip
def test_wrong_types(name, bad):
    with pytest.raises(ConfigError, match=f"{name}: expected .*, got {type(bad).__name__}"):
        Config.from_flat({name: bad})


def test_an_int_is_taken_for_a_float():
    config = Config.from_flat(
        {"geometry.threshold_px": 2, "matcher.options.min_score": 1, "keyframes.rotation_deg": np.float64(5)}
    )
    assert [type(v) for v in (config.geometry.threshold_px, config.matcher.options["min_score"])] == [float, float]
    assert type(config.keyframes.rotation_deg) is float and config.to_yaml()


@pytest.mark.parametrize("word, expected", [("yes", "yes"), ("no", "no"), ("auto", "auto"), ("'yes'", "yes")])
def test_the_words_that_yaml_reads_as_booleans(tmp_path, word, expected):
    assert load(tmp_path, f"rectified: {word}").rectified == expected


def test_all_problems_come_in_one_error():
    with pytest.raises(ConfigError) as error:
        Config.from_flat(
            {"features.fp16": "half", "matcher.options.min_score": 3.0, "threads": "two", "features.name": "surf",
             "features.nam": 1, "threads.options.x": 1}
        )  # fmt: skip
    for part in (
        "unknown parameter 'features.nam'",
        "unknown parameter 'threads.options.x'",
        "lossless, always, never",
        "matcher.options.min_score: 3.0 is outside [0.0, 1.0]",
        "threads",
        "'surf' is not one of aliked, flexglue, orb, sift, xfeat",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        "- a list",
        "just text",
        "a: [",
        "\ta: 1",
        "{1: 2}",
        "3",
        "features: 7",
        "/**: {ros__parameters: 3}",
        "/**: {ros__parameters: [a]}",
    ],
)
def test_files_that_are_no_configuration_are_named(tmp_path, text):
    with pytest.raises(ConfigError, match="given.yaml"):
        load(tmp_path, text)


def test_a_missing_or_binary_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="nowhere.yaml"):
        Config.load(tmp_path / "nowhere.yaml")
    (tmp_path / "given.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="given.yaml"):
        Config.load(tmp_path / "given.yaml")


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)


@given(st.dictionaries(st.sampled_from(sorted(LEAVES)) | st.text(max_size=12), scalars, max_size=3))
def test_anything_gives_a_config_or_a_config_error(values):
    try:
        config = Config.from_flat(values)
    except ConfigError:
        return
    assert Config.from_flat(config.flat()) == config


# -- options of plug-ins -----------------------------------------------------------------------


def test_options_are_filled_in_kept_and_dropped_with_their_plugin():
    config = Config.from_flat({"features.name": "sift", "features.options.edge_threshold": 7})
    assert config.features.options == {"contrast_threshold": 0.04, "edge_threshold": 7.0}
    assert config.with_values(features__max_keypoints=9).features.options["edge_threshold"] == 7.0
    orb = config.with_values(features__name="orb")
    assert orb.features.options == {"fast_threshold": 12, "levels": 8}
    assert [p.name for p in parameters(orb) if "features.options" in p.name] == [
        "features.options.fast_threshold",
        "features.options.levels",
    ]
    with pytest.raises(ConfigError, match=r"no option \['edge_threshold'\].*fast_threshold"):
        orb.with_values(features__options__edge_threshold=3.0)
    with pytest.raises(ConfigError, match="it has none"):
        Config.from_flat({"retrieval.name": "vlad", "retrieval.options.words": 3})


def test_an_installed_plugin_brings_its_own_options(tmp_path, monkeypatch):
    plugin_distribution(
        tmp_path,
        monkeypatch,
        {"features": {"dots": "Dots"}},
        """
from dataclasses import dataclass, field
from vslam_features.options import option
from vslam_features.features.sift import Sift

class Dots(Sift):
    @dataclass(frozen=True)
    class Options(Sift.Options):
        radius: float = option(3.0, "Radius of a dot.", low=1.0, high=9.0)
        plain: int = 4
        made: str = field(default_factory=lambda: "x")
""",
    )
    config = Config.from_flat({"features.name": "dots", "features.options.radius": 5})
    assert config.features.options == {
        "contrast_threshold": 0.04, "edge_threshold": 10.0, "radius": 5.0, "plain": 4, "made": "x"
    }  # fmt: skip
    assert Config.from_flat(config.flat()) == config
    assert {p.name: (p.doc, p.low) for p in parameters(config)}["features.options.radius"] == ("Radius of a dot.", 1.0)
    with pytest.raises(ConfigError, match="features.options.radius: 10.0 is outside"):
        config.with_values(features__options__radius=10)
    with pytest.raises(ConfigError, match="features.options.plain: expected int"):
        config.with_values(features__options__plain="4")
    assert "dots" in LEAVES["features.name"].choices or "dots" in registry.names("features")


def test_no_thread_count_means_all_cores_again(monkeypatch):
    before = cv2.getNumThreads()
    try:
        cv2.setNumThreads(-1)
        cores = cv2.getNumThreads()
        for threads, expected in ((1, 1), (0, cores)):
            FrontEnd(Config(threads=threads))
            assert cv2.getNumThreads() == expected
    finally:
        cv2.setNumThreads(before)


def test_configurations_are_immutable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().threads = 2
