"""Weights of PyTorch checkpoints: right values, and nothing but values whatever a file says.

The files are written here opcode by opcode, so that no PyTorch is needed; ``test/export/test_weights_torch.py``
compares with ``torch.load`` on the published weights.
"""

import io
import os
import pickle
import struct
import tracemalloc
import zipfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vslam_features.errors import WeightsError
from vslam_features.networks.weights import read_tensors

ORDERED_DICT = b"ccollections\nOrderedDict\n"
REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n"
TYPES = {"f4": "FloatStorage", "f8": "DoubleStorage", "f2": "HalfStorage", "i8": "LongStorage", "i4": "IntStorage"}
TYPES |= {
    "i2": "ShortStorage",
    "i1": "CharStorage",
    "u1": "ByteStorage",
    "b1": "BoolStorage",
    "c8": "ComplexFloatStorage",
}
KERNEL = np.arange(24, dtype=np.float32).reshape(2, 3, 4) / 7
COUNT = np.array(5, dtype=np.int64)


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def number(value: int) -> bytes:
    return b"\x8a\x08" + struct.pack("<q", value)


def group(*items: bytes) -> bytes:
    return b"(" + b"".join(items) + b"t"


def mapping(**entries: bytes) -> bytes:
    return ORDERED_DICT + b")R(" + b"".join(text(k) + v for k, v in entries.items()) + b"u"


def tensor(key, numel, kind, shape, strides, offset=0, view=b"") -> bytes:
    storage = group(text("storage"), b"ctorch\n" + kind.encode() + b"\n", text(key), text("cpu"), number(numel), view)
    extents = [group(*map(number, shape)), group(*map(number, strides))]
    return REBUILD + group(storage + b"Q", number(offset), *extents, b"\x89", ORDERED_DICT + b")R") + b"R"


def dense(key: str, array: np.ndarray, view=b"") -> bytes:
    strides = [s // array.itemsize for s in array.strides]
    return tensor(key, array.size, TYPES[array.dtype.str[1:]], array.shape, strides, view=view)


def stream(tree: bytes) -> bytes:
    return b"\x80\x02" + tree + b"."


def zipped(tree: bytes, storages: dict[str, bytes] | None = None, **members) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", members.pop("compression", zipfile.ZIP_STORED)) as archive:
        archive.writestr("archive/data.pkl", tree)
        for name, content in members.items():
            archive.writestr(f"archive/{name}", content)
        for key, content in (storages or {}).items():
            archive.writestr(f"archive/data/{key}", content)
        archive.writestr("archive/version", "3\n")
    return buffer.getvalue()


def legacy(tree: bytes, keys: list[str], storages: bytes, little: bytes = b"\x88") -> bytes:
    head = stream(b"\x8a\x0a" + (0x1950A86A20F9469CFC6C).to_bytes(10, "little")) + stream(number(1001))
    machine = stream(b"}(" + text("little_endian") + little + b"u")
    return head + machine + stream(tree) + stream(b"](" + b"".join(map(text, keys)) + b"e") + storages


def two_tensors(view=b"") -> bytes:
    return mapping(kernel=dense("0", KERNEL, view), count=dense("1", COUNT, view))


TWO_ZIPPED = zipped(stream(two_tensors()), {"0": KERNEL.tobytes(), "1": COUNT.tobytes()})
TWO_STORAGES = struct.pack("<q", 24) + KERNEL.tobytes() + struct.pack("<q", 1) + COUNT.tobytes()
TWO_LEGACY = legacy(two_tensors(view=b"N"), ["0", "1"], TWO_STORAGES)


@pytest.fixture
def load(tmp_path):
    def read(content: bytes) -> dict[str, np.ndarray]:
        path = tmp_path / "net.pth"
        path.write_bytes(content)
        return read_tensors(path)

    return read


def assert_two(tensors):
    assert list(tensors) == ["kernel", "count"]
    for name, expected in (("kernel", KERNEL), ("count", COUNT)):
        assert tensors[name].dtype == expected.dtype and tensors[name].shape == expected.shape
        np.testing.assert_array_equal(tensors[name], expected)


@pytest.mark.parametrize("content", [TWO_ZIPPED, TWO_LEGACY], ids=["zip", "legacy"])
def test_a_state_dict_gives_its_arrays(load, content):
    tensors = load(content)
    assert_two(tensors)
    assert all(a.flags.writeable and a.flags.c_contiguous for a in tensors.values())


@pytest.mark.parametrize("dtype", sorted(TYPES))
@pytest.mark.parametrize("order", ["little", "big"])
def test_every_type_in_either_byte_order(load, dtype, order):
    values = np.array([0, 1, 1, 0, 100][: 4 if dtype == "b1" else 5], dtype)
    stored = values.astype(values.dtype.newbyteorder("<" if order == "little" else ">")).tobytes()
    got = load(zipped(stream(mapping(x=dense("0", values))), {"0": stored}, byteorder=order))["x"]
    assert got.dtype == np.dtype(dtype) and got.dtype.isnative
    np.testing.assert_array_equal(got, values)


def test_bfloat16_becomes_float32(load):
    # Sign, 8 bits of exponent, 7 of mantissa: 1, -2, 3.140625, infinity.
    halves = struct.pack("<4H", 0x3F80, 0xC000, 0x4049, 0x7F80)
    got = load(zipped(stream(mapping(x=tensor("0", 4, "BFloat16Storage", [4], [1]))), {"0": halves}))["x"]
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, np.float32([1, -2, 3.140625, np.inf]))


