"""Dense features and their matcher in the front-end: keypoints, storage, maps, sizes that change, gate, faults."""

from dataclasses import replace

import cv2
import helpers
import numpy as np
import pytest
from dense_models import (
    DENSE,
    FEATURES_CARD,
    MAP,
    MATCHER_CARD,
    PICTURES,
    SEEN,
    STEPS,
    _dense_cache,  # noqa: F401
    dense,  # noqa: F401
    dense_config,
    map_matcher,
    map_model,
)
from helpers import frame
from model_helpers import (
    Opened,
    engine,
    features_model,
    learned,  # noqa: F401 (fixtures)
    own_cache,  # noqa: F401
    save,
)
from model_helpers import card as card_of

from vslam_features.config import Config
from vslam_features.errors import (
    DataError,
    IdentityError,
    ModelFileError,
    ModelMissingError,
    PluginError,
)
from vslam_features.features.base import store_descriptors
from vslam_features.features.dense import FlexGlue, Grid
from vslam_features.features.orb import Orb
from vslam_features.features.sift import Sift
from vslam_features.frontend import FrontEnd
from vslam_features.matching.base import as_map, as_vectors
from vslam_features.matching.flexglue import FlexGlue as FlexGlueMatcher
from vslam_features.models import Models
from vslam_features.runtimes.base import LoadRequest
from vslam_features.runtimes.ort import OnnxRuntime
from vslam_features.types import Frame, Status


@pytest.fixture(scope="module")
def sides(tmp_path_factory):
    """Features of both pictures of a shipped pair, without a cache."""
    folder = tmp_path_factory.mktemp("sides")
    plugin = features_of(folder)
    return tuple(plugin.extract(frame(image)) for image in PICTURES["room-step"])


def features_of(folder, detector="sift", long_side=640, max_keypoints=400, **faults) -> FlexGlue:
    path = save(map_model(), FEATURES_CARD, folder / "features.onnx")
    opened = Opened(engine(path, folder / "incidents", path if faults else None, **faults))
    return FlexGlue(max_keypoints, long_side, FlexGlue.Options("any", detector), opened)


def matcher_of(folder, min_covisibility=0.0, model=None) -> FlexGlueMatcher:
    path = save(model or map_matcher(), MATCHER_CARD, folder / "matcher.onnx")
    return FlexGlueMatcher(FlexGlueMatcher.Options("any", 0.1, min_covisibility), Opened(engine(path, folder)))


# -- keypoints -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name, plugin", [("sift", Sift), ("orb", Orb)])
def test_keypoints_are_those_of_the_detector_and_the_map_is_the_models(name, plugin, tmp_path):
    picture = helpers.image(480, 848)
    found = features_of(tmp_path, name).extract(frame(picture))
    alone = plugin(400, 640, plugin.Options()).extract(frame(picture))
    assert len(found) > 50
    for field in ("keypoints", "scores", "image_size", "pixel_scale"):
        np.testing.assert_array_equal(getattr(found, field), getattr(alone, field))
    assert found.descriptors.shape == MAP and found.descriptors.dtype == np.float32
    session = OnnxRuntime().load(tmp_path / "features.onnx", LoadRequest(threads=1))
    small = cv2.resize(picture, SEEN, interpolation=cv2.INTER_AREA)[None, None] / np.float32(255)
    np.testing.assert_allclose(found.descriptors, session.run({"image": small})["descriptors"], atol=2e-3)


def test_keypoints_are_free_so_the_identity_is_that_of_the_model(tmp_path):
    plugins = [features_of(tmp_path, detector) for detector in ("sift", "orb", "grid")]
    found = [p.extract(frame()) for p in plugins]
    assert len({p.identity for p in plugins}) == 1 and {f.model for f in found} == {plugins[0].identity}
    assert plugins[0].identity.name == "dense-features" and plugins[0].identity.preprocessing == "grey-512x384-area"
    assert plugins[0].descriptor_length == MAP[0] and "onnxruntime" in plugins[0].runtime
    maps = [f.descriptors.tobytes() for f in found]
    assert len(set(maps)) == 1
    # Those of different detectors can be matched.
    assert len(matcher_of(tmp_path).match(found[0], found[1]).pairs) > 5


