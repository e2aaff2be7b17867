"""A map is checked before it is used: rows, lengths and references, but no array's bytes."""

from __future__ import annotations

import contextlib
import sqlite3
import zlib

import numpy as np
import pytest
from map_damage import COUNT, map_bytes, rewrite
from power_cut.entries import MODELS

from vslam_features.errors import MapDamagedError
from vslam_features.maps.file_store import FileStore
from vslam_features.maps.keyframe_map import KeyframeMap


@pytest.fixture
def path(tmp_path):
    """A whole map."""
    file = tmp_path / "a.vmap"
    file.write_bytes(map_bytes())
    return file


def load(path, read_only: bool) -> int:
    """As a front-end does: keyframes of the map."""
    store = FileStore(path, MODELS, read_only=read_only)
    try:
        keyframes = KeyframeMap(store)
        list(keyframes.global_descriptors())
        keyframes.confirmed_loops()
        return len(keyframes)
    finally:
        store.close()


@pytest.mark.parametrize("read_only", [True, False])
def test_a_whole_map_opens(path, read_only):
    assert load(path, read_only) == COUNT


@pytest.mark.parametrize("read_only", [True, False])
@pytest.mark.parametrize(
    ("table", "row", "change", "told"),
    [
        ("features", 3, {"keypoints_shape": "7,2"}, "keypoints"),
        ("features", 3, {"model": 99}, "model 99"),
        ("global_descriptors", 2, {"descriptor_dtype": "float64"}, "descriptor"),
        ("matches", 5, {"reference": COUNT}, "refers to"),
        ("loops", 4, {"reference": -1}, "refers to"),
    ],
)
def test_lies_with_right_checksums_are_refused_with_table_and_row(path, table, row, change, told, read_only):
    rewrite(path, table, row, change, {})
    with pytest.raises(MapDamagedError) as caught:
        load(path, read_only)
    text = str(caught.value)
    assert str(path) in text and f"table {table}" in text and told in text and f"row {row}" in text


@pytest.mark.parametrize("table", ["features", "matches", "loops", "global_descriptors", "keyframes"])
def test_a_changed_value_without_its_checksum_is_refused(path, table):
    column = {"features": "pixel_scale", "keyframes": "stamp_ns"}.get(table, "id")
    with contextlib.closing(sqlite3.connect(path)) as db:
        last = db.execute(f"SELECT max(id) FROM {table}").fetchone()[0]
        db.execute(f"UPDATE {table} SET {column} = {column} + 1 WHERE id = ?", (last,))
        db.commit()
    with pytest.raises(MapDamagedError, match=f"table {table}"):
        load(path, read_only=True)


def test_bytes_of_arrays_are_checked_when_they_are_read_and_a_refused_map_has_no_writer(path):
    """Opening reads no descriptor, so that it takes no longer for a large map; a wrong one is told by name later."""
    with contextlib.closing(sqlite3.connect(path)) as db:
        blob = bytearray(db.execute("SELECT descriptors FROM features WHERE id = 7").fetchone()[0])
        blob[5] ^= 1
        db.execute("UPDATE features SET descriptors = ? WHERE id = 7", (bytes(blob),))
        db.commit()
    store = FileStore(path, MODELS, read_only=True)
    store.keyframe(6)
    for _ in range(2):  # not only the first time
        with pytest.raises(MapDamagedError, match="table features, row 7: descriptors: the checksum"):
            store.keyframe(7)
    store.close()


def test_values_that_are_not_finite_are_refused_though_their_checksum_is_right(path):
    with contextlib.closing(sqlite3.connect(path)) as db:
        dtype, shape, blob = db.execute(
            "SELECT descriptors_dtype, descriptors_shape, descriptors FROM features WHERE id = 7"
        ).fetchone()
    array = np.frombuffer(blob, dtype).copy().reshape([int(n) for n in shape.split(",")])
    array.flat[3] = np.nan if array.dtype.kind == "f" else 0
    if array.dtype.kind != "f":
        pytest.skip("descriptors of this keyframe are bits")
    assert zlib.crc32(array.tobytes()) != zlib.crc32(blob)
    rewrite(path, "features", 7, {}, {"descriptors": array})
    store = FileStore(path, MODELS, read_only=True)
    with pytest.raises(MapDamagedError, match="table features, row 7: descriptors: not finite"):
        store.keyframe(7)
    store.close()
