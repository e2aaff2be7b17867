"""What a file is by its bytes, and what an ONNX file says beside its graph, held against the onnx package."""

import json
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vslam_features.artifacts.file_kind import FileKind, identify, require_kind
from vslam_features.errors import ModelFileError
from vslam_features.runtimes.onnx_header import MAX_FIELD_BYTES, read_header, read_metadata

METADATA = {"vslam_features": json.dumps({"name": "net", "note": "ä" * 300}), "empty": ""}


def varint(value: int) -> bytes:
    out = b""
    while value > 0x7F:
        out, value = out + bytes([value & 0x7F | 0x80]), value >> 7
    return out + bytes([value])


def field(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


@pytest.fixture(scope="module")
def onnx_bytes() -> bytes:
    """A small model that the onnx package made, with two opsets and metadata."""
    onnx = pytest.importorskip("onnx")
    weights = onnx.numpy_helper.from_array(np.arange(2000, dtype=np.float32), "w")
    ends = [onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, [2000]) for n in "xy"]
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Add", ["x", "w"], ["y"])], "g", ends[:1], ends[1:], [weights]
    )
    opsets = [onnx.helper.make_opsetid("", 18), onnx.helper.make_opsetid("ai.onnx.ml", 3)]
    model = onnx.helper.make_model(
        graph, opset_imports=opsets, ir_version=8, producer_name="maker", producer_version="7"
    )
    onnx.helper.set_model_props(model, METADATA)
    return model.SerializeToString()


@pytest.fixture
def write(tmp_path):
    def to_file(content: bytes, name="net.onnx"):
        path = tmp_path / name
        path.write_bytes(content)
        return path

    return to_file


def test_header_of_a_model(write, onnx_bytes):
    header = read_header(write(onnx_bytes))
    assert header.metadata == METADATA
    assert header.opsets == {"": 18, "ai.onnx.ml": 3}
    assert (header.ir_version, header.producer) == (8, "maker 7")
    assert 8000 < header.graph_bytes < len(onnx_bytes)


def test_the_graph_is_not_read(tmp_path, onnx_bytes):
    # Sparse: were the graph read, this would need 3 GB of memory.
    begin = varint(1 << 3) + varint(8) + varint(7 << 3 | 2) + varint(3 << 30)
    path = tmp_path / "huge.onnx"
    with open(path, "wb") as file:
        file.write(begin)
        file.seek(len(begin) + (3 << 30))
        file.write(field(8, varint(2 << 3) + varint(18)) + field(14, field(1, b"key") + field(2, b"value")))
    assert read_metadata(path) == {"key": "value"}


def test_every_truncation_is_noticed_or_leaves_right_metadata(write, onnx_bytes):
    noticed = 0
    cuts = [*range(0, len(onnx_bytes) - 900, 97), *range(len(onnx_bytes) - 900, len(onnx_bytes))]
    for length in cuts:
        path = write(onnx_bytes[:length])
        try:
            metadata = read_metadata(path)
        except ModelFileError:
            noticed += 1
            assert identify(path).kind in (FileKind.CUT_ONNX, FileKind.EMPTY, FileKind.UNKNOWN)
        else:
            assert metadata.items() <= METADATA.items()
    assert noticed >= len(cuts) - 4, "only cuts between the fields after the graph are valid messages"


def test_a_cut_file_says_how_much_is_missing(write, onnx_bytes):
    path = write(onnx_bytes[:5000])
    end = len(onnx_bytes) - len(onnx_bytes.partition(b"ai.onnx.ml")[2])
    with pytest.raises(ModelFileError, match=r"has 5000 bytes, and its field 7 at byte \d+ asks for (\d+)") as caught:
        read_metadata(path)
    asked = int(str(caught.value).split("asks for ")[1].split(":")[0])
    assert 8000 < asked < end
    assert identify(path).kind is FileKind.CUT_ONNX
    with pytest.raises(ModelFileError, match="is an ONNX model that is cut short .*5000.*, expected an ONNX model"):
        require_kind(path, FileKind.ONNX)


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "no IR version and no graph and no opset"),
        (b"hello world", "begins no field"),
        (varint(1 << 3) + varint(8), "no graph and no opset"),
        (varint(1 << 3) * 2 + varint(1 << 3) + varint(9), "twice"),
        (varint(1 << 3) + b"\xff" * 12, "a number has no end"),
        (varint(9 << 3 | 2) + b"\0", "begins no field"),
        (field(14, b"\x0a\xff"), "damaged: a number has no end"),
        (field(14, b"\x0a\x05abc"), "damaged: 5 bytes asked for, 3 there"),
        (field(14, field(3, b"")), "damaged: it holds field 3"),
        (field(14, field(1, b"\xff")), "not UTF-8"),
        (field(14, b"\0" * (MAX_FIELD_BYTES + 1)), "which no model needs"),
    ],
)
def test_what_is_no_onnx_file_is_refused(write, content, message):
    path = write(content)
    with pytest.raises(ModelFileError, match=message) as caught:
        read_header(path)
    assert str(path) in str(caught.value)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"ab" * 32 + b"\nsize 6247949\n"