@pytest.mark.parametrize("detector", ["sift", "orb", "grid"])
def test_a_mask_holds_for_every_detector(detector, tmp_path):
    plugin, mask = features_of(tmp_path, detector), np.zeros((120, 160), bool)
    assert len(plugin.extract(frame(mask=mask))) == 0
    mask[:, 80:] = True
    found = plugin.extract(frame(mask=mask))
    assert len(found) > 5 and found.keypoints[:, 0].min() > 78 and found.descriptors.shape == MAP


def test_a_grid_has_a_point_in_the_centre_of_each_cell():
    found = Grid(2048, 8).extract(frame(np.zeros((24, 32), np.uint8)))
    assert found.keypoints.tolist() == [[x, y] for y in (3.5, 11.5, 19.5) for x in (3.5, 11.5, 19.5, 27.5)]
    assert found.scores.tolist() == [1] * 12 and found.pixel_scale == 4.0
    assert len(Grid(2048, 8).extract(frame(np.zeros((1, 1), np.uint8)))) == 1
    assert Grid(10**6, 1).extract(frame(np.zeros((2, 3), np.uint8))).keypoints.tolist() == [
        [0, 0], [1, 0], [2, 0], [0, 1], [1, 1], [2, 1],
    ]  # fmt: skip


@pytest.mark.parametrize("size, most", [((848, 480), 2048), ((544, 640), 100), ((1000, 3), 7), ((5, 5), 1)])
def test_a_grid_of_too_many_cells_has_larger_ones(size, most):
    found = Grid(most, 2).extract(frame(np.zeros(size[::-1], np.uint8)))
    assert most / 3 <= len(found) <= most
    assert (found.keypoints >= 0).all() and (found.keypoints <= np.array(size) - 1).all()
    steps = np.unique(np.diff(np.unique(found.keypoints[:, 0])))
    assert not len(steps) or steps.max() == 2 * found.pixel_scale


def test_detectors_that_are_none(tmp_path):
    with pytest.raises(PluginError, match=r"features.options.detector: 'harris' is none of .*sift.*grid"):
        features_of(tmp_path, "harris")
    with pytest.raises(PluginError, match="detector: 'flexglue' has no keypoints of its own"):
        features_of(tmp_path, "flexglue")


@pytest.mark.usefixtures("dense")
def test_a_learned_detector_and_its_second_opinion():
    """Where it found nothing its fallback is asked, as by its own plug-in."""
    save(features_model(), card_of("features", "xfeat"))
    Models(dense_config(runtime__name="fake")).open("features", "xfeat")
    options = {"features__options__detector": "xfeat", "features__long_side": 0}
    honest = FrontEnd(dense_config(**options)).extract(frame())
    assert len(honest) > 50 and honest.model.name == "dense-features" and not honest.recovered
    faults = {"runtime__name": "fake", "runtime__options__only": "xfeat", "runtime__options__zero_calls": "all"}
    front_end = FrontEnd(dense_config(**options, **faults))
    found = front_end.extract(frame())
    np.testing.assert_array_equal(found.keypoints, honest.keypoints)
    np.testing.assert_array_equal(found.descriptors, honest.descriptors)
    assert found.recovered.startswith("no keypoint in an image with texture")


@pytest.mark.usefixtures("dense")
def test_the_model_of_a_detector_may_be_missing_as_its_own():
    config = dense_config(features__options__detector="aliked", retrieval__name="vlad")
    front_end = FrontEnd(config)
    assert front_end.config.features.name == "sift" and "model 'aliked-n16' (fp32) is not on" in front_end.warning
    with pytest.raises(ModelMissingError, match="aliked-n16"):
        FrontEnd(config.with_values(models__if_missing="error"))


def test_a_map_that_the_fallback_computed_is_told(tmp_path):
    found = features_of(tmp_path, nan_calls="1").extract(frame())
    assert "not finite" in found.recovered
    np.testing.assert_array_equal(found.descriptors, features_of(tmp_path).extract(frame()).descriptors)


# -- what goes together --------------------------------------------------------------------------


