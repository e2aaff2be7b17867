"""vlad against a slow loop, flat against a full sort."""

import dataclasses

import numpy as np
import pytest
from helpers import features, frame, image, unit
from hypothesis import given, settings
from hypothesis import strategies as st

from vslam_features import registry
from vslam_features.errors import DataError, PluginError
from vslam_features.retrieval.flat import Flat
from vslam_features.retrieval.vlad import Vlad, load_codebook, vlad
from vslam_features.types import ModelIdentity


def slow_vlad(descriptors, words):
    """The definition, one descriptor at a time, in f64."""
    out = np.zeros(words.shape)
    for d in descriptors.astype(np.float64):
        k = min(range(len(words)), key=lambda w: ((d - words[w]) ** 2).sum())
        out[k] += d - words[k]
    for k in range(len(words)):
        if np.linalg.norm(out[k]) > 0:
            out[k] /= np.linalg.norm(out[k])
    total = np.linalg.norm(out)
    return (out / total if total > 0 else out).ravel()


# -- vlad --------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 50, 500])
def test_vlad_is_its_definition(n):
    rng = np.random.default_rng(n)
    d, words = unit(rng, n, 16), unit(rng, 8, 16)
    np.testing.assert_allclose(vlad(d, words), slow_vlad(d, words), atol=2e-6)


@pytest.mark.parametrize("name", ["sift", "orb"])
def test_the_shipped_codebooks(name):
    cls = registry.get("features", name)
    extractor = cls(500, 0, cls.Options())
    words, sha256, weighted = load_codebook(name)
    assert not weighted
    assert words.dtype == np.float32 and np.isfinite(words).all() and len(np.unique(words, axis=0)) == len(words)
    plugin = Vlad(Vlad.Options(), extractor.identity)
    assert sha256 in str(plugin.identity) or plugin.identity.sha256 == sha256
    pictures = [frame(image(240, 320, seed=s)) for s in range(3)]
    d = [plugin.describe(p, extractor.extract(p)) for p in pictures]
    d.append(plugin.describe(pictures[0], extractor.extract(frame(pictures[0].image[:230, :310]))))
    np.testing.assert_allclose([np.linalg.norm(x) for x in d], 1, atol=1e-5)
    assert d[0] @ d[3] > max(d[0] @ d[1], d[0] @ d[2]) + 0.2, "a cut of the same picture is the most alike"
    blank = frame(np.zeros((240, 320), np.uint8))
    assert not plugin.describe(blank, extractor.extract(blank)).any()


@pytest.mark.parametrize("n", [1, 50])
def test_weights_are_factors_of_the_residuals(n):
    """A weight of k is a descriptor that is there k times; all alike change nothing."""
    rng = np.random.default_rng(n)
    d, words, counts = unit(rng, n, 16), unit(rng, 8, 16), rng.integers(1, 5, n)
    expected = slow_vlad(np.repeat(d, counts, axis=0), words)
    np.testing.assert_allclose(vlad(d, words, counts.astype(np.float32) / 7), expected, atol=2e-6)
    np.testing.assert_allclose(vlad(d, words, np.full(n, 0.3, np.float32)), vlad(d, words), atol=2e-6)


@pytest.mark.parametrize("name, dimension, weighted", [("xfeat", 64, True), ("aliked-n16", 128, False)])
def test_codebooks_of_learned_features(name, dimension, weighted):
    codebook = load_codebook(name)
    assert codebook.words.shape == (64, dimension) and codebook.weighted == weighted
    assert len(np.unique(codebook.words, axis=0)) == 64
    lengths = np.linalg.norm(codebook.words, axis=1)
    assert (lengths > 0.3).all() and (lengths < 1).all(), "means of unit descriptors that are alike"


def test_the_codebook_of_xfeat_weights_by_score():
    codebook = load_codebook("xfeat")
    xfeat = ModelIdentity("features", "xfeat", "0" * 64, "any")
    plugin = Vlad(Vlad.Options(), xfeat)
    assert plugin.identity.sha256 == codebook.sha256
    found = features(unit(np.random.default_rng(0), 40, 64), model=xfeat)
    found = dataclasses.replace(found, scores=np.arange(1, 41, dtype=np.float32))
    expected = slow_vlad(np.repeat(found.descriptors, np.arange(1, 41), axis=0), codebook.words)
    np.testing.assert_allclose(plugin.describe(frame(), found), expected, atol=2e-6)


def test_codebooks_are_small():
    from importlib import resources

    for path in (resources.files("vslam_features") / "codebooks").iterdir():
        assert len(path.read_bytes()) < 300_000, path.name


def test_vlad_does_not_depend_on_order_or_fp16():
    rng = np.random.default_rng(0)
    d = unit(rng, 200, 128).astype(np.float16)
    words = load_codebook("sift")[0]
    a, b = (vlad(x.astype(np.float32), words) for x in (d, d[rng.permutation(200)]))
    np.testing.assert_allclose(a, b, atol=1e-5)
    sift = ModelIdentity("features", "sift", "0" * 64, "grey8")
    plugin = Vlad(Vlad.Options(), sift)
    stored, live = (plugin.describe(frame(), features(x, model=sift)) for x in (d, d.astype(np.float32)))
    np.testing.assert_array_equal(stored, live)


