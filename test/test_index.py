"""flat and faiss against sums that are exact (math.fsum), of the vectors as they are stored."""

import gc
import importlib.util
import math
import subprocess
import sys
import threading
import time
import tracemalloc
import weakref

import numpy as np
import pytest
from helpers import unit
from hypothesis import given, settings
from hypothesis import strategies as st
from model_helpers import (
    _tiny_cache,  # noqa: F401 (fixtures)
    own_cache,  # noqa: F401
    tiny,  # noqa: F401
    tiny_config,
)

from vslam_features import registry
from vslam_features.errors import DataError, PluginError
from vslam_features.frontend import FrontEnd
from vslam_features.replay.scenes import make_scene

BLOCK = 256  # bytes: a few rows
FAISS = pytest.mark.skipif(importlib.util.find_spec("faiss") is None, reason="faiss-cpu is not installed")


@pytest.fixture(params=["flat", pytest.param("faiss", marks=FAISS)])
def make(request):
    """The class of an index."""
    return registry.get("index", request.param)


def as_stored(make, d) -> np.ndarray:
    """(n, D) f64 of what an index of this class keeps."""
    return (
        np.asarray(d).astype(np.float32).astype({"Flat": np.float32, "Faiss": np.float16}[make.__name__]).astype(float)
    )


def exact(rows: np.ndarray, query: np.ndarray) -> list[float]:
    """Inner products of (n, D) rows: a product of f32 numbers is exact in f64, and fsum rounds the sum once."""
    return [math.fsum(row * query.astype(float)) for row in rows]


def check(found, rows, ids, query, k, newest):
    """The best k of those that are old enough; ties within what sums in f64 are wrong by may be swapped."""
    ids = np.asarray(ids, np.int64)
    allowed = np.flatnonzero(ids <= newest)
    truth = dict(zip(ids[allowed].tolist(), exact(rows[allowed], query)))
    got, similarity = found
    assert (got.dtype, similarity.dtype) == (np.int64, np.float32) and len(set(got.tolist())) == len(got)
    of_found = [truth[i] for i in got.tolist()]
    np.testing.assert_allclose(of_found, sorted(truth.values(), reverse=True)[:k], rtol=0, atol=1e-12)
    np.testing.assert_allclose(similarity, of_found, rtol=1e-6, atol=1e-12)
    place = {i: n for n, i in enumerate(got.tolist())}
    row_of = dict(zip(ids.tolist(), (r.tobytes() for r in rows)))
    for n, i in enumerate(got.tolist()):  # of equal vectors the older come first
        assert all(place.get(j, k) < n for j in truth if j < i and row_of[j] == row_of[i])


@pytest.mark.parametrize("name", ["flat", pytest.param("faiss", marks=FAISS)])
@given(data=st.data(), dim=st.integers(1, 9), kinds=st.integers(1, 60), seed=st.integers(0, 999))
@settings(deadline=None, max_examples=150)
def test_it_is_brute_force(name, data, dim, kinds, seed):
    """Any mix of adds and batches; ids with gaps; equal vectors and zeros; newest ids within blocks; any k."""
    make = registry.get("index", name)
    rng = np.random.default_rng(seed)
    pool = unit(rng, kinds, dim)
    pool[0] *= data.draw(st.sampled_from([0, 1]))  # nothing seen
    index, ids, given_rows = make(block_bytes=BLOCK), [], []
    for count in data.draw(st.lists(st.integers(0, 40), max_size=5)):
        d = pool[rng.integers(0, kinds, count)]
        new = ((ids[-1] if ids else -1) + np.cumsum(rng.integers(1, 4, count))).tolist()
        if data.draw(st.booleans()):
            index.add_batch(new, d)
        else:
            for i, row in zip(new, d):
                index.add(i, row)
        ids, given_rows = ids + new, [*given_rows, *d]
    rows = as_stored(make, np.reshape(given_rows, (len(ids), dim)))
    assert len(index) == len(ids)
    queries = unit(rng, data.draw(st.integers(1, 70)), dim)
    newest = rng.integers(-2, (ids[-1] if ids else 0) + 3, len(queries)).tolist()
    k = data.draw(st.integers(1, 250))
    found = index.search_batch(queries, k, newest)
    assert len(found) == len(queries)
    for one, query, limit in zip(found, queries, newest):
        check(one, rows, ids, query, k, limit)
    for got, wanted in zip(index.search(queries[0], k, newest[0]), found[0]):
        np.testing.assert_array_equal(got, wanted, strict=True)


