"""Maps of tinynav, written here as its ``TinyNavDB`` writes them."""

import dbm.dumb
import hashlib
import importlib
import os
import pickle
import shelve
import shutil
import sqlite3
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from helpers import rotation
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vslam_features.errors import MapError, MapFileError
from vslam_features.exchange.legacy import import_legacy
from vslam_features.exchange.shelf import COPY_COMMAND, open_shelf
from vslam_features.maps.reader import MapReader
from vslam_features.types import ModelIdentity

STAMPS = [1_760_000_000_123_456_789, 1_760_000_001_000_000_001, 999_999_999]
SIZE = (848, 480)
K = np.array([[420.0, 0, 423.5], [0, 421.0, 239.5], [0, 0, 1]])
SUPERPOINT = ModelIdentity("features", "superpoint", "ab" * 32, "grey")


def record(seed: int, n: int = 6, half: bool = True, **changes) -> dict:
    """What SuperPointTRT returns: batched, the last two rows are filling, which the mask tells."""
    rng = np.random.default_rng(seed)
    descriptors = rng.normal(size=(1, n, 256)).astype(np.float16 if half else np.float64).astype(np.float32)
    mask = np.ones((1, n, 1), bool)
    mask[0, -2:] = False
    keypoints = rng.uniform(0, (847, 479), (1, n, 2)).astype(np.float32)
    scores = rng.uniform(size=(1, n)).astype(np.float32)
    return {"kpts": keypoints, "scores": scores, "descps": descriptors, "mask": mask} | changes


def shelf(name, entries: dict, protocol: int = 4) -> None:
    with shelve.Shelf(dbm.dumb.open(str(name), "n"), protocol=protocol) as file:
        for key, value in entries.items():
            file[str(key)] = value


def pose(i: int) -> np.ndarray:
    T = np.eye(4)
    T[:3, :3], T[:3, 3] = rotation((10 * i, 5, 0)), (i, 0.5, 0.1)
    return T


def write(folder, records=None, protocol: int = 4, **options):
    """A whole map; ``images`` instead of depths, as older versions had."""
    folder.mkdir(exist_ok=True)
    records = {t: record(i) for i, t in enumerate(STAMPS)} if records is None else records
    shelf(folder / "features", records, protocol)
    embeddings = {t: np.random.default_rng(t % 99).normal(size=768).astype(np.float32) for t in records}
    shelf(folder / "embeddings", embeddings, protocol)
    if options.get("images"):
        shelf(folder / "infra1_images", {t: np.full(SIZE[::-1], 7, np.uint8) for t in records}, protocol)
    else:
        shelf(folder / "depths", {t: np.ones(SIZE[::-1], np.float32) for t in records}, protocol)
    np.save(folder / "poses.npy", {t: pose(i) for i, t in enumerate(records)}, allow_pickle=True)
    np.save(folder / "intrinsics.npy", K)
    return records, embeddings


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_map_comes_over_whole(tmp_path, protocol):
    records, embeddings = write(tmp_path / "old", protocol=protocol)
    seen = []
    target = tmp_path / "new.vmap"
    assert import_legacy(tmp_path / "old", target, model=SUPERPOINT, progress=lambda *a: seen.append(a)) == 3
    assert seen == [(1, 3), (2, 3), (3, 3)]
    with MapReader(target) as reader:
        assert reader.models.features == SUPERPOINT
        headers = reader.headers()
        assert [h.stamp_ns for h in headers] == sorted(STAMPS)
        for header in headers:
            old, kf = records[header.stamp_ns], reader.keyframe(header.id)
            kept = old["mask"].ravel()
            np.testing.assert_array_equal(kf.features.keypoints, old["kpts"][0][kept])
            np.testing.assert_array_equal(kf.features.scores, old["scores"][0][kept])
            assert kf.features.descriptors.dtype == np.float16
            np.testing.assert_array_equal(kf.features.descriptors.astype(np.float32), old["descps"][0][kept])
            place = embeddings[header.stamp_ns].astype(np.float64)  # maps hold them with unit length
            np.testing.assert_allclose(kf.global_descriptor, place / np.linalg.norm(place), rtol=1e-6)
            assert header.image_size == SIZE and header.frame_id == "camera"
            assert header.camera.rectified
            np.testing.assert_array_equal(header.camera.K, K)
            T = pose(STAMPS.index(header.stamp_ns))
            np.testing.assert_allclose(header.pose.R, T[:3, :3])
            np.testing.assert_allclose(header.pose.t, T[:3, 3])
            assert header.pose.frame_id == "world"


