"""KeyframeMap: ids, sessions, localisation, and how each keyframe reaches the store once."""

import threading
from dataclasses import replace

import numpy as np
import pytest
from helpers import SECOND, T0, features, keyframe, matches, pose
from hypothesis import given, settings
from hypothesis import strategies as st

from vslam_features.errors import DataError, MapDamagedError, MapError
from vslam_features.maps.keyframe_map import LOCALISATION_KEEPS, KeyframeMap
from vslam_features.maps.memory import MemoryStore
from vslam_features.maps.store import KeyframeStore, entry_bytes
from vslam_features.types import Candidate, PairKind, PairResult, Status


def small(i: int, **fields):
    return replace(keyframe(T0 + i * SECOND, n=2), **fields)


def pair(kf_id: int, ref: int, kind: PairKind = PairKind.TRACK, inliers: int = 3) -> PairResult:
    return PairResult(kind, kf_id, ref, T0 + ref * SECOND, matches(inliers))


def filled(*sessions: int, poses=None) -> MemoryStore:
    """A store with so many keyframes in each session, in one metre steps where ``poses``."""
    store = MemoryStore()
    for count in sessions:
        m = KeyframeMap(store)
        for i in range(count):
            m.finish(m.add(small(i, pose=poses(i) if poses else None, global_descriptor=np.eye(8)[0])).id)
    return store


class Recorder(KeyframeStore):
    """Notes what it is given; full and failing where told."""

    def __init__(self):
        self.entries, self.calls, self.full = [], [], False

    def headers(self):
        return []

    def keyframe(self, kf_id):
        return self.entries[kf_id].keyframe

    def put(self, entry):
        self.entries.append(entry)

    def global_descriptors(self):
        return iter(())

    def confirmed_loops(self):
        return []

    def wait_for_room(self):
        if self.full:
            raise MapError("the disk is full")

    def flush(self, timeout_s=None):
        self.calls.append(("flush", timeout_s))

    def close(self):
        self.calls.append("close")


# -- finishing ---------------------------------------------------------------------------------


def test_a_finished_keyframe_takes_all_that_belongs_to_it_along():
    store = Recorder()
    m = KeyframeMap(store)
    m.finish(m.add(small(0)).id)
    one, d = m.add(small(1)), np.ones(4, np.float32)
    track, loop = pair(1, 0), pair(1, 0, PairKind.LOOP)
    candidate, gated = Candidate(1, 0, T0, 0.9, 0.1, 0), Candidate(1, 0, T0, 0.8, 0.1, 1)
    m.attach(1, [track])
    m.describe(1, d)
    assert len(store.entries) == 1 and m.stored == 1 and len(m) == 2
    m.finish(1, [loop], [candidate], [gated])
    entry = store.entries[1]
    assert entry.keyframe.global_descriptor is d and entry.keyframe.features is one.features
    assert entry.pairs == (track, loop) and entry.candidates == (candidate,) and entry.gated == (gated,)
    m.finish(1, [loop, loop])  # late calls change nothing
    m.attach(1, [loop])
    m.describe(1, d + 1)
    assert store.entries[1] is entry and len(store.entries) == 2 and m.stored == 2
    for call in (m.finish, lambda i: m.attach(i, []), lambda i: m.describe(i, d)):
        for unknown in (-1, 2):
            with pytest.raises(IndexError):
                call(unknown)


def test_what_was_never_finished_follows_with_the_next_one_or_at_the_end():
    store = Recorder()
    m = KeyframeMap(store)
    for i in range(5):
        m.add(small(i))
        m.attach(i, [pair(i, i - 1)] if i else [])
    m.finish(2, [pair(2, 0, PairKind.LOOP)])
    assert [e.keyframe.id for e in store.entries] == [0, 1, 2]
    assert [[p.kind for p in e.pairs] for e in store.entries] == [[], [PairKind.TRACK], [PairKind.TRACK, PairKind.LOOP]]
    m.flush(0.01)
    assert len(store.entries) == 3, "their loops may still come"
    m.flush(unfinished=True)
    assert [len(e.pairs) for e in store.entries] == [0, 1, 2, 1, 1]
    m.add(small(5))
    m.close()
    m.close()
    assert [e.keyframe.id for e in store.entries] == list(range(6)) and store.calls[-1] == "close"


