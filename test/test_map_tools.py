"""The tools on map files: what they say of damage, what they save, and that they change nothing else."""

import contextlib
import random
import shutil
import sqlite3
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from map_damage import COUNT, SECOND_SESSION, known, map_bytes, pages, read_damaged, rewrite, rows_in, touched
from power_cut.entries import MODELS, assert_same, entry
from test_map_damage import LIES, places
from test_map_file import NO_MAPS

from vslam_features.errors import IdentityError, MapDamagedError, MapError, MapFileError
from vslam_features.maps.copy import compact_map
from vslam_features.maps.merge import merge
from vslam_features.maps.reader import MapReader
from vslam_features.maps.recover import recover
from vslam_features.maps.summary import summarise
from vslam_features.maps.tables import PAGE_SIZE
from vslam_features.maps.verify import verify
from vslam_features.maps.writer import MapWriter
from vslam_features.types import MapEntry, MapModels, ModelIdentity, PairResult, Status

LONG = [pytest.mark.slow, pytest.mark.endurance, pytest.mark.timeout(900)]


@pytest.fixture
def path(tmp_path) -> Path:
    """A whole map."""
    path = tmp_path / "a.vmap"
    path.write_bytes(map_bytes())
    return path


def write(path: Path, entries, models=MODELS) -> Path:
    with MapWriter(path, models, create=True, durable=False) as writer:
        for item in entries:
            writer.append(item)
    return path


# -- verify ------------------------------------------------------------------------------------


def test_a_whole_map_is_intact(path):
    steps = []
    report = verify(path, lambda done, total: steps.append((done, total)))
    assert not report.damaged and not report.oddities and not report.notes
    with contextlib.closing(sqlite3.connect(path)) as db:
        counts = {name: db.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in report.rows}
    assert report.rows == counts == dict(report.intact)
    assert report.intact_ranges == [(0, COUNT - 1)]
    assert steps[-1][0] == steps[-1][1] == len(steps)
    assert path.read_bytes() == map_bytes() and [p.name for p in path.parent.iterdir()] == ["a.vmap"]


@pytest.mark.parametrize("kind", NO_MAPS)
def test_what_is_no_map_is_a_report(tmp_path, kind):
    path = tmp_path / "a.vmap"
    NO_MAPS[kind](path)
    report = verify(path)
    assert report.damaged and str(path) in report.damages[0].what and not report.rows


def test_a_file_that_is_not_there_is_a_report(tmp_path):
    assert "no such" in verify(tmp_path / "a.vmap").damages[0].what.lower()


@pytest.mark.parametrize("lie", LIES)
def test_lies_with_right_checksums_are_told(path, lie):
    table, plain, blobs = LIES[lie]
    rewrite(path, table, {"meta": 0, "cameras": 0, "matches": 12}.get(table, 8), plain, blobs)
    tracemalloc.start()
    try:
        report = verify(path)
        assert report.damaged and tracemalloc.get_traced_memory()[1] < 30e6
    finally:
        tracemalloc.stop()
    told = {d.table for d in report.damages}
    assert told & {table, "keyframes", "features", "matches", "loops", "global_descriptors"}, told


INCONSISTENT = {
    "pairs beyond the keypoints": (
        ("matches", 12, {}, {"pairs": np.full((6, 2), 12, "<i4")}),
        ("matches", 12, "has 12"),
    ),
    "negative pairs": (("matches", 12, {}, {"pairs": np.full((6, 2), -1, "<i4")}), ("matches", 12, "pairs")),
    "a match of another keyframe": (("matches", 12, {"keyframe": 3}, {}), ("matches", 12, "of keyframe 3")),
    "a match with itself": (("matches", 12, {"reference": 8}, {}), ("matches", 12, "keyframes 8 and 8")),
    "a loop with nobody": (("loops", 8, {"reference": 99}, {}), ("loops", 8, "keyframes 8 and 99")),
    "a loop's status": (("loops", 8, {"status": 55}, {}), ("loops", 8, "status 55")),
    "a session that is not": (("keyframes", 8, {"session": 7}, {}), ("keyframes", 8, "session 7")),
    "rows of the one before": (("keyframes", 8, {"first_match": 5}, {}), ("keyframes", 8, "first_match 5")),
    "bytes in all": (("meta", 0, {"payload_bytes": 5}, {}), ("meta", 0, "payload_bytes is 5")),
    "a counter": (("meta", 0, {"loops": 5}, {}), ("loops", None, "5 rows expected")),
    "a role": (("models", 1, {"role": "features"}, {}), ("models", 1, "role")),
}