@pytest.mark.parametrize("count, k", [(300, 5), (300, 299), (40, 40), (9, 100)])
def test_equal_vectors_rank_the_older_first(make, count, k):
    """More than a block is asked for, in blocks of several sizes; a better one stands at the end."""
    d = unit(np.random.default_rng(0), 2, 64)
    index = make(block_bytes=5 * 64 * 4)
    index.add_batch(range(count), np.repeat(d[:1], count, axis=0))
    assert index.search(d[0], k, count)[0].tolist() == list(range(min(k, count)))
    assert index.search(d[0], k, 6)[0].tolist() == list(range(min(k, 7)))
    index.add(count, d[1])
    assert index.search(d[1], k, count)[0].tolist() == [count, *range(count)][:k]


@pytest.mark.parametrize("block_bytes", [2**17, 2**24])
def test_order_is_right_where_f32_cannot_tell(make, block_bytes):
    """300 neighbours of a vector, closer together than sums in f32 are exact, whatever the best k are."""
    rng, count, dim = np.random.default_rng(3), 300, 8448
    rows = np.repeat(unit(rng, 1, dim).astype(np.float16).astype(np.float32), count, axis=0)
    query = unit(rng, 1, dim)[0] * np.float32(0.1) + rows[0]
    query /= np.linalg.norm(query)
    small = np.argsort(np.abs(rows[0] * query))[3000 : 3000 + count]
    rows[np.arange(count), small] *= np.float32(1 + 2**-8)  # some units of f16
    stored = as_stored(make, rows)
    truth = np.array(exact(stored, query))
    assert np.ptp(truth) < 1e-7, "or f32 could tell"
    order = np.lexsort((np.arange(count), -truth)).tolist()
    naive = np.argsort(-(stored.astype(np.float32) @ query), kind="stable").tolist()
    assert all(set(naive[:k]) != set(order[:k]) for k in (1, 5, 20))
    index = make(block_bytes)
    index.add_batch(range(count), rows)
    for k in (1, 2, 5, 10, 20, 100):
        check(index.search(query, k, count), stored, range(count), query, k, count)


@FAISS
def test_half_precision_is_ieee_and_queries_are_not_rounded():
    """What faiss computes with is numpy's float16 of what was added."""
    rng = np.random.default_rng(0)
    rows, queries = unit(rng, 200, 33), unit(rng, 4, 33)
    index = registry.get("index", "faiss")()
    index.add_batch(range(200), rows)
    for query in queries:
        check(index.search(query, 7, 200), as_stored(type(index), rows), range(200), query, 7, 200)
    own, wide = (max(exact(r, queries[0])) for r in (as_stored(type(index), rows), rows.astype(float)))
    assert abs(own - wide) > 1e-6 and index.search(queries[0], 1, 200)[1][0] == np.float32(own)


@pytest.mark.endurance
@pytest.mark.usefixtures("tiny")
def test_both_indexes_find_the_same_loops():
    pytest.importorskip("faiss")
    made, results = make_scene("room", width=320, height=240, fps=5.0), []
    for name in ("flat", "faiss"):
        front_end = FrontEnd(tiny_config(retrieval__index=name, retrieval__exclude_s=1.0))
        assert front_end.index.runtime == {"flat": "numpy", "faiss": "faiss"}[name]
        loops = [front_end.process(made.frame(i))[1] for i in range(10)]
        assert not any(r.faults for r in loops)
        results.append([r.candidates for r in loops])
    # repr: a margin may be NaN
    assert repr(results[0]) == repr(results[1]) and sum(map(len, results[0])) > 9


# -- memory ------------------------------------------------------------------------------------


def test_adding_one_copies_nothing_else_and_memory_stays_small(make, monkeypatch):
    """By counts: 3000 adds one by one allocate each byte that is held once, and no block moves."""
    allocated, allocate = [], make._allocate

    def counting(self, rows, dimension):
        block = allocate(self, rows, dimension)
        allocated.append(block.nbytes)
        return block

    monkeypatch.setattr(make, "_allocate", counting)
    block_bytes, dim = 2**15, 64
    index, d = make(block_bytes=block_bytes), unit(np.random.default_rng(0), 3000, 64)
    row_bytes = dim * {"Flat": 4, "Faiss": 2}[make.__name__]
    places = []
    for i, row in enumerate(d):
        index.add(i, row)
        held, payload = index.nbytes - 8 * (i + 1), (i + 1) * row_bytes  # 8: the id
        assert payload <= held <= payload + min(block_bytes, max(payload, 16 * row_bytes))
        now = [block.ctypes.data for block in index._blocks]
        assert now[: len(places)] == places
        places = now
    assert sum(allocated) == index.nbytes - 8 * 3000 and max(allocated) <= block_bytes
    assert len(allocated) < 10 + 3000 * row_bytes / block_bytes
    found = index.search_batch(d[::7], 1, [9999] * len(d[::7]))
    assert [f[0].tolist() for f in found] == [[i] for i in range(0, 3000, 7)]


