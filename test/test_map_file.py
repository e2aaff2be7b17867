"""The map file: what is written comes back, in little more than its own bytes; damage is noticed, whatever it is."""

import contextlib
import json
import os
import sqlite3
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers import CAMERA, IDENTITY, T0, frame, image, unit
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from map_damage import map_bytes
from model_helpers import learned  # noqa: F401 (a fixture)
from power_cut.entries import MODELS, assert_same, entry

from vslam_features.errors import DataError, MapDamagedError, MapFileError
from vslam_features.features.base import store_descriptors
from vslam_features.features.sift import Sift
from vslam_features.half import exact_half
from vslam_features.maps.reader import MapReader
from vslam_features.maps.tables import TABLES
from vslam_features.maps.writer import MapWriter
from vslam_features.matching.nearest import Nearest
from vslam_features.types import (
    Candidate,
    Features,
    Keyframe,
    MapEntry,
    MapModels,
    Matches,
    ModelIdentity,
    PairKind,
    PairResult,
    Pose,
    Status,
)

GLOBAL = ModelIdentity("global", "g", "1" * 64, "none")
SLOW_DISK = settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def write(path, *entries, models=MapModels(IDENTITY, GLOBAL)):  # noqa: B008 (frozen)
    path.unlink(missing_ok=True)
    with MapWriter(path, models, create=True, durable=False) as writer:
        for item in entries:
            writer.append(item)
    return path


def back(path, kf_id=0) -> MapEntry:
    with MapReader(path) as reader:
        return reader.entry(kf_id)


def features(descriptors, n=None, **fields) -> Features:
    n = len(descriptors) if n is None else n
    rng = np.random.default_rng(n)
    keypoints = rng.uniform(0, 2000, (n, 2)).astype(np.float32)
    return Features(keypoints, rng.random(n, np.float32), descriptors, (1920, 1080), IDENTITY, **fields)


# -- round trips -------------------------------------------------------------------------------


def arrays(dtype, shape):
    def made(seed):
        values = np.random.default_rng(seed).normal(size=shape)
        return (values * 50 + 128).clip(0, 255).astype(dtype) if dtype == np.uint8 else values.astype(dtype)

    return st.integers(0, 99).map(made)


text = st.text(st.characters(codec="utf-8"), max_size=40)
poses = st.builds(
    lambda seed, frame_id, known: Pose(*_rigid(seed), frame_id, known), st.integers(0, 99), text, st.booleans()
)


def _rigid(seed):
    rng = np.random.default_rng(seed)
    return np.linalg.qr(rng.normal(size=(3, 3)))[0], rng.normal(size=3) * 1e3


@st.composite
def keyframes(draw):
    n, d = draw(st.integers(0, 40)), draw(st.integers(1, 33))
    shape = draw(st.sampled_from([(n, d), (3, 4, 5)]))
    descriptors = draw(arrays(draw(st.sampled_from([np.float16, np.float32, np.uint8])), shape))
    found = features(descriptors, n, pixel_scale=draw(st.sampled_from([1.0, 2.0, 1.37])), recovered=draw(text))
    thumbnail = st.sampled_from([(1, 1), (90, 160), (90, 160, 3)]).flatmap(lambda s: arrays(np.uint8, s))
    return Keyframe(
        0,
        draw(st.integers(-(2**63), 2**63 - 1)),
        draw(text),
        found,
        draw(st.sampled_from([None, CAMERA])),
        draw(st.none() | poses),
        draw(st.none() | arrays(np.float32, (16,)) | arrays(np.float16, (16,))),
        draw(st.none() | thumbnail),
        draw(st.integers(0, 2**40)),
    )


@given(keyframe=keyframes())
@SLOW_DISK
def test_a_keyframe_comes_back_as_it_was_given(tmp_path, keyframe):
    got = back(write(tmp_path / "a.vmap", MapEntry(keyframe))).keyframe
    place, wanted = got.global_descriptor, keyframe.global_descriptor
    assert (place is None) == (wanted is None)
    if place is not None:
        wanted = wanted if place.dtype == wanted.dtype else wanted.astype(place.dtype)
    assert_same(got, replace(keyframe, global_descriptor=wanted))
    assert got.features.descriptors.dtype == keyframe.features.descriptors.dtype
    assert got.thumbnail is None or got.thumbnail.dtype == np.uint8


