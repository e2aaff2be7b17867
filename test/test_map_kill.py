"""Maps of processes that are killed, interrupted, or run out of disk."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from power_cut import recorder
from power_cut.entries import MODELS, entry
from power_cut.maps import check_map, write_map

from vslam_features.errors import MapError
from vslam_features.maps.copy import copy_map
from vslam_features.maps.file_store import FileStore
from vslam_features.maps.writer import MapWriter

LONG = [pytest.mark.slow, pytest.mark.endurance, pytest.mark.timeout(900)]

needs_shim = pytest.mark.skipif(bool(recorder.missing()), reason=recorder.missing())
CHILD = [sys.executable, str(recorder.HERE / "child.py")]
RUNS_A_MAP = 2
REASON = {"device": "full", "pages": "full", "file size": "limit of file sizes"}


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    return recorder.shim(tmp_path_factory.mktemp("shim"))


def wait_for(what, seconds: float = 60.0):
    """The first true value of ``what()``."""
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.002)
    return found


@pytest.mark.parametrize("kills", [10, pytest.param(100, marks=LONG)])
def test_a_mapping_run_that_is_killed_loses_only_what_was_queued(tmp_path, kills):
    with ThreadPoolExecutor(2) as pool:  # a run waits for its disk most of the time
        mapped = pool.map(lambda seed: kill_again_and_again(tmp_path / str(seed), seed), range(kills // RUNS_A_MAP))
    assert sum(mapped) > kills, "too few keyframes for a test of anything"


def kill_again_and_again(folder: Path, seed: int) -> int:
    """Kill run after run of one map, and check it after each; the keyframes that it has at last."""
    rng = random.Random(seed)
    lived_through: list[int] = []
    folder.mkdir()
    path = folder / "a.vmap"
    for run in range(RUNS_A_MAP):
        delay = rng.uniform(0, 0.1) if rng.random() < 0.3 else rng.uniform(0, 0.25)
        lines = killed_while_mapping(folder, delay)
        before = len(lived_through)
        queued, stored = map(int, lines[-1].split()) if len(lines) > 1 else (before, before)
        if not path.exists():
            assert before == 0 and len(lines) == 1, "a map is gone"
            continue
        sessions = check_map(path, stored, queued + 1)
        where = f"map {seed}, run {run}, killed after {delay:.3f} s"
        assert sessions[:before] == lived_through and len(set(sessions[before:])) <= 1, where
        lived_through = sessions
    return len(lived_through)


@needs_shim
@pytest.mark.parametrize("how", ["copy", "copy, deaf", "store", "store, deaf"])
def test_a_slow_save_that_is_interrupted_and_killed(library, tmp_path, how):
    write_map(tmp_path / "target.vmap", 3, salt=1)
    write_map(tmp_path / "a.vmap", 40)
    old = (tmp_path / "target.vmap").read_bytes()
    with open(tmp_path / "said", "w+b") as said:
        command = [*CHILD, "slow_save", str(tmp_path), how]
        child = subprocess.Popen(command, env=recorder.environment(library, tmp_path), stdout=said, stderr=said)
        wait_for(lambda: any(p.stat().st_size > 100_000 for p in tmp_path.glob(".target.vmap.*")) or child.poll())
        os.kill(child.pid, signal.SIGINT)
        time.sleep(0.2)
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        said.seek(0)
        assert b"saved" not in said.read()
    assert (tmp_path / "target.vmap").read_bytes() == old
    assert not (tmp_path / "target.vmap-journal").exists()
    check_map(tmp_path / "a.vmap", 40, 40)
    if "deaf" in how:
        assert list(tmp_path.glob(".target.vmap.*")), "nothing was left for the next save to remove"

    copy_map(tmp_path / "a.vmap", tmp_path / "target.vmap")
    check_map(tmp_path / "target.vmap", 40, 40)
    assert list(tmp_path.glob(".target.vmap.*")) == []
    store = FileStore(tmp_path / "a.vmap", MODELS)
    store.put(entry(40))
    store.close()
    check_map(tmp_path / "a.vmap", 41, 41)


def test_a_map_that_is_being_written_is_not_replaced(tmp_path):
    write_map(tmp_path / "new.vmap", 2)
    with MapWriter(tmp_path / "target.vmap", MODELS, create=True) as other:
        other.append(entry(0))
        with pytest.raises(MapError, match=f"target.vmap: another process .pid {os.getpid()}. writes"):
            copy_map(tmp_path / "new.vmap", tmp_path / "target.vmap")
        other.append(entry(1))
    check_map(tmp_path / "target.vmap", 2, 2)
    copy_map(tmp_path / "new.vmap", tmp_path / "target.vmap")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["new.vmap", "target.vmap"]


@needs_shim
@pytest.mark.parametrize("how", ["device", "file size", "pages"])
def test_mapping_goes_on_while_the_disk_is_full(library, tmp_path, how):
    said = run(library, tmp_path, "map_on_full_disk", how)
    assert 0 < int(said["waiting"]) <= 20
    assert REASON[how] in said["problem"], said
    assert said["problem"] in said["flush"]
    assert said["problem then"] == ""
    check_map(tmp_path / "a.vmap", 25, 25)


@needs_shim
def test_a_map_is_continued_while_the_disk_is_full(library, tmp_path):
    write_map(tmp_path / "a.vmap", 3)
    assert "full" in run(library, tmp_path, "continue_on_full_disk")["append"]
    check_map(tmp_path / "a.vmap", 4, 4)
    assert [p.name for p in tmp_path.iterdir()] == ["a.vmap"]


@needs_shim
@pytest.mark.parametrize("how", ["device", "file size"])
def test_a_copy_that_does_not_fit_leaves_all_as_it_was(library, tmp_path, how):
    write_map(tmp_path / "target.vmap", 3, salt=1)
    write_map(tmp_path / "new.vmap", 30)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    said = run(library, tmp_path, "copy_to_full_disk", how)
    assert "target.vmap" in said["copy"] and REASON[how] in said["copy"], said
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def killed_while_mapping(folder: Path, delay: float) -> list[str]:
    """Lines of ``child.mapping``, killed ``delay`` seconds after it began to open the map."""
    environment = {**os.environ, "PYTHONPATH": f"{recorder.HERE.parent}:{recorder.HERE.parent.parent}"}
    with open(folder / "said", "w+b") as said:
        child = subprocess.Popen([*CHILD, "mapping", str(folder)], env=environment, stdout=said)
        wait_for(lambda: os.fstat(said.fileno()).st_size or child.poll())
        time.sleep(delay)
        assert child.poll() is None, "it ended by itself"
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        said.seek(0)
        return said.read().decode().splitlines()


def run(library: Path, folder: Path, *arguments: str) -> dict[str, str]:
    """What a scenario said: word before the colon -> text after it."""
    command = [*CHILD, arguments[0], str(folder), *arguments[1:]]
    environment = recorder.environment(library, folder)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return dict(line.split(": ", 1) for line in done.stdout.splitlines())
