"""Connections to a map and the file beside them: locks that last, readers side by side, writing that begins early."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from vslam_features.errors import DataError, MapDamagedError, MapError, MapFileError
from vslam_features.maps import connection, database
from vslam_features.maps import side_by_side as module
from vslam_features.maps.open_file import OpenFile
from vslam_features.maps.reader import MapReader
from vslam_features.maps.recover import recover
from vslam_features.maps.rows import scan
from vslam_features.maps.side_by_side import side_by_side
from vslam_features.maps.tables import KEYFRAMES
from vslam_features.maps.verify import verify
from vslam_features.maps.writer import MapWriter
from vslam_features.types import Features, Keyframe, MapEntry, MapModels, ModelIdentity

MODELS = MapModels(ModelIdentity("features", "f", "0" * 64, "p"), ModelIdentity("global", "g", "1" * 64, "p"))
OTHER_PROGRAM = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], timeout=0.1, isolation_level=None)
try:
    connection.execute("BEGIN EXCLUSIVE")
    print("got it")
except sqlite3.OperationalError as error:
    print(error)
"""


def entry(i: int, channels: int = 4, fill: int = 1) -> MapEntry:
    descriptors = np.full((2, channels), fill, np.float16)
    features = Features(np.full((2, 2), i, np.float32), np.ones(2, np.float32), descriptors, (8, 8), MODELS.features)
    return MapEntry(Keyframe(i, i, "camera", features, global_descriptor=np.full(8, i, np.float16)))


def make(path, count: int = 3, fill: int = 1):
    with MapWriter(path, MODELS, create=True) as writer:
        writer.append(*(entry(i, fill=fill) for i in range(count)))
    return path


def what_another_program_gets(path) -> str:
    """It asks for a lock that only one can have."""
    done = subprocess.run([sys.executable, "-c", OTHER_PROGRAM, str(path)], capture_output=True, text=True, timeout=60)
    return done.stdout.strip() or done.stderr


def with_these_tests() -> dict[str, str]:
    """The environment of a process that imports this file."""
    here = Path(__file__).parent
    return os.environ | {"PYTHONPATH": f"{here}{os.pathsep}{here.parent}"}


def descriptors_of(path) -> int:
    """Open files of this process that are this one."""
    own, found = os.stat(path), 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += os.path.samestat(os.stat(f"/proc/self/fd/{number}"), own)
    return found


def test_a_reader_that_closes_leaves_the_locks_of_this_process(tmp_path):
    """POSIX takes them away with any descriptor of the file that is closed."""
    path = make(tmp_path / "a.vmap")
    with MapWriter(path, MODELS) as writer:
        writer.append(entry(3))  # it goes on reading, so that its journal stays open
        assert "locked" in what_another_program_gets(path)
        with MapReader(path) as reader, MapReader(path):
            reader.keyframe(1)
        database.open_for_reading(path).close()
        with pytest.raises(IndexError), MapReader(path) as reader:
            reader.keyframe(9)
        assert "locked" in what_another_program_gets(path)
        writer.append(entry(4))
    assert what_another_program_gets(path) == "got it"
    assert not OpenFile._opened and descriptors_of(path) == 0


def test_a_file_under_two_names_is_one(tmp_path):
    path, second = make(tmp_path / "a.vmap"), tmp_path / "b.vmap"
    os.link(path, second)
    with MapWriter(path, MODELS) as writer:
        writer.append(entry(3))
        with MapReader(second) as reader:
            assert reader._connection.file is writer._connection.file
        assert "locked" in what_another_program_gets(path)


def test_opening_that_fails_leaves_no_file_open(tmp_path, monkeypatch):
    no_map = tmp_path / "b.vmap"
    no_map.write_bytes(b"no map" * 1000)
    for _ in range(3):
        with pytest.raises(MapFileError, match="no map"):
            MapReader(no_map)

    def fail(*_, **__):
        raise sqlite3.OperationalError("unable to open database file")

    path = make(tmp_path / "a.vmap")
    monkeypatch.setattr(connection.sqlite3, "connect", fail)
    with pytest.raises(MapFileError, match="unable to open"):
        MapReader(path)
    assert not OpenFile._opened and descriptors_of(no_map) == descriptors_of(path) == 0


