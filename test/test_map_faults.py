"""What goes wrong around a running map: other programs at its file, disks that fail or are slow, threads that meet."""

import os
import threading
import time
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import helpers
import numpy as np
import pytest

from vslam_features import session_files
from vslam_features.config import Config
from vslam_features.errors import ConfigError, DataError, MapError
from vslam_features.frontend import FrontEnd
from vslam_features.map_keeper import MapKeeper, absolute
from vslam_features.maps import file_watch, write_queue
from vslam_features.maps.file_store import FileStore
from vslam_features.maps.keyframe_map import KeyframeMap
from vslam_features.maps.lock import WriterLock, is_written
from vslam_features.maps.reader import MapReader
from vslam_features.maps.write_queue import WriteQueue
from vslam_features.maps.writer import MapWriter
from vslam_features.types import MapEntry, MapModels, ModelIdentity, PairKind, PairResult, Pose

MODELS = MapModels(helpers.IDENTITY, None)
PARAMETERS = {
    "features.name": "orb",
    "features.max_keypoints": 200,
    "matcher.name": "nearest",
    "keyframes.every": 1,
    "retrieval.exclude_s": 0.0,
    "retrieval.exclude_frames": 2,
    "map.keep_sessions": 2,
}
WALL = helpers.image(200, 500)


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("VSLAM_FEATURES_STATE", str(tmp_path / "state"))
    return tmp_path / "state" / "sessions"


def make(**parameters) -> MapKeeper:
    given = {name.replace("__", "."): str(v) if name == "map_path" else v for name, v in parameters.items()}
    return MapKeeper(FrontEnd(Config.from_flat({**PARAMETERS, **given})))


def started(**parameters) -> MapKeeper:
    keeper = make(**parameters)
    keeper.start()
    return keeper


def walk(keeper, count, start=0):
    """Process images of a walk along the wall; (tracked, loops) of each."""
    out = []
    for i in range(start, start + count):
        picture = np.ascontiguousarray(WALL[:, 20 * i : 20 * i + 200])
        out.append(keeper._front_end.process(helpers.frame(picture, helpers.T0 + i * helpers.SECOND)))
    return out


def saved(path: Path, count: int = 5, **parameters) -> Path:
    keeper = started(map_path=path, **parameters)
    walk(keeper, count)
    keeper.close()
    return path


def small(i: int, **fields):
    return replace(helpers.keyframe(helpers.T0 + i * helpers.SECOND, n=20), id=i, **fields)


def stored(path: Path) -> int:
    """Keyframes that can be read, each with all that belongs to it."""
    with MapReader(path) as reader:
        return len([reader.entry(h.id) for h in reader.headers()])


@pytest.fixture
def full(monkeypatch):
    """full.set(): the disk takes nothing more; full.clear()."""
    event, append = threading.Event(), MapWriter.append

    def tried(self, *entries):
        if event.is_set():
            raise MapError("the disk is full")
        append(self, *entries)

    monkeypatch.setattr(MapWriter, "append", tried)
    monkeypatch.setattr(write_queue, "RETRY_S", 0.01)
    return event


# -- other programs at the file ----------------------------------------------------------------


def remove(path):
    path.unlink()


def exchange(path):
    saved(path.with_name("other.vmap"), 2)
    os.replace(path.with_name("other.vmap"), path)


def cut(path):
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize(
    ("happens", "told"), [(remove, "was removed"), (exchange, "another file has taken the place"), (cut, "cut short")]
)
def test_what_happens_to_the_file_of_a_running_map_is_told(tmp_path, happens, told):
    path = tmp_path / "a.vmap"
    keeper = started(map_path=path)
    walk(keeper, 4)
    keeper.flush()
    assert keeper.status().problem == ""
    happens(path)
    walk(keeper, 3, start=4)  # as long as the file was, and longer
    keeper.flush()
    assert told in keeper.status().problem and str(path) in keeper.status().problem
    if happens is not remove:
        with pytest.raises(MapError, match=told):
            keeper.save(path)
    with pytest.raises(MapError, match=told):
        keeper.load(path)
    with pytest.raises(MapError, match=told):
        keeper.set_localization(True)
    if happens is cut:
        with pytest.raises(MapError, match=told):
            keeper.save(tmp_path / "b.vmap")
    else:
        assert keeper.save(tmp_path / "b.vmap").startswith("7 keyframes in")
        assert stored(tmp_path / "b.vmap") == 7
    with pytest.raises(MapError, match=told):
        keeper.close()


