"""A power cut at any point of a recorded run leaves a whole map. What is assumed of a disk: ``power_cut/disk.py``."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from power_cut import recorder
from power_cut.child import row
from power_cut.disk import DATA, NAMES, states
from power_cut.maps import check_map, write_map

from vslam_features.errors import MapError
from vslam_features.maps.reader import MapReader

SLOW = [pytest.mark.slow, pytest.mark.endurance, pytest.mark.timeout(900)]
many = pytest.mark.parametrize(
    ("cases", "seed"), [(150, 0), *(pytest.param(1000, seed, marks=SLOW) for seed in (1, 2))]
)
pytestmark = pytest.mark.skipif(bool(recorder.missing()), reason=recorder.missing())


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    return recorder.shim(tmp_path_factory.mktemp("shim"))


@pytest.fixture
def cuts(tmp_path):
    """A folder in memory where there is one: each repair of a map syncs, which is not what is tested here."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else tmp_path) as folder:
        yield Path(folder)


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
    """Cut ``cases`` times or a little more, in all ways; what ``check(folder, done, begun)`` raised.

    Always cut just before and after whatever is no write, which is all around commits, and several times around what
    is done to names, which happens rarely; the other points, between the writes of a transaction, are drawn.
    """
    ops, plan = recording.ops, random.Random(seed)
    ways = [(data, names) for data in DATA for names in NAMES]
    borders = {k for i, op in enumerate(ops) if op.kind != "W" for k in (i, i + 1)}
    names = [k for i, op in enumerate(ops) if op.kind in "RUD" for k in (i, i + 1)]
    drawn = [plan.randint(0, len(ops)) for _ in range(cases - len(borders))]
    chosen = Counter([*borders, *names * 5, *drawn])
    found, checked, promised = [], set(), {"begun": 0, "done": 0}
    for k, disk in states(recording.before, ops, ignored):
        if k and ops[k - 1].kind == "M":
            word, number = ops[k - 1].name.split()
            promised[word] = int(number)
        for i in range(chosen[k]):
            data, names = plan.choice(ways)
            left = disk.cut(random.Random(f"{seed} {k} {i}"), data, names)
            case = hash((*promised.values(), *sorted(left.items())))
            if case in checked:  # all ways lead to one where little is pending
                continue
            checked.add(case)
            there = folder / f"{k}-{i}"
            there.mkdir(parents=True)
            for name, content in left.items():
                (there / name).write_bytes(content)
            try:
                check(there, **promised)
            except (AssertionError, sqlite3.Error, MapError) as e:
                found.append(f"cut at {k} of {len(ops)}, {data}, {names}, case {i}, seed {seed}: {e!r}")
            shutil.rmtree(there)
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


def check_writer(folder: Path, done: int, begun: int, before: int = 0) -> None:
    """The map of ``child.writer``; it is there once it has been opened."""
    path = folder / "a.vmap"
    if begun or before or path.exists():
        check_map(path, max(done, before), max(begun, before))


def check_running(folder: Path, done: int, begun: int, copying: int = 0, copied: int = 0) -> None:
    """Both maps of ``child.running``."""
    check_writer(folder, done, begun)
    try:
        check_map(folder / "target.vmap", copying, begun)
    except (AssertionError, MapError) as e:
        assert not copied, f"not the new map: {e!r}"
        check_map(folder / "target.vmap", 3, 3, salt=1)


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


def test_sqlite_with_our_pragmas_loses_nothing_that_was_committed(recorded, cuts):
    recording = recorded("plain", 12, "FULL")
    assert failures(recording, cuts, check_plain, 400) == []


@pytest.mark.parametrize(
    ("synchronous", "ignored", "at_least"),
    [pytest.param("OFF", "", 20, id="synchronous off"), pytest.param("FULL", "S", 20, id="a disk that ignores syncs")],
)
def test_the_simulator_finds_what_syncs_are_for(recorded, cuts, synchronous, ignored, at_least):
    recording = recorded("plain", 12, synchronous)
    assert len(failures(recording, cuts, check_plain, 400, ignored=ignored)) >= at_least


def test_a_copy_with_all_its_syncs_is_the_old_or_the_new_file(recorded, cuts):
    recording = recorded("copy", "file+folder", prepare=fill_copy)
    assert failures(recording, cuts, check_copy, 300) == []