@pytest.mark.usefixtures("dense")
def test_dense_and_sparse_are_told_apart_at_the_start():
    with pytest.raises(
        PluginError, match="features 'flexglue' have a dense map, matcher 'nearest' takes a descriptor a"
    ):
        FrontEnd(dense_config(matcher__name="nearest"))
    with pytest.raises(
        PluginError, match="features 'sift' have a descriptor a keypoint, matcher 'flexglue' takes a dense"
    ):
        FrontEnd(Config.from_flat({n: v for n, v in DENSE.items() if not n.startswith("features")}
                                  | {"features.name": "sift"}))  # fmt: skip
    with pytest.raises(PluginError, match="no VLAD codebook for features 'dense-features'.*another global descriptor"):
        FrontEnd(dense_config(retrieval__name="vlad"))
    assert Config.from_flat({"features.name": "flexglue"}).matcher.name == "flexglue"


@pytest.mark.usefixtures("dense")
def test_a_matcher_of_other_maps_is_refused_at_the_start():
    save(map_matcher(shape=(96, 64, 64)), MATCHER_CARD)
    with pytest.raises(ModelFileError, match=r"takes maps \(96, 64, 64\), its features model .* gives \(96, 48, 64\)"):
        FrontEnd(dense_config())
    save(map_matcher(shape=(32, 48, 64)), replace(MATCHER_CARD, features_model=""))
    with pytest.raises(PluginError, match="dense-matcher takes descriptors of length 32, dense-features has 96"):
        FrontEnd(dense_config())


@pytest.mark.usefixtures("dense")
def test_tokens_tell_the_number_of_cells_only():
    """4800 of them are 60 rows of 80, or 64 of 75."""
    save(map_model(seen=(640, 480)), replace(FEATURES_CARD, preprocessing=replace(STEPS, width=640, height=480)))
    tokens = {"descriptors0": "tokens", "descriptors1": "tokens"}
    own = replace(MATCHER_CARD, layouts=tokens)
    save(map_matcher(shape=(96, 60, 80), layout="tokens"), own)
    front_end = FrontEnd(dense_config())
    found = [front_end.extract(frame(image)) for image in PICTURES["room-step"]]
    assert len(front_end.matcher.match(*found)) > 30
    save(map_matcher(shape=(96, 60, 64), layout="tokens"), own)
    with pytest.raises(ModelFileError, match=r"takes maps .*, its features model .* gives \(96, 60, 80\)"):
        FrontEnd(dense_config())


def test_what_needs_the_other_kind_says_so(sides, tmp_path):
    with pytest.raises(DataError, match="dense map"):
        as_vectors(sides[0])
    with pytest.raises(DataError, match=r"has descriptors \(4, 8\); this method needs a dense map"):
        as_map(helpers.features(np.zeros((4, 8), np.float32)))
    other = replace(sides[1], model=replace(sides[1].model, sha256="1" * 64))
    with pytest.raises(IdentityError):
        FrontEnd(Config.from_flat({"features.name": "sift", "matcher.name": "nearest"})).matcher.match(sides[0], other)


# -- matches -------------------------------------------------------------------------------------


def test_matches_are_those_of_numpy(sides, tmp_path):
    """Bilinear samples of the maps at the keypoints, mutual nearest neighbours over 0.8."""
    rows = []
    for f in sides:
        c, h, w = f.descriptors.shape
        at = (f.keypoints.astype(np.float64) + 0.5) * (w, h) / f.image_size - 0.5
        x, y = (np.clip(at[:, i], 0, n - 1) for i, n in ((0, w), (1, h)))
        x0, y0 = (np.minimum(v.astype(int), n - 2) for v, n in ((x, w), (y, h)))
        fx, fy, d = x - x0, y - y0, f.descriptors.astype(np.float64)
        top = d[:, y0, x0] * (1 - fx) + d[:, y0, x0 + 1] * fx
        below = d[:, y0 + 1, x0] * (1 - fx) + d[:, y0 + 1, x0 + 1] * fx
        row = (top * (1 - fy) + below * fy).T
        rows.append(row / np.linalg.norm(row, axis=1, keepdims=True))
    cosine = rows[0] @ rows[1].T
    forth, back = cosine.argmax(1), cosine.argmax(0)
    expected = {(i, int(j)) for i, j in enumerate(forth) if back[j] == i and cosine[i, j] > 0.8}
    found = matcher_of(tmp_path).match(*sides)
    got = {tuple(p) for p in found.pairs.tolist()}
    assert len(got) > 100 and len(got ^ expected) <= 2
    assert found.covisibility == pytest.approx(len(got) / len(sides[0]), abs=1e-6)


