"""Global descriptors: vlad against a slow loop, learned ones in half precision, MegaLoc as a plug-in."""

import dataclasses

import numpy as np
import pytest
from helpers import features, frame, image, unit
from model_helpers import (
    _tiny_cache,  # noqa: F401 (fixtures)
    own_cache,  # noqa: F401
    tiny,  # noqa: F401
    tiny_config,
)

from vslam_features import registry
from vslam_features.config import Config
from vslam_features.errors import ConfigError, DataError, IdentityError, PluginError
from vslam_features.frontend import FrontEnd
from vslam_features.maps.file_store import FileStore
from vslam_features.maps.keyframe_map import KeyframeMap
from vslam_features.maps.reader import MapReader
from vslam_features.replay.scenes import make_scene
from vslam_features.retrieval.learned import EffNetCov, MegaLoc
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


# -- learned -----------------------------------------------------------------------------------


def mapped(path, front_end: FrontEnd, frames) -> list[np.ndarray]:
    """Live descriptors of frames that go to a new map file."""
    front_end.use_map(KeyframeMap(FileStore(path, front_end.map_models, create=True)))
    results = [front_end.process(f)[1] for f in frames]
    front_end.keyframes.close()
    assert not any(r.faults for r in results)
    return [r.keyframe.global_descriptor for r in results]


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("name", ["effnet_cov", "megaloc"])
def test_learned_descriptors_are_the_same_live_stored_and_loaded_and_take_two_bytes_a_number(name, tmp_path):
    made = make_scene("room", width=320, height=240, fps=5.0)
    settings = tiny_config(retrieval__name=name, retrieval__options__model="tiny-global")
    front_end = FrontEnd(settings)
    assert type(front_end.global_descriptor) is {"effnet_cov": EffNetCov, "megaloc": MegaLoc}[name]
    live = mapped(tmp_path / "a.vmap", front_end, [made.frame(i) for i in range(5)])
    raw = front_end.global_descriptor.engine.run(
        {"image": front_end.global_descriptor.engine.model.card.preprocessing.apply(made.frame(0).image)}
    ).outputs["descriptor"]
    assert (live[0] != raw).any(), "or there was nothing to round"
    np.testing.assert_allclose(live[0], raw, rtol=2**-11, atol=2**-25)  # half a unit of f16 (IEEE 754)
    with MapReader(tmp_path / "a.vmap") as reader:
        stored = [reader.keyframe(i).global_descriptor for i in range(5)]
    for ours, theirs in zip(live, stored):
        assert (ours.dtype, theirs.dtype) == (np.float32, np.float16) and theirs.nbytes == 2 * len(ours)
        np.testing.assert_array_equal(ours, theirs.astype(np.float32), strict=True)
    again = FrontEnd(settings)
    again.use_map(KeyframeMap(FileStore(tmp_path / "a.vmap", again.map_models, read_only=True)))
    assert len(again.index) == 5
    for d in live:
        for found, wanted in zip(again.index.search(d, 5, 9), front_end.index.search(d, 5, 9)):
            np.testing.assert_array_equal(found, wanted, strict=True)
    again.keyframes.close()


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("change", [{"preprocessing": "rgb-322x322-area"}, {"name": "other"}, {"sha256": "ab" * 32}])
def test_a_map_with_global_descriptors_of_another_model_or_preprocessing_is_refused_by_name(change, tmp_path):
    front_end, path = FrontEnd(tiny_config()), tmp_path / "a.vmap"
    mapped(path, front_end, [frame(image(240, 320))])
    own = front_end.map_models
    other = dataclasses.replace(own.global_descriptor, **change)
    for read_only in (False, True):
        with pytest.raises(IdentityError, match="a.vmap is a map of .*set features.name and retrieval.name") as error:
            FileStore(path, dataclasses.replace(own, global_descriptor=other), read_only=read_only)
        assert str(own.global_descriptor) in str(error.value) and str(other) in str(error.value)
        assert str(own.global_descriptor) != str(other)


def test_the_index_of_the_configuration():
    assert Config().retrieval.index == "flat"
    assert Config.from_flat({"retrieval.index": "faiss"}).retrieval.index == "faiss"
    with pytest.raises(ConfigError, match="retrieval.index: 'flats' is not one of faiss, flat"):
        Config.from_flat({"retrieval.index": "flats"})
    assert Config.from_flat({"retrieval.name": "megaloc"}).retrieval.options == {"model": "megaloc"}