def test_a_flush_waits_a_moment_for_keyframes_that_are_being_finished():
    store = Recorder()
    m = KeyframeMap(store)
    m.add(small(0))
    timer = threading.Timer(0.05, m.finish, (0,))
    timer.start()
    m.flush()
    timer.join()
    assert [e.keyframe.id for e in store.entries] == [0] and store.calls == [("flush", None)]
    m.flush(3.0)
    assert 2.5 < store.calls[-1][1] <= 3.0, "what is left of the time"


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_each_keyframe_reaches_the_store_once_in_order_with_its_pairs(data):
    """Any interleaving of a thread that adds and one that finishes, of which some keyframes are dropped."""
    store = Recorder()
    m = KeyframeMap(store, keep=data.draw(st.integers(1, 4)))
    tracked, dropped, described, finished, queue = {}, set(), set(), set(), []
    for _ in range(data.draw(st.integers(1, 40))):
        step = data.draw(st.sampled_from(["add", "add", "close loops", "drop", "flush"]))
        if step == "add":
            kf_id = m.add(small(len(m))).id
            assert kf_id == len(m) - 1 == len(tracked)
            tracked[kf_id] = tuple(pair(kf_id, r) for r in range(max(kf_id - 2, 0), kf_id))
            m.attach(kf_id, tracked[kf_id])
            queue.append(kf_id)
        elif step == "close loops" and queue:
            kf_id = queue.pop(0)
            if data.draw(st.booleans()):
                m.describe(kf_id, np.full(4, kf_id, np.float32))
                described.add(kf_id)
            if data.draw(st.integers(0, 3)):  # else a crash in between
                m.finish(kf_id, [pair(kf_id, 0, PairKind.LOOP)])
                finished.add(kf_id)
        elif step == "drop" and queue:
            dropped.add(queue.pop(0))
        elif step == "flush" and not queue:
            m.flush(unfinished=True)
        newest = max(finished, default=-1)
        assert [e.keyframe.id for e in store.entries][: newest + 1] == list(range(newest + 1))
        assert all(m[i].id == i and m.header(i) == m[i].header for i in range(len(m)))
    m.close()
    assert [e.keyframe.id for e in store.entries] == list(range(len(tracked))) and m.stored == len(m)
    for kf_id, entry in enumerate(store.entries):
        kinds = [p.kind for p in entry.pairs[len(tracked[kf_id]) :]]
        assert entry.pairs[: len(tracked[kf_id])] == tracked[kf_id]
        assert kinds == ([PairKind.LOOP] if kf_id in finished else [])
        assert (entry.keyframe.global_descriptor is not None) == (kf_id in described)
        assert kf_id not in dropped or not kinds


def test_between_threads_every_keyframe_is_readable_at_any_time():
    store, count, failed = MemoryStore(), 400, []
    m, done = KeyframeMap(store), threading.Event()
    ready: list[int] = []

    def watched(work):
        def run():
            try:
                work()
            except BaseException as error:
                failed.append(error)
                done.set()

        return threading.Thread(target=run)

    def finish():
        seen = 0
        while seen < count and not failed:
            if seen < len(ready):
                m.describe(seen, np.full(3, seen, np.float32))
                if seen % 3:
                    m.finish(seen, [pair(seen, 0, PairKind.LOOP)])
                seen += 1

    def read():
        rng = np.random.default_rng()
        while not done.is_set():
            if len(m):
                i = int(rng.integers(len(m)))
                assert m[i].id == m.header(i).id == i and m.nbytes > 0 and 0 <= m.stored <= count
                assert [k.id for k in m.last(2)] or not len(m)

    readers, finisher = [watched(read) for _ in range(3)], watched(finish)
    for thread in (*readers, finisher):
        thread.start()
    for i in range(count):
        m.add(small(i))
        m.attach(i, [pair(i, max(i - 1, 0))])
        ready.append(i)
    finisher.join(60)
    done.set()
    for thread in readers:
        thread.join(60)
    m.close()
    assert not failed and [h.id for h in store.headers()] == list(range(count))
    assert [len(store.entry(i).pairs) for i in range(count)] == [1 + (i % 3 > 0) for i in range(count)]
    assert [i for i, _ in store.global_descriptors()] == list(range(count))


