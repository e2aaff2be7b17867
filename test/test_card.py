"""Model cards: what is read, what is refused, and where their files are."""

import dataclasses
import hashlib
import json
import re
from dataclasses import replace

import onnx
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_helpers import card, global_model, save

from vslam_features.artifacts.card import (
    METADATA_KEY,
    PRECISIONS,
    ROLES,
    ModelCard,
    identity,
    read_card,
    sidecar_path,
)
from vslam_features.artifacts.preprocessing import CHANNELS, KERNELS, Preprocessing
from vslam_features.artifacts.store import content_sha256, locate, model_path
from vslam_features.errors import ConfigError, ModelFileError, ModelMissingError

FULL = ModelCard(
    "matcher", "glue", "MIT", "ab" * 32, "fp16", "2024-04", "xfeat", Preprocessing("grey", 64, 48, "area"),
    {"keypoints0": "kpts0"}, {"matches0": "m0"}, 9, (2, 4), {"onnx": "1.18"},
)  # fmt: skip
NAMES = {f.name for f in dataclasses.fields(ModelCard)}


CARDS = st.builds(
    ModelCard,
    role=st.sampled_from(ROLES),
    name=st.text(),
    licence=st.text(),
    source_sha256=st.text(),
    precision=st.sampled_from(PRECISIONS),
    version=st.text(),
    features_model=st.text(),
    preprocessing=st.one_of(
        st.builds(Preprocessing, channels=st.sampled_from(CHANNELS)),
        st.builds(
            Preprocessing,
            channels=st.sampled_from(CHANNELS),
            width=st.integers(1, 16384),
            height=st.integers(1, 16384),
            kernel=st.sampled_from(KERNELS[1:]),
        ),
    ),
    inputs=st.dictionaries(st.text(), st.text(), max_size=3),
    outputs=st.dictionaries(st.text(), st.text(), max_size=3),
    layers=st.just(0) | st.integers(100, 200),
    early_stop_layers=st.sets(st.integers(1, 99), max_size=3).map(lambda layers: tuple(sorted(layers))),
    tools=st.dictionaries(st.text(), st.text(), max_size=3),
    self_check=st.dictionaries(st.text(), st.text(), max_size=3),
    keypoints=st.text(),
    layouts=st.dictionaries(st.text(), st.text(), max_size=3),
    patches=st.lists(st.text(), max_size=3).map(tuple),
    shapes=st.dictionaries(st.text(), st.lists(st.integers(1, 999), min_size=1).map(lambda d: "x".join(map(str, d)))),
)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=12), inner, max_size=3),
    max_leaves=8,
)


# -- reading and writing ---------------------------------------------------------------------


@given(CARDS)
def test_a_card_survives_json_and_yaml(made):
    assert ModelCard.from_dict(json.loads(made.to_json()), "here") == made
    text = yaml.safe_dump(made.to_dict())
    assert ModelCard.from_dict(yaml.safe_load(text), "here") == made


@given(st.dictionaries(st.sampled_from(sorted(NAMES)) | st.text(max_size=5), ANYTHING, max_size=8), st.booleans())
@settings(max_examples=400)
def test_anything_is_an_error_of_the_file_or_a_card_that_can_be_written(values, complete):
    if complete:
        values = {**FULL.to_dict(), **values}
    try:
        read = ModelCard.from_dict(values, "some/file")
    except ModelFileError as error:
        assert str(error).startswith("some/file: ")
        return
    assert ModelCard.from_dict(json.loads(read.to_json()), "here") == read
    assert isinstance(hash((read.role, read.early_stop_layers)), int) and read.preprocessing.id


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
def test_any_bytes_of_a_sidecar_are_an_error_of_the_file_or_a_card(tmp_path, content):
    path = tmp_path / "x.onnx"
    sidecar_path(path).write_bytes(content)
    try:
        read_card(path)
    except ModelFileError as error:
        assert str(sidecar_path(path)) in str(error)