@st.composite
def results(draw, status):
    m = draw(st.integers(1 if status.confirms else 0, 20))
    rng = np.random.default_rng(m)
    hypotheses = tuple(draw(st.lists(poses, max_size=3)))
    known = draw(st.booleans())  # of one pair, all poses have it or none
    plain = [replace(p, frame_id="", scale_known=known) for p in hypotheses]
    return Matches(
        rng.integers(0, 5, (m, 2)).astype(np.int32),
        rng.random(m, np.float32),
        np.arange(m) < 1 if status.confirms else rng.random(m) < 0.5,
        status,
        draw(st.none() | st.floats(0, 1)),
        draw(st.integers(0, 9)),
        plain[0] if plain else None,
        tuple(plain),
        draw(st.sampled_from([None, "essential", "fundamental", "homography"])),
        draw(st.floats(0, 1e6)),
        draw(text),
        draw(text),
    )


@pytest.mark.parametrize("status", Status)
@pytest.mark.parametrize("kind", [PairKind.TRACK, PairKind.LOOP])
def test_pairs_of_every_status_come_back(tmp_path, status, kind):
    @given(matches=results(status))
    @settings(SLOW_DISK, max_examples=3)
    def check(matches):
        first, second = (Keyframe(i, T0 + i, "cam", features(np.ones((5, 4), np.float32))) for i in (0, 1))
        pair = PairResult(kind, 1, 0, T0, matches)
        found = (Candidate(1, 0, T0, 0.875, float("nan"), 0), Candidate(1, 0, T0, 2.0, -1.0, 3))
        wanted = MapEntry(second, (pair,), found[:1], found[1:])
        path = write(tmp_path / "a.vmap", MapEntry(first), wanted)
        assert_same(back(path, 1), wanted)
        with MapReader(path) as reader:
            assert reader.confirmed_loops() == ([(1, 0)] if status.confirms and kind is PairKind.LOOP else [])

    check()


def test_precision_is_lost_nowhere(tmp_path):
    values = np.array([[70000.0, 1.0], [0.1, -2.0]], np.float32)
    big = features(exact_half(values))
    halves = features(exact_half(np.array([[0.5, 1024.0], [0.25, -2.0]], np.float32)))
    halves = replace(halves, keypoints=np.array([[1500.3, 0.1], [-0.25, 1079.49]], np.float32))
    path = write(
        tmp_path / "a.vmap", MapEntry(Keyframe(0, 2**53 + 1, "c", big)), MapEntry(Keyframe(1, -5, "c", halves))
    )
    first, second = back(path, 0).keyframe, back(path, 1).keyframe
    assert first.features.descriptors.dtype == np.float32 and first.features.descriptors[0, 0] == 70000.0
    assert second.features.descriptors.dtype == np.float16
    assert second.features.keypoints.dtype == np.float32 and second.features.keypoints[0, 0] == np.float32(1500.3)
    assert (first.stamp_ns, second.stamp_ns) == (9007199254740993, -5)


def test_an_array_that_is_not_finite_is_not_stored(tmp_path):
    bad = np.ones((5, 4), np.float16)
    bad[3, 2] = np.nan
    with MapWriter(tmp_path / "a.vmap", MapModels(IDENTITY), create=True) as writer:
        with pytest.raises(DataError, match="descriptors is not finite"):
            writer.append(MapEntry(Keyframe(0, 1, "c", features(bad))))
        writer.append(MapEntry(Keyframe(0, 1, "c", features(np.ones((5, 4), np.float16)))))
    assert len(back(tmp_path / "a.vmap").keyframe.features) == 5


def test_a_text_that_no_file_can_hold_is_refused_and_the_next_one_taken(tmp_path):
    found = features(np.ones((5, 4), np.float16))
    with MapWriter(tmp_path / "a.vmap", MapModels(IDENTITY), create=True) as writer:
        with pytest.raises(DataError, match="no UTF-8"):
            writer.append(MapEntry(Keyframe(0, 1, "cam\ud800", found)))
        for stamp in (2**63, -(2**63) - 1):
            with pytest.raises(DataError, match="64 bits"):
                writer.append(MapEntry(Keyframe(0, stamp, "cam", found)))
        writer.append(MapEntry(Keyframe(0, 1, "cam", found)))
    assert back(tmp_path / "a.vmap").keyframe.frame_id == "cam"