@pytest.mark.parametrize("what", INCONSISTENT)
def test_rows_that_contradict_each_other_are_told(path, what):
    (table, row, plain, blobs), (told_table, told_row, said) = INCONSISTENT[what]
    rewrite(path, table, row, plain, blobs)
    found = [d for d in verify(path).damages if (d.table, d.row) == (told_table, told_row) and said in d.what]
    assert found, verify(path).damages


def test_a_missing_row_is_told_and_costs_its_keyframe(path):
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("DELETE FROM matches WHERE id = 12")  # of keyframe 8
        db.commit()
    report = verify(path)
    (owner,) = [n for n in range(COUNT) if sum(len(known(i).pairs) for i in range(n)) <= 12][-1:]
    assert report.intact_ranges == [(0, owner - 1), (owner + 1, COUNT - 1)]
    assert report.intact["matches"] == report.rows["matches"] - 1


def test_what_is_odd_is_told_but_no_damage(tmp_path):
    e = [entry(n) for n in range(3)]
    far = np.full((12, 2), 700, np.float32)
    e[0] = MapEntry(replace(e[0].keyframe, features=replace(e[0].keyframe.features, keypoints=far)))
    e[1] = MapEntry(replace(e[1].keyframe, global_descriptor=np.full(8, 2.0, np.float32)))
    e[2] = MapEntry(replace(e[2].keyframe, stamp_ns=e[1].keyframe.stamp_ns, global_descriptor=np.zeros(8, np.float32)))
    report = verify(write(tmp_path / "a.vmap", e))
    assert not report.damaged and report.num_oddities == 3
    assert {(o.table, o.row) for o in report.oddities} == {("features", 0), ("global_descriptors", 1), ("keyframes", 2)}


def test_a_map_that_is_being_written_is_verified_without_stopping_the_writer(tmp_path):
    path, written = tmp_path / "a.vmap", []
    with MapWriter(path, MODELS, create=True) as writer:
        for n in range(8):
            writer.append(entry(n))

        def progress(done, total):
            if len(written) < 4:
                writer.append(entry(8 + len(written)))
                written.append(done)

        report = verify(path, progress)
        assert not report.damaged and "a process writes" in report.notes[0]
        assert len(written) == 4 and report.rows["keyframes"] == 8
    report = verify(path)
    assert not report.damaged and not report.notes and report.rows["keyframes"] == 12


@pytest.mark.parametrize("per_region", [3, pytest.param(40, marks=LONG)])
def test_whatever_reading_refuses_is_told(path, per_region):
    rng = random.Random(per_region)
    for region, place in places(per_region, 7):
        data = bytearray(map_bytes())
        data[place] ^= rng.randrange(1, 256)
        path.write_bytes(data)
        report = verify(path)
        assert report.damaged or not read_damaged(path), region
        if report.damaged:
            assert all(d.what for d in report.damages) and report.to_dict()


# -- recover -----------------------------------------------------------------------------------


def assert_recovered(source: Path, target: Path, damage: bytes) -> None:
    """Of a damaged file all keyframes whose pages are as they were come back; none comes back changed."""
    source.write_bytes(damage)
    target.unlink(missing_ok=True)
    lost = rows_in(touched(damage))
    wanted = [n for n in range(COUNT) if ("keyframes", n) not in lost and ("features", n) not in lost]
    try:
        report = recover(source, target, models=MODELS)
    except MapError as error:
        assert not wanted and not target.exists(), error
        return
    finally:
        assert source.read_bytes() == damage
    assert set(wanted) <= set(report.ids)
    assert list(report.ids.values()) == list(range(len(report.ids))) and list(report.ids) == sorted(report.ids)
    with MapReader(target) as reader:
        assert len(reader.headers()) == len(report.ids)
        for old, new in report.ids.items():
            assert_kept(reader.entry(new), old, report.ids, lost)