@pytest.mark.parametrize("times", [1, 9])
def test_a_map_that_is_replaced_while_it_is_opened_is_never_two_files(tmp_path, monkeypatch, times):
    path, connect = make(tmp_path / "a.vmap"), sqlite3.connect
    others = [make(tmp_path / f"{i}.vmap", count=2, fill=7) for i in range(times)]

    def after_a_replacement(*args, **kwargs):
        if others:
            os.replace(others.pop(), path)
        return connect(*args, **kwargs)

    monkeypatch.setattr(connection.sqlite3, "connect", after_a_replacement)
    if times == 1:
        with MapReader(path) as reader:
            assert reader._connection.file.is_at(path) and len(reader.headers()) == 2
    else:
        with pytest.raises(MapError, match="other files take its place again and again"):
            MapReader(path)
    assert not OpenFile._opened


def test_what_is_added_to_the_file_is_written_early_and_once(tmp_path, monkeypatch):
    asked, path = [], tmp_path / "a.vmap"
    with MapWriter(path, MODELS, create=True) as writer:
        monkeypatch.setattr(os, "posix_fadvise", lambda *args: asked.append(args), raising=False)
        writer.append(*(entry(i, channels=200_000) for i in range(16)))  # 0.8 MB each
        during = sum(length for _, _, length, _ in asked)
        assert 0.5 * path.stat().st_size < during < path.stat().st_size  # the last ones are left to the sync
        writer.append(*(entry(i, channels=200_000) for i in range(16, 32)))
        assert {file for file, *_ in asked} == {writer._connection.file.descriptor}
    ends = [start + length for _, start, length, _ in asked]
    assert [start for _, start, _, _ in asked][1:] == ends[:-1] and len(asked) > 16
    with MapReader(path) as reader:
        assert [len(reader.keyframe(h.id).features) for h in reader.headers()] == [2] * 32


def test_what_single_keyframes_added_stays_in_memory_when_several_follow(tmp_path, monkeypatch):
    asked, path = [], tmp_path / "a.vmap"
    with MapWriter(path, MODELS, create=True) as writer:
        for i in range(3):
            writer.append(entry(i, channels=200_000))
        synced = path.stat().st_size
        monkeypatch.setattr(os, "posix_fadvise", lambda *args: asked.append(args), raising=False)
        writer.append(*(entry(i, channels=200_000) for i in range(3, 11)))
    assert synced > 2e6 and min(start for _, start, _, _ in asked) == synced


def test_a_disk_that_fills_up_amid_a_transaction_leaves_none_of_it(tmp_path):
    path, many = tmp_path / "a.vmap", [entry(i, channels=200_000) for i in range(1, 17)]
    with MapWriter(path, MODELS, create=True) as writer, MapReader(path) as reader:
        writer.append(entry(0))
        size = path.stat().st_size
        some = size // 8192 + 1000  # pages of ten of them: they are written before the error
        writer._connection.execute(f"PRAGMA max_page_count = {some}")
        for _ in range(2):
            with pytest.raises(MapError, match="the disk is full"):
                writer.append(*many)
            assert len(writer) == len(reader.headers()) == 1
        writer._connection.execute("PRAGMA max_page_count = 1000000")
        writer.append(*many)
        assert [h.id for h in reader.headers()] == list(range(17))
    assert not verify(path).damaged


def test_a_system_without_such_advice_writes_all_the_same(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "posix_fadvise", raising=False)
    with MapReader(make(tmp_path / "a.vmap", 20)) as reader:
        assert len(reader.headers()) == 20


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("map reader")]


def first_descriptor(reader: MapReader, kf_id: int) -> float:
    return float(reader.keyframe(kf_id).features.descriptors[0, 0])


