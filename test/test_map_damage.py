"""Damage to a map file, by accident or on purpose: an error that names file and table, or the undamaged result."""

import random
import tracemalloc

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from map_damage import map_bytes, pages, read_damaged, rewrite, structure

from vslam_features.errors import MapDamagedError
from vslam_features.maps.pages import PageFile
from vslam_features.maps.reader import MapReader
from vslam_features.maps.tables import FEATURES, GLOBAL_DESCRIPTORS, PAGE_SIZE
from vslam_features.maps.writer import MapWriter
from vslam_features.types import Features, Keyframe, MapEntry, MapModels, ModelIdentity

LONG = [pytest.mark.slow, pytest.mark.endurance, pytest.mark.timeout(900)]

# -- lies with right checksums -----------------------------------------------------------------

FLOATS = np.ones((5, 4), "<f4")
LIES = {
    "longer shape": ("features", {"descriptors_shape": "99,16"}, {}),
    "absurd shape": ("features", {"descriptors_shape": "999999999,64"}, {}),
    "more absurd": ("features", {"descriptors_shape": "9" * 60 + ",2"}, {}),
    "overflow": ("features", {"descriptors_shape": f"{2**62},4"}, {}),
    "negative": ("features", {"descriptors_shape": "-12,-16"}, {}),
    "no number": ("features", {"descriptors_shape": "12,,16"}, {}),
    "unicode digits": ("features", {"descriptors_shape": "1²,16"}, {}),
    "empty shape": ("features", {"descriptors_shape": ""}, {}),
    "too many axes": ("features", {"descriptors_shape": "1,1,1,12,16"}, {}),
    "other dtype": ("features", {"descriptors_dtype": "float16"}, {}),
    "pickle": ("features", {"descriptors_dtype": "object"}, {}),
    "no dtype": ("features", {"descriptors_dtype": "zlib"}, {}),
    "NaN": ("features", {}, {"descriptors": np.full((12, 16), np.nan, "<f4")}),
    "NaN halves": ("features", {"descriptors_dtype": "float16"}, {"descriptors": np.full((12, 16), np.nan, "<f2")}),
    "infinite keypoints": ("features", {}, {"keypoints": np.full((12, 2), np.inf, "<f4")}),
    "fewer keypoints": ("features", {"keypoints_shape": "5,2"}, {"keypoints": np.ones((5, 2), "<f4")}),
    "fewer of all": (
        "features",
        {"keypoints_shape": "5,2", "scores_shape": "5", "descriptors_shape": "5,4"},
        {"keypoints": np.ones((5, 2), "<f4"), "scores": np.ones(5, "<f4"), "descriptors": FLOATS},
    ),
    "text as bytes": ("features", {"descriptors": "x" * 768}, {}),
    "another model": ("features", {"model": 77}, {}),
    "a camera that is not": ("keyframes", {"camera": 77}, {}),
    "keypoints of a header": ("keyframes", {"num_keypoints": 2**40}, {}),
    "matches of another": ("keyframes", {"first_match": 0}, {}),
    "absurd matches": ("keyframes", {"num_matches": 2**62, "first_match": 2**62}, {}),
    "negative matches": ("keyframes", {"num_matches": -1}, {}),
    "absurd loops": ("keyframes", {"num_loops": 2**63 - 1}, {}),
    "absurd counters": ("meta", {"keyframes": 2**62}, {}),
    "negative counters": ("meta", {"keyframes": -1}, {}),
    "absurd places": ("meta", {"global_descriptors": 2**63 - 1}, {}),
    "a status": ("matches", {"status": 99}, {}),
    "a kind": ("matches", {"kind": -1}, {}),
    "bools": ("matches", {}, {"inliers": np.full(6, 7, "u1")}),
    "bool sizes": ("matches", {"inliers_shape": "3,2"}, {}),
    "half a pose": ("keyframes", {"pose_shape": "4,3"}, {}),
    "a negative camera": ("cameras", {"width": -640}, {}),
    "a camera model": ("cameras", {"model": "magic"}, {}),
    "NaN places": ("global_descriptors", {}, {"descriptor": np.full(8, np.nan, "<f4")}),
    "a text for a number": ("keyframes", {"stamp_ns": "soon"}, {}),
    "a fraction": ("keyframes", {"width": 640.5}, {}),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_with_right_checksums_is_refused(tmp_path, lie):
    path = tmp_path / "a.vmap"
    path.write_bytes(map_bytes())
    table, plain, blobs = LIES[lie]
    row = {"meta": 0, "cameras": 0, "matches": 12}.get(table, 8)
    rewrite(path, table, row, plain, blobs)
    tracemalloc.start()
    try:
        assert read_damaged(path, lies=True), "nothing was refused"
        assert tracemalloc.get_traced_memory()[1] < 30e6
    finally:
        tracemalloc.stop()


def test_the_length_of_an_array_is_not_believed_over_that_of_the_file(tmp_path):
    path, n = tmp_path / "a.vmap", 40_000
    identity = ModelIdentity("features", "f", "0" * 64, "none")
    arrays = (np.zeros(shape, np.float32) for shape in ((n, 2), n, (n, 8)))
    with MapWriter(path, MapModels(identity), create=True) as writer:
        writer.append(MapEntry(Keyframe(0, 1, "c", Features(*arrays, (640, 480), identity))))
    claimed = 3_000_000  # of the same number of bytes as a varint
    rewrite(path, "features", 0, {"descriptors_shape": f"{claimed},8"}, {})
    with PageFile(path) as found:
        (at,) = [r.offset for r in found.rows() if r.table is FEATURES]
    data = bytearray(path.read_bytes())
    place = data.index(_varint(n * 32 * 2 + 12), at, at + 60)
    data[place : place + 4] = _varint(claimed * 32 * 2 + 12)
    path.write_bytes(data)
    tracemalloc.start()
    try:
        with MapReader(path) as reader, pytest.raises(MapDamagedError, match="table features"):
            reader.keyframe(0)
        assert tracemalloc.get_traced_memory()[1] < 30e6
    finally:
        tracemalloc.stop()


def _varint(value: int) -> bytes:
    parts = [value >> shift & 0x7F for shift in (21, 14, 7, 0)]
    return bytes([*(p | 0x80 for p in parts[:3]), parts[3]])


# -- damage ------------------------------------------------------------------------------------


def places(per_region: int, seed: int) -> list[tuple[str, int]]:
    """Offsets all over the file: of its header, and for each table and kind of page of its structure and elsewhere."""
    rng = random.Random(seed)
    regions: dict[str, list] = {}
    for page in pages():
        regions.setdefault(f"{page.table} {page.kind}", []).append(page)
    out = [("header", rng.randrange(100)) for _ in range(2 * per_region)]
    for name, found in regions.items():
        for i in range(per_region):
            page = rng.choice(found)
            place = rng.choice(structure(page)) if i % 3 else page.start + rng.randrange(PAGE_SIZE)
            out.append((name, place))
    return out


@pytest.mark.parametrize("per_region", [5, pytest.param(40, marks=LONG)])
def test_flipped_bytes_anywhere_change_no_result(tmp_path, per_region):
    path, rng, refused = tmp_path / "a.vmap", random.Random(per_region), set()
    found = places(per_region, per_region)
    assert {"header", "features internal", "features overflow", "matches leaf"} <= {region for region, _ in found}
    for region, place in found:
        data = bytearray(map_bytes())
        data[place] ^= rng.randrange(1, 256)
        path.write_bytes(data)
        if read_damaged(path):
            refused.add(region)
    assert len(refused) > 5, "hardly any damage was found: are the checks on?"


def test_a_row_with_the_id_of_another_is_noticed(tmp_path):
    """To look id 0 up finds the row that has had it always: the list of ids would name one descriptor twice."""
    path, data = tmp_path / "a.vmap", bytearray(map_bytes())
    path.write_bytes(data)
    with PageFile(path) as found:
        (row,) = [r for r in found.rows() if r.table is GLOBAL_DESCRIPTORS and r["id"] == 7]
    assert data[row.offset - 1] == 7
    data[row.offset - 1] = 0
    path.write_bytes(data)
    with MapReader(path) as reader, pytest.raises(MapDamagedError, match="global_descriptors.*row 0 follows row 6"):
        list(reader.global_descriptors())
    assert read_damaged(path)


@pytest.mark.parametrize("examples", [15, pytest.param(300, marks=LONG)])
def test_a_file_that_is_cut_short_is_refused(tmp_path, examples):
    @given(length=st.integers(1, len(map_bytes()) - 1))
    @settings(deadline=None, max_examples=examples, suppress_health_check=list(HealthCheck))
    def check(length):
        path = tmp_path / "a.vmap"
        path.write_bytes(map_bytes()[:length])
        assert read_damaged(path)

    check()


def test_sectors_of_zeros_change_no_result(tmp_path):
    path, rng = tmp_path / "a.vmap", random.Random(3)
    for _ in range(15):
        data, place = bytearray(map_bytes()), rng.randrange(len(map_bytes()) // 512) * 512
        data[place : place + 512] = bytes(512)
        path.write_bytes(data)
        read_damaged(path)


def test_the_whole_map_is_read_without_complaint(tmp_path):
    path = tmp_path / "a.vmap"
    path.write_bytes(map_bytes())
    assert not read_damaged(path)
    assert path.read_bytes() == map_bytes() and [p.name for p in tmp_path.iterdir()] == ["a.vmap"]