def assert_kept(got: MapEntry, old: int, ids: dict[int, int], lost: set) -> None:
    want, kf = known(old), known(old).keyframe
    assert_same(got.keyframe.features, kf.features)
    for name in ("stamp_ns", "frame_id", "session"):
        assert getattr(got.keyframe, name) == getattr(kf, name)
    whole = {"global_descriptor": ("global_descriptors", old) not in lost, "pose": True, "thumbnail": True}
    whole["camera"] = not any(table == "cameras" for table, _ in lost)
    for name, must in whole.items():
        found = getattr(got.keyframe, name)
        if found is not None or (must and ("keyframes", old) not in lost and ("features", old) not in lost):
            assert_same(found, getattr(kf, name))
    first = sum(len(known(n).pairs) for n in range(old))
    there = [p for p in want.pairs if p.ref_kf_id in ids]
    sure = [p for i, p in enumerate(want.pairs) if p.ref_kf_id in ids and ("matches", first + i) not in lost]
    assert contained(sure, got.pairs, ids) and contained(got.pairs, there, None, ids)
    first = sum(len(known(n).candidates) + len(known(n).gated) for n in range(old))
    for have, wanted, begin in (
        (got.candidates, want.candidates, first),
        (got.gated, want.gated, first + len(want.candidates)),
    ):
        sure = [c for i, c in enumerate(wanted) if c.ref_kf_id in ids and ("loops", begin + i) not in lost]
        assert [(ids[c.ref_kf_id], c.rank) for c in sure if c.ref_kf_id in ids] == [
            (c.ref_kf_id, c.rank) for c in have
        ] or len(have) > len(sure)


def contained(some, all_of, ids=None, back=None) -> bool:
    """Each of ``some`` is one of ``all_of``, which are those of old ids where ``back`` maps them to new ones."""

    def key(p: PairResult, renumbered) -> tuple:
        reference = renumbered[p.ref_kf_id] if renumbered else p.ref_kf_id
        return p.kind, reference, p.ref_stamp_ns, p.matches.pairs.tobytes(), p.matches.scores.tobytes()

    return {key(p, ids) for p in some} <= {key(p, back) for p in all_of}


def test_a_whole_map_is_recovered_whole(path, tmp_path):
    report = recover(path, tmp_path / "b.vmap")
    assert report.ids == {n: n for n in range(COUNT)} and not report.lost and not report.without and not report.notes
    assert not verify(tmp_path / "b.vmap").damaged
    (tmp_path / "c").mkdir()
    shutil.copy(tmp_path / "b.vmap", tmp_path / "c" / "a.vmap")
    assert not read_damaged(tmp_path / "c" / "a.vmap")
    with MapReader(path) as a, MapReader(tmp_path / "b.vmap") as b:
        assert a.sessions() == b.sessions()  # with the times when they began


def test_without_header_trees_and_heads_of_pages_everything_is_recovered(path, tmp_path):
    data = bytearray(map_bytes())
    data[:PAGE_SIZE] = random.Random(0).randbytes(PAGE_SIZE)
    for page in pages():
        if page.kind == "internal":
            data[page.start : page.start + PAGE_SIZE] = bytes(PAGE_SIZE)
        elif page.kind == "leaf":
            data[page.start : page.start + 8] = b"\xff" * 8
    path.write_bytes(data)
    with pytest.raises(MapFileError):
        MapReader(path)
    report = recover(path, tmp_path / "b.vmap")
    assert len(report.ids) == COUNT and not report.without
    assert not read_damaged(tmp_path / "b.vmap")


@pytest.mark.parametrize("per_region", [2, pytest.param(12, marks=LONG)])
def test_flipped_bytes_cost_only_the_keyframes_that_they_are_in(tmp_path, per_region):
    rng = random.Random(per_region)
    for _, place in places(per_region, 11):
        data = bytearray(map_bytes())
        data[place] ^= rng.randrange(1, 256)
        assert_recovered(tmp_path / "a.vmap", tmp_path / "b.vmap", bytes(data))


@pytest.mark.parametrize("examples", [10, pytest.param(200, marks=LONG)])
def test_any_damage_costs_only_the_keyframes_that_it_is_in(tmp_path, examples):
    n = len(map_bytes())
    pieces = st.tuples(st.integers(0, n - 1), st.sampled_from([1, 512, 4096, 50_000]), st.integers(0, 255))

    @given(cut=st.none() | st.integers(1, n), damages=st.lists(pieces, min_size=1, max_size=4))
    @settings(deadline=None, max_examples=examples, suppress_health_check=list(HealthCheck))
    def check(cut, damages):
        data = bytearray(map_bytes())
        for start, length, value in damages:
            length = min(length, n - start)
            data[start : start + length] = bytes([value]) * length
        assert_recovered(tmp_path / "a.vmap", tmp_path / "b.vmap", bytes(data[:cut]))

    check()


