"""Feature plug-ins against OpenCV called directly, and what must hold for any image."""

import warnings

import cv2
import numpy as np
import pytest
from helpers import IDENTITY, features, frame, image, unit
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from vslam_features import registry
from vslam_features.errors import DataError
from vslam_features.features.base import store_descriptors
from vslam_features.matching.nearest import Nearest

both = pytest.mark.parametrize("name", ["sift", "orb"])


def extractor(name="sift", max_keypoints=2048, long_side=0, **options):
    cls = registry.get("features", name)
    return cls(max_keypoints, long_side, cls.Options(**options))


def extract(picture, name="sift", mask=None, **arguments):
    return extractor(name, **arguments).extract(frame(picture, mask=mask))


def same(a, b) -> bool:
    return all(np.array_equal(getattr(a, n), getattr(b, n)) for n in ("keypoints", "scores", "descriptors"))


# -- against OpenCV ----------------------------------------------------------------------------


def test_sift_is_opencv_sift_with_the_root_norm():
    picture = image(240, 320)
    found, d = cv2.SIFT_create().detectAndCompute(picture, None)
    order = np.argsort([-k.response for k in found], kind="stable")
    f = extract(picture)
    assert len(f) == len(found) > 100
    np.testing.assert_allclose(f.keypoints, np.float32([found[i].pt for i in order]) - 0.25, atol=1e-4)
    np.testing.assert_array_equal(f.scores, np.float32([found[i].response for i in order]))
    hellinger = np.sqrt(d[order] / d[order].sum(axis=1, keepdims=True))
    np.testing.assert_allclose(f.descriptors, hellinger, atol=1e-6)


def test_root_sift_has_unit_length_and_its_product_is_the_hellinger_kernel():
    f = extract(image(240, 320))
    np.testing.assert_allclose(np.linalg.norm(f.descriptors, axis=1), 1, atol=1e-5)
    assert (f.descriptors >= 0).all() and f.descriptors.dtype == np.float32
    assert (np.diff(f.scores) <= 0).all() and f.keypoints.dtype == np.float32


def test_orb_is_opencv_orb():
    picture = image(240, 320)
    found, d = cv2.ORB_create(2048, fastThreshold=12).detectAndCompute(picture, None)
    order = np.argsort([-k.response for k in found], kind="stable")
    f = extract(picture, "orb")
    np.testing.assert_array_equal(f.descriptors, d[order])
    np.testing.assert_allclose(f.keypoints, np.float32([found[i].pt for i in order]), atol=2.5)  # see mirrored test
    assert f.descriptors.dtype == np.uint8


@both
def test_colour_is_searched_in_its_luma(name):
    rgb = np.stack([image(seed=s) for s in range(3)], -1)
    assert same(extract(rgb, name), extract(cv2.cvtColor(rgb, cv2.COLOR_RGB2GRAY), name))


@both
def test_max_keypoints_keeps_the_best(name):
    everything, few = extract(image(240, 320), name), extract(image(240, 320), name, max_keypoints=10)
    assert len(few) <= 10 < len(everything)
    if name == "sift":
        assert same(few, features_slice(everything, 10))


def features_slice(f, n):
    return type(f)(f.keypoints[:n], f.scores[:n], f.descriptors[:n], f.image_size, f.model, f.pixel_scale)


# -- coordinates -------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("long_side", [0, 200])
def test_keypoints_are_unbiased(name, long_side):
    """In a turned image x becomes W - 1 - x, and so must keypoints: a bias would count twice."""
    picture = image(301, 403)
    a, b = (extract(p, name, long_side=long_side) for p in (picture, picture[::-1, ::-1].copy()))
    pairs = Nearest(Nearest.Options(ratio=0.8)).match(a, b).pairs
    bias = (a.keypoints[pairs[:, 0]] + b.keypoints[pairs[:, 1]] - (402, 300)) / 2
    bias = bias[np.abs(bias).max(axis=1) < 4 * a.pixel_scale]
    assert len(bias) > 40
    np.testing.assert_allclose(np.median(bias, axis=0), 0, atol=0.02 * a.pixel_scale)
    if name == "orb":  # small corners at level 0 are the most; the biases grow with the level
        np.testing.assert_allclose(bias.mean(axis=0), 0, atol=0.1 * a.pixel_scale)