def test_strides_offsets_and_shared_storages(load):
    flat = np.arange(24, dtype=np.float32)
    tree = mapping(
        transposed=tensor("0", 24, "FloatStorage", [4, 6], [1, 4]),
        part=tensor("0", 24, "FloatStorage", [2, 3], [12, 2], offset=5),
        expanded=tensor("0", 24, "FloatStorage", [3, 2], [0, 1], offset=22),
        empty=tensor("0", 24, "FloatStorage", [0, 5], [5, 1], offset=24),
    )
    got = load(zipped(stream(tree), {"0": flat.tobytes()}))
    np.testing.assert_array_equal(got["transposed"], flat.reshape(6, 4).T)
    np.testing.assert_array_equal(got["part"], [[5, 7, 9], [17, 19, 21]])
    np.testing.assert_array_equal(got["expanded"], [[22, 23]] * 3)
    assert got["empty"].shape == (0, 5)
    got["transposed"][:] = -1
    assert got["part"][0, 0] == 5, "tensors of one storage do not share memory"


def test_the_state_dict_of_a_checkpoint_is_taken(load):
    storages = {"0": KERNEL.tobytes(), "1": COUNT.tobytes()}
    assert_two(load(zipped(stream(mapping(epoch=number(3), state_dict=two_tensors())), storages)))
    assert_two(load(zipped(stream(mapping(extractor=two_tensors(), loss=b"N")), storages)))
    other = mapping(kernel=dense("0", KERNEL))
    assert_two(load(zipped(stream(mapping(ema=other, model=two_tensors())), storages)))
    with pytest.raises(WeightsError, match="2 of its entries are state dicts, expected one; it has ema, student"):
        load(zipped(stream(mapping(ema=other, student=other)), storages))


@pytest.mark.parametrize(
    "tree, message",
    [
        (mapping(kernel=dense("0", KERNEL), epoch=number(3)), r"mixed with other entries \(epoch\)"),
        (mapping(), "expected one; it has nothing"),
        (number(3), "holds a int, expected a dict"),
        (mapping(x=dense("../../etc/passwd", KERNEL)), "no member 'archive/data/../../etc/passwd'"),
        (mapping(x=tensor("0", 23, "FloatStorage", [23], [1])), "has 96 bytes, expected 23 x 4"),
        (mapping(x=tensor("0", 24, "FloatStorage", [25], [1])), "does not lie within its storage of 24"),
        (mapping(x=tensor("0", 24, "FloatStorage", [5, 5], [5, 1])), "does not lie within"),
        (mapping(x=tensor("0", 24, "FloatStorage", [4], [1], offset=21)), "does not lie within"),
        (mapping(x=tensor("0", 24, "FloatStorage", [2], [-1], offset=1)), "no counts"),
        (mapping(x=tensor("0", 24, "FloatStorage", [2], [1], offset=-1)), "no counts"),
        (mapping(x=tensor("0", 24, "FloatStorage", [2, 3], [3])), "no counts"),
        (mapping(x=tensor("0", 24, "FloatStorage", [0, 1 << 40, 1 << 40], [0, 0, 0])), "has shape"),
        (mapping(x=tensor("0", 24, "QInt8Storage", [24], [1])), "'torch.QInt8Storage'"),
        (mapping(x=tensor("0", 24, "FloatStorage", [24], [1], view=group(text("1"), number(0)))), "before 0.4"),
    ],
)
def test_what_is_no_state_dict_is_refused(load, tmp_path, tree, message):
    with pytest.raises(WeightsError, match=message) as caught:
        load(zipped(stream(tree), {"0": KERNEL.tobytes()}))
    assert str(tmp_path / "net.pth") in str(caught.value)


class Calls:
    """Pickles as a call of ``function`` with ``arguments``."""

    def __init__(self, function, *arguments):
        self.made = function, arguments

    def __reduce__(self):
        return self.made