def test_no_room_costs_the_keyframe_but_no_id():
    store = Recorder()
    m = KeyframeMap(store)
    m.add(small(0))
    store.full = True
    with pytest.raises(MapError, match="disk is full"):
        m.add(small(1))
    assert len(m) == 1 and [k.id for k in m.last(5)] == [0]
    store.full = False
    assert m.add(small(2)).id == 1


def test_what_the_store_never_takes_gets_no_id():
    store = Recorder()
    m = KeyframeMap(store)

    def refuse(one):
        if one.stamp_ns == T0:
            raise DataError("not finite")

    store.check = refuse
    with pytest.raises(DataError, match="not finite"):
        m.add(small(0))
    assert m.add(small(1)).id == 0
    store.read_only = True
    assert KeyframeMap(store).add(small(0)).id == 0, "a localisation stores nothing"


def test_stored_keyframes_are_let_go_but_for_the_newest():
    store = Recorder()
    m = KeyframeMap(store, keep=3)
    for i in range(10):
        m.finish(m.add(small(i)).id)
    kept = [m[i] for i in range(10)]
    store.entries = [replace(e, keyframe=replace(e.keyframe, frame_id="from the store")) for e in store.entries]
    assert [m[i].frame_id for i in range(10)] == ["from the store"] * 7 + ["cam"] * 3
    assert m.last(3) == kept[:-4:-1] and m.nbytes == 0, "what is stored is the store's to count"
    m.add(small(10))
    assert m.nbytes == entry_bytes(store.entries[0])


# -- sessions ----------------------------------------------------------------------------------


def test_a_map_that_is_opened_again_is_a_new_session():
    store = filled(3, 2)
    m = KeyframeMap(store)
    assert (len(m), m.first_id, m.session, m.stored) == (5, 5, 2, 5) and m.last(9) == []
    assert [m.header(i).session for i in range(5)] == [0, 0, 0, 1, 1]
    new = m.add(small(-100))  # stamps of a session have nothing to do with those before
    assert (new.id, new.session) == (5, 2) and m.last(9) == [new]
    m.finish(5)
    assert store.keyframe(5) is m[5] and m.stored == 6
    assert KeyframeMap(filled()).session == 0


@given(st.integers(-100, 100), st.floats(0, 1e3), st.integers(0, 1000))
@settings(deadline=None)
def test_all_keyframes_of_older_sessions_are_older(shift, seconds, count):
    m = KeyframeMap(filled(4))
    first = m.add(small(shift))
    assert m.newest_older_than(first, seconds, count) == 3
    second = m.add(small(shift + 10))
    expected = 4 if seconds <= 10 and count <= 1 else 3
    assert m.newest_older_than(second, seconds, count) == expected


def test_the_track_begins_anew_with_each_session():
    store = filled(3, 3, poses=lambda i: pose(10.0 * i))
    m = KeyframeMap(store)
    m.add(small(0, pose=pose(7)))
    m.add(small(1, pose=pose(8)))
    assert (m.travelled(0, 2), m.travelled(3, 5), m.travelled(6, 7)) == (20, 20, 1)


def test_headers_out_of_order_are_damage():
    store = filled(2, 2)
    wrong = [h for h in store.headers() if h.id != 1], list(reversed(store.headers())), store.headers()[1:]
    sessions = [replace(h, session=1 - h.session) for h in store.headers()]
    for headers in (*wrong, sessions):
        broken = MemoryStore()
        broken.headers = lambda found=headers: found
        with pytest.raises(MapDamagedError, match="map in memory: table keyframes: expected keyframe"):
            KeyframeMap(broken)