def test_keypoints_come_back_in_input_pixels():
    """A dot's centre, known exactly, is found at any shrinking; a missing half pixel would show."""
    height, width, centre = 480, 800, (401.5, 237.5)
    y, x = np.mgrid[:height, :width]
    dot = 30 + 200 * np.exp(-((x - centre[0]) ** 2 + (y - centre[1]) ** 2) / (2 * 12.0**2))
    for long_side in (0, 800, 400, 200, 100):
        f = extract(np.rint(dot).astype(np.uint8), long_side=long_side)
        assert f.image_size == (width, height)
        assert f.pixel_scale == pytest.approx(max(1, 800 / long_side) if long_side else 1)
        assert np.abs(f.keypoints - centre).max(axis=1).min() < 0.05 * f.pixel_scale, long_side


def test_shrinking_maps_by_the_ratio_of_the_sizes_on_each_axis():
    picture = image(301, 400)  # shrinks to 75.25 rows, rounded to 75
    f = extract(picture, long_side=100)
    small = cv2.resize(picture, (100, 75), interpolation=cv2.INTER_AREA)
    g = extract(small)
    np.testing.assert_allclose(f.keypoints, (g.keypoints + 0.5) * [4, 301 / 75] - 0.5, atol=1e-3)
    assert f.pixel_scale == pytest.approx(301 / 75)
    np.testing.assert_array_equal(f.descriptors, g.descriptors)


def test_images_are_never_enlarged():
    f, g = extract(image(), long_side=640), extract(image(), long_side=0)
    assert same(f, g) and f.pixel_scale == 1


def test_a_shift_of_the_image_shifts_the_keypoints():
    big = image(300, 400)
    a, b = extract(big[:250, :350]), extract(big[16:266, 32:382])
    pairs = Nearest(Nearest.Options(ratio=0.5)).match(a, b).pairs
    shift = a.keypoints[pairs[:, 0]] - b.keypoints[pairs[:, 1]]
    assert len(pairs) > 50
    np.testing.assert_allclose(np.median(shift, axis=0), (32, 16), atol=0.01)


# -- masks -------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("long_side", [0, 160])
def test_keypoints_lie_within_the_mask(name, long_side):
    mask = np.zeros((240, 320), bool)
    mask[60:200, 100:180] = True
    f = extract(image(240, 320), name, mask=mask, long_side=long_side)
    slack = f.pixel_scale
    assert len(f) > 5
    assert (f.keypoints >= (100 - slack, 60 - slack)).all() and (f.keypoints <= (180 + slack, 200 + slack)).all()


@both
def test_an_empty_mask_leaves_nothing_and_a_full_one_everything(name):
    picture = image(240, 320)
    assert len(extract(picture, name, mask=np.zeros(picture.shape, bool))) == 0
    assert same(extract(picture, name, mask=np.ones(picture.shape, bool)), extract(picture, name))


# -- any image ---------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("value", [0, 127, 255])
def test_blank_images_have_no_keypoints(name, value):
    f = extract(np.full((120, 160), value, np.uint8), name)
    assert f.keypoints.shape == (0, 2) and f.scores.shape == (0,)
    assert f.descriptors.shape == (0, {"sift": 128, "orb": 32}[name])
    assert f.descriptors.dtype == extract(image(), name).descriptors.dtype


@both
@pytest.mark.parametrize("long_side", [0, 1, 16, 640])
@pytest.mark.parametrize(
    "shape", [(1, 1), (1, 2), (2, 1), (2, 2), (3, 3), (7, 9), (1, 3000), (3000, 1), (4, 2000), (2000, 5)]
)
def test_tiny_and_lengthy_images(name, shape, long_side):
    picture = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    f = extract(picture, name, long_side=long_side)
    assert f.image_size == shape[::-1]
    assert (f.keypoints >= -0.5).all() and (f.keypoints <= np.array(shape[::-1]) - 0.5).all()


