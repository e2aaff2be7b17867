"""The writer's journal stays open between keyframes, is harmless there, and errors leave nothing behind."""

import dataclasses
import os
import sqlite3
import subprocess
import sys
import threading

import numpy as np
import pytest

from vslam_features.errors import DataError, MapError
from vslam_features.maps.database import has_journal
from vslam_features.maps.keyframe_cache import KeyframeCache, nbytes_of
from vslam_features.maps.reader import MapReader
from vslam_features.maps.recover import recover
from vslam_features.maps.writer import MapWriter
from vslam_features.types import Features, Keyframe, MapEntry, MapModels, ModelIdentity

MODELS = MapModels(ModelIdentity("features", "f", "0" * 64, "p"), None)


def keyframe(i: int, width: int = 64) -> Keyframe:
    features = Features(
        np.zeros((64, 2), np.float32), np.ones(64, np.float32), np.full((64, width), i, np.float16), (8, 8),
        MODELS.features,
    )  # fmt: skip
    return Keyframe(i, i, "camera", features)


def journal(path) -> bytes:
    return path.with_name(f"{path.name}-journal").read_bytes()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.vmap"


def test_between_two_keyframes_the_journal_is_there_and_says_that_nothing_is_to_be_rolled_back(path):
    with MapWriter(path, MODELS, create=True) as writer:
        inodes = set()
        for i in range(4):
            writer.append(MapEntry(keyframe(i)))
            inodes.add(os.stat(f"{path}-journal").st_ino)
            assert journal(path)[:28] == bytes(28) and not has_journal(path)
            with MapReader(path) as reader:
                assert len(reader.headers()) == i + 1
        assert len(inodes) == 1
    assert not os.path.exists(f"{path}-journal")


@pytest.mark.parametrize("held", [True, False])
def test_a_reader_of_another_connection_is_not_kept_out(path, held):
    with MapWriter(path, MODELS, create=True) as writer:
        writer.append(MapEntry(keyframe(0)))
        if not held:
            writer._let_go()
        other = sqlite3.connect(path, timeout=0)
        assert other.execute("SELECT count(*) FROM keyframes").fetchone() == (1,)
        other.close()
        writer.append(MapEntry(keyframe(1)))


def test_a_full_disk_rolls_back_and_the_same_keyframe_is_taken_later(path):
    with MapWriter(path, MODELS, create=True) as writer:
        writer.append(MapEntry(keyframe(0)))
        pages = writer._connection.execute("PRAGMA page_count").fetchone()[0]
        for _ in range(3):
            writer._connection.execute(f"PRAGMA max_page_count = {pages + 2}")
            with pytest.raises(MapError, match="full"):
                writer.append(MapEntry(keyframe(1, 4096)))
            assert not has_journal(path)
            with MapReader(path) as reader:
                assert len(reader.headers()) == 1
        writer._connection.execute("PRAGMA max_page_count = 1000000")
        writer.append(MapEntry(keyframe(1, 4096)))
    with MapReader(path) as reader:
        assert (reader.keyframe(1).features.descriptors == 1).all()


def test_a_map_that_was_left_with_a_journal_without_a_transaction_is_recovered_whole(path, tmp_path):
    with MapWriter(path, MODELS, create=True) as writer:
        for i in range(3):
            writer.append(MapEntry(keyframe(i)))
        left = tmp_path / "left.vmap"
        left.write_bytes(path.read_bytes())
        left.with_name("left.vmap-journal").write_bytes(journal(path))
    with MapReader(left) as reader:
        assert len(reader.headers()) == 3
    report = recover(left, tmp_path / "saved.vmap")
    assert list(report.ids) == [0, 1, 2] and not any("journal" in note for note in report.notes)
    with MapWriter(left, MODELS) as writer:
        writer.append(MapEntry(keyframe(3)))