@pytest.mark.parametrize("count", [1, 2, 3, 20])
def test_readers_side_by_side_give_all_in_order_and_end(tmp_path, monkeypatch, count):
    monkeypatch.setattr(module, "READERS", 3)
    with MapReader(make(tmp_path / "a.vmap", 20)) as reader:
        used = set()

        def read(one: MapReader, i: int) -> float:
            used.add(id(one))
            return float(one.keyframe(i).global_descriptor[0])

        assert list(side_by_side(reader, read, range(count))) == list(range(count)) and len(used) == min(3, count)
        some = side_by_side(reader, read, range(count))
        assert next(some) == 0 and not threads()
        del some
        assert descriptors_of(reader.path) == 2  # SQLite's, and that of all
        with pytest.raises(IndexError, match="keyframe id 20"):
            list(side_by_side(reader, read, range(19, 25)))
        assert not threads() and reader.keyframe(3).id == 3
    assert not OpenFile._opened


@pytest.mark.parametrize("after", [0, 1, 2])
def test_without_threads_one_reader_reads_all(tmp_path, monkeypatch, after):
    start, left = threading.Thread.start, [after]

    def some(self):
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("can't start new thread")
        start(self)

    with MapReader(make(tmp_path / "a.vmap", 12)) as reader:
        monkeypatch.setattr(threading.Thread, "start", some)
        assert list(side_by_side(reader, first_descriptor, range(12))) == [1] * 12


def test_readers_side_by_side_never_read_another_map(tmp_path):
    """A map that another program replaced is read on as it was when it was opened."""
    path = make(tmp_path / "a.vmap", 200)
    with MapReader(path) as reader:
        os.replace(make(tmp_path / "b.vmap", 200, fill=7), path)
        with pytest.raises(MapError, match="another file has taken the place"):
            reader.twin()
        assert list(side_by_side(reader, first_descriptor, range(200))) == [1] * 200
        assert [i for i, _ in reader.global_descriptors()] == list(range(200))


def test_damage_that_one_of_several_readers_finds_is_told(tmp_path):
    path = make(tmp_path / "a.vmap", 200)
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("UPDATE global_descriptors SET descriptor = zeroblob(16) WHERE id = 150")
        db.commit()
    with MapReader(path) as reader:
        with pytest.raises(MapDamagedError, match=r"global_descriptors, row 150: descriptor: the checksum is wrong"):
            list(reader.global_descriptors())
        assert not threads()


def test_readers_that_nobody_closed_leave_nothing_when_they_are_collected(tmp_path):
    path = make(tmp_path / "a.vmap", 300)
    for _ in range(5):
        reader = MapReader(path)
        some = reader.global_descriptors()
        next(some)
        reader.kept = some  # a circle, which only the garbage collector finds
    del reader, some
    gc.collect()
    assert not OpenFile._opened and descriptors_of(path) == 0


