"""Pickles of arrays: the values that Python's own machine gives, and nothing but values whatever a pickle says."""

import copyreg
import io
import os
import pickle
import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from vslam_features.errors import MapFileError
from vslam_features.exchange import array_pickle
from vslam_features.exchange.array_pickle import MAX_BYTES, read_array_pickle

KEYFRAME = {
    "kpts": np.arange(20, dtype=np.float32).reshape(1, 10, 2),
    "descps": np.linspace(0, 1, 40, dtype=np.float32).reshape(1, 10, 4),
    "mask": np.array([True, False] * 5).reshape(1, 10, 1),
}
VALUES = {
    "a keyframe": KEYFRAME,
    "plain": [1, -2, 2**70, 1.5, True, None, "text", b"bytes", b"", (1, (2, (3, 4, 5, 6))), {"a": {}, 3: []}],
    "scalars": [np.float32(2.5), np.int64(-3), np.bool_(True), np.float16(0.5), np.uint8(7)],
    "orders": [np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.arange(10)[::3], np.arange(4, dtype=">f4")],
    "empty": [np.empty((0, 3), np.float32), np.array(5.0), np.empty((2, 0), np.int8)],
    "dtypes": [np.dtype("f4"), np.dtype(">i2"), np.dtype(bool)],
    "the same twice": [KEYFRAME["kpts"]] * 2,
}


def assert_same(found, expected):
    assert type(found) is type(expected)
    if isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype and found.shape == expected.shape
        np.testing.assert_array_equal(found, expected)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for a, b in zip(found, expected):
            assert_same(a, b)
    else:
        assert found == expected


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("name", VALUES)
def test_values_are_those_of_pythons_own_machine(name, protocol):
    data = pickle.dumps(VALUES[name], protocol)
    assert_same(read_array_pickle(data), pickle.loads(data))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("written", ["numpy.core", "numpy._core"])
def test_pickles_of_numpy_1_and_2_are_read_by_either(written, protocol):
    data = pickle.dumps(KEYFRAME, protocol)
    for module in ("multiarray", "numeric"):
        for known in ("numpy.core", "numpy._core"):
            old, new = f"{known}.{module}".encode(), f"{written}.{module}".encode()
            data = data.replace(bytes([len(old)]) + old, bytes([len(new)]) + new)  # with its length: protocol 4 on
            data = data.replace(b"c" + old, b"c" + new)
    assert written.encode() + b"." in data
    assert_same(read_array_pickle(data), KEYFRAME)


@given(arrays(st.sampled_from(["f2", "f4", "f8", "i1", "u2", "i4", "u8", "?"]), array_shapes(min_dims=0, min_side=0)))
def test_any_array_comes_back(array):
    for protocol in (2, 3, 4, 5):
        assert_same(read_array_pickle(pickle.dumps(array, protocol)), array)


class Evil:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


class WithState:
    def __setstate__(self, state):
        raise AssertionError("it was run")


class Subclass(np.ndarray):
    pass


ran = []


def note(*arguments):
    ran.append(arguments)
    return {}


ATTACKS = {
    "os.system": Evil(os.system, "true"),
    "eval": Evil(eval, "1"),
    "our own function": Evil(note, 1),
    "a module of numpy": Evil(np.save, "/nowhere", 1),
    "getattr": Evil(getattr, "a", "upper"),
    "an object with a state": WithState(),
    "a subclass of arrays": np.arange(3).view(Subclass),
    "an array of objects": np.array([Evil(note, 2)], dtype=object),
    "an array of plain objects": np.array([1, "a"], dtype=object),
    "a structured array": np.zeros(2, [("a", "f4"), ("b", "i4")]),
    "strings": np.array(["a", "b"]),
    "dates": np.array(["2026-01-01"], "datetime64[D]"),
    "complex": np.array([1j]),
    "a set": {1, 2},
    "a class": int,
    "nested": {"kpts": [(1, {"x": Evil(note, 3)})]},
}


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("name", ATTACKS)
def test_nothing_else_is_admitted_and_nothing_is_run(name, protocol):
    before = len(ran)
    with pytest.raises(MapFileError):
        read_array_pickle(pickle.dumps(ATTACKS[name], protocol))
    assert len(ran) == before


@pytest.mark.parametrize("protocol", [2, 4])
def test_the_error_names_what_was_asked_for(protocol):
    with pytest.raises(MapFileError, match=r"'(posix|nt)\.system'.*nothing was run"):
        read_array_pickle(pickle.dumps({"a": ATTACKS["os.system"]}, protocol))


