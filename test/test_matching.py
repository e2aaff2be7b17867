"""nearest against brute force and OpenCV's matcher; VerifiedMatcher against what plug-ins may return."""

import tracemalloc

import cv2
import numpy as np
import pytest
from helpers import CAMERA, features, two_views, unit
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from vslam_features.config import GeometryConfig
from vslam_features.errors import DataError, IdentityError
from vslam_features.geometry import Verifier
from vslam_features.matching.base import Correspondences, Matcher, as_vectors
from vslam_features.matching.nearest import Nearest
from vslam_features.matching.verified import VerifiedMatcher
from vslam_features.types import ModelIdentity, Status

SIZES = (1, 2, 3, 127)


def match(d0, d1, **options) -> Correspondences:
    return Nearest(Nearest.Options(**options)).match(features(d0), features(d1))


def distances(d0, d1) -> np.ndarray:
    if d0.dtype == np.uint8:
        return np.unpackbits(d0[:, None] ^ d1[None], axis=2).sum(axis=2).astype(np.float64)
    return np.linalg.norm(d0[:, None].astype(np.float64) - d1[None].astype(np.float64), axis=2)


def brute_force(d0, d1, ratio=0.8, mutual=True, max_distance=0.0) -> dict[tuple[int, int], float]:
    """Pairs and scores by the words of the documentation, one by one."""
    distance, out = distances(d0, d1), {}
    for i, row in enumerate(distance):
        j = int(row.argmin())
        first, second = row[j], np.inf if len(row) == 1 else np.partition(row, 1)[1]
        if ratio < 1 and not (first <= ratio * second and first < second):
            continue
        if mutual and (
            distance[:, j].min() < first or any(distance[r].argmin() == j and distance[r, j] == first for r in range(i))
        ):
            continue  # another is nearer, or an earlier one as near has chosen the same
        if max_distance and first > max_distance:
            continue
        out[i, j] = 0.0 if first >= second else 1 - first / second
    return out


def as_dict(found: Correspondences) -> dict[tuple[int, int], float]:
    assert found.pairs.dtype == np.int32 and found.scores.dtype == np.float32 and found.status is None
    assert (np.diff(found.scores) <= 0).all()
    return {(int(i), int(j)): float(s) for (i, j), s in zip(found.pairs, found.scores)}


def noisy(rng, d, sigma=0.05):
    d = d + rng.normal(0, sigma, d.shape).astype(np.float32)
    return d / np.linalg.norm(d, axis=1, keepdims=True)


def two_sets(seed, n0=127, n1=127, dim=32):
    """Float descriptors, about half of which have a partner."""
    rng = np.random.default_rng(seed)
    d0, d1 = unit(rng, n0, dim), unit(rng, n1, dim)
    k = min(n0, n1) // 2
    d1[:k] = noisy(rng, d0[:k])
    return d0, d1[rng.permutation(n1)]


# -- against brute force -----------------------------------------------------------------------


@pytest.mark.parametrize("n0", SIZES)
@pytest.mark.parametrize("n1", SIZES)
@pytest.mark.parametrize("options", [{}, {"ratio": 1.0}, {"mutual": False}, {"max_distance": 0.35, "ratio": 1.0}])
def test_floats_against_brute_force(n0, n1, options):
    d0, d1 = two_sets(n0 * 1000 + n1, n0, n1)
    expected = brute_force(d0, d1, **options)
    found = as_dict(match(d0, d1, **options))
    assert found.keys() == expected.keys()
    for pair, score in expected.items():
        assert found[pair] == pytest.approx(score, abs=1e-5)


@pytest.mark.parametrize("n0", SIZES)
@pytest.mark.parametrize("n1", SIZES)
@pytest.mark.parametrize("options", [{}, {"mutual": False}, {"max_distance": 30.0}])
def test_bits_against_brute_force(n0, n1, options):
    rng = np.random.default_rng(n0 * 1000 + n1)
    d0, d1 = (rng.integers(0, 256, (n, 8), np.uint8) for n in (n0, n1))
    k = min(n0, n1) // 2
    d1[:k] = d0[:k] ^ (rng.random((k, 8)) < 0.2)
    assert as_dict(match(d0, d1, **options)) == pytest.approx(brute_force(d0, d1, **options), abs=1e-6)