def attacks(marker):
    command = f"touch {marker}"
    python = f"open({str(marker)!r}, 'w')"
    yield "system", Calls(os.system, command)
    yield "builtins.eval", Calls(eval, python)
    yield "builtins.exec", Calls(exec, python)
    yield "builtins.getattr", Calls(getattr, Calls(__import__, "os"), "system")
    yield "builtins.__import__", Calls(__import__, "antigravity")
    yield "pickle.loads", Calls(pickle.loads, pickle.dumps(Calls(os.system, command)))


@pytest.mark.parametrize("index", range(6))
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_code_in_a_pickle_is_named_and_not_run(load, tmp_path, index, protocol):
    marker = tmp_path / "was_here"
    name, attack = list(attacks(marker))[index]
    if index < 2:
        pickle.loads(pickle.dumps(attack, protocol))
        assert marker.exists(), "the attack works where pickles are loaded"
        marker.unlink()
    for content in (
        zipped(pickle.dumps({"x": attack}, protocol)),
        legacy(pickle.dumps(attack, protocol)[:-1], [], b""),
    ):
        with pytest.raises(WeightsError, match="refused|no state dict needs") as caught:
            load(content)
        if protocol >= 2 and index != 5:
            assert name.replace("builtins", "" if protocol < 3 else "builtins").lstrip(".") in str(caught.value)
    assert not marker.exists()


@pytest.mark.parametrize(
    "tree, message",
    [
        (b"(S'touch x'\nios\nsystem\n", "opcode"),  # INST
        (b"(cos\nsystem\nX\x01\x00\x00\x00xo", "os.system"),  # OBJ
        (b"\x82\x01", "opcode EXT1"),
        (REBUILD + b")\x81", "opcode NEWOBJ"),
        (REBUILD + b"}b", "sets attributes"),
        (b"ctorch\nFloatStorage\n)R", "calls torch.FloatStorage"),
        (ORDERED_DICT + group(text("x")) + b"R", "OrderedDict with arguments"),
        (b"}(" + group(text("a")) + text("b") + b"u", "a key is a tuple"),
        (group(text("module"), text("net"), text("net.py"), text("code")) + b"Q", "other than a storage"),
        (b"R", "damaged"),
        (b"t", "damaged"),
        (b"h\x07", "damaged"),
        (b"\x8d" + struct.pack("<Q", 1 << 62), "damaged"),
        (text("x" * (4 << 20)), "longer than 4 MiB"),
    ],
)
def test_opcodes_that_no_state_dict_needs_are_refused(load, tree, message):
    with pytest.raises(WeightsError, match=message):
        load(zipped(stream(tree)))


def test_a_small_file_cannot_ask_for_much_memory(load):
    wide = mapping(x=tensor("0", 24, "FloatStorage", [1 << 15, 1 << 15], [0, 0]))
    many = mapping(**{f"x{i}": tensor("0", 24, "FloatStorage", [1 << 13], [0]) for i in range(200)})
    for tree in (wide, many):
        content = zipped(stream(tree), {"0": KERNEL.tobytes()})
        tracemalloc.start()
        with pytest.raises(WeightsError, match="8 times the file's bytes"):
            load(content)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 10 * len(content) + (1 << 20)


def test_shared_containers_cost_no_time(load):
    # Each level holds the one below twice: 2^60 leaves for whoever walks it as a tree.
    lists = b"]q\x00" + b"".join(b"0](h" + bytes([i]) + b"h" + bytes([i]) + b"eq" + bytes([i + 1]) for i in range(60))
    lists = lists.replace(b"0]", b"]")
    with pytest.raises(WeightsError, match="holds a list"):
        load(zipped(stream(lists)))
    with pytest.raises(WeightsError, match="holds a list"):
        load(legacy(lists, [], b""))


def test_zip_archives_that_torch_does_not_write(load):
    tree, storages = stream(two_tensors()), {"0": KERNEL.tobytes(), "1": COUNT.tobytes()}
    with pytest.raises(WeightsError, match="compressed"):
        load(zipped(tree, storages, compression=zipfile.ZIP_DEFLATED))
    with pytest.raises(WeightsError, match="TorchScript"):
        load(zipped(tree, storages, **{"constants.pkl": b""}))
    with pytest.raises(WeightsError, match="byte order b'middle'"):
        load(zipped(tree, storages, byteorder="middle"))
    with pytest.raises(WeightsError, match="no member 'archive/data/1'"):
        load(zipped(tree, {"0": storages["0"]}))
    with pytest.warns(UserWarning, match="Duplicate"):
        twice = zipped(tree, storages, **{"data/0": b"other"})
    with pytest.raises(WeightsError, match="same name"):
        load(twice)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as wheel:
        wheel.writestr("package/__init__.py", "")
    with pytest.raises(WeightsError, match="torch.save did not write"):
        load(buffer.getvalue())