def test_a_file_that_grows_while_it_is_looked_at_is_not_cut_short(tmp_path, monkeypatch):
    store, stat = FileStore(tmp_path / "a.vmap", MODELS, create=True), os.stat
    caller, grown = threading.current_thread(), []

    def late(path, **options):
        found = stat(path, **options)
        if threading.current_thread() is caller and not grown:
            grown.append(found.st_size)
            store.put(MapEntry(small(0, features=helpers.features(np.zeros((1000, 64), np.float32)))))
            store.flush()  # between the look and the comparison
        return found

    with monkeypatch.context() as patch:
        patch.setattr(file_watch.os, "stat", late)
        assert store.astray == ""
    assert store.file_bytes > grown[0] and store.astray == ""
    store.close()


def test_a_map_that_was_removed_can_be_saved_under_its_own_name(tmp_path):
    keeper = started(map_path=tmp_path / "a.vmap")
    walk(keeper, 3)
    keeper.flush()
    (tmp_path / "a.vmap").unlink()
    assert keeper.save(tmp_path / "a.vmap") == f"3 keyframes in {tmp_path}/a.vmap, " + keeper.status().last_save[-6:]
    assert stored(tmp_path / "a.vmap") == 3
    with pytest.raises(MapError, match="another file"):
        keeper.close()


def test_a_jump_back_in_time_does_not_add_to_a_file_of_somebody_else(tmp_path):
    keeper = started(map_path=tmp_path / "a.vmap")
    walk(keeper, 3)
    keeper.flush()
    exchange(tmp_path / "a.vmap")
    assert keeper.reset(forget=False)
    assert "another file has taken the place" in keeper.status().warning
    walk(keeper, 2)
    keeper.close()
    assert stored(tmp_path / "a.vmap") == 2


@pytest.mark.parametrize("happens", [remove, exchange])
def test_a_localisation_goes_on_in_the_file_that_was_opened(tmp_path, happens):
    path = saved(tmp_path / "a.vmap")
    keeper = started(map_path=path, mode="localization")
    walk(keeper, 2)
    happens(path)
    assert keeper.status().problem == "" and str(path) in keeper.status().warning
    for refused in (lambda: keeper.save(tmp_path / "b.vmap"), lambda: keeper.set_localization(False)):
        with pytest.raises(MapError, match="removed|taken the place"):
            refused()
    assert keeper.reset(forget=False)
    tracked, loops = walk(keeper, 1)[0]  # earlier than the last image
    assert tracked.keyframe.id == 5 and not loops.faults
    assert [p.ref_kf_id for p in loops.pairs if p.matches.num_inliers > 50]
    keeper.close()


# -- names -------------------------------------------------------------------------------------


def test_a_symbolic_link_is_the_same_map(tmp_path):
    (tmp_path / "real").mkdir()
    path, link = tmp_path / "real" / "a.vmap", tmp_path / "link.vmap"
    link.symlink_to(path)
    with MapWriter(path, MODELS, create=True):
        assert is_written(link)
        with pytest.raises(MapError, match="another process"):
            MapWriter(link, MODELS)
    with MapWriter(link, MODELS), pytest.raises(MapError, match="another process"):
        MapWriter(path, MODELS)


def test_a_lock_that_was_removed_is_not_taken_from_the_next_one(tmp_path):
    first = WriterLock(tmp_path / "a.vmap")
    (tmp_path / ".a.vmap.lock").unlink()
    second = WriterLock(tmp_path / "a.vmap")
    first.release()
    assert is_written(tmp_path / "a.vmap")
    second.release()
    assert not is_written(tmp_path / "a.vmap")


