"""The store of a running map: order, batches, and entries that no map takes. Disks that fail: test_map_kill.py."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from power_cut.entries import MODELS, assert_same, entry

from vslam_features.errors import MapError
from vslam_features.maps import write_queue
from vslam_features.maps.file_store import FileStore
from vslam_features.maps.reader import MapReader
from vslam_features.maps.write_queue import BATCH, WriteQueue
from vslam_features.maps.writer import MapWriter
from vslam_features.types import MapEntry


@pytest.fixture
def gate(monkeypatch):
    """Holds up the writer's transactions until it is set; ``sizes``: keyframes in each, which take ``seconds`` each."""
    event, append = threading.Event(), MapWriter.append
    event.sizes, event.seconds = [], 0.0

    def slow(self, *entries):
        event.wait(20)
        event.sizes.append(len(entries))
        time.sleep(event.seconds * len(entries))
        append(self, *entries)

    monkeypatch.setattr(MapWriter, "append", slow)
    return event


def stored(path) -> list[MapEntry]:
    with MapReader(path) as reader:
        return [reader.entry(i) for i in range(len(reader.headers()))]


def test_entries_that_had_to_wait_share_transactions_in_order(tmp_path, gate):
    store = FileStore(tmp_path / "a.vmap", MODELS, create=True)
    for n in range(3 * BATCH):
        store.put(entry(n))
        assert_same(store.keyframe(n), entry(n).keyframe)  # readable before it is on the disk
    assert store.waiting == 3 * BATCH
    gate.set()
    store.close()
    assert sum(gate.sizes) == 3 * BATCH and max(gate.sizes) == BATCH
    assert_same(tuple(stored(tmp_path / "a.vmap")), tuple(entry(n) for n in range(3 * BATCH)))


def test_on_a_slow_disk_a_transaction_keeps_readers_waiting_no_longer_than_said(tmp_path, gate, monkeypatch):
    monkeypatch.setattr(write_queue, "HOLD_S", 0.1)
    store = FileStore(tmp_path / "a.vmap", MODELS, create=True)
    gate.seconds = 0.04  # so that two keyframes take less, and three take more
    gate.set()
    store.put(entry(0))
    store.flush()  # nothing is known of the disk before
    gate.clear()
    for n in range(1, 13):
        store.put(entry(n))
    gate.set()
    store.close()
    assert sum(gate.sizes) == 13 and max(gate.sizes) == 2


def test_a_transaction_holds_no_more_bytes_than_is_allowed(tmp_path, gate, monkeypatch):
    monkeypatch.setattr(write_queue, "BATCH_BYTES", 1)
    store = FileStore(tmp_path / "a.vmap", MODELS, create=True)
    for n in range(5):
        store.put(entry(n))
    gate.set()
    store.close()
    assert gate.sizes == [1] * 5


@pytest.mark.parametrize("bad", [0, 3, 5])
def test_an_entry_that_no_map_takes_costs_only_what_is_wrong_with_it(tmp_path, gate, bad, caplog):
    """Else all that come after it would wait for ever."""
    wrong = entry(bad)
    if wrong.pairs:
        scores = np.full(len(wrong.pairs[0].matches), np.nan, np.float32)
        pair = replace(wrong.pairs[0], matches=replace(wrong.pairs[0].matches, scores=scores))
        wrong, lost = replace(wrong, pairs=(pair, *wrong.pairs[1:])), "without its matches"
        left = MapEntry(wrong.keyframe)
    else:
        descriptor = np.full(8, np.inf, np.float32)
        left = MapEntry(replace(wrong.keyframe, global_descriptor=None))
        wrong = replace(wrong, keyframe=replace(wrong.keyframe, global_descriptor=descriptor))
        lost = "global descriptor"
    store = FileStore(tmp_path / "a.vmap", MODELS, create=True)
    for n in range(7):
        store.put(wrong if n == bad else entry(n))
    gate.set()
    store.close()
    assert_same(tuple(stored(tmp_path / "a.vmap")), tuple(left if n == bad else entry(n) for n in range(7)))
    assert lost in caplog.text and f"keyframe {bad} " in caplog.text


def test_a_disk_that_fails_within_a_batch_stores_nothing_twice(tmp_path, monkeypatch):
    append, calls = MapWriter.append, []

    def failing(self, *entries):
        calls.append([e.keyframe.id for e in entries])
        if any(np.isnan(p.matches.scores).any() for e in entries for p in e.pairs) and len(calls) == 3:
            raise MapError("the disk is full")  # in the middle of what is done one by one
        append(self, *entries)

    monkeypatch.setattr(MapWriter, "append", failing)
    monkeypatch.setattr(write_queue, "RETRY_S", 0.01)
    hold = threading.Event()
    batch = WriteQueue._batch
    monkeypatch.setattr(WriteQueue, "_batch", lambda self, most: batch(self, most) if hold.is_set() else [])
    store = FileStore(tmp_path / "a.vmap", MODELS, create=True)
    scores = np.full(len(entry(1).pairs[0].matches), np.nan, np.float32)
    pair = replace(entry(1).pairs[0], matches=replace(entry(1).pairs[0].matches, scores=scores))
    for n in range(4):
        store.put(replace(entry(1), pairs=(pair,)) if n == 1 else entry(n))
    hold.set()
    while store.waiting:
        with contextlib.suppress(MapError):
            store.flush()
    store.close()
    assert [e.keyframe.id for e in stored(tmp_path / "a.vmap")] == [0, 1, 2, 3]
    assert calls[:3] == [[0, 1, 2, 3], [0], [1]]


def test_no_room_is_an_error_only_after_a_slow_disk_had_its_time(tmp_path, gate, monkeypatch):
    monkeypatch.setattr(write_queue, "ROOM_S", 0.05)
    store = FileStore(tmp_path / "a.vmap", MODELS, create=True, queue=3)
    for n in range(3):
        store.wait_for_room()
        store.put(entry(n))
    with pytest.raises(MapError, match="3 keyframes wait to be stored, no more are taken: the disk is too slow"):
        store.wait_for_room()
    with pytest.raises(MapError, match="not taken them within 0 s"):
        store.flush(timeout_s=0.05)
    gate.set()
    store.flush()
    store.wait_for_room()
    assert store.waiting == 0 and not store.problem
    store.close()


def test_a_save_to_another_disk_has_what_is_stored_and_tells_what_is_not(tmp_path, monkeypatch):
    append = MapWriter.append

    def full(self, *entries):
        if entries[0].keyframe.id >= 3:
            raise MapError("the disk is full")
        append(self, *entries)

    monkeypatch.setattr(MapWriter, "append", full)
    monkeypatch.setattr(write_queue, "BATCH", 1)
    store = FileStore(tmp_path / "a.vmap", MODELS, create=True)
    for n in range(5):
        store.put(entry(n))
    with pytest.raises(MapError, match=r"b\.vmap has what is stored, but .*a\.vmap: 2 keyframes .* the disk is full"):
        store.copy(tmp_path / "b.vmap")
    assert_same(tuple(stored(tmp_path / "b.vmap")), tuple(entry(n) for n in range(3)))
    monkeypatch.setattr(MapWriter, "append", append)
    store.close()
    assert len(stored(tmp_path / "a.vmap")) == 5
