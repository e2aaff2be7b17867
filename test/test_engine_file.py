"""Engine files: what is written is read, and what was cut, changed or lies is no engine."""

import dataclasses
import hashlib
import io
import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vslam_features.artifacts.card import ModelCard, read_card
from vslam_features.artifacts.file_kind import FileKind, identify
from vslam_features.errors import ModelFileError
from vslam_features.runtimes.content import content_sha256
from vslam_features.runtimes.cuda import Gpu
from vslam_features.runtimes.engine_file import (
    BuildFacts,
    EngineHeader,
    machine_differences,
    read_engine,
    read_header,
    rebuild,
    write,
)

CARD = ModelCard("features", "tiny", "CC0-1.0", source_sha256="ab" * 32, precision="fp16")
FACTS = BuildFacts(
    key="k" * 64,
    gpu="NVIDIA Orin",
    capability="8.7",
    driver="12.6",
    cuda="12.6",
    tensorrt="10.3.0",
    source="/models/tiny.onnx",
    source_sha256="cd" * 32,
    built_from_sha256="ef" * 32,
    precision="fp16",
    typing="weak",
    has_if=False,
    patches={"cumsum": 1},
    profiles={"image": [[1, 3, 96, 96], [1, 3, 480, 640], [1, 3, 1024, 1280]], "max_keypoints": [[1], [1024], [4096]]},
    options={"workspace_mb": 0, "attention": "auto", "tf32": True, "ratio": 0.5},
    layer_precisions={"/core.0/MatMul": "bf16"},
    made_with={"vslam_features": "1.0"},
    time="2026-11-30T00:00:00Z",
)
ENGINE = bytes(range(256)) * 5
ORIN = Gpu(0, "NVIDIA Orin", "8.7", "12.6", "12.6", 7620)


def written(facts=FACTS, engine=ENGINE, card=None) -> bytes:
    file = io.BytesIO()
    write(file, EngineHeader(CARD.to_dict() if card is None else card, facts), engine)
    return file.getvalue()


def digest(values: dict) -> str:
    """Of a header without the digest itself, as JSON with sorted keys."""
    engine = {name: value for name, value in values["engine"].items() if name != "header_sha256"}
    return hashlib.sha256(json.dumps({**values, "engine": engine}, sort_keys=True).encode()).hexdigest()


def forged(values: dict) -> bytes:
    """A header as a program would write it that knows the digest."""
    text = json.dumps({**values, "engine": {**values["engine"], "header_sha256": digest(values)}}).encode()
    return struct.pack("<I", len(text)) + text


@pytest.fixture
def place(tmp_path):
    def to_file(content: bytes):
        path = tmp_path / "tiny.engine"
        path.write_bytes(content)
        return path

    return to_file


@pytest.fixture(scope="module")
def one_file(tmp_path_factory):
    return tmp_path_factory.mktemp("engines") / "any.engine"


def test_what_is_written_is_read(place):
    path = place(written())
    header, engine = read_engine(path)
    assert engine == ENGINE
    assert header == read_header(path)
    assert header.facts.header_sha256 == digest(json.loads(path.read_bytes()[4 : -len(ENGINE)]))
    expected = dataclasses.replace(
        FACTS, bytes=len(ENGINE), sha256=hashlib.sha256(ENGINE).hexdigest(), header_sha256=header.facts.header_sha256
    )
    assert header == EngineHeader(CARD.to_dict(), expected)


def test_the_layout_is_a_length_a_json_object_and_the_engine():
    content = written()
    (length,) = struct.unpack("<I", content[:4])
    values = json.loads(content[4 : 4 + length])
    assert content[4 + length :] == ENGINE
    engine = values.pop("engine")
    assert values == CARD.to_dict()
    assert engine["gpu"] == "NVIDIA Orin" and engine["bytes"] == len(ENGINE)