@pytest.mark.parametrize(
    "text",
    [
        "2020-13-45",
        "a: " + "9" * 5000,
        "[" * 2000,
        "{[]: 1}",
        "&a [*a]",
        "!!python/object/apply:os.getcwd []",
        "\x00",
        "",
    ],
    ids=range(8),
)
def test_yaml_that_breaks_its_reader_is_an_error_of_the_file(tmp_path, text):
    sidecar_path(tmp_path / "x.onnx").write_text(text)
    with pytest.raises(ModelFileError, match="card.yaml"):
        read_card(tmp_path / "x.onnx")


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", "null", "9" * 5000, "[" * 100_000, '{"role": "features"}'], ids=range(7)
)
def test_json_that_is_no_card_is_an_error_of_the_file(tmp_path, text):
    model = global_model()
    onnx.helper.set_model_props(model, {METADATA_KEY: text})
    onnx.save(model, tmp_path / "x.onnx")
    with pytest.raises(ModelFileError, match="x.onnx"):
        read_card(tmp_path / "x.onnx")


def test_a_card_inside_a_file(tmp_path):
    assert read_card(save(global_model(), FULL, tmp_path / "x.onnx")) == FULL


def test_a_sidecar_comes_before_what_is_inside(tmp_path):
    path = save(global_model(), FULL, tmp_path / "x.onnx")
    sidecar_path(path).write_text(yaml.safe_dump({"role": "global", "name": "other", "licence": "MIT"}))
    assert read_card(path) == ModelCard("global", "other", "MIT")


def test_a_file_without_a_card_is_told_where_to_put_one(tmp_path):
    onnx.save(global_model(), tmp_path / "x.onnx")
    with pytest.raises(ModelFileError, match=r"no model card.*write x\.onnx\.card\.yaml beside it.*docs/models\.md"):
        read_card(tmp_path / "x.onnx")
    (tmp_path / "x.xml").write_text("<net/>")
    with pytest.raises(ModelFileError, match=r"write x\.xml\.card\.yaml"):
        read_card(tmp_path / "x.xml")


@pytest.mark.parametrize(
    "content, said",
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"ab" * 32 + b"\nsize 6247949\n",
         "is a Git LFS pointer .*git lfs pull"),
        (b"<!DOCTYPE html><html><title>Sign in</title></html>", "is a web page .*Sign in"),
        (b"no model at all", "no ONNX model"),
    ],
)  # fmt: skip
def test_what_lies_under_the_name_of_a_model_is_called_by_its_name(tmp_path, content, said):
    path = tmp_path / "net.onnx"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=said):
        read_card(path)


@pytest.mark.parametrize("schema", [0, -1, 5, 99, "1", True, 1.0, None])
def test_another_schema_is_refused_before_its_fields(schema):
    with pytest.raises(ModelFileError, match=r"has schema .*, this version reads 1 to 4: update vslam_features"):
        ModelCard.from_dict({"schema": schema, "unheard_of": 1}, "here")


# The fields of a card as the first version wrote them; it refuses others, and schemas above 1.
FIRST = {"role", "name", "licence", "source_sha256", "precision", "version", "features_model", "inputs", "outputs",
         "preprocessing", "layers", "early_stop_layers", "tools", "schema"}  # fmt: skip


def test_older_versions_read_what_they_can_and_are_told_of_the_rest():
    plain = FULL.to_dict()
    assert set(plain) == FIRST and set(plain["preprocessing"]) == {"channels", "width", "height", "kernel"}
    assert plain["schema"] == 1
    for schema, change in (
        (2, {"self_check": {"cosine": "0.99999"}}),
        (2, {"preprocessing": Preprocessing("rgb", mean=(0.5, 0.4, 0.3), std=(0.2, 0.2, 0.2))}),
        (2, {"preprocessing": Preprocessing("rgb", 64, 48, "antialias")}),
        (3, {"keypoints": "unit"}),
        (3, {"layouts": {"descriptors": "hwc"}}),
        (3, {"patches": ("early-stop 2,4",), "self_check": {"cosine": "1"}}),
        (4, {"shapes": {"image": "1x3x64x64"}, "patches": ("cumsum",)}),
    ):
        card = replace(FULL, **change)
        assert card.to_dict()["schema"] == schema and ModelCard.from_dict(card.to_dict(), "here") == card