def test_an_add_takes_no_more_memory_than_a_block():
    """Measured, of all that Python and numpy allocate; a buffer that doubles would take 8 MB at some add."""
    index, d = registry.get("index", "flat")(block_bytes=2**17), unit(np.random.default_rng(0), 64, 1024)
    worst = 0
    tracemalloc.start()
    try:
        for i in range(2100):
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            index.add(i, d[i % 64])
            worst = max(worst, tracemalloc.get_traced_memory()[1] - before)
    finally:
        tracemalloc.stop()
    assert 2**17 <= worst < 2**17 + 2**16


def test_an_index_keeps_its_own_copy(make):
    index, d = make(), unit(np.random.default_rng(0), 3, 16)
    index.add_batch([0, 1, 2], d)
    row = d[0].copy()
    d[:] = 0
    assert index.search(row, 1, 9)[1][0] == pytest.approx(1, abs=1e-3)


def test_an_index_that_nobody_holds_is_gone_with_its_threads(make):
    """As where another map is opened."""

    def threads():
        return {t.ident for t in threading.enumerate()}

    before, index = threads(), make(block_bytes=BLOCK)
    index.add_batch(range(90), unit(np.random.default_rng(0), 90, 8))
    index.search(np.float32([1, 0, 0, 0, 0, 0, 0, 0]), 5, 90)
    gone, own = weakref.ref(index), threads() - before
    assert own
    del index
    gc.collect()
    assert gone() is None
    until = time.monotonic() + 10
    while own & threads() and time.monotonic() < until:
        time.sleep(0.01)
    assert not own & threads()