def test_two_members_on_the_same_bytes_are_refused(load):
    content = bytearray(zipped(stream(two_tensors()), {"0": b"a" * 4000, "1": b"b" * 4000, "2": b"c" * 4000}))
    # In the central directory: let member 0 claim what all three have.
    entry = content.index(b"archive/data/0", content.index(b"PK\x01\x02")) - 46
    struct.pack_into("<II", content, entry + 20, 12000, 12000)
    with pytest.raises(WeightsError, match="claim more bytes than the file"):
        load(bytes(content))


def test_legacy_files_that_are_not_whole(load):
    with pytest.raises(WeightsError, match="neither safetensors nor a PyTorch checkpoint; it begins with b'hello'"):
        load(b"hello")
    with pytest.raises(WeightsError, match="before 0.1.10"):
        load(b"\0" * 257 + b"ustar" + b"\0" * 250)
    with pytest.raises(WeightsError, match="a pickle, but no PyTorch checkpoint"):
        load(stream(number(1)) * 5)
    with pytest.raises(WeightsError, match="big-endian"):
        load(legacy(two_tensors(b"N"), ["0", "1"], TWO_STORAGES, little=b"\x89"))
    with pytest.raises(WeightsError, match="'7' belongs to no tensor"):
        load(legacy(two_tensors(b"N"), ["0", "7"], TWO_STORAGES))
    with pytest.raises(WeightsError, match="storage '1' of 1 numbers is not in the file"):
        load(legacy(two_tensors(b"N"), ["0"], TWO_STORAGES))
    with pytest.raises(WeightsError, match="list of storages is damaged"):
        load(legacy(two_tensors(b"N"), ["0", "0"], TWO_STORAGES))


def test_a_missing_or_huge_file_is_named(tmp_path):
    with open(tmp_path / "huge.pth", "wb") as file:
        file.truncate((1 << 30) + 1)  # sparse: takes no space
    with pytest.raises(WeightsError, match="huge.pth has 1073741825 bytes"):
        read_tensors(tmp_path / "huge.pth")
    with pytest.raises(WeightsError, match="nowhere.pth cannot be read: No such file"):
        read_tensors(tmp_path / "nowhere.pth")


@given(at=st.integers(0, len(TWO_ZIPPED) - 1), flip=st.integers(1, 255))
@settings(deadline=None, max_examples=400)
def test_a_changed_byte_of_a_zip_is_noticed_or_changes_nothing(tmp_path_factory, at, flip):
    content = bytearray(TWO_ZIPPED)
    content[at] ^= flip
    path = tmp_path_factory.getbasetemp() / "flipped.pth"
    path.write_bytes(content)
    try:
        assert_two(read_tensors(path))
    except WeightsError:
        pass


@given(at=st.integers(0, len(TWO_LEGACY) - 1), flip=st.integers(1, 255))
@settings(deadline=None, max_examples=400)
def test_a_changed_byte_of_a_legacy_file_is_an_error_or_a_value(tmp_path_factory, at, flip):
    content = bytearray(TWO_LEGACY)
    content[at] ^= flip
    path = tmp_path_factory.getbasetemp() / "flipped.pth"
    path.write_bytes(content)
    try:
        tensors = read_tensors(path)
    except WeightsError:
        return
    assert sum(a.nbytes for a in tensors.values()) <= 8 * len(content)
    if at < len(TWO_LEGACY) - len(TWO_STORAGES):
        # In the tree a flip can change names, types and strides, not the amount of numbers there are.
        assert all(a.size <= 24 for a in tensors.values())


@pytest.mark.parametrize("content", [TWO_ZIPPED, TWO_LEGACY], ids=["zip", "legacy"])
def test_every_truncation_is_noticed(load, content):
    for length in [*range(0, len(content), 5), len(content) - 1]:
        with pytest.raises(WeightsError):
            load(content[:length])


SNIPPETS = [b"(", b"t", b"u", b"}", b"]", b")", b"e", b"a", b"s", b"R", b"b", b"Q", b"N", b"\x88", b"q\x00", b"h\x00"]
SNIPPETS += [b"\x85", b"\x86", b"\x87", b"\x94", b"\x93", text("storage"), text("0"), number(24), ORDERED_DICT, REBUILD]
SNIPPETS += [b"ctorch\nFloatStorage\n", b"ctorch._utils\n_rebuild_parameter\n", dense("0", KERNEL), two_tensors()]


@given(st.lists(st.sampled_from(SNIPPETS), max_size=40))
@settings(deadline=None, max_examples=400)
def test_any_pickle_gives_arrays_or_the_typed_error(tmp_path_factory, parts):
    path = tmp_path_factory.getbasetemp() / "random.pth"
    path.write_bytes(zipped(stream(b"".join(parts)), {"0": KERNEL.tobytes(), "1": COUNT.tobytes()}))
    try:
        tensors = read_tensors(path)
    except WeightsError:
        return
    assert tensors and all(isinstance(a, np.ndarray) for a in tensors.values())
