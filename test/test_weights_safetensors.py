"""Weights of safetensors files: right values, and the typed error for what is none."""

import json
import struct
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vslam_features.artifacts.file_kind import FileKind, identify
from vslam_features.errors import WeightsError
from vslam_features.networks.weights import read_tensors

save = pytest.importorskip("safetensors.numpy").save

KERNEL = np.arange(24, dtype=np.float32).reshape(2, 3, 4) / 7
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"ab" * 32 + b"\nsize 914577660\n"


def written(header: dict | bytes, data: bytes = b"") -> bytes:
    """A file of the format's documentation: length of the header as u64, JSON header, data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


TWO = written(
    {"kernel": entry("F32", [2, 3, 4], 0, 96), "count": entry("I64", [], 96, 104)},
    KERNEL.tobytes() + struct.pack("<q", 5),
)


@pytest.fixture
def load(tmp_path):
    def load(content: bytes, name: str = "model.safetensors") -> dict[str, np.ndarray]:
        path = tmp_path / name
        path.write_bytes(content)
        return read_tensors(path)

    return load


def test_values_types_and_shapes_are_those_saved(load):
    types = "f8 f4 f2 i8 i4 i2 i1 u8 u4 u2 u1 c8".split()
    saved = {f"of.{t}": (np.arange(6) * 3 - (0 if t[0] == "u" else 4)).astype(t).reshape(2, 3) for t in types}
    saved |= {"flags": np.array([True, False, True]), "scalar": np.array(2.5, np.float32)}
    saved |= {"empty": np.zeros((0, 4), np.float32)}
    got = load(save(saved, metadata={"format": "pt"}))
    assert set(got) == set(saved)
    for name, value in saved.items():
        assert got[name].dtype == value.dtype and got[name].flags.c_contiguous and got[name].flags.writeable
        np.testing.assert_array_equal(got[name], value, strict=True)


def test_the_documented_layout_is_read(load):
    got = load(TWO)
    assert list(got) == ["count", "kernel"] and got["count"] == 5
    np.testing.assert_array_equal(got["kernel"], KERNEL, strict=True)


def test_bfloat16_becomes_float32(load):
    # Sign, eight bits of exponent, seven of mantissa: 1, -2.5, 2^-126, infinity.
    content = written({"x": entry("BF16", [2, 2], 0, 8)}, struct.pack("<4H", 0x3F80, 0xC020, 0x0080, 0x7F80))
    expected = np.array([[1, -2.5], [2.0**-126, np.inf]], np.float32)
    np.testing.assert_array_equal(load(content)["x"], expected, strict=True)


@pytest.mark.parametrize("length", [0x280, 0x23C, 0x208, 0x300])
def test_content_decides_not_the_name_nor_what_the_length_looks_like(load, tmp_path, length):
    """A length may begin as a pickle (80 02), as markup (3C, '<') or as an ONNX file (08) does."""
    header = json.dumps({"x": entry("F32", [2, 3, 4], 0, 96)}).encode().ljust(length)
    got = load(written(header, KERNEL.tobytes()), "weights.pth")
    np.testing.assert_array_equal(got["x"], KERNEL, strict=True)
    assert identify(tmp_path / "weights.pth").kind is FileKind.SAFETENSORS


@pytest.mark.parametrize(
    "content, message",
    [
        (written({"x": entry("F32", [2], 0, 4)}, b"1234"), "cut short or damaged"),
        (written({"x": entry("F32", [1], 0, 4)}, b"123"), "cut short or damaged"),
        (written({"x": entry("F32", [1], 0, 4)}, b"12345"), "cut short or damaged"),
        (written({"x": entry("F32", [1 << 62], 0, 4)}, b"1234"), "cut short or damaged"),
        (written({"x": entry("F32", [1], 0, 4), "y": entry("F32", [1], 0, 4)}, b"1234"), "cut short or damaged"),
        (written({"x": entry("F32", [1], 4, 0)}, b"1234"), "cut short or damaged"),
        (written({"x": entry("F32", [-1], 0, 4)}, b"1234"), "cut short or damaged"),
        (written({"x": entry("OBJECT", [1], 0, 4)}, b"1234"), "cut short or damaged"),
        (written({"x": {"shape": [1]}}, b"1234"), "cut short or damaged"),
        (written(b'{"x":' * 5000), "cut short or damaged"),
        (struct.pack("<Q", 5000) + b'{"x"', "cut short or damaged"),
        (written({"x": entry("F32", [0, 1 << 63], 0, 0)}), "tensor 'x' has shape"),
        (written({"x": entry("F8_E4M3", [4], 0, 4)}, b"1234"), "tensor 'x' is of type F8_E4M3; save it as F32"),
        (struct.pack("<Q", 1 << 60) + b"{}", "neither safetensors nor a PyTorch checkpoint"),
        (b"", "is empty .0 bytes; a download"),
        (POINTER, "is a Git LFS pointer .it stands for 914577660 bytes, .*'git lfs pull'.*expected a safetensors file"),
        (b"<!DOCTYPE html><title>Sign in</title>", "is a web page .titled 'Sign in'"),
    ],
)
def test_what_is_no_whole_file_is_said(load, content, message):
    with pytest.raises(WeightsError, match=f"model.safetensors .*{message}"):
        load(content)


def test_every_truncation_is_noticed(load):
    for length in range(len(TWO)):
        with pytest.raises(WeightsError, match="model.safetensors"):
            load(TWO[:length])


@given(at=st.integers(0, len(TWO) - 1), flip=st.integers(1, 255))
@settings(deadline=None, max_examples=400)
def test_a_changed_byte_is_an_error_or_other_numbers(tmp_path_factory, at, flip):
    content = bytearray(TWO)
    content[at] ^= flip
    path = tmp_path_factory.getbasetemp() / "flipped.safetensors"
    path.write_bytes(content)
    try:
        tensors = read_tensors(path)
    except WeightsError:
        return
    # bfloat16 made float32 takes twice its bytes in the file.
    assert 0 < sum(a.nbytes for a in tensors.values()) <= 2 * 104
    if at >= len(TWO) - 104:
        changed = [name for name, a in read_tensors_of(TWO, path).items() if a.tobytes() != tensors[name].tobytes()]
        assert len(changed) == 1 and set(tensors) == {"kernel", "count"}


def read_tensors_of(content: bytes, path) -> dict[str, np.ndarray]:
    path.write_bytes(content)
    return read_tensors(path)


NUMBERS = st.integers(-2, 1 << 65) | st.integers(0, 8)
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "F16", "BOOL", "I8", "F4", "F8_E5M2", "C64", "f32", ""]),
        "shape": st.lists(NUMBERS, max_size=3) | st.just("12"),
        "data_offsets": st.lists(NUMBERS, min_size=2, max_size=2),
    }
)
VALUES = ENTRIES | st.none() | st.lists(NUMBERS, max_size=2)


@given(st.dictionaries(st.text(max_size=4) | st.just("__metadata__"), VALUES, max_size=3), st.binary(max_size=16))
@settings(deadline=None, max_examples=300)
def test_any_header_gives_arrays_or_the_typed_error(tmp_path_factory, header, data):
    path = tmp_path_factory.getbasetemp() / "random.safetensors"
    path.write_bytes(written(header, data))
    try:
        tensors = read_tensors(path)
    except WeightsError:
        return
    assert all(isinstance(a, np.ndarray) for a in tensors.values())
    assert sum(a.nbytes for a in tensors.values()) <= 2 * len(data)


def test_without_the_library_the_extra_is_named(load, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(WeightsError, match=r"safetensors cannot be imported .*pip install 'vslam_features\[export\]'"):
        load(TWO)
