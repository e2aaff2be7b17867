"""Reading a map: which halves are numbers, descriptors in batches, one lock for a keyframe."""

import contextlib
import sqlite3

import numpy as np
import pytest

from vslam_features.errors import DataError, MapError
from vslam_features.maps import rows
from vslam_features.maps.arrays import finite
from vslam_features.maps.reader import MapReader
from vslam_features.maps.tables import FEATURES
from vslam_features.maps.writer import MapWriter
from vslam_features.types import Features, Keyframe, MapEntry, MapModels, ModelIdentity

MODELS = MapModels(ModelIdentity("features", "f", "0" * 64, "p"), ModelIdentity("global", "g", "1" * 64, "p"))
COUNT = 150  # more than two batches


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "a.vmap"
    with MapWriter(path, MODELS, create=True) as writer:
        for i in range(COUNT):
            descriptor = None if i % 3 == 0 else np.full(8, i, np.float16)
            features = Features(
                np.full((2, 2), i, np.float32), np.ones(2, np.float32), np.ones((2, 4), np.float16), (8, 8),
                MODELS.features,
            )  # fmt: skip
            writer.append(MapEntry(Keyframe(i, i, "camera", features, global_descriptor=descriptor)))
    return path


def test_each_half_is_judged_as_by_numpy():
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    for block in halves.reshape(-1, 64):
        assert finite(block) == np.isfinite(block).all()
    good = halves[np.isfinite(halves)]
    assert len(good) == 2 * 31 * 1024 and finite(good)


@pytest.mark.parametrize("size", [1, 32767, 32768, 32769, 65536, 100_000])
def test_one_bad_half_is_found_at_the_edges_of_blocks(size):
    array = np.full((size,), -65504, np.float16)
    assert finite(array)
    for i in {0, size - 1, min(size - 1, 32767), min(size - 1, 32768)}:
        for bad in (np.nan, np.inf, -np.inf):
            array[i] = bad
            assert not finite(array)
        array[i] = 1
    assert finite(array[:0]) and finite(array.reshape(1, size, 1)[:, ::-1])


def test_global_descriptors_come_in_order_over_all_batches(path):
    with MapReader(path) as reader:
        found = list(reader.global_descriptors())
    assert [i for i, _ in found] == [i for i in range(COUNT) if i % 3]
    assert all(d.dtype == np.float16 and (d == i).all() for i, d in found)


def test_a_writer_goes_on_between_two_batches_and_after_a_keyframe(path):
    with MapReader(path) as reader:
        some = reader.global_descriptors()
        next(some)
        reader.keyframe(3)
        with MapWriter(path, MODELS) as writer:
            writer._connection.execute("PRAGMA busy_timeout = 2000")  # a lock that is left behind fails soon
            kf = reader.keyframe(1)
            writer.append(MapEntry(Keyframe(COUNT, COUNT, "camera", kf.features)))
        assert len(list(some)) == COUNT * 2 // 3 - 1
        assert (reader.keyframe(COUNT).features.keypoints == 1).all()


def test_a_keyframe_that_cannot_be_read_leaves_no_lock(path):
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("UPDATE features SET descriptors_crc = 1 WHERE id = 5")
    with MapReader(path) as reader:
        for kf_id, error in ((5, MapError), (COUNT, IndexError)):
            with pytest.raises(error):
                reader.keyframe(kf_id)
            assert not reader._connection.in_transaction


@pytest.mark.parametrize("opens_blobs", [False, True])
def test_an_array_whose_row_is_gone_is_an_error(path, monkeypatch, opens_blobs):
    """A damaged tree lists such a row; with Python 3.10 it is looked for by other means than later."""
    monkeypatch.setattr(rows, "_OPENS_BLOBS", opens_blobs and rows._OPENS_BLOBS)
    with contextlib.closing(sqlite3.connect(path)) as db:
        row = rows.read(db, FEATURES, 5)
        assert row.array("descriptors") is not None
        db.execute("DELETE FROM features WHERE id = 5")
        with pytest.raises((DataError, sqlite3.Error)):
            row.array("descriptors")


def test_a_closed_reader_raises_a_map_error(path):
    reader = MapReader(path)
    reader.close()
    with pytest.raises(MapError):
        reader.keyframe(0)
    with pytest.raises(MapError):
        list(reader.global_descriptors())