def test_rows_that_the_tree_moved_to_an_end_that_is_lost_are_found_where_they_were(tmp_path):
    path = write(
        tmp_path / "a.vmap", [MapEntry(entry(n, keypoints=2 if n % 7 == 5 else 60).keyframe) for n in range(70)]
    )
    with contextlib.closing(sqlite3.connect(path)) as db:
        sql = "SELECT min(pageno) FROM dbstat WHERE name = 'keyframes' AND pagetype = 'leaf'"
        first = db.execute(sql).fetchone()[0]
    data = path.read_bytes()
    assert first * PAGE_SIZE > len(data) / 2, "the first rows are at the end of the file"
    path.write_bytes(data[: (first - 1) * PAGE_SIZE])
    report = recover(path, tmp_path / "b.vmap")
    assert len(report.ids) >= 0.9 * report.found > 30


def test_ids_are_renumbered_and_references_follow(path, tmp_path):
    gone = next(p for p in pages() if p.table == "features" and p.kind == "overflow" and p.rows == (5,))
    data = bytearray(map_bytes())
    data[gone.start + 100] ^= 1
    path.write_bytes(data)
    report = recover(path, tmp_path / "b.vmap")
    assert list(report.lost) == [5] and "the checksum is wrong" in report.lost[5]
    assert report.ids == {n: n - (n > 5) for n in range(COUNT) if n != 5}
    # Keyframe 6 was matched with 5, keyframe 8 had a loop with 5, keyframe 9 a gated candidate.
    assert report.without == {"matches": 2, "loop candidates": 2}
    with MapReader(tmp_path / "b.vmap") as reader:
        assert reader.entry(5).pairs[0].kf_id == 5 and reader.entry(5).keyframe.stamp_ns == known(6).keyframe.stamp_ns
        assert [p.ref_kf_id for p in reader.pairs(6)] == [5, 4]  # once 7 with 6 and 4
        assert [h.session for h in reader.headers()] == [int(n >= SECOND_SESSION) for n in range(COUNT) if n != 5]
    assert not verify(tmp_path / "b.vmap").damaged


def test_what_is_not_needed_is_left_out_and_counted(path, tmp_path):
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("UPDATE global_descriptors SET descriptor = zeroblob(32) WHERE id = 3")
        db.execute("UPDATE features SET thumbnail = zeroblob(192) WHERE id = 8")
        db.execute("UPDATE keyframes SET pose = zeroblob(96) WHERE id = 10")
        db.execute("UPDATE matches SET inliers = zeroblob(6) WHERE id = 50")
        db.execute("UPDATE cameras SET K = zeroblob(72) WHERE id = 2")
        db.execute("UPDATE sessions SET started_ns = 5 WHERE id = 1")
        db.commit()
    report = recover(path, tmp_path / "b.vmap")
    of_camera = sum(known(n).keyframe.camera == known(25).keyframe.camera for n in range(COUNT))
    assert len(report.ids) == COUNT
    assert report.without == {
        "global descriptors": 1, "thumbnails": 1, "poses": 1, "matches": 1, "cameras": of_camera,
    }  # fmt: skip
    with MapReader(tmp_path / "b.vmap") as reader:
        assert reader.keyframe(3).global_descriptor is None and reader.keyframe(8).thumbnail is None
        assert reader.keyframe(10).pose is None and reader.keyframe(25).camera is None
        assert reader.sessions()[1] == 0  # unknown


def test_a_map_that_lost_the_names_of_its_models_needs_one_that_has_them(path, tmp_path):
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("UPDATE models SET sha256 = 'x'")
        db.commit()
    with pytest.raises(MapError, match="--like"):
        recover(path, tmp_path / "b.vmap")
    report = recover(path, tmp_path / "b.vmap", models=MODELS)
    assert len(report.ids) == COUNT and not report.without
    with MapReader(tmp_path / "b.vmap") as reader:
        assert reader.models == MODELS


def test_a_map_is_not_given_the_names_of_other_models(path, tmp_path):
    other = MapModels(ModelIdentity("features", "other", "2" * 64, "none"))
    with pytest.raises(IdentityError, match="'test'.*'other'"):
        recover(path, tmp_path / "b.vmap", models=other)
    assert [p.name for p in tmp_path.iterdir()] == ["a.vmap"]


