"""A power cut at any point of a recorded run leaves a whole map. What is assumed of a disk: ``power_cut/disk.py``."""

from __future__ import annotations

import random
import sqlite3
from functools import partial
from pathlib import Path

import pytest
from power_cut import recorder
from power_cut.child import row
from power_cut.disk import DATA, NAMES, states
from power_cut.maps import check_map, write_map

from vslam_features.errors import MapError

pytestmark = pytest.mark.skipif(bool(recorder.missing()), reason=recorder.missing())


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    return recorder.shim(tmp_path_factory.mktemp("shim"))


@pytest.fixture
def recorded(library, tmp_path):
    """Run a scenario in a folder that ``prepare`` fills."""

    def run(scenario: str, *arguments, prepare=lambda folder: None) -> recorder.Recording:
        folder = tmp_path / "recorded"
        folder.mkdir()
        prepare(folder)
        return recorder.record(library, folder, tmp_path / "log", scenario, *arguments)

    return run


def failures(recording, folder: Path, check, cases: int, seed: int = 0, ignored: str = "") -> list[str]:
    """Cut ``cases`` times, everywhere and in all ways; what ``check(folder, done, begun)`` raised.

    Each operation is a point to cut at; points are left out evenly where there are more than cases.
    """
    ways = [(data, names) for data in DATA for names in NAMES]
    plan = random.Random(seed)
    points = range(len(recording.ops) + 1)
    chosen = {}
    for k in [*points] * (cases // len(points)) + plan.sample(points, cases % len(points)):
        chosen.setdefault(k, []).append(plan.choice(ways))
    found = []
    for k, disk in states(recording.before, recording.ops, ignored):
        done, begun = (max(map(int, recording.marks(word, k)), default=0) for word in ("done", "begun"))
        for i, (data, names) in enumerate(chosen.get(k, ())):
            there = folder / f"{k}-{i}"
            there.mkdir(parents=True)
            for name, content in disk.cut(random.Random(f"{seed} {k} {i}"), data, names).items():
                (there / name).write_bytes(content)
            try:
                check(there, done, begun)
            except (AssertionError, sqlite3.Error, MapError) as e:
                found.append(f"cut at {k} of {len(recording.ops)}, {data}, {names}, seed {seed}: {e!r}")
    return found


def check_plain(folder: Path, done: int, begun: int, before: int = 0) -> None:
    """The database of ``child.plain`` holds what was committed, and nothing else."""
    path = folder / "plain.db"
    if not path.exists():
        assert done == 0, "the file is gone"
        return
    db = sqlite3.connect(path, isolation_level=None)
    try:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        there = db.execute("SELECT 1 FROM sqlite_master").fetchone()
        rows = db.execute("SELECT n, data FROM rows ORDER BY n").fetchall() if there else []
    finally:
        db.close()
    assert max(done, before) <= len(rows) <= max(begun, before)
    assert rows == [(n, row(n)) for n in range(len(rows))]


def check_writer(folder: Path, done: int, begun: int) -> None:
    """The map of ``child.writer``; it is there once it has been opened."""
    path = folder / "a.vmap"
    if begun or path.exists():
        check_map(path, done, begun)


def check_copy_of_map(folder: Path, done: int, begun: int, new: bytes) -> None:
    """The target of ``child.copy_of_map``: the old map or the new one; what is copied stays as it was."""
    assert (folder / "new.vmap").read_bytes() == new
    try:
        check_map(folder / "target.vmap", 6, 6, salt=1)
    except (AssertionError, MapError) as e:
        assert not done, f"not the new map: {e!r}"
        check_map(folder / "target.vmap", 3, 3)


def check_copy(folder: Path, done: int, begun: int) -> None:
    """The target of ``child.copy`` is the old or the new one, whole."""
    content = (folder / "target").read_bytes()
    assert content in ((b"new" * 5000,) if done else (b"old" * 3000, b"new" * 5000)), f"{len(content)} bytes"


def fill_copy(folder: Path) -> None:
    (folder / "new").write_bytes(b"new" * 5000)
    (folder / "target").write_bytes(b"old" * 3000)


def fill_maps(folder: Path) -> None:
    write_map(folder / "target.vmap", 3)
    write_map(folder / "new.vmap", 6, salt=1)


def test_sqlite_with_our_pragmas_loses_nothing_that_was_committed(recorded, tmp_path):
    recording = recorded("plain", 12, "FULL")
    assert failures(recording, tmp_path / "cut", check_plain, 400) == []


@pytest.mark.parametrize(
    ("synchronous", "ignored", "at_least"),
    [pytest.param("OFF", "", 20, id="synchronous off"), pytest.param("FULL", "S", 20, id="a disk that ignores syncs")],
)
def test_the_simulator_finds_what_syncs_are_for(recorded, tmp_path, synchronous, ignored, at_least):
    recording = recorded("plain", 12, synchronous)
    assert len(failures(recording, tmp_path / "cut", check_plain, 400, ignored=ignored)) >= at_least


def test_a_copy_with_all_its_syncs_is_the_old_or_the_new_file(recorded, tmp_path):
    recording = recorded("copy", "file+folder", prepare=fill_copy)
    assert failures(recording, tmp_path / "cut", check_copy, 300) == []


@pytest.mark.parametrize("sync", ["file", "folder", "none"])
def test_the_simulator_finds_each_sync_that_a_copy_leaves_out(recorded, tmp_path, sync):
    recording = recorded("copy", sync, prepare=fill_copy)
    assert len(failures(recording, tmp_path / "cut", check_copy, 300)) >= 5


def test_a_mapping_run_keeps_every_keyframe_that_was_committed(recorded, tmp_path):
    recording = recorded("writer", 12)
    assert failures(recording, tmp_path / "cut", check_writer, 300) == []


def test_a_continued_map_keeps_what_it_had(recorded, tmp_path):
    recording = recorded("writer", 4, prepare=lambda folder: write_map(folder / "a.vmap", 6))
    assert failures(recording, tmp_path / "cut", lambda f, d, b: check_writer(f, max(d, 6), max(b, 6)), 200) == []


def test_a_copy_over_a_map_is_the_old_or_the_new_map(recorded, tmp_path):
    recording = recorded("copy_of_map", prepare=fill_maps)
    check = partial(check_copy_of_map, new=recording.before["new.vmap"][1])
    assert failures(recording, tmp_path / "cut", check, 150) == []
    assert len(failures(recording, tmp_path / "no file is synced", check, 70, ignored="S")) >= 2
    assert len(failures(recording, tmp_path / "nor is the folder", check, 70, ignored="D")) >= 1


def test_a_copy_over_a_half_written_map(library, recorded, tmp_path):
    """The journal of the old map must never be rolled back into the new one."""

    def prepare(folder):
        fill_maps(folder)
        recorder.run(library, folder, "half_written", "target.vmap", killed=True)
        assert (folder / "target.vmap-journal").stat().st_size > 0

    recording = recorded("copy_of_map", prepare=prepare)
    check = partial(check_copy_of_map, new=recording.before["new.vmap"][1])
    assert failures(recording, tmp_path / "cut", check, 200) == []
