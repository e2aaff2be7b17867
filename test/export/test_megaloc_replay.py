"""The tiny MegaLoc from a recording to a map and back: replayed, continued, localised in; what is refused; faults."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from megaloc_helpers import NAME, SETTINGS, model_file, other_preprocessing, other_weights

from vslam_features.artifacts import records
from vslam_features.artifacts.store import content_sha256
from vslam_features.config import Config
from vslam_features.errors import IdentityError, ParityError
from vslam_features.frontend import FrontEnd
from vslam_features.maps.file_store import FileStore
from vslam_features.maps.keyframe_map import KeyframeMap
from vslam_features.maps.reader import MapReader
from vslam_features.maps.verify import verify
from vslam_features.replay.bag_writer import write_scene_bag
from vslam_features.replay.metrics import metrics
from vslam_features.replay.open_source import open_source
from vslam_features.replay.runner import replay
from vslam_features.replay.scenes import make_scene
from vslam_features.types import PairKind, Status

EXCLUDE_NS = int(SETTINGS["retrieval.exclude_s"] * 1e9)
TOP_K = Config().retrieval.top_k


def config(**values) -> Config:
    return Config.from_flat({**SETTINGS, **{name.replace("__", "."): value for name, value in values.items()}})


@pytest.fixture(scope="module")
def bag(tmp_path_factory):
    """A lap through a room and the begin of the next one; 1 image a second."""
    scene = make_scene("room", width=320, height=240, fps=1.0, noise_sigma=2.0)
    return write_scene_bag(scene, tmp_path_factory.mktemp("room") / "bag")


@pytest.fixture(scope="module")
def count(bag):
    with open_source(bag, config()) as source:
        return len(source)


def command(bag, out, path, *more, cache):
    """``vslam-features replay`` as people run it."""
    arguments = [sys.executable, "-m", "vslam_features", "replay", bag, "--out", out, "--map", path, "--no-pose", *more]
    for name, value in SETTINGS.items():
        arguments += ["--set", f"{name}={value}"]
    return subprocess.run(
        [*map(str, arguments)],
        env={**os.environ, "VSLAM_FEATURES_CACHE": str(cache)},
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.fixture(scope="module")
def house(bag, megaloc_cache, tmp_path_factory):
    """(file, folder of the report) of a map of the bag."""
    folder = tmp_path_factory.mktemp("house")
    done = command(bag, folder / "out", folder / "house.vmap", cache=megaloc_cache)
    assert done.returncode == 0, done.stderr
    return folder / "house.vmap", folder / "out"


@pytest.fixture
def copy(house, tmp_path):
    path = tmp_path / "copy.vmap"
    path.write_bytes(house[0].read_bytes())
    return path


def run(bag, path=None, mode="new", frames=0, **values):
    """A replay in this process, without poses, which would gate candidates. ``frames``: only the first ones."""
    with open_source(bag, config(**values), use_pose=False) as source:
        return replay(source, map_path=path, map_mode=mode, max_frames=frames)


def described(path) -> np.ndarray:
    """(n, D) global descriptors of a map, as they are stored."""
    with MapReader(path) as m:
        found = dict(m.global_descriptors())
        assert sorted(found) == list(range(len(m.headers())))
    return np.stack([found[i] for i in sorted(found)])


def nearest(old: np.ndarray, queries: np.ndarray, limits) -> list[list[int]]:
    """The most similar of the first ``limit`` rows for each query, best first, by sums in f64."""
    out = []
    for query, limit in zip(queries.astype(np.float64), limits):
        similarity = old[:limit].astype(np.float64) @ query
        out.append(np.lexsort((np.arange(limit), -similarity))[:TOP_K].tolist())
    return out


def ranked(log) -> list[list[int]]:
    """Ids of the candidates of each keyframe of a run, by rank."""
    out = {k.id: [] for k in log.keyframes}
    for c in sorted(log.candidates, key=lambda c: (c.kf_id, c.rank)):
        assert c.rank == len(out[c.kf_id])
        out[c.kf_id].append(c.ref_kf_id)
    return list(out.values())


def old_enough(log) -> list[int]:
    """How many keyframes of a new map are candidates of each."""
    stamps = np.array([k.stamp_ns for k in log.keyframes])
    return [int((stamps <= s - EXCLUDE_NS).sum()) for s in stamps]


# -- one run after another -----------------------------------------------------------------------


@pytest.mark.usefixtures("megaloc")
def test_descriptors_of_the_map_are_those_of_a_live_run_bit_for_bit(bag, house, count):
    front_end, live = FrontEnd(config()), []
    with open_source(bag, config(), use_pose=False) as source:
        for frame in source:
            tracked, loops = front_end.process(frame)
            assert not tracked.faults and not loops.faults
            live.append(loops.keyframe.global_descriptor)
    stored, card = described(house[0]), front_end.global_descriptor.engine.model.card
    assert (stored.dtype, stored.shape, len(live)) == (np.float16, (count, live[0].size), count)
    np.testing.assert_array_equal(np.stack(live), stored.astype(np.float32), strict=True)
    assert card.self_check and (card.name, card.preprocessing.channels) == (NAME, "rgb")
    report = verify(house[0])
    assert not report.damaged and not report.oddities
    with MapReader(house[0]) as m:
        assert m.models == front_end.map_models


@pytest.mark.usefixtures("megaloc")
def test_ranks_are_those_of_the_exact_sums_in_each_mode(bag, house, copy, count):
    stored, live = described(house[0]), run(bag)
    assert ranked(live) == nearest(stored, stored, old_enough(live))
    assert len(live.candidates) > count
    located = run(bag, house[0], "localize")
    assert ranked(located) == nearest(stored, stored, [count] * count)
    assert [row[0] for row in ranked(located)] == list(range(count)), "the same image first"
    continued = run(bag, copy, "continue")
    twice = np.concatenate([stored, stored])
    assert ranked(continued) == nearest(twice, stored, [count + n for n in old_enough(live)])
    np.testing.assert_array_equal(described(copy), twice)


def test_the_command_continues_and_localises_and_tells_the_model(bag, house, copy, count, megaloc_cache, tmp_path):
    first = json.loads((house[1] / "metrics.json").read_text())
    numbers = {}
    for mode in ("continue", "localize"):
        done = command(bag, tmp_path / mode, copy, "--map-mode", mode, cache=megaloc_cache)
        assert done.returncode == 0, done.stderr
        assert re.search(rf"{NAME} +{count} runs on onnxruntime .* fp32", done.stdout)
        numbers[mode] = json.loads((tmp_path / mode / "metrics.json").read_text())
    assert numbers["continue"]["map"]["loops_with_older_sessions"] > count / 2
    assert numbers["continue"]["map"]["keyframes_after"] == numbers["localize"]["map"]["keyframes_after"] == 2 * count
    assert numbers["localize"]["relocalisation"]["keyframes"] > count / 2
    assert first["loops"]["verified"] > 0
    sha256 = content_sha256(megaloc_cache / "models" / f"{NAME}.fp32.onnx")
    for m in (first, *numbers.values()):
        (engine,) = m["engines"]
        assert (engine["role"], engine["name"], engine["precision"]) == ("global", NAME, "fp32")
        assert engine["linked"] and engine["verified"].startswith("passed on ") and engine["runs"] == count
        assert not engine["non_finite"] and not engine["errors"] and not engine["lost"]
        assert (
            sha256[:12] in m["provenance"]["models"]["global"] and "-antialias" in m["provenance"]["models"]["global"]
        )
    page = (tmp_path / "localize" / "report.html").read_text()
    assert all(text in page for text in (NAME, engine["runtime"], engine["verified"], sha256[:12]))


@pytest.mark.usefixtures("megaloc")
def test_faiss_and_flat_find_the_same(bag, house):
    for path, mode in ((None, "new"), (house[0], "localize")):
        flat, faiss = (run(bag, path, mode, retrieval__index=index) for index in ("flat", "faiss"))
        assert flat.candidates and repr(faiss.candidates) == repr(flat.candidates)  # NaN is a margin, too
        assert metrics(faiss)["loops"] == metrics(flat)["loops"]
        pairs = [[(p.kind, p.kf_id, p.ref_kf_id, p.status, p.num_inliers) for p in log.pairs] for log in (flat, faiss)]
        assert pairs[0] == pairs[1] and any(p[0] != PairKind.TRACK for p in pairs[0])


@pytest.mark.usefixtures("megaloc")
def test_another_runtime_localises_in_the_map(bag, house):
    """The same file: one identity. Descriptors differ by rounding."""
    log = run(bag, house[0], "localize", frames=6, runtime__name="openvino")
    assert log.engines[0].runtime.startswith("openvino") and log.engines[0].linked
    assert [row[0] for row in ranked(log)] == list(range(6))
    assert min(c.similarity for c in log.candidates if c.rank == 0) > 0.999


# -- which models a map takes ----------------------------------------------------------------------


def open_map(path, **values):
    """A front-end that opened a map for localisation."""
    front_end = FrontEnd(config(**values))
    front_end.use_map(KeyframeMap(FileStore(path, front_end.map_models, read_only=True)))
    front_end.keyframes.close()
    return front_end


def both_named(error, path) -> set[str]:
    """The identities of a refusal."""
    text = str(error.value)
    assert str(path) in text and "cannot be compared" in text
    found = re.findall(r"global '([^']+)' \(weights ([0-9a-f]{12}), preprocessing ([^)]+)\)", text)
    assert len(set(found)) == 2, text
    return {"/".join(identity) for identity in found}


@pytest.mark.usefixtures("megaloc")
def test_the_fp16_twin_opens_the_map_because_a_record_links_it(bag, house):
    log = run(bag, house[0], "localize", frames=6, runtime__precision="fp16")
    (engine,) = log.engines
    fp32 = content_sha256(model_file("fp32"))
    (record,) = records.records_of(content_sha256(model_file("fp16")))
    assert record.passed and record.reference == fp32
    assert (engine.precision, engine.verified) == ("fp16", record.summary) and fp32[:12] in engine.verified
    assert [row[0] for row in ranked(log)] == list(range(6))
    assert open_map(house[0], runtime__precision="fp16").map_models == open_map(house[0]).map_models


def test_both_files_in_a_folder_of_ones_choice_open_the_map(house, megaloc, tmp_path):
    """As on a robot: copied there, with an empty cache."""
    (megaloc / "models").rename(tmp_path / "models")
    shutil.rmtree(megaloc)
    found = [open_map(house[0], retrieval__options__model=str(p)) for p in (tmp_path / "models").glob("*.onnx")]
    assert sorted(f.models.health()[0].precision for f in found) == ["fp16", "fp32"]


@pytest.mark.usefixtures("megaloc")
def test_a_twin_without_the_file_that_it_was_made_from_is_refused(house):
    fp32, own = content_sha256(model_file("fp32")), content_sha256(model_file("fp16"))
    model_file("fp32").unlink()
    for record in records.cache_folder("records").iterdir():
        record.unlink()
    with pytest.raises(IdentityError) as error:
        open_map(house[0], runtime__precision="fp16")
    assert {name.split("/")[1] for name in both_named(error, house[0])} == {fp32[:12], own[:12]}


@pytest.mark.usefixtures("megaloc")
def test_a_twin_that_failed_its_gate_is_refused(house):
    other_weights("fp16")  # its card still claims the weights of the fp32 file
    with pytest.raises(ParityError, match=f"{NAME} on onnxruntime.*does not compute what its reference computes"):
        open_map(house[0], runtime__precision="fp16")
    with pytest.raises(IdentityError) as error:
        open_map(house[0], runtime__precision="fp16", models__allow_unverified=True)
    weights = {name.split("/")[1] for name in both_named(error, house[0])}
    assert content_sha256(model_file("fp32"))[:12] in weights


REFUSED = {
    "vlad": (lambda: None, {"retrieval.name": "vlad", "retrieval.options.model": None}, "vlad"),
    "preprocessing": (other_preprocessing, {}, "-area"),
    "weights": (lambda: other_weights(source_sha256="ab" * 32, version="random, seed 1"), {}, NAME),
    "resize by Pillow": (lambda: other_preprocessing("pillow"), {}, "-pillow"),
}


@pytest.mark.usefixtures("megaloc")
@pytest.mark.parametrize("change, settings, named", REFUSED.values(), ids=REFUSED)
def test_a_map_of_another_global_descriptor_is_refused_by_both_names(bag, house, copy, change, settings, named):
    before = copy.read_bytes()
    own = FrontEnd(config()).map_models.global_descriptor
    change()
    changed = Config.from_flat({n: v for n, v in {**SETTINGS, **settings}.items() if v is not None})
    other = FrontEnd(changed).map_models.global_descriptor
    assert named in str(other) and str(other) != str(own)
    for mode in ("continue", "localize"):
        with open_source(bag, changed, use_pose=False) as source, pytest.raises(IdentityError) as error:
            replay(source, map_path=copy, map_mode=mode)
        assert str(copy) in str(error.value) and str(own) in str(error.value) and str(other) in str(error.value)
    assert copy.read_bytes() == before
    with open_source(bag, changed, use_pose=False) as source:  # and the other way round
        replay(source, map_path=copy.with_name("other.vmap"), max_frames=1)
    with pytest.raises(IdentityError) as error:
        FileStore(
            copy.with_name("other.vmap"), dataclasses.replace(FrontEnd(changed).map_models, global_descriptor=own)
        )
    assert str(own) in str(error.value) and str(other) in str(error.value)


# -- faults ----------------------------------------------------------------------------------------


NAN = {"runtime__name": "fake", "runtime__options__only": NAME, "runtime__options__nan_calls": "2,5"}


@pytest.mark.usefixtures("megaloc")
def test_nan_is_made_good_by_the_fallback_and_counted(bag, house, copy, count):
    log = run(bag, copy, "continue", **NAN)
    (engine,) = log.engines
    counts = (engine.runs, engine.non_finite, engine.recovered, engine.lost)
    assert counts == (count, 2, 2, 0) and "not finite" in engine.last_fault and engine.incidents == 1
    assert not log.fault_counts
    made_good = described(copy)[count:].astype(np.float32)
    stored = described(house[0]).astype(np.float32)
    np.testing.assert_allclose(made_good, stored, rtol=2**-9, atol=2**-12)  # of an unoptimised graph: other rounding
    untouched = [i for i in range(count) if i not in (1, 4)]
    np.testing.assert_array_equal(made_good[untouched], stored[untouched])


@pytest.mark.usefixtures("megaloc")
def test_without_a_fallback_a_keyframe_has_no_global_descriptor_and_nothing_else_is_lost(bag, count, tmp_path):
    log = run(bag, tmp_path / "a.vmap", runtime__fallback="none", **NAN)
    (engine,) = log.engines
    assert (engine.non_finite, engine.recovered, engine.lost) == (2, 0, 2)
    assert dict(log.fault_counts) == {"global": 2} and len(log.keyframes) == count
    assert not verify(tmp_path / "a.vmap").damaged
    with MapReader(tmp_path / "a.vmap") as m:
        assert sorted(dict(m.global_descriptors())) == [i for i in range(count) if i not in (1, 4)]
    firsts = [row[0] for row in ranked(run(bag, tmp_path / "a.vmap", "localize", frames=4))]
    assert [firsts[i] for i in (0, 2, 3)] == [0, 2, 3] and firsts[1] != 1


@pytest.mark.usefixtures("megaloc")
def test_blank_images_are_described_and_recognise_nothing(bag, house):
    front_end = FrontEnd(config())
    front_end.use_map(KeyframeMap(FileStore(house[0], front_end.map_models, read_only=True)))
    with open_source(bag, config(), use_pose=False) as source:
        frames = [next(iter(source))]
    for i, grey in enumerate((0, 128, 255), 1):
        image = np.full_like(frames[0].image, grey)
        frames.append(dataclasses.replace(frames[0], image=image, stamp_ns=frames[0].stamp_ns + i * 10**9))
    results = [front_end.process(f) for f in frames]
    front_end.keyframes.close()
    for (tracked, loops), grey in zip(results[1:], (0, 128, 255)):
        assert not tracked.faults and not loops.faults, grey
        d = loops.keyframe.global_descriptor
        assert np.isfinite(d).all() and np.linalg.norm(d) == pytest.approx(1, abs=1e-3)
        assert loops.pairs and {p.matches.status for p in loops.pairs} == {Status.NO_KEYPOINTS}
    counts = front_end.models.health()[0].counts
    assert (counts.runs, counts.faults, counts.empty_agreed) == (4, 0, 0)