def stored(tmp_path, live: Features) -> list[Features]:
    """Features as they were, and as maps give them back that store them in half and in single precision."""
    out = [live]
    for policy in ("lossless", "never"):
        kept = Keyframe(0, 1, "c", store_descriptors(live, policy))
        path = write(tmp_path / f"{policy}.vmap", MapEntry(kept), models=MapModels(live.model))
        out.append(back(path).keyframe.features)
    return out


def assert_matched_alike(tmp_path, matcher, a: Features, b: Features) -> None:
    """Matches of what is stored in any way; numbers are such that half precision holds them."""
    sides = []
    for side in (a, b):
        exact = side.descriptors.astype(np.float16).astype(np.float32)
        sides.append(stored(tmp_path, replace(side, descriptors=exact)))
        assert [f.descriptors.dtype for f in sides[-1]] == [np.float32, np.float16, np.float32]
    wanted = matcher.match(sides[0][0], sides[1][0])
    assert len(wanted.pairs) > 20
    for i, j in ((1, 1), (2, 2), (0, 1), (1, 2), (2, 0)):
        found = matcher.match(sides[0][i], sides[1][j])
        assert np.array_equal(found.pairs, wanted.pairs) and np.array_equal(found.scores, wanted.scores)


def test_matches_are_the_same_whatever_precision_the_map_has(tmp_path):
    sift = Sift(500, 0, Sift.Options())
    picture = image(240, 320)
    a, b = (sift.extract(frame(p)) for p in (picture, np.roll(picture, 7, 1)))
    assert_matched_alike(tmp_path, Nearest(Nearest.Options()), a, b)


@pytest.mark.usefixtures("learned")
def test_learned_matches_are_the_same_whatever_precision_the_map_has(tmp_path):
    from vslam_features.config import Config
    from vslam_features.features.learned import XFeat
    from vslam_features.matching.learned import LighterGlue
    from vslam_features.models import Models

    models = Models(Config())
    plugin = XFeat(300, 0, XFeat.Options(), models)
    picture = image(240, 320)
    a, b = (plugin.extract(frame(p)) for p in (picture, np.roll(picture, 7, 1)))
    assert_matched_alike(tmp_path, LighterGlue(LighterGlue.Options(), models), a, b)


# -- size --------------------------------------------------------------------------------------


def real_size(kind: str, dtype) -> MapEntry:
    """A keyframe as the front-end stores it, with pairs, of 640x480 images."""
    rng = np.random.default_rng(0)
    if kind == "dense":
        n, descriptors = 2048, rng.normal(size=(256, 64, 64)).astype(dtype)
    else:
        n = 2048
        descriptors = unit(rng, n, {"xfeat": 64, "sift": 128}[kind]).astype(dtype)
    found = Features(
        rng.uniform(0, 480, (n, 2)).astype(np.float32), rng.random(n, np.float32), descriptors, (640, 480), IDENTITY
    )
    thumbnail = rng.integers(0, 256, (120, 160), np.uint8)
    place = unit(rng, 1, 1280)[0] if kind == "xfeat" else unit(rng, 1, 8192)[0]
    return MapEntry(Keyframe(0, T0, "cam", found, CAMERA, Pose(np.eye(3), np.zeros(3)), place, thumbnail))


def sized(path, kind, dtype, count=50) -> tuple[int, int]:
    one = real_size(kind, dtype)
    index = np.stack([np.arange(400, dtype=np.int32)] * 2, 1)
    matches = Matches(index, np.ones(400, np.float32), np.ones(400, bool), Status.OK, 0.5)
    entries = [
        MapEntry(
            replace(one.keyframe, id=i, stamp_ns=T0 + i),
            tuple(PairResult(PairKind.TRACK, i, j, T0 + j, matches) for j in range(max(0, i - 1), i)),
        )
        for i in range(count)
    ]
    write(path, *entries)
    with MapReader(path) as reader:
        return os.path.getsize(path), reader.meta["payload_bytes"]