def test_an_engine_has_card_kind_and_content(place):
    path = place(written())
    assert read_card(path) == CARD
    assert identify(path).kind is FileKind.TENSORRT_ENGINE and "'tiny'" in str(identify(path))
    assert content_sha256(path) == hashlib.sha256(path.read_bytes()).hexdigest()
    path.with_name(path.name + ".card.yaml").write_text("{role: global, name: other, licence: MIT}")
    assert read_card(path).name == "other"  # a user's card comes first, as for every file


@given(st.data())
def test_a_cut_is_noticed(one_file, data):
    content = written()
    one_file.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    for read in (read_header, read_engine):
        with pytest.raises(ModelFileError, match="models build (NAME|tiny) --runtime tensorrt"):
            read(one_file)


@given(st.data())
def test_no_change_gives_another_engine(one_file, data):
    """One that means nothing may pass, such as a space in the header: what is read is then still what was built."""
    content = bytearray(written())
    at = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[at] ^= data.draw(st.integers(1, 255))
    else:
        content[at:at] = data.draw(st.binary(min_size=1, max_size=9))
    one_file.write_bytes(content)
    try:
        header, engine = read_engine(one_file)
    except ModelFileError as error:
        assert "--runtime tensorrt" in str(error)
    else:
        assert engine == ENGINE and header.card == CARD.to_dict()
        assert dataclasses.replace(header.facts, bytes=0, sha256="", header_sha256="") == FACTS


@given(st.binary(min_size=4, max_size=4), st.binary(max_size=200))
def test_lengths_that_lie_are_refused(one_file, length, rest):
    one_file.write_bytes(length + b"{" + rest)
    with pytest.raises(ModelFileError):
        read_engine(one_file)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from([n for n in dataclasses.asdict(FACTS) if n != "header_sha256"]), JSON)
def test_a_field_of_another_type_is_refused_and_named(one_file, name, value):
    facts = dataclasses.asdict(dataclasses.replace(FACTS, bytes=len(ENGINE), sha256="0" * 64))
    same = type(value) is type(facts[name]) and (not isinstance(value, dict) or value == {})
    facts[name] = value
    one_file.write_bytes(forged({**CARD.to_dict(), "engine": facts}) + ENGINE)
    try:
        read_header(one_file)
    except ModelFileError as error:
        assert name in str(error) or "of engine behind the header" in str(error)
    else:
        assert same or isinstance(value, dict)


@pytest.mark.parametrize(
    "change, said",
    [
        ({"unknown": 1}, "unknown field 'unknown'"),
        ({"bytes": -1}, "bytes: got -1"),
        ({"patches": {"cumsum": "1"}}, "patches: got"),
        ({"patches": {"cumsum": True}}, "patches: got"),
        ({"profiles": {"image": [[1, "3"]]}}, "profiles: got"),
        ({"profiles": {"image": []}}, "profiles of 'image': got []"),
        ({"profiles": {"image": [[], [], []]}}, "profiles of 'image': got [[], [], []]"),
        ({"profiles": {"image": [[1, 3], [1, 3]]}}, "profiles of 'image': got"),
        ({"profiles": {"image": [[1], [1, 3], [1, 3]]}}, "profiles of 'image': got"),
        ({"profiles": {"image": [[1], [3], [2]]}}, "profiles of 'image': got"),
        ({"profiles": {"image": [[1], [1], [1 << 31]]}}, "profiles of 'image': got"),
        ({"options": {"a": [1]}}, "options: got"),
        ({"precision": "fp61"}, "precision: got 'fp61'"),
        ({"typing": ""}, "typing: got ''"),
        ({"layer_precisions": {"/core/MatMul": "bf17"}}, "layer_precisions has a type that is none"),
        ({"has_if": 0}, "has_if: got 0"),
        ({"gpu": None}, "gpu: got None"),
    ],
)
def test_a_wrong_header_says_what_is_wrong(place, change, said):
    text = forged({**CARD.to_dict(), "engine": {**dataclasses.asdict(FACTS), **change}})
    with pytest.raises(ModelFileError, match="another version of vslam_features") as caught:
        read_header(place(text))
    assert said in str(caught.value) and "models build tiny --runtime tensorrt" in str(caught.value)