def test_shapes_are_read_when_the_card_is():
    shapes = {"keypoints0": "1x2,1024x2,4096x2", "image": "1x3x64x64"}
    assert ModelCard.from_dict({**FULL.to_dict(), "shapes": shapes, "schema": 4}, "here").shapes == shapes
    for wrong, message in (
        ({"keypoints0": "1x2,3x2"}, "shapes: keypoints0: '1x2,3x2': expected MIN,OPT,MAX"),
        ({"keypoints0": "3x2,2x2,1x2"}, "shapes: keypoints0: 3x2,2x2,1x2: axis 0 goes 3, 2, 1"),
        ({"keypoints0": [1, 2]}, "shapes: expected texts by name"),
        (["1x2"], "shapes: expected texts by name"),
    ):
        with pytest.raises(ModelFileError, match=re.escape(message)):
            ModelCard.from_dict({**FULL.to_dict(), "shapes": wrong}, "here")


def test_a_self_check_is_texts():
    assert ModelCard.from_dict({**FULL.to_dict(), "self_check": {"a": "b"}}, "here").self_check == {"a": "b"}
    for wrong in ({"a": 1}, {1: "a"}, ["a"], "a", None):
        with pytest.raises(ModelFileError, match="self_check: expected texts by name, got"):
            ModelCard.from_dict({**FULL.to_dict(), "self_check": wrong}, "here")


@pytest.mark.parametrize(
    "change, said",
    [
        ({"role": "matchers"}, "role: 'matchers' is not one of features, matcher, global"),
        ({"precision": "f16"}, "precision: 'f16' is not one of"),
        ({"name": 7}, "name: expected a text, got 7"),
        ({"layers": True}, "layers: expected a whole number, got True"),
        ({"layers": -1}, "layers: expected a number of layers, got -1"),
        ({"early_stop_layers": [3, "4"]}, r"early_stop_layers: expected numbers of layers, from 1, got \[3, '4'\]"),
        ({"patches": ["a", 3]}, r"patches: expected texts, got \['a', 3\]"),
        ({"early_stop_layers": 3}, "early_stop_layers: expected a list, got 3"),
        ({"early_stop_layers": [4, 2]}, r"early_stop_layers: expected ascending numbers, got \[4, 2\]"),
        ({"early_stop_layers": [2, 2]}, r"early_stop_layers: expected ascending numbers, got \[2, 2\]"),
        ({"layers": 9, "early_stop_layers": [2, 9]}, r"early_stop_layers: 9 is not below the number of layers \(9\)"),
        ({"inputs": {"image": 3}}, "inputs: expected texts by name, got"),
        ({"preprocessing": "rgb"}, "preprocessing: expected a mapping, got 'rgb'"),
        ({"preprocessing": {"channels": "bgr"}}, "preprocessing.channels: 'bgr' is not one of any, rgb, grey"),
        ({"preprocessing": {"kernel": ["area"]}}, r"preprocessing.kernel: \['area'\] is not one of"),
        ({"preprocessing": {"width": 64}}, "width, height and kernel go together"),
        ({"preprocessing": {"width": 64, "height": 48}}, "width, height and kernel go together"),
        ({"preprocessing": {"width": True, "height": 1, "kernel": "area"}}, "width and height are pixels"),
        ({"preprocessing": {"gamma": 0.5}}, "preprocessing: unknown field 'gamma'"),
        ({"licence_": "MIT"}, "unknown field 'licence_'"),
    ],
)
def test_a_wrong_field_is_named(change, said):
    with pytest.raises(ModelFileError, match=rf"^here: not a valid model card: .*{said}.*docs/models\.md$"):
        ModelCard.from_dict({**FULL.to_dict(), **change}, "here")