@pytest.mark.parametrize("protocol", [0, 1])
def test_protocols_that_nobody_writes_since_python_3_are_refused(protocol):
    with pytest.raises(MapFileError, match="holds the opcode"):
        read_array_pickle(pickle.dumps(KEYFRAME, protocol))


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


ARRAY = b"cnumpy.core.multiarray\n_reconstruct\n"
NDARRAY = b"cnumpy\nndarray\n"
DTYPE = b"cnumpy\ndtype\n"
FLOAT = DTYPE + b"(" + text("f4") + b"\x89\x88tR"
FLOAT_STATE = b"(K\x03" + text("<") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
EMPTY_ARRAY = ARRAY + b"(" + NDARRAY + b"K\x00\x85C\x01btR"


def state(shape=b"K\x02\x85", dtype=FLOAT + FLOAT_STATE, data=b"C\x08" + bytes(8), fortran=b"\x89", version=b"K\x01"):
    return b"(" + version + shape + dtype + fortran + data + b"tb"


def test_the_handmade_array_is_one():
    np.testing.assert_array_equal(read_array_pickle(b"\x80\x03" + EMPTY_ARRAY + state() + b"."), np.zeros(2, "f4"))


# Each level is twice the one before, and in memory once.
DOUBLED = b")\x94" + b"".join(b"h" + bytes([i]) + b"h" + bytes([i]) + b"\x86\x94" for i in range(60))
LIES = {
    "a shape without end": DOUBLED + EMPTY_ARRAY + state(shape=b"h\x3c"),
    "a dtype without end": DOUBLED + DTYPE + b"(h\x3c\x89\x88tR",
    "an order without end": DOUBLED + FLOAT + FLOAT_STATE.replace(text("<"), b"h\x3c"),
    "too few bytes": EMPTY_ARRAY + state(shape=b"K\x03\x85"),
    "too many bytes": EMPTY_ARRAY + state(shape=b"K\x01\x85"),
    "a negative size": EMPTY_ARRAY + state(shape=b"J\xff\xff\xff\xffJ\xfe\xff\xff\xff\x86"),
    "an absurd size": EMPTY_ARRAY + state(shape=b"\x8a\x08" + struct.pack("<q", 2**62) + b"\x85"),
    "absurd sizes whose product overflows to 8": EMPTY_ARRAY
    + state(shape=b"\x8a\x09" + (2**63).to_bytes(9, "little") + b"K\x04\x86"),
    "a float as a size": EMPTY_ARRAY + state(shape=b"G" + struct.pack(">d", 2.0) + b"\x85"),
    "a list as a shape": EMPTY_ARRAY + state(shape=b"]K\x02a"),
    "data as text": EMPTY_ARRAY + state(data=text("12345678")),
    "data as a list": EMPTY_ARRAY + state(data=b"](K\x01K\x02e"),
    "no dtype": EMPTY_ARRAY + state(dtype=b"N"),
    "a dtype by name": EMPTY_ARRAY + state(dtype=text("f4")),
    "objects": EMPTY_ARRAY + state(dtype=DTYPE + b"(" + text("O8") + b"\x89\x88tR", data=b"](K\x01K\x02e"),
    "void": EMPTY_ARRAY + state(dtype=DTYPE + b"(" + text("V4") + b"\x89\x88tR"),
    "a subarray": EMPTY_ARRAY + state(dtype=DTYPE + b"(" + text("(2,)f4") + b"\x89\x88tR"),
    "a dtype with fields": EMPTY_ARRAY + state(dtype=FLOAT + FLOAT_STATE.replace(b"NNN", b"N" + text("a") + b"\x85N")),
    "another version": EMPTY_ARRAY + state(version=b"K\x07"),
    "a state that is set twice": EMPTY_ARRAY + state() + state(),
    "a state of another length": EMPTY_ARRAY + b"(K\x01tb",
    "another class": ARRAY + b"(" + DTYPE + b"K\x00\x85C\x01btR",
    "no arguments": ARRAY + b")R",
    "a global as a value": NDARRAY,
    "a global in a list": b"]" + NDARRAY + b"a",
    "a function as a value": ARRAY,
    "attributes of a dict": b"}}" + text("x") + b"K\x01sb",
    "attributes by slots": b"]N}" + text("x") + b"K\x01s\x86b",
    "a call of a number": b"K\x01)R",
    "an extension by number": b"\x82\x01",
    "an extension of two bytes": b"\x83\x01\x00",
    "an extension of four bytes": b"\x84\x01\x00\x00\x00",
    "a persistent id": text("storage") + b"Q",
    "a persistent id in text": b"Pabc\n",
    "an object": NDARRAY + b")\x81",
    "an object with names": NDARRAY + b")}\x92",
    "an instance": b"(inumpy\nndarray\n",
    "an instance of a popped class": b"(" + NDARRAY + b"o",
    "a buffer from outside": b"\x97",
    "a buffer that is read-only": b"C\x01a\x98",
    "a key that is a list": b"}]K\x01s",
    "a key that is a tuple": b"}K\x01\x85K\x01s",
    "an integer key of many bits": b"}\x8a\x0a" + b"\x01" * 10 + b"K\x01s",
    "a memory that is not there": b"h\x07",
    "an empty stack": b"",
    "no mark": b"t",
    "a text longer than the file": b"X\xff\xff\xff\xffabc",
    "bytes longer than the file": b"\x8e" + struct.pack("<Q", 2**62) + b"abc",
    "bytes that can change, longer than the file": b"\x96" + struct.pack("<Q", 2**40) + b"abc",
    "a number longer than the file": b"\x8b\xff\xff\xff\x7f\x01",
    "a negative length": b"\x8b\xff\xff\xff\xff\x01",
    "text that is none": b"X\x02\x00\x00\x00\xff\xfe",
    "a codec": b"c_codecs\nencode\n" + text("abc") + text("rot13") + b"\x86R",
    "bytes of a list": b"c__builtin__\nbytes\n]\x85R",
}