def test_a_file_can_be_released_amid_an_acquisition(tmp_path, monkeypatch):
    """As a garbage collection or a signal does it, in the very thread that has the guard."""
    path, other = make(tmp_path / "a.vmap"), make(tmp_path / "b.vmap")
    file, stat, times = OpenFile.acquire(path), os.stat, []

    def interrupted(*args, **kwargs):
        if not times:
            times.append(file.release())
        return stat(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", interrupted)
        second = OpenFile.acquire(other)
    assert times and descriptors_of(path) == 0 and descriptors_of(other) == 1
    second.release()
    assert not OpenFile._opened


def test_what_recover_reads_leaves_the_locks_of_this_process(tmp_path):
    path = make(tmp_path / "a.vmap")
    with MapReader(path) as reader, reader._snapshot():
        reader.keyframe(1)
        assert "locked" in what_another_program_gets(path)
        recover(path, tmp_path / "b.vmap")
        assert "locked" in what_another_program_gets(path)
    with MapReader(tmp_path / "b.vmap") as reader:
        assert len(reader.headers()) == 3


def test_a_path_with_two_slashes(tmp_path):
    path = make(Path(f"/{tmp_path}/a b?.vmap"))
    with MapReader(path) as reader:
        assert len(reader.headers()) == 3


WRITES_WITHOUT_A_PAUSE = """
import sys
import numpy as np
from vslam_features.maps.writer import MapWriter
from test_map_connection import MODELS, entry
with MapWriter(sys.argv[1], MODELS) as writer:
    for round in range(1000):
        writer.append(*(entry(len(writer) + i, channels=500_000) for i in range(8)))  # 2 MB each
        print(len(writer), flush=True)
"""


def test_a_reader_is_not_starved_by_a_writer_that_never_pauses(tmp_path):
    path = make(tmp_path / "a.vmap")
    command = [sys.executable, "-c", WRITES_WITHOUT_A_PAUSE, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=with_these_tests()) as other:
        try:
            assert other.stdout.readline().strip() == "11"
            waits = []
            for _ in range(10):
                begin = time.monotonic()
                with MapReader(path) as reader:
                    reader.keyframe(1)
                waits.append(time.monotonic() - begin)
            assert other.poll() is None
        finally:
            other.kill()
    assert sorted(waits)[5] < 1 and max(waits) < 5, waits  # a transaction takes a tenth of a second


KILLED_AMID_A_TRANSACTION = """
import os, signal, sys
from vslam_features.maps.writer import MapWriter
from test_map_connection import MODELS, entry
writer = MapWriter(sys.argv[1], MODELS)
insert = writer._insert
def killed(entry, packer):
    insert(entry, packer)
    if entry.keyframe.id == 15:
        os.kill(os.getpid(), signal.SIGKILL)
writer._insert = killed
writer.append(*(entry(3 + i, channels=500_000) for i in range(16)))
"""


def test_a_reader_reads_on_after_a_writer_was_killed_amid_a_transaction(tmp_path):
    """Parts of it are in the file: somebody has to roll it back, and a connection for reading may not."""
    path = make(tmp_path / "a.vmap")
    with MapReader(path) as reader:
        reader.keyframe(1)
        command = [sys.executable, "-c", KILLED_AMID_A_TRANSACTION, str(path)]
        done = subprocess.run(command, env=with_these_tests(), timeout=60, check=False)
        assert done.returncode == -signal.SIGKILL and database.has_journal(path)
        assert path.stat().st_size > 10e6
        assert reader.keyframe(2).id == 2 and len(reader.headers()) == 3
    assert not verify(path).damaged


def test_a_reader_that_is_closed_amid_its_rows_leaves_no_lock(tmp_path):
    """Else the next one would have SQLite's lock only in SQLite's own books."""
    path = make(tmp_path / "a.vmap")
    reader = MapReader(path)
    some = scan(reader._connection, KEYFRAMES)
    next(some)
    reader.close()
    with MapReader(path) as second, second._snapshot():
        second.keyframe(1)
        assert "locked" in what_another_program_gets(path)
    assert what_another_program_gets(path) == "got it"
    with pytest.raises(sqlite3.ProgrammingError):
        next(some)


def test_a_writer_is_as_patient_after_an_error_as_before(tmp_path):
    with MapWriter(make(tmp_path / "a.vmap"), MODELS) as writer:
        with pytest.raises(DataError, match="keyframe 3 is the next one"):
            writer.append(entry(9), entry(10))
        assert writer._connection.execute("PRAGMA busy_timeout").fetchone() == (int(connection.BUSY_S * 1000),)


def test_a_writer_waits_once_for_one_who_reads_on(tmp_path, monkeypatch):
    path, many = make(tmp_path / "a.vmap"), [entry(3 + i, channels=200_000) for i in range(16)]
    monkeypatch.setattr("vslam_features.maps.writer.BUSY_S", 0.5)
    with MapWriter(path, MODELS) as writer, contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN")
        other.execute("SELECT * FROM meta").fetchall()
        begin = time.monotonic()
        with pytest.raises(MapError, match="another process holds it"):
            writer.append(*many)
        assert 0.4 < time.monotonic() - begin < 5
        other.execute("COMMIT")
        writer.append(*many)
        assert len(writer) == 19
    assert not verify(path).damaged