def test_the_other_way_round_they_are_the_same(sides, tmp_path):
    matcher = matcher_of(tmp_path)
    there, back = matcher.match(*sides), matcher.match(*sides[::-1])
    assert len(there.pairs) > 100
    assert {tuple(p) for p in there.pairs} == {tuple(p[::-1]) for p in back.pairs}


def test_a_pair_of_too_small_covisibility_is_not_covisible(sides, tmp_path):
    found = matcher_of(tmp_path, min_covisibility=0.9).match(*sides)
    assert found.status is Status.NOT_COVISIBLE and not len(found.pairs) and 0.1 < found.covisibility < 0.9
    assert FlexGlueMatcher.Options().min_covisibility == FlexGlueMatcher.Options().early_stop_decay == 0.5


def test_matches_are_the_same_live_and_stored_in_fp16_and_fp32(sides, tmp_path):
    """Stored losslessly, since the model rounds to fp16; a map holds what was live to the last bit."""
    matcher, live = matcher_of(tmp_path), sides
    stored = {policy: tuple(store_descriptors(f, policy) for f in live) for policy in ("lossless", "never")}
    assert [f.descriptors.dtype for f in stored["lossless"]] == [np.float16] * 2
    assert stored["lossless"][0].descriptors.nbytes == np.prod(MAP) * 2
    assert [f.descriptors.dtype for f in stored["never"]] == [np.float32] * 2
    expected = matcher.match(*live)
    assert len(expected.pairs) > 100
    for pair in (*stored.values(), (live[0], stored["lossless"][1]), (stored["lossless"][0], live[1])):
        found = matcher.match(*pair)
        np.testing.assert_array_equal(found.pairs, expected.pairs)
        assert found.scores.tobytes() == expected.scores.tobytes()
    odd = replace(live[0], descriptors=live[0].descriptors * np.float32(1 / 3))
    assert store_descriptors(odd, "lossless").descriptors.dtype == np.float32
    assert store_descriptors(odd, "always").descriptors.dtype == np.float16


@pytest.mark.usefixtures("dense")
def test_an_image_size_that_switches_changes_nothing():
    """848x480 to 544x640 and back in one stream, of views that differ by a known affine map."""
    wide = cv2.GaussianBlur(helpers.image(480, 848), (0, 0), 2.0)
    high = cv2.resize(wide, (544, 640), interpolation=cv2.INTER_CUBIC)
    scale = np.array([544 / 848, 640 / 480])
    images = [wide, high, wide, high, high]
    front_end = FrontEnd(dense_config(features__long_side=0))
    seen = [front_end.process(Frame(i, "cam", image))[0] for i, image in enumerate(images, 1)]
    assert not any(t.faults for t in seen)
    for tracked, image in zip(seen, images):  # as if no other size had ever been
        alone = FrontEnd(dense_config(features__long_side=0)).extract(Frame(0, "cam", image))
        np.testing.assert_array_equal(tracked.features.keypoints, alone.keypoints)
        np.testing.assert_array_equal(tracked.features.descriptors, alone.descriptors)
        assert tracked.features.image_size == image.shape[1::-1]
    points = [t.features.keypoints.astype(np.float64) for t in seen]
    for i, to_wide in ((1, True), (2, False)):
        pairs = seen[i].pairs[0].matches.pairs
        own, ref = points[i][pairs[:, 0]], points[i - 1][pairs[:, 1]]
        h, w = (own, ref) if to_wide else (ref, own)
        error = np.linalg.norm((h + 0.5) / scale - 0.5 - w, axis=1)
        assert len(pairs) > 60 and np.median(error) < 1.5 and (error < 4).mean() > 0.8, (len(pairs), np.median(error))
    same = seen[4].pairs[0].matches  # the same picture twice
    assert len(same) > 100 and np.abs(points[4][same.pairs[:, 0]] - points[3][same.pairs[:, 1]]).max() < 1e-3