@pytest.mark.parametrize("name", LIES)
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_lies_are_refused(name, protocol):
    copyreg.add_extension("os", "system", 1)
    try:
        with pytest.raises(MapFileError, match="its pickle"):
            read_array_pickle(bytes([0x80, protocol]) + LIES[name] + b".")
    finally:
        copyreg.remove_extension("os", "system", 1)


def test_no_length_that_a_pickle_claims_is_allocated():
    tracemalloc.start()
    try:
        for lie in LIES.values():
            with pytest.raises(MapFileError):
                read_array_pickle(b"\x80\x04" + lie + b".")
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


BOMBS = {
    "lists": b"\x80\x04" + b"]" * 200_000,
    "nested tuples": b"\x80\x04)" + b"\x85" * 200_000 + b".",
    "dicts": b"\x80\x04(" + b"}" * 200_000 + b"t.",
    "marks": b"\x80\x04" + b"(" * 200_000,
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_costs_little(name, monkeypatch):
    monkeypatch.setattr(array_pickle._ArrayMachine, "max_steps", 100_000)  # a tenth, for the time that it takes
    tracemalloc.start()
    try:
        with pytest.raises(MapFileError, match="opcodes"):
            read_array_pickle(BOMBS[name])
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()


def test_shared_values_that_unfold_to_billions_are_no_work():
    value = read_array_pickle(b"\x80\x04" + DOUBLED + b".")
    assert isinstance(value, tuple) and len(value) == 2


def test_over_64_mib_is_refused():
    with pytest.raises(MapFileError, match="over 64 MiB"):
        read_array_pickle(bytes(MAX_BYTES + 1))


def test_a_dict_in_an_array_is_admitted_only_where_it_is_asked_for():
    buffer = io.BytesIO()
    np.save(buffer, {5: np.eye(4)}, allow_pickle=True)
    data = buffer.getvalue()
    data = data[data.index(b"\n") + 1 :]
    found = read_array_pickle(data, single_object=True)
    assert found.shape == ()
    np.testing.assert_array_equal(found.item()[5], np.eye(4))
    with pytest.raises(MapFileError):
        read_array_pickle(data)
    hidden = pickle.dumps(np.array(Evil(note, 4), dtype=object))
    with pytest.raises(MapFileError, match="note"):
        read_array_pickle(hidden, single_object=True)


@settings(max_examples=300)
@given(st.data(), st.sampled_from([2, 3, 4, 5]))
def test_damage_is_an_error_or_plain_values(data, protocol):
    content = bytearray(pickle.dumps(KEYFRAME, protocol))
    for _ in range(data.draw(st.integers(0, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.one_of(st.just(len(content)), st.integers(0, len(content))))
    try:
        value = read_array_pickle(bytes(content[:cut]))
    except MapFileError:
        return
    assert_plain(value)


@settings(max_examples=300)
@given(st.binary(max_size=60))
def test_any_bytes_are_an_error_or_plain_values(content):
    try:
        assert_plain(read_array_pickle(b"\x80\x04" + content))
    except MapFileError:
        pass


def assert_plain(value):
    if isinstance(value, dict):
        for key, entry in value.items():
            assert_plain(key)
            assert_plain(entry)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            assert_plain(entry)
    else:
        plain = (np.generic, np.dtype, str, bytes, bytearray, bool, int, float, type(None))
        assert isinstance(value, plain) or (type(value) is np.ndarray and value.dtype.kind in "fiub")