def test_descriptors_that_fp16_would_change_stay_fp32(tmp_path):
    records, _ = write(tmp_path / "old", {5: record(0, half=False), 6: record(1)})
    import_legacy(tmp_path / "old", tmp_path / "new.vmap")
    with MapReader(tmp_path / "new.vmap") as reader:
        first, second = (reader.keyframe(i).features.descriptors for i in (0, 1))
    assert (first.dtype, second.dtype) == (np.float32, np.float16)
    np.testing.assert_array_equal(first, records[5]["descps"][0][:4])


def test_images_give_thumbnails_and_the_size(tmp_path):
    write(tmp_path / "old", images=True)
    import_legacy(tmp_path / "old", tmp_path / "new.vmap")
    with MapReader(tmp_path / "new.vmap") as reader:
        assert reader.headers()[0].image_size == SIZE
        assert (reader.thumbnail(0) == 7).all()


DENSE = np.random.default_rng(0).normal(size=(64, 64, 256)).astype(np.float16).astype(np.float32)


@pytest.mark.parametrize(
    "stored",
    [DENSE.transpose(2, 0, 1)[None], DENSE[None], DENSE.reshape(1, 4096, 256), DENSE.astype(np.float16)],
    ids=["1CHW", "1HWC", "tokens", "HWC f16"],
)
def test_dense_descriptors_are_a_map(tmp_path, stored):
    write(tmp_path / "old", {5: record(0, descps=stored)})
    import_legacy(tmp_path / "old", tmp_path / "new.vmap")
    with MapReader(tmp_path / "new.vmap") as reader:
        features = reader.keyframe(0).features
    assert len(features) == 4 and features.descriptors.dtype == np.float16
    np.testing.assert_array_equal(features.descriptors.astype(np.float32), DENSE.transpose(2, 0, 1))
    assert os.path.getsize(tmp_path / "new.vmap") < 2.3 * 2**20


def test_without_an_identity_a_map_gets_one_of_its_own(tmp_path):
    for name, seed in (("a", 0), ("b", 1)):
        write(tmp_path / name, {5: record(seed)})
        import_legacy(tmp_path / name, tmp_path / f"{name}.vmap")
    import_legacy(tmp_path / "a", tmp_path / "again.vmap")
    found = {}
    for name in ("a", "b", "again"):
        with MapReader(tmp_path / f"{name}.vmap") as reader:
            found[name] = reader.models
    assert found["a"] == found["again"] != found["b"]
    assert found["a"].features.preprocessing == "imported" and found["a"].global_descriptor.role == "global"


def test_parts_that_are_missing_are_none(tmp_path):
    write(tmp_path / "old")
    for name in ("poses.npy", "intrinsics.npy", "embeddings.dat", "embeddings.dir", "embeddings.bak"):
        (tmp_path / "old" / name).unlink()
    import_legacy(tmp_path / "old" / "features.dat", tmp_path / "new.vmap")
    with MapReader(tmp_path / "new.vmap") as reader:
        kf = reader.keyframe(0)
        assert kf.pose is None and kf.camera is None and kf.global_descriptor is None
        assert reader.models.global_descriptor is None