@pytest.mark.parametrize("kind", ["float", "bits"])
def test_against_the_matcher_of_opencv(kind):
    rng = np.random.default_rng(3)
    if kind == "float":
        (d0, d1), norm = two_sets(3, 400, 300, 128), cv2.NORM_L2
    else:
        d0, d1 = (rng.integers(0, 256, (n, 32), np.uint8) for n in (400, 300))
        d1[:150], norm = d0[:150] ^ (rng.random((150, 32)) < 0.1), cv2.NORM_HAMMING
    two = cv2.BFMatcher(norm).knnMatch(d0, d1, k=2)
    good = {(a.queryIdx, a.trainIdx) for a, b in two if a.distance < 0.8 * b.distance}
    assert set(as_dict(match(d0, d1, mutual=False))) == good
    cross = {(m.queryIdx, m.trainIdx) for m in cv2.BFMatcher(norm, crossCheck=True).match(d0, d1)}
    assert set(as_dict(match(d0, d1))) == good & cross
    if kind == "float":
        assert set(as_dict(match(d0, d1, ratio=1.0))) == cross


small = hnp.arrays(np.int8, st.tuples(st.integers(1, 40), st.just(3)), elements=st.integers(-2, 2))


@given(small, small, st.sampled_from([0.5, 0.8, 1.0]), st.booleans(), st.sampled_from([16, 17, 1000]))
@settings(deadline=None)
def test_duplicates_and_ties_against_brute_force(a, b, ratio, mutual, chunk):
    """Small integers: exact in f32, and full of equal distances, of which the first wins."""
    d0, d1 = a.astype(np.float32), b.astype(np.float32)
    expected = brute_force(d0, d1, ratio, mutual)
    assert as_dict(match(d0, d1, ratio=ratio, mutual=mutual, chunk=chunk)) == pytest.approx(expected, abs=1e-6)


# -- chunks and memory -------------------------------------------------------------------------