@pytest.mark.parametrize(
    "content, said",
    [
        (b"", "0 bytes"),
        (b"ftrt" + bytes(400), "begins with no header"),  # a plan that trtexec wrote
        (struct.pack("<I", 9) + b'{"name": "mayaku"}', "begins with no header"),
        (struct.pack("<I", 18) + b'{"name": "mayaku"}' + bytes(50), "another program wrote it"),
        (struct.pack("<I", 13) + b'{"engine": 5}', "another program wrote it"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 9\n", "git lfs pull"),
        (b"<!DOCTYPE html><title>Sign in</title>", "Sign in"),
    ],
)
def test_what_is_no_engine_of_ours_is_called_by_its_name(place, content, said):
    path = place(content)
    with pytest.raises(ModelFileError, match=said):
        read_card(path)
    with pytest.raises(ModelFileError):
        read_engine(path)


def test_a_missing_file_and_a_header_beyond_its_limit(tmp_path):
    with pytest.raises(ModelFileError, match="cannot be read"):
        read_header(tmp_path / "none.engine")
    with pytest.raises(ModelFileError, match="the card of tiny has a number that is not finite"):
        written(card={**CARD.to_dict(), "mean": [float("nan")]})
    many = {f"layer {i}": "bf16" for i in range(60_000)}
    with pytest.raises(ModelFileError, match="limited to 1048576 bytes"):
        written(dataclasses.replace(FACTS, layer_precisions=many))


def test_one_digit_in_the_card_is_damage(place):
    """It would be another normalisation of images, say, and all else as it was."""
    card = {**CARD.to_dict(), "train_note": "0.485"}
    content = written(card=card)
    with pytest.raises(
        ModelFileError, match="damaged .*: it is not what was written; run 'vslam-features models build t"
    ):
        read_header(place(content.replace(b"0.485", b"0.455")))
    assert read_header(place(content)).card == card


@pytest.mark.parametrize("name", [None, 7, "", ["tiny"], "a' && rm -rf '", "\ud800", "x" * 10_000])
def test_a_name_that_no_command_takes_is_in_none(place, name):
    with pytest.raises(ModelFileError, match="models build NAME --runtime tensorrt") as caught:
        read_header(place(forged({"name": name, "engine": dataclasses.asdict(FACTS)}) + ENGINE))
    str(caught.value).encode()


@pytest.mark.parametrize(
    "source, facts, words",
    [
        ("tiny.fp16.onnx", {"precision": "fp16"}, "tiny --runtime tensorrt --precision fp16"),
        ("tiny.fp32.onnx", {"precision": "fp32"}, "tiny --runtime tensorrt"),
        ("exported here.onnx", {"precision": "bf16"}, "'{}' --runtime tensorrt"),
        ("gone.onnx", {"precision": "fp16"}, "tiny --runtime tensorrt --precision fp16"),
    ],
)
def test_the_command_that_builds_it_again(tmp_path, source, facts, words):
    """A model of the registry by its name, another by its file; and in the same precision, or it is another."""
    path = tmp_path / source
    if "gone" not in source:
        path.write_bytes(b"")
    header = EngineHeader(CARD.to_dict(), dataclasses.replace(FACTS, source=str(path), **facts))
    assert rebuild(header) == f"run 'vslam-features models build {words.format(path)}'"


def test_what_differs_from_this_machine_is_told_with_both_values():
    assert machine_differences(FACTS, ORIN, "10.3.0") == []
    here = Gpu(1, "NVIDIA A100", "8.0", "12.4", "12.4", 40_000)
    assert machine_differences(FACTS, here, "10.13.3.9") == [
        "GPU NVIDIA A100, was NVIDIA Orin",
        "compute capability 8.0, was 8.7",
        "driver 12.4, was 12.6",
        "TensorRT 10.13.3.9, was 10.3.0",
    ]