def test_a_search_works_while_the_interpreter_ends(make):
    """As in a thread that goes on after the end of a script: then no pool of threads takes work any more."""
    code = f"""
import threading, numpy as np
from vslam_features import registry

index = registry.get("index", {make.__name__.lower()!r})()
index.add_batch(range(8), np.eye(8))

def late():
    threading.main_thread().join()
    print(index.search(np.eye(8)[3], 1, 9)[0].tolist())

threading.Thread(target=late).start()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[3]\n", "")


# -- at the door -------------------------------------------------------------------------------

GOOD = np.float32([1, 0, 0, 0])
BAD = [
    (np.zeros((2, 4)), r"shape \(4,\), got \(2, 4\)"),
    (np.zeros(0), r"shape \(4,\), got \(0,\)"),
    (np.float32(1), r"shape \(4,\), got \(\)"),
    (np.ones(5) / 5**0.5, r"shape \(4,\), got \(5,\)"),
    (np.float32([np.nan, 0, 0, 1]), "not finite"),
    (np.float16([np.inf, 0, 0, 0]), "not finite"),
    (np.float32([1, 1, 1, 1]), "unit length, got 2;"),
    (np.float32([0.98, 0, 0, 0]), "unit length, got 0.98;"),
    (np.full(4, 1e30), r"unit length, got 2e\+30"),
    (np.full(4, 1e300), r"unit length, got 2e\+300"),
    (np.full(4, 1e-30), "unit length, got 2e-30"),
    (np.array([1, 0, 0, 0]), "expected float16, float32 or float64, got int64"),
    (np.array([True, False, False, False]), "got bool"),
    (np.array([1 + 0j, 0, 0, 0]), "got complex128"),
    (np.array([1, 0, 0, 0], object), "got object"),
    ("abcd", r"shape \(4,\), got \(\)"),
    (None, r"shape \(4,\), got \(\)"),
    ([[1.0], [1.0, 0.0]], "shape"),
]


@pytest.mark.parametrize("bad, words", BAD)
def test_refusals_leave_the_index_as_it_was(make, bad, words):
    index = make(block_bytes=BLOCK)
    index.add(3, GOOD)
    calls = [
        (lambda: index.add(4, bad), words),
        (lambda: index.add_batch([4, 7, 9], [GOOD, bad, GOOD]), words),
        (lambda: index.extend(iter([(4, GOOD), (7, bad)])), words),
        (lambda: index.search(bad, 1, 9), words),
        (lambda: index.search_batch([GOOD, bad], 1, [9, 9]), words),
    ]
    for n, (call, expected) in enumerate(calls):
        with pytest.raises(DataError, match=expected) as error:
            call()
        named = ["of keyframe 4", "of keyframe 7", "of keyframe 7", "of query 0", "of query 1"][n]
        assert named in str(error.value) or bad == BAD[-1][0]
        assert len(index) == 1
    assert index.search(GOOD, 5, 9)[0].tolist() == [3]
    index.add(4, GOOD)
    assert index.search(GOOD, 5, 9)[0].tolist() == [3, 4]


@pytest.mark.parametrize(
    "ids, words",
    [([3], "got 3 after 3"), ([2], "got 2 after 3"), ([-1], "got -1 after 3"), ([4, 6, 6], "got 6 after 6"),
     ([4, 5, 2**63], f"got {2**63} after 5"), ([4.0], "whole number, got 4.0"), (["4"], "whole number, got '4'")],
)  # fmt: skip
def test_ids_increase(make, ids, words):
    index = make(block_bytes=BLOCK)
    index.add(3, GOOD)
    with pytest.raises(DataError, match=words):
        index.add_batch(ids, [GOOD] * len(ids))
    assert len(index) == 1 and index.search(GOOD, 9, 2**70)[0].tolist() == [3]
    with pytest.raises(DataError, match="got -1 as the first"):
        make().add(-1, GOOD)


def test_a_batch_that_is_refused_fixes_no_length(make):
    index = make()
    with pytest.raises(DataError, match=r"keyframe 1: expected shape \(3,\), got \(4,\)"):
        index.add_batch([0, 1], [GOOD[:3], GOOD])
    index.add(0, GOOD)
    assert index.search(GOOD, 1, 0)[0].tolist() == [0]


def test_counts_that_do_not_fit(make):
    index = make()
    index.add_batch([], np.empty((0, 4), np.float32))
    index.add_batch([], [])
    index.add_batch(np.array([1, 5]), np.stack([GOOD, GOOD]).astype(np.float64))
    for call, words in (
        (lambda: index.add_batch([6, 7], [GOOD]), "2 expected, got 1"),
        (lambda: index.add_batch([6], 1.0), r"shape \(n, 4\)"),
        (lambda: index.search_batch([GOOD, GOOD], 1, [9]), "1 expected, got 2"),
        (lambda: index.search(GOOD, 0, 9), "k must be at least 1, got 0"),
        (lambda: index.search(GOOD, 1.5, 9), "k must be a whole number, got 1.5"),
        (lambda: index.search(GOOD, 1, None), "newest id must be a whole number, got None"),
    ):
        with pytest.raises(DataError, match=words):
            call()
    assert len(index) == 2 and index.search_batch([], 1, []) == []


def test_unit_length_has_the_tolerance_of_half_precision_models(make):
    index = make()
    for i, length in enumerate((0.991, 1.009)):
        index.add(i, GOOD * np.float32(length))
    assert index.search(GOOD, 2, 1)[1].tolist() == pytest.approx([1.009, 0.991], abs=1e-3)


def test_a_zero_vector_is_alike_to_nothing(make):
    index = make()
    index.add(0, np.zeros(4, np.float32))
    index.add(1, np.float32([0, 1, 0, 0]))
    ids, similarity = index.search(np.float32([0, 0.6, 0.8, 0]), 2, 9)
    assert ids.tolist() == [1, 0] and similarity.tolist() == pytest.approx([0.6, 0])
    assert index.search(np.zeros(4, np.float32), 2, 9)[0].tolist() == [0, 1]


def test_an_empty_index_finds_nothing(make):
    for newest in (-1, 5):
        ids, similarity = make().search(np.float32([1, 0]), 10**9, newest)
        assert (ids.shape, similarity.shape, ids.dtype, similarity.dtype) == ((0,), (0,), np.int64, np.float32)
    with pytest.raises(DataError, match="query 0: not finite"):
        make().search(np.float32([np.nan, 0]), 5, 9)


def test_many_places_are_added_in_batches(make):
    d = unit(np.random.default_rng(0), 150, 8)
    mixed = [row.astype((np.float16, np.float32)[i % 2]) for i, row in enumerate(d)]
    index, single = make(), make()
    index.extend((2 * i, row) for i, row in enumerate(mixed))
    for i, row in enumerate(mixed):
        single.add(2 * i, row)
    for query in d[:5]:
        for a, b in zip(index.search(query, 20, 250), single.search(query, 20, 250)):
            np.testing.assert_array_equal(a, b, strict=True)

    def breaks():
        yield from ((300 + i, row) for i, row in enumerate(d[:70]))
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="disk"):
        index.extend(breaks())
    assert len(index) == 150 + 64, "a batch is there as a whole or not at all"


def test_where_faiss_is_not_installed_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(PluginError, match=r"index plug-in 'faiss'.*pip install 'vslam_features\[faiss\]'.*flat"):
        registry.get("index", "faiss")()