ENGINE = struct.pack("<I", 15) + b'{"name": "net"}' + b"ftrt" * 20


@pytest.mark.parametrize(
    "content, kind, detail",
    [
        (POINTER, FileKind.GIT_LFS_POINTER, "stands for 6247949 bytes, sha256:abab"),
        (b"\n<!DOCTYPE HTML>\n<html><title>Page not\n found</title>", FileKind.HTML, "titled 'Page not\\n found'"),
        (b"<html><body>x", FileKind.HTML, "without a title"),
        (b'<?xml version="1.0"?>\n<!DOCTYPE html>\n<html>', FileKind.HTML, "without a title"),
        (b'<?xml version="1.0"?>\n<net name="m" version="11">', FileKind.OPENVINO_XML, ""),
        (b'<?xml version="1.0"?><Error><Code>AccessDenied</Code>', FileKind.UNKNOWN, "markup that begins with"),
        (ENGINE, FileKind.TENSORRT_ENGINE, "model 'net'"),
        (ENGINE[:12], FileKind.UNKNOWN, "begins with"),
        (struct.pack("<I", 3) + b"{x}" + b"engine", FileKind.UNKNOWN, "begins with"),
        (b"PK\x03\x04rest", FileKind.ZIP, ""),
        (struct.pack("<Q", 0x3C02) + b"{}", FileKind.SAFETENSORS, ""),  # the length begins with "\x02<"
        (b"\x80\x02\x8a\x0a", FileKind.PICKLE, ""),
        (b"\x80", FileKind.UNKNOWN, ""),
        (b"", FileKind.EMPTY, "0 bytes"),
        (b"\x08", FileKind.UNKNOWN, ""),
    ],
)
def test_kinds(write, content, kind, detail):
    facts = identify(write(content))
    assert facts.kind is kind and facts.size == len(content)
    assert detail in facts.detail


def test_the_kind_of_a_model(write, onnx_bytes):
    path = write(onnx_bytes)
    assert identify(path).detail == "opset 18, maker 7"
    assert require_kind(path, FileKind.ZIP, FileKind.ONNX).kind is FileKind.ONNX


def test_the_wrong_file_is_explained(write, tmp_path):
    path = write(POINTER)
    with pytest.raises(
        ModelFileError, match="net.onnx .* is a Git LFS pointer .*git lfs pull.*expected an ONNX model or a"
    ):
        require_kind(path, FileKind.ONNX, FileKind.ZIP)
    with pytest.raises(ModelFileError, match="nowhere.onnx cannot be read: No such file"):
        require_kind(tmp_path / "nowhere.onnx", FileKind.ONNX)
    with pytest.raises(ModelFileError, match="cannot be read: Is a directory"):
        identify(tmp_path)


STARTS = [b"", b"\x08\x08", POINTER[:30], b"<", b"\x0f\0\0\0{", b"PK", b"\x80", field(14, field(1, b"k"))]


@given(st.sampled_from(STARTS), st.binary(max_size=300))
@settings(deadline=None, max_examples=500)
def test_any_bytes_give_a_kind(tmp_path_factory, start, rest):
    path = tmp_path_factory.getbasetemp() / "any"
    path.write_bytes(start + rest)
    facts = identify(path)
    assert facts.size == len(start + rest) and facts.kind in FileKind
    if facts.kind is not FileKind.ONNX:
        with pytest.raises(ModelFileError):
            require_kind(path, FileKind.ONNX)


@given(st.lists(st.tuples(st.sampled_from([1, 2, 7, 8, 14, 20, 3]), st.binary(max_size=20)), max_size=8))
@settings(deadline=None, max_examples=500)
def test_any_fields_give_a_header_or_the_typed_error(tmp_path_factory, fields):
    path = tmp_path_factory.getbasetemp() / "fields"
    path.write_bytes(b"\x08\x08" + b"".join(field(n, content) for n, content in fields))
    try:
        header = read_header(path)
    except ModelFileError:
        return
    assert header.graph_bytes == sum(len(c) for n, c in fields if n == 7)