def test_descriptors_are_shaped_as_those_of_the_models_that_are_claimed(tmp_path):
    write(tmp_path / "old")
    assert import_legacy(tmp_path / "old", tmp_path / "new.vmap", model=SUPERPOINT) == 3
    with MapReader(tmp_path / "new.vmap") as reader:
        like = reader.keyframe(0)
    assert import_legacy(tmp_path / "old", tmp_path / "again.vmap", model=SUPERPOINT, like=like) == 3
    other = replace(like, features=replace(like.features, descriptors=like.features.descriptors[:, :7]))
    with pytest.raises(MapFileError, match="descriptors are of length .*, those of the map whose models it names"):
        import_legacy(tmp_path / "old", tmp_path / "third.vmap", model=SUPERPOINT, like=other)
    other = replace(like, global_descriptor=like.global_descriptor[:5])
    with pytest.raises(MapFileError, match="has 768 numbers, that of the map whose models it names 5"):
        import_legacy(tmp_path / "old", tmp_path / "third.vmap", model=SUPERPOINT, like=other)
    assert not (tmp_path / "third.vmap").exists()


def test_the_size_of_the_images_must_come_from_somewhere(tmp_path):
    write(tmp_path / "old")
    for suffix in ("dat", "dir", "bak"):
        (tmp_path / "old" / f"depths.{suffix}").unlink()
    with pytest.raises(MapFileError, match="give image_size"):
        import_legacy(tmp_path / "old", tmp_path / "new.vmap")
    assert import_legacy(tmp_path / "old", tmp_path / "new.vmap", image_size=SIZE) == 3
    with pytest.raises(MapFileError, match="outside of an image of 64x48"):
        import_legacy(tmp_path / "old", tmp_path / "other.vmap", image_size=(64, 48))


class Evil:
    def __reduce__(self):
        return os.system, ("touch /tmp/never",)


def nan(array):
    array = array.copy()
    array[0, 0, 0] = np.nan
    return array