def test_vlad_refusals():
    words = unit(np.random.default_rng(0), 4, 8)
    assert not vlad(np.empty((0, 8), np.float32), words).any()
    with pytest.raises(DataError, match="8-d descriptors, got 9-d"):
        vlad(np.zeros((3, 9), np.float32), words)
    for bad in (np.nan, np.inf):
        with pytest.raises(DataError, match="not finite"):
            vlad(np.full((3, 8), bad, np.float32), words)
    for bad in (np.ones(2, np.float32), np.array([1, np.nan, 1], np.float32)):
        with pytest.raises(DataError, match="3 finite weights"):
            vlad(np.zeros((3, 8), np.float32), words, bad)
    with pytest.raises(PluginError, match="'surf'.*orb, sift.*make_codebooks"):
        Vlad(Vlad.Options(), ModelIdentity("features", "surf", "0" * 64, "none"))


def test_identity_holds_the_codebook_and_the_features():
    a, b = (Vlad(Vlad.Options(), ModelIdentity("features", "sift", c * 64, "grey8")).identity for c in "01")
    assert a != b and a.sha256 == b.sha256 == load_codebook("sift")[1]


# -- flat --------------------------------------------------------------------------------------


@given(
    rows=st.lists(st.integers(0, 2**16), min_size=0, max_size=70),
    gaps=st.lists(st.integers(1, 5), min_size=70, max_size=70),
    k=st.integers(1, 80),
    newest=st.integers(-2, 400),
    repeats=st.booleans(),
)
@settings(deadline=None)
def test_flat_is_a_full_sort_at_any_size(rows, gaps, k, newest, repeats):
    """Growth, ids with gaps, equal similarities, more or fewer than k, ids newer than allowed."""
    index, dim = Flat(), 3
    ids = np.cumsum(gaps[: len(rows)]) - 1
    d = np.array([unit(np.random.default_rng(r % 3 if repeats else r), 1, dim)[0] for r in rows]).reshape(-1, dim)
    for i, row in zip(ids, d):
        index.add(int(i), row)
    assert len(index) == len(rows)
    query = unit(np.random.default_rng(7), 1, dim)[0]
    found, similarity = index.search(query, k, newest)
    allowed = ids <= newest
    similarities = d[allowed] @ query
    order = sorted(range(len(similarities)), key=lambda n: (-similarities[n], ids[n]))[:k]
    np.testing.assert_allclose(similarity, similarities[order], atol=1e-6)
    if not repeats:
        assert found.tolist() == ids[allowed][order].tolist()
    assert (np.diff(similarity) <= 0).all() and set(found.tolist()) <= set(ids[allowed].tolist())


def test_equal_similarities_rank_the_older_first():
    index, d = Flat(), unit(np.random.default_rng(0), 1, 64)[0]
    for i in range(40):
        index.add(i, d)
    assert index.search(d, 5, 100)[0].tolist() == [0, 1, 2, 3, 4]


def test_growth_alters_nothing():
    index, d = Flat(), unit(np.random.default_rng(0), 200, 16)
    for i, row in enumerate(d):
        index.add(i, row)
        found, similarity = index.search(row, 1, i)
        assert found.tolist() == [i] and similarity[0] == pytest.approx(1, abs=1e-5)
    row = d[0].copy()
    d[0] = 0  # the index keeps its own copy
    assert index.search(row, 1, 999)[1][0] == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    "bad, words",
    [(np.zeros((2, 4)), "shape"), (np.zeros(0), "shape"), (np.float32(1), "shape"), (np.ones(5) / 5**0.5, r"\(4,\)"),
     ([np.nan, 0, 0, 1], "not finite"), ([np.inf, 0, 0, 0], "not finite"), ([1, 1, 1, 1], "unit length, got 2.0"),
     (np.full(4, 1e30), "unit length")],
)  # fmt: skip
def test_refusals_leave_the_index_as_it_was(bad, words):
    index = Flat()
    index.add(3, np.float32([1, 0, 0, 0]))
    with np.errstate(over="ignore"):
        for call in (lambda: index.add(4, bad), lambda: index.search(bad, 1, 9)):
            with pytest.raises(DataError, match=words):
                call()
    for old in (3, 2, -1):
        with pytest.raises(DataError, match=f"ids must increase, got {old} after 3"):
            index.add(old, np.float32([0, 1, 0, 0]))
    assert len(index) == 1 and index.search(np.float32([1, 0, 0, 0]), 5, 9)[0].tolist() == [3]


def test_a_zero_vector_is_alike_to_nothing():
    index = Flat()
    index.add(0, np.zeros(4, np.float32))
    index.add(1, np.float32([0, 1, 0, 0]))
    ids, similarity = index.search(np.float32([0, 0.6, 0.8, 0]), 2, 9)
    assert ids.tolist() == [1, 0] and similarity.tolist() == pytest.approx([0.6, 0])


def test_an_empty_index_finds_nothing():
    ids, similarity = Flat().search(np.float32([1, 0]), 5, 9)
    assert (ids.shape, similarity.shape, ids.dtype, similarity.dtype) == ((0,), (0,), np.int64, np.float32)