@both
@given(
    picture=st.sampled_from([(), (3,)]).flatmap(
        lambda c: hnp.arrays(np.uint8, st.tuples(st.integers(1, 70), st.integers(1, 70), *map(st.just, c)))
    ),
    long_side=st.sampled_from([0, 1, 5, 30]),
    masked=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_any_image_gives_features_within_the_contract(name, picture, long_side, masked):
    mask = picture.reshape(*picture.shape[:2], -1)[..., 0] > 100 if masked else None
    f = extract(picture, name, mask=mask, long_side=long_side, max_keypoints=50)
    assert len(f) <= 50 and np.isfinite(f.descriptors).all() and np.isfinite(f.scores).all()


@both
@pytest.mark.parametrize("view", [np.flipud, np.fliplr, np.transpose, lambda a: a[::2, ::2], np.asfortranarray])
def test_views_are_as_good_as_copies(name, view):
    picture = view(image(240, 320))
    assert same(extract(picture, name), extract(picture.copy(), name))


@both
def test_the_same_image_gives_the_same_features(name):
    one = extractor(name)
    a, b, c = one.extract(frame(image(240, 320))), one.extract(frame(image(240, 320))), extract(image(240, 320), name)
    assert same(a, b) and same(a, c)


def test_identity_holds_what_shapes_descriptors():
    assert extractor(contrast_threshold=0.01).identity == extractor(max_keypoints=5, long_side=9).identity
    assert extractor("orb").identity != extractor("sift").identity
    assert extract(image()).model == extractor().identity


# -- storage -----------------------------------------------------------------------------------

EXACT = np.float32([[0.5, 0.25, -3.0], [1.0, 65504.0, 0.0]])
INEXACT = np.float32([[0.1, 0.25, -3.0], [1.0, 2.0, 0.0]])
TOO_LARGE = np.float32([[70000.0, 1.0, 0.0]])


@pytest.mark.parametrize(
    "policy, values, dtype",
    [("lossless", EXACT, np.float16), ("lossless", INEXACT, np.float32), ("lossless", TOO_LARGE, np.float32),
     ("always", EXACT, np.float16), ("always", INEXACT, np.float16),
     ("never", EXACT, np.float32), ("never", TOO_LARGE, np.float32)],
)  # fmt: skip
def test_storage_policies(policy, values, dtype):
    given_features = features(values)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kept = store_descriptors(given_features, policy)
    assert kept.descriptors.dtype == dtype
    assert kept.keypoints.dtype == np.float32 and kept.keypoints is given_features.keypoints
    if policy == "lossless":
        np.testing.assert_array_equal(kept.descriptors.astype(np.float32), values)
    assert kept.model == IDENTITY


def test_always_refuses_what_fp16_cannot_hold():
    with pytest.raises(DataError, match="70000.*65504.*features.fp16"):
        store_descriptors(features(TOO_LARGE), "always")


@given(hnp.arrays(np.float32, (3, 5), elements=st.floats(width=32)))
def test_lossless_never_alters_a_bit(values):
    kept = store_descriptors(features(values), "lossless").descriptors.astype(np.float32)
    np.testing.assert_array_equal(kept, values)


def test_bits_stay_bits():
    f = features(np.arange(64, dtype=np.uint8).reshape(2, 32))
    assert store_descriptors(f, "always") is f


def test_matches_are_identical_live_and_stored():
    rng = np.random.default_rng(0)
    # values that fp16 holds exactly, so that lossless storage is fp16
    d = [unit(rng, 300, 64).astype(np.float16).astype(np.float32) for _ in range(2)]
    d[1][:150] = d[0][:150] + (rng.normal(0, 0.02, (150, 64))).astype(np.float16)
    live = [features(x.astype(np.float16).astype(np.float32)) for x in d]
    for policy, dtype in (("lossless", np.float16), ("always", np.float16), ("never", np.float32)):
        stored = [store_descriptors(f, policy) for f in live]
        assert {f.descriptors.dtype for f in stored} == {np.dtype(dtype)}
        for a, b in ((live[0], stored[1]), (stored[0], live[1]), tuple(stored)):
            found, expected = (Nearest(Nearest.Options()).match(*f) for f in ((a, b), tuple(live)))
            np.testing.assert_array_equal(found.pairs, expected.pairs)
            np.testing.assert_array_equal(found.scores, expected.scores)
    assert len(expected.pairs) > 100