def test_what_a_growing_file_got_after_its_headers_is_not_there():
    store = filled(3)
    loops = [(2, 0), (4, 1), (2, 5), (-1, 0)]
    store.confirmed_loops = lambda: loops
    store.read_only = True
    m = KeyframeMap(store)
    store.read_only = False
    store.put(replace(store.entry(2), keyframe=replace(store.keyframe(2), id=3)))
    assert [i for i, _ in m.global_descriptors()] == [0, 1, 2] and m.confirmed_loops() == [(2, 0)]


# -- localisation ------------------------------------------------------------------------------


def test_a_localisation_leaves_the_map_alone_and_forgets():
    store = filled(3)
    before, size = list(store.headers()), store.nbytes
    store.read_only = True
    m = KeyframeMap(store)
    count, keeps = 10 * LOCALISATION_KEEPS, LOCALISATION_KEEPS
    sizes = set()
    for i in range(count):
        new = m.add(small(i, pose=pose(float(i))))
        m.attach(new.id, [pair(new.id, 0)])
        m.describe(new.id, np.ones(1000, np.float32))
        m.finish(new.id, [pair(new.id, 1, PairKind.RELOCALISATION)])
        assert (new.id, new.session) == (3 + i, 1) and m.newest_older_than(new, 0.0, 1) == 2
        sizes.add(m.nbytes)
    assert len(m) == 3 + count and m.stored == 3 and max(sizes) == m.nbytes < size * (keeps + 4)
    assert [m[i].id for i in (0, 1, 2)] == [0, 1, 2], "the map itself stays"
    assert [k.id for k in m.last(2)] == [len(m) - 1, len(m) - 2] and len(m.last(count)) == keeps
    oldest = len(m) - keeps
    assert m[oldest].id == oldest and m.travelled(oldest, len(m) - 1) == keeps - 1
    for read in (m.__getitem__, m.header, lambda i: m.travelled(i, len(m) - 1)):
        with pytest.raises(IndexError, match=f"only the newest {keeps} keyframes are kept"):
            read(oldest - 1)
    assert len(m._headers) == len(m._travelled) == 3 + keeps
    m.flush()
    m.close()
    assert store.headers() == before and store.nbytes == size


def test_a_localisation_keeps_as_many_as_are_matched():
    store = filled(1)
    store.read_only = True
    m = KeyframeMap(store, keep=100)
    for i in range(300):
        m.add(small(i))
    assert len(m.last(1000)) == 100


# -- the store in memory -----------------------------------------------------------------------


def test_the_store_in_memory():
    store = MemoryStore()
    m = KeyframeMap(store)
    for i in range(3):
        m.add(small(i, features=features(np.zeros((4, 8), np.float32))))
    m.describe(1, np.ones(4, np.float32))
    lost = replace(pair(2, 0, PairKind.LOOP), matches=matches(3, Status.AMBIGUOUS))
    m.finish(2, [pair(2, 1), pair(2, 0, PairKind.LOOP), pair(2, 1, PairKind.LOOP), lost])
    assert store.confirmed_loops() == m.confirmed_loops() == [(2, 0), (2, 1)]
    assert [i for i, _ in store.global_descriptors()] == [1]
    each, matched = 4 * 8 * 4 + 4 * 2 * 4 + 4 * 4, 3 * (8 + 4 + 1)
    assert store.nbytes == m.nbytes == 3 * each + 16 + 4 * matched
    for bad in (-1, 3):
        with pytest.raises(IndexError):
            store.keyframe(bad)
    with pytest.raises(MapError, match="expected keyframe 3 next, got 2"):
        store.put(store.entry(2))
    store.read_only = True
    with pytest.raises(MapError, match="read-only"):
        store.put(store.entry(2))