@pytest.mark.parametrize("kind", [k for k in NO_MAPS if k not in ("wrong magic", "wrong application id")])
def test_of_what_is_no_map_nothing_is_made(tmp_path, kind):
    path = tmp_path / "a.vmap"
    NO_MAPS[kind](path)
    with pytest.raises(MapError, match="a.vmap"):
        recover(path, tmp_path / "b.vmap")
    assert [p.name for p in tmp_path.iterdir()] == ["a.vmap"]


def test_recover_replaces_nothing_unless_told_so(path, tmp_path):
    target = tmp_path / "b.vmap"
    target.write_text("mine")
    with pytest.raises(MapError, match="there already"):
        recover(path, target)
    with pytest.raises(MapError, match="is no map"):
        recover(path, target, overwrite=True)
    assert target.read_text() == "mine"
    with pytest.raises(MapError, match="same file"):
        recover(path, path, overwrite=True)
    target.write_bytes(map_bytes()[: len(map_bytes()) // 2])  # a damaged map is one
    assert len(recover(path, target, overwrite=True).ids) == COUNT
    with MapWriter(path, MODELS), pytest.raises(MapError, match="a process writes"):
        recover(path, tmp_path / "c.vmap")


def half_written(path: Path) -> tuple[bytes, bytes]:
    """A map and its journal as a crash leaves them in the middle of a transaction."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("PRAGMA cache_size = 1")  # pages of the transaction go to the file before its end
        db.execute("BEGIN")
        db.execute("UPDATE keyframes SET frame_id = frame_id || 'half-written', stamp_ns = stamp_ns + 1")
        db.execute("UPDATE features SET recovered = 'half-written' || hex(zeroblob(3000))")
        db.execute("UPDATE global_descriptors SET model = 0")
        db.execute("UPDATE meta SET keyframes = keyframes + 1")  # as each transaction of ours
        found = path.read_bytes(), Path(f"{path}-journal").read_bytes()
        db.execute("ROLLBACK")
    return found


def test_a_transaction_that_a_crash_left_is_rolled_back_on_a_copy(path, tmp_path):
    data, journal = half_written(path)
    assert data[: len(map_bytes())] != map_bytes()
    folder = tmp_path / "crashed"
    folder.mkdir()
    source = folder / "a.vmap"
    for broken_header in (False, True):
        source.write_bytes(b"garbage!" * 12 + data[96:] if broken_header else data)
        Path(f"{source}-journal").write_bytes(journal)
        before = {p.name: p.read_bytes() for p in folder.iterdir()}
        target = tmp_path / f"b{broken_header}.vmap"
        report = recover(source, target)
        assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
        assert report.ids == {n: n for n in range(COUNT)} and "rolled back" in report.notes[0]
        assert not read_damaged(target)
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_a_journal_of_another_map_is_not_used(path, tmp_path):
    other = write(tmp_path / "other.vmap", [entry(n, salt=3) for n in range(COUNT)])
    _, journal = half_written(other)
    Path(f"{path}-journal").write_bytes(journal)
    report = recover(path, tmp_path / "b.vmap")
    assert len(report.ids) == COUNT and "not used" in report.notes[0]
    with MapReader(tmp_path / "b.vmap") as reader:
        assert_same(reader.entry(20), known(20))


def test_recovering_takes_little_memory(tmp_path):
    big = entry(5, keypoints=400).keyframe  # 150 times as many: 4 MB a keyframe
    path = write(tmp_path / "a.vmap", [MapEntry(replace(big, id=n, stamp_ns=n)) for n in range(8)])
    tracemalloc.start()
    try:
        assert len(recover(path, tmp_path / "b.vmap").ids) == 8
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert path.stat().st_size > 35e6 and peak < 30e6


# -- merge, compact, info ------------------------------------------------------------------------


def test_merged_maps_follow_one_another(path, tmp_path):
    other = write(tmp_path / "b.vmap", [entry(n, salt=2) for n in range(9)])
    steps = []
    target = tmp_path / "both.vmap"
    assert merge(path, other, target, lambda *step: steps.append(step)) == COUNT + 9
    assert steps[-1] == (COUNT + 9, COUNT + 9)
    assert not verify(target).damaged and not verify(target).oddities
    with MapReader(target) as reader, MapReader(other) as b:
        for n in range(COUNT):
            assert_same(reader.entry(n), known(n))
        for n in range(9):
            got, want = reader.entry(COUNT + n), b.entry(n)
            assert_same(got.keyframe, replace(want.keyframe, id=COUNT + n, session=2))
            assert [(p.kf_id, p.ref_kf_id) for p in got.pairs] == [
                (COUNT + p.kf_id, COUNT + p.ref_kf_id) for p in want.pairs
            ]
            assert [c.ref_kf_id - COUNT for c in got.candidates] == [c.ref_kf_id for c in want.candidates]
        assert reader.sessions()[2] == b.sessions()[0]
        cameras = {h.camera for h in reader.headers()} - {None}
    with contextlib.closing(sqlite3.connect(target)) as db:
        assert db.execute("SELECT count(*) FROM cameras").fetchone() == (len(cameras),)
    with MapWriter(target, MODELS) as writer:  # and may be continued
        writer.append(MapEntry(replace(entry(0).keyframe, id=COUNT + 9, session=3)))


def test_maps_of_other_models_are_not_merged(path, tmp_path):
    model = ModelIdentity("features", "orb", "3" * 64, "none")
    kf = entry(0).keyframe
    e = MapEntry(replace(kf, features=replace(kf.features, model=model)))
    other = write(tmp_path / "b.vmap", [e], MapModels(model, MODELS.global_descriptor))
    with pytest.raises(IdentityError, match="'test'.*'orb'"):
        merge(path, other, tmp_path / "both.vmap")
    assert not (tmp_path / "both.vmap").exists()


def test_a_damaged_map_is_not_merged_and_leaves_nothing(path, tmp_path):
    other = write(tmp_path / "b.vmap", [entry(n) for n in range(9)])
    data = bytearray(map_bytes())
    data[next(p for p in pages() if p.table == "features" and p.kind == "overflow").start + 99] ^= 1
    path.write_bytes(data)
    with pytest.raises(MapDamagedError, match="table features, row 5"):
        merge(path, other, tmp_path / "both.vmap")
    with pytest.raises(MapError, match="same file"):
        merge(path, other, other, overwrite=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.vmap", "b.vmap"]


def test_an_empty_map_merges_with_any(path, tmp_path):
    empty = write(tmp_path / "b.vmap", [])
    assert merge(empty, path, tmp_path / "both.vmap") == COUNT
    assert not read_damaged(tmp_path / "both.vmap")
    assert not verify(empty).damaged
    with pytest.raises(MapError, match="no keyframes"):
        merge(empty, empty, tmp_path / "c.vmap")


def test_compact_takes_out_the_space_that_is_lost(path):
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE t AS SELECT zeroblob(300000)")
        db.execute("DROP TABLE t")
        db.commit()
    assert path.stat().st_size > len(map_bytes()) + 290_000
    compact_map(path, path)
    assert path.stat().st_size <= len(map_bytes()) + PAGE_SIZE
    assert not read_damaged(path) and not verify(path).damaged


def test_the_numbers_of_a_map(path):
    numbers = summarise(path)
    entries = [known(n) for n in range(COUNT)]
    assert numbers["keyframes"] == COUNT and numbers["bytes"] == len(map_bytes())
    assert numbers["keypoints"] == sum(len(e.keyframe.features) for e in entries)
    descriptors = [e.keyframe.features.descriptors for e in entries]
    assert numbers["descriptors"] == {
        "float32": {"count": COUNT, "bytes": sum(d.nbytes for d in descriptors), "shape": ["N", 16]}
    }
    assert numbers["global_descriptors"]["float32"]["count"] == sum(
        e.keyframe.global_descriptor is not None for e in entries
    )
    assert numbers["pairs"] == {"track": {"ok": COUNT - 1}, "loop": {"ok": COUNT - 4}}
    assert numbers["loops"] == {
        "candidates": COUNT - 4, "gated": COUNT - 4, "tried": {"ok": COUNT - 4}, "confirmed": COUNT - 4,
    }  # fmt: skip
    first, second = numbers["sessions"]
    assert (first["keyframes"], second["keyframes"]) == (SECOND_SESSION, COUNT - SECOND_SESSION)
    x = [e.keyframe.pose.t[0] for e in entries[:SECOND_SESSION] if e.keyframe.pose is not None]
    (extent,) = first["extents"]
    assert extent["size"] == pytest.approx([max(x) - min(x), 0, 0]) and extent["length"] == pytest.approx(max(x))
    assert first["span_s"] == pytest.approx((SECOND_SESSION - 1) / 10)
    assert sum(c["keyframes"] for c in numbers["cameras"]) == COUNT
    assert Status.OK.label in numbers["pairs"]["track"]