def test_what_is_no_file_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    keeper = started()
    walk(keeper, 1)
    with pytest.raises(MapError, match="pipe.*not replaced"):
        keeper.save(tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()
    keeper.close()


def test_without_a_home_there_is_no_crash(tmp_path, monkeypatch):
    monkeypatch.setenv("VSLAM_FEATURES_STATE", "~no-such-user/state")
    keeper = make()
    assert "in memory only" in keeper.start() and "VSLAM_FEATURES_STATE" in keeper.status().warning
    with pytest.raises(ConfigError, match="~no-such-user/a.vmap"):
        absolute("~no-such-user/a.vmap")


# -- files of runs -----------------------------------------------------------------------------


def test_a_file_that_is_localised_in_is_not_removed_by_other_runs(state):
    keeper = started()
    walk(keeper, 3)
    keeper.set_localization(True)
    keeper.reset(forget=True)
    for _ in range(4):
        other = started()
        walk(other, 1)
        other.close()
    assert len(list(state.glob("*.vmap"))) == 4  # this one, the running one of the last run, and two beside it
    assert "is continued: 3 keyframes" in keeper.set_localization(False)
    keeper.close()
    assert not list(state.glob(".*"))


def test_files_are_in_the_order_of_runs_where_the_clock_was_set_back(state, monkeypatch):
    class Clock(datetime):
        times = [datetime(year, 1, 1, tzinfo=timezone.utc) for year in (2020, 2021, 1970, 1970, 1970)]

        @classmethod
        def now(cls, tz):
            return cls.times.pop(0)

    monkeypatch.setattr(session_files, "datetime", Clock)
    paths = []
    for _ in range(5):
        keeper = started()
        walk(keeper, 1)
        paths.append(keeper.path)
        keeper.close()
    assert paths == sorted(set(paths)) and [p.exists() for p in paths] == [False, False, True, True, True]


# -- a disk that is full, or slow ----------------------------------------------------------------


def test_a_load_does_not_lose_what_the_disk_does_not_take(tmp_path, full):
    other = saved(tmp_path / "b.vmap")
    keeper = started(map_path=tmp_path / "a.vmap")
    full.set()
    walk(keeper, 2)
    with pytest.raises(MapError, match="a.vmap: 2 keyframes are not stored: the disk is full; the running map stays"):
        keeper.load(other)
    assert keeper.path == tmp_path / "a.vmap"
    full.clear()
    assert "b.vmap is continued" in keeper.load(other)
    keeper.close()
    assert stored(tmp_path / "a.vmap") == 2


def test_keyframes_that_a_reset_loses_are_told_afterwards(full):
    keeper = started()
    full.set()
    walk(keeper, 2)
    keeper.reset(forget=True)
    assert "2 keyframes are not stored: the disk is full" in keeper.status().warning
    full.clear()
    walk(keeper, 1)
    keeper.reset(forget=True)
    assert keeper.status().warning == ""
    keeper.close()


def test_a_slow_disk_holds_up_one_keyframe_not_each(tmp_path, monkeypatch):
    gate, append = threading.Event(), MapWriter.append
    monkeypatch.setattr(MapWriter, "append", lambda self, *entries: gate.wait(20) and append(self, *entries))
    monkeypatch.setattr(write_queue, "ROOM_S", 0.3)
    store = FileStore(tmp_path / "a.vmap", MODELS, create=True, queue=4)
    for i in range(4):
        store.put(MapEntry(small(i)))
    waited = []
    for _ in range(3):
        start = time.monotonic()
        with pytest.raises(MapError, match="the disk is too slow"):
            store.wait_for_room()
        waited.append(time.monotonic() - start)
    assert waited[0] >= 0.3 > min(waited[1:])
    assert store.problem == "the disk is too slow"
    gate.set()
    store.flush()
    assert store.problem == ""
    store.wait_for_room()
    store.close()
    with pytest.raises(MapError, match="a.vmap is closed"):
        store.wait_for_room()


def test_a_flush_ends_though_more_comes_in(tmp_path, monkeypatch):
    """It waits for what was put before, not for a moment in which nothing waits."""
    store = FileStore(tmp_path / "a.vmap", MODELS, create=True)
    batch, ids = WriteQueue._batch, iter(range(1000))

    def fed(self, most):
        if batch(self, most):
            store.put(MapEntry(small(next(ids))))  # there is always a next one
        return batch(self, 1)

    with monkeypatch.context() as patch:
        patch.setattr(WriteQueue, "_batch", fed)
        store.put(MapEntry(small(next(ids))))
        store.flush(timeout_s=20)
        assert store.waiting
    store.close()


def test_a_flush_ends_when_another_thread_closes_the_map(tmp_path, full, monkeypatch):
    full.set()
    store, closing, go_on = FileStore(tmp_path / "a.vmap", MODELS, create=True), threading.Event(), threading.Event()
    close = MapWriter.close

    def slow(self):
        closing.set()
        go_on.wait(20)
        close(self)

    monkeypatch.setattr(MapWriter, "close", slow)
    store.put(MapEntry(small(0)))
    errors = []

    def failing(work):
        with pytest.raises(MapError) as raised:
            work()
        errors.append(str(raised.value))

    first = threading.Thread(target=failing, args=(store.close,), daemon=True)
    first.start()
    assert closing.wait(20)  # the writer's thread is at its end: nobody tries again
    second = threading.Thread(target=failing, args=(store.flush,), daemon=True)
    second.start()
    time.sleep(0.1)
    go_on.set()
    for thread in (first, second):
        thread.join(20)
        assert not thread.is_alive()
    assert len(errors) == 2 and all("1 keyframes are not stored: the disk is full" in e for e in errors)


# -- what no map takes ---------------------------------------------------------------------------

F = helpers.keyframe(n=20).features
POSE = helpers.pose()


@pytest.mark.parametrize(
    "fields",
    [
        {"frame_id": "a\udcff"},
        {"pose": Pose(POSE.R, POSE.t, "a\udcff")},
        {"stamp_ns": 1 << 63},
        {"thumbnail": np.zeros((4, 4, 3), np.float32)},
        {"features": replace(F, model=ModelIdentity("features", "x", "1" * 64, "none"))},
        {"features": replace(F, descriptors=F.descriptors.astype(np.float64))},
        {"features": replace(F, pixel_scale=float("nan"))},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_keyframe_that_no_map_takes_is_refused_at_once(tmp_path, fields):
    """In the queue it would hold up all that come after it, for ever."""
    keyframes = KeyframeMap(FileStore(tmp_path / "a.vmap", MODELS, create=True))
    with pytest.raises(DataError):
        keyframes.add(small(0, **fields))
    keyframes.finish(keyframes.add(small(1)).id)
    keyframes.close()
    assert stored(tmp_path / "a.vmap") == 1


@pytest.mark.parametrize("name", ["covisibility", "elapsed_ms"])
def test_a_number_that_sqlite_does_not_store_costs_the_matches_only(tmp_path, name):
    matches = replace(helpers.matches(3), **{name: float("nan")})
    store = FileStore(tmp_path / "a.vmap", MODELS, create=True)
    for i in range(3):
        store.put(MapEntry(small(i), (PairResult(PairKind.TRACK, 1, 0, helpers.T0, matches),) if i == 1 else ()))
    store.close()
    assert stored(tmp_path / "a.vmap") == 3


# -- localisation that could never recognise anything --------------------------------------------


def test_a_map_without_places_is_not_localised_in(tmp_path):
    blind, empty = saved(tmp_path / "blind.vmap", loops__enabled=False), tmp_path / "empty.vmap"
    MapWriter(empty, make()._front_end.map_models, create=True).close()
    whole = saved(tmp_path / "whole.vmap")
    for path, told in ((blind, "none of its keyframes has a global descriptor"), (empty, "no keyframe yet")):
        with pytest.raises(MapError, match=told):
            started(map_path=path, mode="localization")
    with pytest.raises(ConfigError, match="loops.enabled"):
        started(map_path=whole, mode="localization", loops__enabled=False)
    keeper = started(map_path=whole, mode="localization")
    for path in (blind, empty):
        with pytest.raises(MapError):
            keeper.load(path)
    assert keeper.path == whole
    keeper.close()
    keeper = started(map_path=blind, loops__enabled=False)
    with pytest.raises(ConfigError, match="loops.enabled"):
        keeper.set_localization(True)
    assert walk(keeper, 1)[0][0].keyframe.id == 5
    keeper.close()