@pytest.mark.parametrize("n0, n1", [(1, 500), (500, 1), (33, 400), (400, 65), (1000, 999)])
@pytest.mark.parametrize("dim", [2, 64, 128])
def test_the_chunk_never_alters_the_result(n0, n1, dim):
    rng = np.random.default_rng(n0 + dim)
    d0, d1 = two_sets(n0 + dim, n0, n1, dim)
    d0[:: max(n0 // 7, 2)] = d0[0]  # duplicates, in different chunks
    d1[: n1 // 4] = d0[rng.integers(0, n0, n1 // 4)]
    expected = match(d0, d1, chunk=1_000_000)
    for chunk in (16, 17, 100, 512):
        found = match(d0, d1, chunk=chunk)
        np.testing.assert_array_equal(found.pairs, expected.pairs)
        np.testing.assert_array_equal(found.scores, expected.scores)


@pytest.mark.parametrize("chunk", [64, 256])
def test_memory_is_bounded_by_the_chunk(chunk):
    n, dim = 6000, 32
    f0, f1 = (features(unit(np.random.default_rng(s), n, dim)) for s in (0, 1))
    matcher = Nearest(Nearest.Options(chunk=chunk))
    tracemalloc.start()
    try:
        matcher.match(f0, f1)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    table, linear = 4 * chunk * n, 4 * n * dim
    assert peak < 3 * table + 4 * linear < 4 * n * n


# -- values ------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e30])
@pytest.mark.parametrize("side", [0, 1])
def test_values_that_are_not_finite_are_a_status(bad, side):
    d = list(two_sets(0))
    d[side][5, 3] = bad
    found = match(*d)
    assert found.status is Status.NON_FINITE and len(found.pairs) == 0


@pytest.mark.parametrize("scale", [1e-18, 1e-3, 1e3, 1e17])
def test_the_scale_of_descriptors_does_not_matter(scale):
    d0, d1 = two_sets(0)
    found, expected = match(d0 * np.float32(scale), d1 * np.float32(scale)), match(d0, d1)
    np.testing.assert_array_equal(found.pairs[np.lexsort(found.pairs.T)], expected.pairs[np.lexsort(expected.pairs.T)])


def test_no_descriptors_give_no_pairs():
    none = np.empty((0, 32), np.float32)
    for d0, d1 in ((none, none), (none, two_sets(0)[0]), (two_sets(0)[0], none)):
        found = match(d0, d1)
        assert found.pairs.shape == (0, 2) and found.status is None


def test_an_image_with_itself():
    d = unit(np.random.default_rng(0), 200)
    found = match(d, d)
    np.testing.assert_array_equal(found.pairs[:, 0], found.pairs[:, 1])
    assert len(found.pairs) == 200 and (found.scores == 1).all()


def test_equal_descriptors_are_no_match():
    assert len(match(np.ones((50, 8), np.float32), np.ones((50, 8), np.float32)).pairs) == 0


def test_vectors_of_stored_descriptors():
    half = np.float16([[0.5, 1.5]])
    assert as_vectors(features(half)).dtype == np.float32
    np.testing.assert_array_equal(as_vectors(features(np.uint8([[0b10000001]]))), [[1, -1, -1, -1, -1, -1, -1, 1]])
    dense = features(np.zeros((8, 5, 6), np.float32), keypoints=np.zeros((8, 2)))
    with pytest.raises(DataError, match="dense map"):
        as_vectors(dense)


# -- with verification -------------------------------------------------------------------------


class Given(Matcher):
    """Returns what it is given."""

    runtime = "given"

    def __init__(self, **found):
        self.found = found

    def match(self, features0, features1):
        return Correspondences(**self.found)


def verified(matcher, n=60, view=None, **config):
    view = view or two_views(n)
    d = unit(np.random.default_rng(0), len(view.p0))
    f0, f1 = features(d, view.p0), features(d, view.p1)
    return VerifiedMatcher(matcher, Verifier(GeometryConfig(**config))).match(f0, f1, CAMERA, CAMERA)


def test_matched_and_verified():
    result = verified(Nearest(Nearest.Options()))
    assert result.status is Status.OK and result.num_inliers >= 50 and result.pose is not None
    assert (result.runtime, result.covisibility, result.model) == ("numpy", None, "essential")
    assert result.elapsed_ms > 0


def test_what_a_matcher_knows_is_passed_on():
    index = np.arange(60, dtype=np.int32)
    pairs, scores = np.stack([index, index], 1), np.ones(60, np.float32)
    seen = {"covisibility": 0.4, "stopped_after_layer": 3, "layer_scores": ((2, 0.6), (3, 0.4))}
    result = verified(Given(pairs=pairs, scores=scores, **seen))
    assert {name: getattr(result, name) for name in seen} == seen and result.runtime == "given"
    for status in (Status.NOT_COVISIBLE, Status.STOPPED_EARLY, Status.NON_FINITE):
        result = verified(Given(pairs=pairs, scores=scores, covisibility=0.0, status=status))
        assert (result.status, result.covisibility, len(result), result.num_inliers) == (status, 0.0, 60, 0)


@pytest.mark.parametrize("pair", [(0, 60), (60, 0), (-1, 0), (0, -1)])
def test_pairs_of_keypoints_that_do_not_exist_are_refused(pair):
    with pytest.raises(DataError, match="Given returned pairs outside of 60 and 60 keypoints"):
        verified(Given(pairs=np.int32([(0, 0), pair]), scores=np.ones(2, np.float32)))


def test_empty_sides_and_no_matches_say_why():
    matcher = VerifiedMatcher(Nearest(Nearest.Options()), Verifier(GeometryConfig()))
    none, some = features(np.empty((0, 32), np.float32)), features(unit(np.random.default_rng(0), 40))
    for a, b in ((none, some), (some, none), (none, none)):
        assert matcher.match(a, b).status is Status.NO_KEYPOINTS
    same = features(np.ones((40, 32), np.float32))
    assert matcher.match(same, same).status is Status.NO_MATCHES
    broken = features(np.full((40, 32), np.nan, np.float32))
    assert matcher.match(some, broken).status is Status.NON_FINITE


def test_features_of_different_models_are_never_compared_and_both_are_named():
    d = unit(np.random.default_rng(0), 40)
    other = ModelIdentity("features", "other", "f" * 64, "none")
    matcher = VerifiedMatcher(Nearest(Nearest.Options()), Verifier(GeometryConfig()))
    for size in (40, 0):  # also where there is nothing to compare
        with pytest.raises(IdentityError, match="'test'.*'other'"):
            matcher.match(features(d[:size]), features(d[:size], model=other))