@pytest.mark.parametrize("kind, dtype", [("xfeat", np.float32), ("xfeat", np.float16), ("sift", np.float32)])
def test_a_file_is_hardly_larger_than_its_arrays(tmp_path, kind, dtype):
    size, payload = sized(tmp_path / "a.vmap", kind, dtype)
    one = real_size(kind, dtype).keyframe
    arrays = [one.features.keypoints, one.features.scores, one.features.descriptors, one.thumbnail]
    assert payload > 50 * sum(a.nbytes for a in arrays)
    assert size <= 1.03 * payload


def test_dense_descriptors_in_half_precision_take_half(tmp_path):
    half, half_payload = sized(tmp_path / "half.vmap", "dense", np.float16, 4)
    single, single_payload = sized(tmp_path / "single.vmap", "dense", np.float32, 4)
    assert half <= 1.03 * half_payload and single <= 1.03 * single_payload
    assert single - half == pytest.approx(4 * 256 * 64 * 64 * 2, rel=0.01)


# -- what is no map ----------------------------------------------------------------------------


def foreign(path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE keyframes (id INTEGER PRIMARY KEY)")
        db.commit()


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
NO_MAPS = {
    "empty": lambda p: p.write_bytes(b""),
    "folder": lambda p: p.mkdir(),
    "text": lambda p: p.write_text("a map of the world\n" * 1000),
    "lfs pointer": lambda p: p.write_bytes(LFS),
    "another database": foreign,
    "wrong magic": lambda p: p.write_bytes(b"X" + map_bytes()[1:]),
    "wrong application id": lambda p: p.write_bytes(map_bytes()[:68] + b"ABCD" + map_bytes()[72:]),
    "zeros": lambda p: p.write_bytes(bytes(50_000)),
    "one byte": lambda p: p.write_bytes(b"S"),
}


@pytest.mark.parametrize("kind", NO_MAPS)
def test_what_is_no_map_is_called_so(tmp_path, kind):
    path = tmp_path / "a.vmap"
    NO_MAPS[kind](path)
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(MapFileError, match="a.vmap.*no (map|file)"):
        MapReader(path)
    assert (path.read_bytes() if path.is_file() else None) == before


def test_another_schema_version_is_refused_with_both_named(tmp_path):
    path = tmp_path / "a.vmap"
    data = bytearray(map_bytes())
    assert data[60:64] == (1).to_bytes(4, "big")
    data[63] = 2
    path.write_bytes(data)
    with pytest.raises(MapFileError, match="schema version 2, this version reads 1.*newer"):
        MapReader(path)


@pytest.mark.parametrize(
    "sql",
    [
        "CREATE TRIGGER t AFTER INSERT ON keyframes BEGIN DELETE FROM features; END",
        "CREATE VIEW v AS SELECT * FROM keyframes",
        "CREATE TABLE more (id INTEGER)",
        "CREATE INDEX i ON matches (keyframe)",
        "DROP TABLE loops",
        "ALTER TABLE loops ADD COLUMN more TEXT",
    ],
)
def test_another_schema_is_refused_and_not_run(tmp_path, sql):
    path = tmp_path / "a.vmap"
    path.write_bytes(map_bytes())
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute(sql)
        db.commit()
    with pytest.raises(MapDamagedError, match="sqlite_schema.*not as schema version 1 defines it"):
        MapReader(path)
    with pytest.raises(MapDamagedError, match="sqlite_schema"):
        MapWriter(path, MODELS)


# -- the description ---------------------------------------------------------------------------


def test_the_description_of_the_format_is_that_of_the_tables():
    told = (Path(__file__).parents[1] / "docs" / "map_format.md").read_text(encoding="utf-8")
    for table in TABLES:
        assert table.sql in told, f"docs/map_format.md: the statement of table {table.name} differs"


def test_the_description_suffices_to_read_a_map(tmp_path):
    """The program in docs/map_format.md, which uses nothing of this package, reads what we read."""
    told = (Path(__file__).parents[1] / "docs" / "map_format.md").read_text(encoding="utf-8")
    program = told.split("```python\n")[1].split("```")[0]
    path = tmp_path / "a.vmap"
    path.write_bytes(map_bytes())
    space: dict = {}
    exec(program, space)
    found = space["read_keyframe"](str(path), 5)
    want = entry(5).keyframe
    assert found["stamp_ns"] == want.stamp_ns
    for name in ("keypoints", "scores", "descriptors"):
        assert np.array_equal(found[name], getattr(want.features, name))
    json.dumps(found["frame_id"])