def test_all_problems_are_told_at_once():
    with pytest.raises(ModelFileError) as caught:
        ModelCard.from_dict({"role": "x", "preprocessing": {"channels": 3}, "more": 1}, "here")
    for said in ("'name' is missing", "'licence' is missing", "role: 'x'", "preprocessing.channels", "field 'more'"):
        assert said in str(caught.value)


def test_identity_covers_role_name_weights_and_preprocessing():
    base = identity(FULL, "a" * 64)
    assert identity(replace(FULL, precision="fp32", version="9", tools={}, licence="X"), "a" * 64) == base
    others = [identity(FULL, "b" * 64)]
    others += [identity(replace(FULL, **c), "a" * 64) for c in ({"role": "global"}, {"name": "g"})]
    others.append(identity(replace(FULL, preprocessing=Preprocessing("grey", 64, 48, "linear")), "a" * 64))
    assert len({base, *others}) == 5


# -- where files are -------------------------------------------------------------------------


def test_names_are_looked_for_in_the_cache_and_paths_as_they_are(tmp_path, monkeypatch):
    monkeypatch.setenv("VSLAM_FEATURES_CACHE", str(tmp_path / "cache"))
    built = save(global_model(), card("global", "mine"))
    assert built == tmp_path / "cache/models/mine.fp32.onnx" == model_path("mine", "fp32") == locate("mine", "fp32")
    assert locate(str(built), "fp16") == built
    with pytest.raises(ModelMissingError, match=r"models fetch xfeat --precision fp16'"):
        locate("xfeat", "fp16")
    with pytest.raises(ModelMissingError, match=r"models fetch xfeat'$"):
        locate("xfeat", "fp32")
    with pytest.raises(ModelMissingError, match=r"there is no model file nowhere/x\.onnx"):
        locate("nowhere/x.onnx", "fp32")
    with pytest.raises(ConfigError, match="no model is named 'xfaet': is xfeat meant"):
        locate("xfaet", "fp32")
    with pytest.raises(ConfigError, match="~nobody-of-that-name"):
        locate("~nobody-of-that-name/x.onnx", "fp32")


@pytest.mark.parametrize("model, beside", [("m.xml", "m.bin"), ("m.onnx", "m.onnx.data"), ("m.onnx", "m.onnx_data")])
def test_weights_beside_a_file_are_part_of_its_content(tmp_path, model, beside):
    (tmp_path / model).write_bytes(b"graph")
    alone = content_sha256(tmp_path / model)
    (tmp_path / "other.bin").write_bytes(b"of another model")
    assert content_sha256(tmp_path / model) == alone
    (tmp_path / beside).write_bytes(b"weights")
    with_weights = content_sha256(tmp_path / model)
    (tmp_path / beside).write_bytes(b"weighty")
    assert len({alone, with_weights, content_sha256(tmp_path / model)}) == 3


def test_metadata_of_a_file_are_no_part_of_its_content(tmp_path):
    graph = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["a"], ["b"])], "g", *(
        [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [3])] for name in "ab"
    ))  # fmt: skip
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)])
    path, digests = tmp_path / "m.onnx", set()
    for props in ({}, {METADATA_KEY: '{"self_check": "1e-7"}'}, {METADATA_KEY: "x" * 300, "by": "another"}):
        onnx.helper.set_model_props(model, props)
        path.write_bytes(model.SerializeToString())
        digests.add(content_sha256(path))
    del model.metadata_props[:]
    assert digests == {hashlib.sha256(model.SerializeToString()).hexdigest()}
    model.graph.node[0].op_type = "Neg"
    path.write_bytes(model.SerializeToString())
    assert content_sha256(path) not in digests