BAD = {
    "a pickle that runs something": ([Evil()], "asks for 'posix.system'"),
    "a list": ([1], "a list, expected a dict"),
    "no keypoints": ({"descps": np.zeros((1, 2, 4), "f4")}, "no array 'kpts'; it has descps"),
    "no descriptors": ({"kpts": np.zeros((1, 2, 2), "f4")}, "no array 'descps'"),
    "keypoints of three numbers": (record(0, kpts=np.zeros((1, 6, 3), "f4")), r"kpts: \(1, N, 2\)"),
    "whole keypoints": (record(0, kpts=np.zeros((1, 6, 2), "i4")), "kpts: floats"),
    "a batch of two": (record(0, kpts=np.zeros((2, 6, 2), "f4")), "2 axes were expected"),
    "descriptors of others": (record(0, descps=np.zeros((1, 5, 8), "f4")), "neither the descriptors of 6"),
    "a cube": (record(0, descps=np.zeros((8, 8, 8), "f4")), "neither"),
    "NaN descriptors": (record(0, descps=nan(record(0)["descps"])), "descps: not finite"),
    "NaN keypoints": (record(0, kpts=nan(record(0)["kpts"])), "kpts: not finite"),
    "a mask of another length": (record(0, mask=np.ones(5, bool)), "mask: 6 numbers"),
    "scores as text": (record(0, scores="high"), "scores: 6 numbers were expected, got str"),
    "shorter descriptors": (record(0, descps=np.zeros((1, 6, 128), "f4")), "descriptors are of length 128, those of"),
    "a dense map": (
        record(0, descps=np.zeros((1, 256, 4, 4), "f4")),
        r"dense \(256, 4, 4\), those of the first image of",
    ),
    "an array of objects": (record(0, scores=np.array([None] * 6)), "its pickle was refused"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_entry_is_named_and_nothing_is_left(tmp_path, name):
    value, message = BAD[name]
    write(tmp_path / "old", {5: record(0), 6: value})
    with pytest.raises(MapFileError, match=message) as caught:
        import_legacy(tmp_path / "old", tmp_path / "new.vmap")
    assert "features.dat, entry 6" in str(caught.value)
    assert os.listdir(tmp_path) == ["old"]


@pytest.mark.parametrize(
    "file, value, message",
    [
        ("poses", {5: np.zeros((4, 4))}, "entry 5: no rigid transform"),
        ("poses", {5: np.diag([1.0, 1, -1, 1])}, "no rigid transform"),
        ("poses", {5: np.full((4, 4), np.nan)}, "no rigid transform"),
        ("poses", {"5": np.eye(4)}, "a stamp with a"),
        ("poses", {5: Evil()}, "asks for 'posix.system'"),
        ("poses", np.eye(4), "a dict of stamps"),
        ("intrinsics", np.zeros((3, 3)), "focal lengths"),
        ("intrinsics", np.eye(4), "shape"),
        ("intrinsics", np.array([Evil()], dtype=object), "intrinsics.npy"),
    ],
)
def test_a_bad_npy_file_is_named(tmp_path, file, value, message):
    write(tmp_path / "old", {5: record(0)})
    np.save(tmp_path / "old" / file, value, allow_pickle=True)
    with pytest.raises(MapFileError, match=message) as caught:
        import_legacy(tmp_path / "old", tmp_path / "new.vmap")
    assert f"{file}.npy" in str(caught.value) and os.listdir(tmp_path) == ["old"]


def test_an_npy_file_that_claims_a_terabyte_is_refused(tmp_path):
    write(tmp_path / "old", {5: record(0)})
    path = tmp_path / "old" / "intrinsics.npy"
    path.write_bytes(path.read_bytes().replace(b"(3, 3), }    ", b"(3, 9999999),"))
    with pytest.raises(MapFileError, match="intrinsics.npy"):
        import_legacy(tmp_path / "old", tmp_path / "new.vmap")


def test_a_key_that_is_no_stamp_is_named(tmp_path):
    shelf(tmp_path / "features", {"vlad_centres": 1})
    with pytest.raises(MapFileError, match="'vlad_centres' is no stamp"):
        import_legacy(tmp_path, tmp_path / "new.vmap")


def test_no_shelf_and_an_empty_one(tmp_path):
    with pytest.raises(MapFileError, match="no shelf of this name"):
        import_legacy(tmp_path, tmp_path / "new.vmap")
    shelf(tmp_path / "features", {})
    with pytest.raises(MapFileError, match="the shelf is empty"):
        import_legacy(tmp_path, tmp_path / "new.vmap")


def test_an_existing_target_is_kept_unless_told(tmp_path):
    write(tmp_path / "old")
    target = tmp_path / "new.vmap"
    target.write_bytes(b"mine")
    with pytest.raises(MapError, match="there already"):
        import_legacy(tmp_path / "old", target)
    assert target.read_bytes() == b"mine"
    assert import_legacy(tmp_path / "old", target, overwrite=True) == 3
    assert sorted(os.listdir(tmp_path)) == ["new.vmap", "old"]


# -- formats of shelves ------------------------------------------------------------------


def test_a_shelf_of_sqlite_is_read_by_any_python(tmp_path):
    """As ``dbm.sqlite3`` of Python 3.13 writes them."""
    connection = sqlite3.connect(tmp_path / "features")
    connection.execute("CREATE TABLE Dict (key BLOB UNIQUE NOT NULL, value BLOB NOT NULL)")
    connection.execute("INSERT INTO Dict VALUES (CAST(? AS BLOB), ?)", ("17", pickle.dumps({"a": 1})))
    connection.commit()
    connection.close()
    with open_shelf(tmp_path / "features") as file:
        assert file.keys() == ["17"] and pickle.loads(file["17"]) == {"a": 1}
        assert "17" in file and "18" not in file


@pytest.mark.parametrize("kind", ["dbm.gnu", "dbm.ndbm", "dbm.dumb", "dbm.sqlite3"])
def test_a_shelf_of_each_format_that_is_here(tmp_path, kind):
    try:
        module = importlib.import_module(kind)
    except ImportError:
        pytest.skip(f"this Python has no {kind}")
    with shelve.Shelf(module.open(str(tmp_path / "features"), "n")) as file:
        file["17"], file["5"] = {"a": 1}, [2]
    with open_shelf(tmp_path / "features") as file:
        assert file.keys() == ["17", "5"] and pickle.loads(file["17"]) == {"a": 1}


@pytest.mark.parametrize("kind, name", [("dbm.ndbm", "features.db"), ("dbm.gnu", "features")])
def test_a_format_that_this_python_lacks_is_told_with_the_way_out(tmp_path, monkeypatch, kind, name):
    (tmp_path / name).write_bytes((0x13579ACE).to_bytes(4, "little") + bytes(60))
    monkeypatch.setitem(sys.modules, kind, None)
    with pytest.raises(MapFileError, match="with the Python that wrote the map") as caught:
        import_legacy(tmp_path, tmp_path / "new.vmap")
    assert kind in str(caught.value) and COPY_COMMAND in str(caught.value)


def test_the_way_out_works(tmp_path):
    """With a Python that has a C library for shelves, where this machine has one."""
    python = shutil.which("python3", path="/usr/bin")
    probe = (
        "import shelve, sys\nfor n in ('features', 'embeddings', 'depths'):\n s = shelve.open(n); s['7'] = n; s.close()"
    )
    if python is None or subprocess.run([python, "-c", probe], cwd=tmp_path, capture_output=True).returncode:
        pytest.skip("no Python of the system")
    command = COPY_COMMAND.replace("python3", python, 1)
    subprocess.run(command, shell=True, cwd=tmp_path, check=True, capture_output=True)
    for name in ("features", "embeddings", "depths"):
        with open_shelf(tmp_path / name) as file:
            assert pickle.loads(file["7"]) == name


@pytest.mark.parametrize(
    "line",
    ["'5', (0, 99999)", "'5', (999999, 1)", "'5', (0, 10), 7", "'5', (-1, 10)", "5", "'5', (0, 1e9)", "\x00\xff"],
)
def test_an_index_that_lies_is_named(tmp_path, line):
    shelf(tmp_path / "features", {5: record(0)})
    (tmp_path / "features.dir").write_text(line + "\n", encoding="latin-1")
    with pytest.raises(MapFileError, match="features.dir, line 1"):
        import_legacy(tmp_path, tmp_path / "new.vmap")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    write(folder, {5: record(0), 6: record(1)})
    return folder


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(["features.dat", "features.dir", "embeddings.dat", "poses.npy", "intrinsics.npy"]),
    st.floats(0, 1, exclude_max=True),
    st.integers(0, 255),
    st.booleans(),
)
def test_damage_is_an_error_or_a_map(small, tmp_path, name, place, byte, cut):
    folder, target = tmp_path / "damaged", tmp_path / "new.vmap"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(small, folder)
    content = bytearray((folder / name).read_bytes())
    at = int(place * len(content))
    if cut:
        del content[at:]
    else:
        content[at] = byte
    (folder / name).write_bytes(content)
    try:
        import_legacy(folder, target, overwrite=True)
    except MapError:
        return
    finally:
        assert set(os.listdir(tmp_path)) <= {"damaged", "new.vmap"}
    with MapReader(target) as reader:
        for header in reader.headers():
            reader.keyframe(header.id)


def test_names_of_files_of_a_shelf_are_taken_too(tmp_path):
    write(tmp_path / "old")
    for i, name in enumerate(("features", "features.dat", "features.dir")):
        assert import_legacy(tmp_path / "old" / name, tmp_path / f"{i}.vmap") == 3
    digests = {hashlib.sha256(pickle.dumps(content(tmp_path / f"{i}.vmap"))).hexdigest() for i in range(3)}
    assert len(digests) == 1


def content(path):
    with MapReader(path) as reader:
        keyframes = [reader.keyframe(h.id) for h in reader.headers()]
        return [(k.stamp_ns, k.features.descriptors.tobytes(), k.features.keypoints.tobytes()) for k in keyframes]