@pytest.mark.parametrize("at", range(8))
def test_a_bad_array_among_many_keyframes_stores_none_of_them(path, at):
    """Arrays are packed in another thread, ahead of what is written: its errors come back, in order, and it ends."""
    entries = [MapEntry(keyframe(i)) for i in range(8)]
    bad = [*entries]
    for i in (at, 7):
        scores = np.full(64, np.nan, np.float32)
        bad[i] = MapEntry(
            dataclasses.replace(keyframe(i), features=dataclasses.replace(keyframe(i).features, scores=scores))
        )
    with MapWriter(path, MODELS, create=True) as writer:
        for _ in range(3):
            with pytest.raises(DataError, match="scores is not finite"):
                writer.append(*bad)
            assert len(writer) == 0 and not [t for t in threading.enumerate() if t.name.startswith("map packer")]
            with MapReader(path) as reader:
                assert reader.headers() == [] and reader.identities == [] and reader.sessions() == {}
        writer.append(*entries)
    with MapReader(path) as reader:
        for i, header in enumerate(reader.headers()):
            assert (reader.keyframe(header.id).features.descriptors == i).all()
        assert len(reader.headers()) == 8


@pytest.mark.parametrize("when, stored", [("INSERT INTO features", 0), ("UPDATE", 0), ("COMMIT", 3)])
def test_an_interrupt_leaves_all_or_none_and_the_writer_knows_which(path, when, stored):
    """Ctrl-C in the sync of a commit is raised after it: the keyframes are in the file, and those after them follow."""

    class Interrupting:
        def __init__(self, connection):
            self.real = connection

        def __getattr__(self, name):
            return getattr(self.real, name)

        def execute(self, sql, *values):
            result = self.real.execute(sql, *values)
            if sql.startswith(when):
                raise KeyboardInterrupt
            return result

    with MapWriter(path, MODELS, create=True) as writer:
        real = writer._connection
        writer._connection = Interrupting(real)
        with pytest.raises(KeyboardInterrupt):
            writer.append(*(MapEntry(keyframe(i)) for i in range(3)))
        writer._connection = real
        assert len(writer) == stored
        writer.append(*(MapEntry(keyframe(i)) for i in range(stored, 6)))
    with MapReader(path) as reader:
        assert [h.id for h in reader.headers()] == list(range(6)) and len(reader.identities) == 1
        assert all((reader.keyframe(i).features.descriptors == i).all() for i in range(6))


@pytest.mark.parametrize(
    "late",
    ["threading.Thread(target=lambda: (threading.main_thread().join(), late())).start()", "atexit.register(late)"],
)
def test_a_map_that_is_closed_while_the_interpreter_ends_is_whole(path, late):
    """Then no pool of threads takes work any more."""
    code = f"""
import atexit, pathlib, sys, threading
sys.path.insert(0, {str(os.path.dirname(__file__))!r})
from test_map_writing import MODELS, MapEntry, MapWriter, keyframe
from vslam_features.maps.write_queue import WriteQueue

queue = WriteQueue(MapWriter(pathlib.Path({str(path)!r}), MODELS, create=True), 99, lambda: None, lambda *_: None)

def late():
    for i in range(20):
        queue.put(MapEntry(keyframe(i)))
    queue.close()

{late}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    with MapReader(path) as reader:
        assert len(reader.headers()) == 20


def test_a_cache_shares_its_capacity_with_what_its_owner_holds():
    size = nbytes_of(keyframe(0))
    cache = KeyframeCache(4 * size)
    for i in range(6):
        cache.put(keyframe(i))
    assert cache.nbytes == 4 * size and cache.get(1) is None
    cache.make_room(3 * size)
    assert cache.nbytes == size and cache.get(5) is not None
    cache.put(keyframe(6), beside=3 * size)
    assert cache.nbytes == size and cache.get(5) is None and cache.get(6) is not None
    cache.put(keyframe(7), beside=4 * size)
    assert cache.get(7) is None
    cache.make_room(9 * size)
    assert cache.nbytes == 0