@pytest.mark.parametrize("sync", ["file", "folder", "none"])
def test_the_simulator_finds_each_sync_that_a_copy_leaves_out(recorded, cuts, sync):
    recording = recorded("copy", sync, prepare=fill_copy)
    assert failures(recording, cuts, check_copy, 300) != []


def leave_half_written(library: Path, folder: Path, name: str) -> None:
    """The map has a journal of a transaction that never ended, and pages of it in the file."""
    recorder.run(library, folder, "half_written", name, killed=True)
    assert (folder / f"{name}-journal").stat().st_size > 0


@many
def test_a_mapping_run_keeps_every_keyframe_that_was_committed(recorded, cuts, cases, seed):
    recording = recorded("writer", 12)
    assert failures(recording, cuts, check_writer, cases, seed) == []


@many
def test_keyframes_that_share_a_transaction_are_all_there_or_none(recorded, cuts, cases, seed):
    def check(folder, done, begun):
        check_writer(folder, done, begun)
        if (folder / "a.vmap").exists() and begun:
            with MapReader(folder / "a.vmap") as reader:
                assert len(reader.headers()) in (done, begun)

    recording = recorded("waited", 3, 10)
    written = [Path(op.name).name if op.kind == "W" else op.name for op in recording.ops if op.kind in "WM"]
    last = written[written.index("begun 30") : written.index("done 30")]
    early = last.index("a.vmap") < len(last) - 1 - last[::-1].index("a.vmap-journal")
    assert early, "nothing went to the file before the end of the transaction: the test shows nothing"
    assert failures(recording, cuts, check, cases, seed) == []
    assert len(failures(recording, cuts, check, 100, ignored="S")) >= 10


@many
def test_a_continued_map_keeps_what_it_had(recorded, cuts, cases, seed):
    recording = recorded("writer", 4, prepare=lambda folder: write_map(folder / "a.vmap", 6))
    check = partial(check_writer, before=6)
    assert failures(recording, cuts, check, cases, seed) == []
    assert len(failures(recording, cuts, check, 100, ignored="S")) >= 10


@many
@pytest.mark.parametrize("scenario", [("reader",), ("writer", 2)], ids=["read", "continued"])
def test_a_power_cut_while_a_crash_is_repaired(library, recorded, cuts, scenario, cases, seed):
    def prepare(folder):
        write_map(folder / "a.vmap", 6)
        leave_half_written(library, folder, "a.vmap")

    recording = recorded(*scenario, prepare=prepare)
    assert failures(recording, cuts, partial(check_writer, before=6), cases // 3, seed) == []


def test_a_new_map_is_not_hit_by_the_journal_of_a_deleted_one(library, recorded, cuts):
    def prepare(folder):
        write_map(folder / "a.vmap", 6)
        leave_half_written(library, folder, "a.vmap")
        (folder / "a.vmap").unlink()

    recording = recorded("writer", 2, prepare=prepare)
    assert failures(recording, cuts, check_writer, 150) == []


@many
def test_a_copy_over_a_map_is_the_old_or_the_new_map(recorded, cuts, cases, seed):
    recording = recorded("copy_of_map", prepare=fill_maps)
    check = partial(check_copy_of_map, new=recording.before["new.vmap"][1])
    assert failures(recording, cuts, check, cases // 2, seed) == []
    assert failures(recording, cuts, check, 70, ignored="S") != []
    assert failures(recording, cuts, check, 70, ignored="D") != []


@many
def test_a_copy_over_a_half_written_map(library, recorded, cuts, cases, seed):
    """The journal of the old map must never be rolled back into the new one."""

    def prepare(folder):
        fill_maps(folder)
        leave_half_written(library, folder, "target.vmap")

    recording = recorded("copy_of_map", prepare=prepare)
    check = partial(check_copy_of_map, new=recording.before["new.vmap"][1])
    assert failures(recording, cuts, check, cases // 2, seed) == []


@many
def test_a_running_map_that_is_saved_while_keyframes_come(recorded, cuts, cases, seed):
    recording = recorded("running", prepare=lambda folder: write_map(folder / "target.vmap", 3, salt=1))
    assert failures(recording, cuts, check_running, cases, seed) == []
