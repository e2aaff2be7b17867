"""A learned model at work in the front-end, with faults on demand: what is recovered, lost, counted and kept."""

import dataclasses
import json
import queue
import threading
from functools import cache

import cv2
import numpy as np
import pytest
from helpers import SECOND, T0, frame, image
from model_helpers import (
    TINY,
    _tiny_cache,  # noqa: F401 (fixtures)
    card,
    command,
    engine,
    features_model,
    matcher_model,
    own_cache,  # noqa: F401
    save,
    tiny,  # noqa: F401
    tiny_config,
)
from test_frontend import digest

from vslam_features.artifacts import incidents
from vslam_features.artifacts.cache import cache_folder
from vslam_features.artifacts.store import model_path
from vslam_features.config import Config
from vslam_features.errors import BackendError, DataError, ModelFileError, NonFiniteError
from vslam_features.frontend import FrontEnd
from vslam_features.replay.scenes import make_scene
from vslam_features.runtimes.digest import input_digest
from vslam_features.types import Status

pytestmark = pytest.mark.usefixtures("tiny")


@cache
def scene(frames: int = 9):
    """Neighbouring frames of a small room."""
    made = make_scene("room", width=320, height=240, fps=5.0)
    return [made.frame(i) for i in range(frames)]


def faulty(role="matcher", **values) -> FrontEnd:
    """A front-end whose model of a role fails as the options of the fake runtime say."""
    options = {f"runtime__options__{n}": values.pop(n) for n in list(values) if n.endswith(("_calls", "_inputs"))}
    return FrontEnd(tiny_config(runtime__name="fake", runtime__options__only=f"tiny-{role}", **options, **values))


def run(front_end: FrontEnd, frames=None):
    """(tracked, loops) of each frame."""
    return [front_end.process(f) for f in (frames or scene())]


def statuses(results) -> list[Status]:
    return [p.matches.status for tracked, _ in results for p in tracked.pairs]


def health(front_end: FrontEnd, role="matcher"):
    return next(h for h in front_end.models.health() if h.role == role)


def kept():
    return sorted(cache_folder("incidents").glob("*.npz"))


# -- NaN ---------------------------------------------------------------------------------------


def test_nan_on_pair_3_of_8_is_recovered_counted_kept_and_shown_again(capsys):
    honest = run(FrontEnd(tiny_config()))
    assert statuses(honest) == [Status.OK] * 8
    front_end = faulty(nan_calls="3")
    results = run(front_end)
    assert statuses(results) == [Status.OK] * 2 + [Status.FAULT_RECOVERED] + [Status.OK] * 5
    pairs = [t.pairs[0].matches for t, _ in results[1:]]
    assert "not finite" in pairs[2].detail and "'mscores0'" in pairs[2].detail
    assert pairs[2].runtime.startswith("fallback onnxruntime") and pairs[1].runtime.startswith("fake(onnxruntime)")
    expected = [t.pairs[0].matches for t, _ in honest[1:]]
    assert all(np.array_equal(a.pairs, b.pairs) and a.num_inliers == b.num_inliers for a, b in zip(pairs, expected))
    found = health(front_end)
    assert (found.counts.runs, found.counts.non_finite, found.counts.recovered, found.counts.lost) == (8, 1, 1, 0)
    assert found.counts.incidents == 1 and "not finite" in found.last_fault
    assert not any(t.faults or c.faults for t, c in results)

    (file,) = kept()
    saved = incidents.load(file)
    assert (saved.role, saved.name, saved.sha256) == ("matcher", "tiny-matcher", found.sha256)
    assert np.isnan(saved.outputs["mscores0"]).sum() == 1 and len(saved.inputs["keypoints0"]) == 300
    assert np.array_equal(saved.inputs["keypoints0"], results[3][0].features.keypoints)

    # The model itself is sound: the input runs. The record of the fault is shown all the same.
    assert command("models", "verify", "tiny-matcher", "--inputs", str(file)) == 0
    assert f"recorded in {file.name}: tiny-matcher on fake(onnxruntime)" in capsys.readouterr().out
    # A runtime that fails on this input is shown to.
    broken = ["--set", "runtime.name=fake", "--set", f"runtime.options.nan_inputs={input_digest(saved.inputs)}"]
    assert command("models", "verify", "tiny-matcher", "--inputs", str(file), *broken) == 1
    shown = capsys.readouterr().out
    assert "NaN on 1 of 1 pairs" in shown and "FAILED" in shown and "not finite" in shown
    assert command("models", "verify", "tiny-matcher", "--inputs", str(file.parent), "--json", *broken) == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["passed"] and report["pairs"][0]["nan"] == 1 and "not finite" in report["recorded"][0]


def test_nan_without_a_fallback_is_non_finite_and_never_not_covisible():
    front_end = faulty(nan_calls="3", runtime__fallback="none")
    results = run(front_end)
    assert statuses(results) == [Status.OK] * 2 + [Status.NON_FINITE] + [Status.OK] * 5
    pair = results[3][0].pairs[0].matches
    assert len(pair) == 0 and "'mscores0'" in pair.detail and not results[3][0].faults
    counts = health(front_end).counts
    assert (counts.non_finite, counts.recovered, counts.lost, counts.incidents) == (1, 0, 1, 1)
    assert health(front_end).fallback == "none" and len(kept()) == 1


def test_nan_in_all_runs_makes_one_incident_and_few_lines(caplog):
    front_end = faulty(nan_calls="all")
    assert statuses(run(front_end)) == [Status.FAULT_RECOVERED] * 8
    counts = health(front_end).counts
    assert (counts.non_finite, counts.recovered, counts.incidents) == (8, 8, 1) and len(kept()) == 1
    lines = [r.message for r in caplog.records if "tiny-matcher: fault" in r.message]
    assert [int(line.split("fault ")[1].split(":")[0]) for line in lines] == [1, 2, 4, 8]


def test_nan_in_features_is_recovered_with_the_same_features_and_told():
    """The pair of the keyframe says so, and none of those after it."""
    honest = run(FrontEnd(tiny_config()))
    front_end = faulty("features", nan_calls="4")
    results = run(front_end)
    assert statuses(results) == [Status.OK] * 2 + [Status.FAULT_RECOVERED] + [Status.OK] * 5
    details = [t.pairs[0].matches.detail for t, _ in results[1:]]
    assert "features computed by the fallback" in details[2] and "not finite" in details[2]
    assert not any(details[:2] + details[3:])
    for (a, _), (b, _) in zip(honest, results):
        assert np.array_equal(a.features.keypoints, b.features.keypoints) and a.features.model == b.features.model
    assert health(front_end, "features").counts.recovered == 1 and len(kept()) == 1
    assert incidents.load(kept()[0]).inputs["image"].shape[2:] == (240, 320)


def test_nan_in_features_without_a_fallback_costs_the_frame_only():
    front_end = faulty("features", nan_calls="4", runtime__fallback="none")
    results = run(front_end)
    assert [t.features is None for t, _ in results] == [i == 3 for i in range(9)]
    assert "NonFiniteError" in results[3][0].faults["describe"]
    assert statuses(results) == [Status.OK] * 7


def test_nan_in_the_global_descriptor_is_recovered():
    front_end = faulty("global", nan_calls="2-3")
    results = run(front_end)
    assert not any(loops.faults for _, loops in results if loops)
    assert all(loops.keyframe.global_descriptor is not None for _, loops in results)
    counts = health(front_end, "global").counts
    assert (counts.runs, counts.non_finite, counts.recovered) == (9, 2, 2)


def test_no_incidents_are_kept_where_none_are_wanted():
    front_end = faulty(nan_calls="3", models__incidents=0)
    assert statuses(run(front_end)).count(Status.FAULT_RECOVERED) == 1
    assert health(front_end).counts.incidents == 0 and not kept()


def test_openvino_is_made_good_by_onnxruntime_with_the_same_identity():
    pytest.importorskip("openvino")
    honest = FrontEnd(tiny_config())
    openvino = {"runtime__options__inner": "openvino"}
    faulty(**openvino)  # the gate has its own calls
    front_end = faulty(nan_calls="3", **openvino)
    assert front_end.features.identity == honest.features.identity
    results = run(front_end)
    assert statuses(results) == [Status.OK] * 2 + [Status.FAULT_RECOVERED] + [Status.OK] * 5
    pairs = [t.pairs[0].matches for t, _ in results[1:]]
    assert pairs[2].runtime.startswith("fallback onnxruntime") and pairs[3].runtime.startswith("fake(openvino)")
    assert all(h.linked for h in front_end.models.health())


# -- nothing found -----------------------------------------------------------------------------


def test_no_match_between_alike_keyframes_trips_the_guard():
    front_end = faulty(zero_calls="4")
    results = run(front_end)
    assert statuses(results) == [Status.OK] * 3 + [Status.FAULT_RECOVERED] + [Status.OK] * 4
    pair = results[4][0].pairs[0].matches
    assert "between keyframes 3 and 4" in pair.detail and "look alike" in pair.detail and pair.num_inliers > 20
    counts = health(front_end).counts
    assert (counts.runs, counts.empty, counts.recovered, counts.non_finite, counts.lost) == (8, 1, 1, 0, 0)
    (file,) = kept()
    assert "look alike" in incidents.load(file).fault


def test_a_matcher_that_never_finds_anything_is_recovered_each_time():
    front_end = faulty(zero_calls="all")
    assert statuses(run(front_end)) == [Status.FAULT_RECOVERED] * 8
    assert health(front_end).counts.empty == 8 and "fallback" not in health(front_end).fallback


@pytest.mark.parametrize("zero_matches, found", [(3, [0, 0, 1, 1, 1, 1, 1, 1]), (0, [0] * 8)])
def test_the_guard_waits_for_a_streak_or_is_off(zero_matches, found):
    names = {0: Status.NO_MATCHES, 1: Status.FAULT_RECOVERED}
    front_end = faulty(zero_calls="all", models__zero_matches=zero_matches)
    assert statuses(run(front_end)) == [names[i] for i in found]


def test_without_a_fallback_nothing_is_claimed_of_an_empty_match():
    front_end = faulty(zero_calls="4", runtime__fallback="none")
    assert statuses(run(front_end))[3] is Status.NO_MATCHES
    assert health(front_end).counts.faults == 0 and not kept()


def test_after_a_proven_fault_no_empty_result_is_believed():
    """Each keyframe is matched with the last three; the first pair waits for its streak, no other does."""
    front_end = faulty(zero_calls="all", models__zero_matches=2, models__alike=0.0, keyframes__match_last=3)
    results = run(front_end, scene()[:6])
    by_distance = {d: [] for d in (1, 2, 3)}
    for tracked, _ in results:
        for p in tracked.pairs:
            by_distance[p.kf_id - p.ref_kf_id].append(p.matches.status is Status.NO_MATCHES)
    assert by_distance == {1: [True] + [False] * 4, 2: [False] * 4, 3: [False] * 3}
    assert health(front_end).counts.empty == 4 + 4 + 3


def test_two_different_places_do_not_trip_the_guard():
    """A matcher that finds nothing anywhere, and a scene cut at each frame: the fallback is not even loaded."""
    corridor = make_scene("corridor", width=320, height=240, fps=5.0)
    rooms = [f.image for f in scene(4)]
    pictures = [p for i in range(4) for p in (rooms[i], corridor.frame(10 * i).image)]
    front_end = faulty(zero_calls="all")
    results = run(front_end, [frame(p, T0 + i * SECOND) for i, p in enumerate(pictures)])
    assert statuses(results) == [Status.NO_MATCHES] * 7
    assert health(front_end).fallback == "ready" and health(front_end).counts.empty_agreed == 0 and not kept()


def test_an_honest_matcher_between_two_places_is_not_recovered():
    """Here the images do look alike by the limit that is set, and the fallback agrees: no fault."""
    strict = card("matcher", "tiny-matcher", features_model="tiny-features")
    save(matcher_model(least=0.999), strict)
    pictures = [image(240, 320, seed=i) for i in range(6)]
    front_end = FrontEnd(tiny_config(models__alike=0.0, models__allow_unverified=True))
    results = run(front_end, [frame(p, T0 + i * SECOND) for i, p in enumerate(pictures)])
    counts = health(front_end).counts
    assert not [s for s in statuses(results) if s.confirms] and counts.faults == 0 and not kept()
    assert counts.empty_agreed >= 1


def test_where_the_fallback_agrees_it_is_asked_less_and_less():
    save(matcher_model(least=2.0), card("matcher", "tiny-matcher", features_model="tiny-features"))  # matches nothing
    front_end = FrontEnd(tiny_config(models__allow_unverified=True))
    picture = scene()[0].image
    results = run(front_end, [frame(picture, T0 + i * SECOND) for i in range(18)])
    assert statuses(results) == [Status.NO_MATCHES] * 17
    counts = health(front_end).counts
    assert counts.empty_agreed == 4 and counts.faults == 0 and not kept()  # at 1, 3, 7 and 15


def test_a_blank_wall_has_no_keypoints_and_asks_nobody():
    wall = np.full((240, 320), 128, np.uint8)
    front_end = faulty(zero_calls="all")
    results = run(front_end, [frame(wall, T0 + i * SECOND) for i in range(4)])
    assert statuses(results) == [Status.NO_KEYPOINTS] * 3
    assert health(front_end).counts.runs == 0 and health(front_end).fallback == "ready"


def test_images_of_changing_size_do_not_trip_the_guard():
    picture = scene()[0].image
    pictures = [picture, picture[:, :240], picture[:200], picture]
    front_end = faulty(zero_calls="all")
    results = run(front_end, [frame(p.copy(), T0 + i * SECOND) for i, p in enumerate(pictures)])
    assert statuses(results) == [Status.NO_MATCHES] * 3 and health(front_end).fallback == "ready"


# -- no keypoints ------------------------------------------------------------------------------


def still(count: int):
    """The same view again and again, without a word of where it is."""
    picture = scene()[0].image
    return [frame(picture, T0 + i * SECOND) for i in range(count)]


@pytest.mark.parametrize("matcher", ["lighterglue", "nearest"])
def test_features_that_find_nothing_in_an_image_with_texture_are_recovered(matcher):
    """Whatever matches them."""

    def front_end_of(fault: str) -> FrontEnd:
        fake = {"runtime.name": "fake", "runtime.options.only": "tiny-features", "runtime.options.zero_calls": fault}
        values = {n: v for n, v in TINY.items() if matcher == "lighterglue" or n != "matcher.options.model"}
        return FrontEnd(Config.from_flat({**values, **fake, "matcher.name": matcher}))

    honest, front_end = run(front_end_of("")), front_end_of("3-100")
    results = run(front_end)
    first, *others = statuses(honest)
    assert first is Status.OK and others.count(Status.OK) >= 6  # a solver may call a pair degenerate
    assert statuses(results) == [first, *(Status.FAULT_RECOVERED if s is Status.OK else s for s in others)]
    for (a, _), (b, _) in zip(honest, results):
        assert np.array_equal(a.keyframe.features.keypoints, b.keyframe.features.keypoints)
        assert np.abs(a.keyframe.features.descriptors - b.keyframe.features.descriptors).max() < 1e-5
    detail = results[2][0].pairs[0].matches.detail
    assert "features computed by the fallback after: no keypoint in an image with texture" in detail
    counts = health(front_end, "features").counts
    assert (counts.runs, counts.empty, counts.recovered, counts.lost, counts.incidents) == (9, 7, 7, 0, 1)
    (file,) = kept()
    saved = incidents.load(file)
    assert saved.role == "features" and saved.inputs["image"].shape[2:] == (240, 320)
    assert not any(t.faults or c.faults for t, c in results)


def test_a_keypoint_fault_in_one_frame_is_told_of_one_pair():
    front_end = faulty("features", zero_calls="4")
    assert statuses(run(front_end)) == [Status.OK] * 2 + [Status.FAULT_RECOVERED] + [Status.OK] * 5


def test_frames_that_are_no_keyframes_are_guarded_as_well():
    front_end = faulty("features", zero_calls="2-4", keyframes__every=10)
    results = [front_end.track(f) for f in still(6)]
    assert [bool(t.features.recovered) for t in results] == [False, True, True, True, False, False]
    assert min(len(t.features) for t in results) > 100
    assert health(front_end, "features").counts.empty == 3


@pytest.mark.parametrize("zero_matches, found", [(3, [1, 0, 0, 1, 1, 1]), (0, [1, 0, 0, 0, 0, 0])])
def test_the_guard_of_keypoints_waits_for_a_streak_or_is_off(zero_matches, found):
    front_end = faulty("features", zero_calls="2-100", models__zero_matches=zero_matches)
    assert [len(t.features) > 0 for t, _ in run(front_end, still(6))] == [bool(i) for i in found]


def test_without_a_fallback_nothing_is_claimed_of_an_image_without_keypoints():
    front_end = faulty("features", zero_calls="4", runtime__fallback="none")
    assert statuses(run(front_end))[2:4] == [Status.NO_KEYPOINTS] * 2
    assert health(front_end, "features").counts.faults == 0 and not kept()


def test_where_the_fallback_finds_no_keypoint_either_it_is_asked_less_and_less():
    """A soft gradient: contrast, and nothing to hold on to."""
    wall = np.tile(np.linspace(80, 150, 320).astype(np.uint8), (240, 1))
    wall = np.ascontiguousarray(cv2.GaussianBlur(wall, (0, 0), 6.0))
    front_end = FrontEnd(tiny_config())
    results = run(front_end, [frame(wall, T0 + i * SECOND) for i in range(18)])
    assert statuses(results) == [Status.NO_KEYPOINTS] * 17
    counts = health(front_end, "features").counts
    assert (counts.runs, counts.empty_agreed, counts.faults) == (18, 4, 0) and not kept()  # of images 0, 2, 6 and 14


def test_keypoints_under_the_mask_are_none_that_the_model_missed():
    masked = [dataclasses.replace(f, mask=np.zeros((240, 320), bool)) for f in still(4)]
    front_end = faulty("features", zero_calls="all")
    results = run(front_end, masked)
    assert statuses(results) == [Status.NO_KEYPOINTS] * 3
    assert health(front_end, "features").counts.faults == 0 and health(front_end, "features").fallback == "ready"


# -- errors ------------------------------------------------------------------------------------


def test_an_error_of_the_runtime_is_recovered():
    front_end = faulty(error_calls="2")
    results = run(front_end)
    assert statuses(results) == [Status.OK, Status.FAULT_RECOVERED] + [Status.OK] * 6
    assert "injected error in call 2" in results[2][0].pairs[0].matches.detail
    counts = health(front_end).counts
    assert (counts.errors, counts.non_finite, counts.recovered) == (1, 0, 1)
    assert incidents.load(kept()[0]).outputs == {}


def test_an_error_without_a_fallback_is_a_backend_error():
    front_end = faulty(error_calls="2", runtime__fallback="none")
    results = run(front_end)
    assert statuses(results) == [Status.OK, Status.BACKEND_ERROR] + [Status.OK] * 6
    assert "injected error in call 2" in results[2][0].pairs[0].matches.detail
    assert health(front_end).counts.lost == 1


@pytest.mark.parametrize("kind, status", [("nan_calls", Status.NON_FINITE), ("error_calls", Status.BACKEND_ERROR)])
@pytest.mark.parametrize("change", ["removed", "replaced"])
def test_a_fallback_whose_file_is_not_the_one_that_was_opened_is_not_used(kind, status, change, caplog):
    front_end = faulty(**{kind: "2"})
    file = model_path("tiny-matcher", "fp32")
    if change == "removed":
        file.unlink()
    else:
        save(matcher_model(least=0.1), card("matcher", "tiny-matcher", features_model="tiny-features"))
    results = run(front_end)
    assert statuses(results) == [Status.OK, status] + [Status.OK] * 6
    said = {"removed": "is gone since the model was opened", "replaced": "content has changed since it was opened"}
    assert said[change] in caplog.text and said[change] in health(front_end).last_fault
    counts = health(front_end).counts
    assert (counts.recovered, counts.lost, counts.incidents) == (0, 1, 1)


# -- the engine itself -------------------------------------------------------------------------


@pytest.fixture
def models(tmp_path):
    """Files: a features model, and the same with other names for its tensors."""
    names = {"image": "pixels", "max_keypoints": "limit"}, {"keypoints": "xy", "scores": "s", "descriptors": "d"}
    own = card("features", "tiny-features")
    plain = save(features_model(), own, tmp_path / "plain.onnx")
    bound = card("features", "tiny-features", inputs=names[0], outputs=names[1])
    renamed = save(_renamed(features_model(), {**names[0], **names[1]}), bound, tmp_path / "renamed.onnx")
    return plain, renamed


def _renamed(model, names):
    for node in model.graph.node:
        for field in (node.input, node.output):
            field[:] = [names.get(n, n) for n in field]
    for info in [*model.graph.input, *model.graph.output]:
        info.name = names.get(info.name, info.name)
    return model


INPUTS = {"image": image(120, 160)[None, None].astype(np.float32) / 255, "max_keypoints": np.array([50])}


def test_outputs_have_our_names_whatever_the_file_calls_them(models, tmp_path):
    plain, renamed = (engine(m, tmp_path).run(INPUTS).outputs for m in models)
    assert set(renamed) == {"keypoints", "scores", "descriptors"}
    assert all(np.array_equal(plain[n], renamed[n]) for n in plain)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_fallback_is_run_by_the_names_of_its_own_file(models, order, tmp_path):
    first, second = (models[i] for i in order)
    broken = engine(first, tmp_path, second, nan_calls="1")
    answer, honest = broken.run(INPUTS), engine(first, tmp_path).run(INPUTS)
    assert answer.recovered and not honest.recovered
    assert all(np.array_equal(answer.outputs[n], honest.outputs[n]) for n in honest.outputs)


def test_non_finite_outputs_have_our_names_in_the_error_and_the_incident(models, tmp_path):
    broken = engine(models[1], tmp_path / "kept", nan_calls="1")
    with pytest.raises(NonFiniteError) as caught:
        broken.run(INPUTS)
    assert set(caught.value.outputs) == {"keypoints", "scores", "descriptors"}
    (file,) = (tmp_path / "kept").iterdir()
    assert set(incidents.load(file).inputs) == set(INPUTS)
    assert np.isnan(incidents.load(file).outputs["descriptors"]).sum() == 1


def test_wrong_inputs_are_no_fault_of_the_model(models, tmp_path):
    sound = engine(models[0], tmp_path / "kept", models[0])
    with pytest.raises(DataError, match="max_keypoints"):
        sound.run({"image": INPUTS["image"]})
    with pytest.raises(DataError, match="not finite"):
        sound.run({**INPUTS, "image": np.full_like(INPUTS["image"], np.nan)})
    assert sound.counts.faults == sound.counts.incidents == 0 and not (tmp_path / "kept").exists()


def test_where_both_fail_the_first_error_is_told_with_the_second_behind_it(models, tmp_path):
    broken = engine(models[0], tmp_path, models[0], error_calls="all")
    broken.load_fallback = lambda: (_ for _ in ()).throw(ModelFileError("no such luck"))
    for _ in range(3):
        with pytest.raises(BackendError, match="injected error") as caught:
            broken.run(INPUTS)
        assert isinstance(caught.value.__cause__, ModelFileError)
    assert broken.counts.lost == broken.counts.errors == 3 and broken.counts.recovered == 0
    assert broken.last_fault.endswith("the fallback failed too: no such luck")


def test_health_names_what_runs_and_what_stands_behind_it(models, tmp_path):
    broken = engine(models[0], tmp_path, models[0], nan_calls="2")
    before = broken.health()
    broken.run(INPUTS)
    broken.run(INPUTS)
    after = broken.health()
    assert (before.fallback, before.counts.runs, before.last_fault) == ("ready", 0, "")
    assert after.fallback.startswith("onnxruntime") and after.counts.runs == 2 and after.counts.faults == 1
    assert (after.role, after.name, after.file, after.precision) == ("features", "tiny-features", "plain.onnx", "fp32")
    assert after.runtime.startswith("fake(onnxruntime)") and after.device.startswith("cpu")


def test_a_doubt_is_settled_by_the_fallback_alone(models, tmp_path):
    def nothing(outputs):
        return not (outputs["scores"] > 0).any()

    broken = engine(models[0], tmp_path / "a", models[0], zero_calls="all")
    assert nothing(broken.run(INPUTS).outputs)
    answer = broken.doubt(INPUTS, "strange", nothing)
    assert answer.recovered == "strange" and not nothing(answer.outputs)
    assert broken.doubt({**INPUTS, "image": INPUTS["image"] * 0}, "blank", nothing) is None
    counts = broken.counts
    assert (counts.runs, counts.empty, counts.empty_agreed, counts.recovered, counts.incidents) == (1, 1, 1, 1, 1)
    assert engine(models[0], tmp_path / "b", zero_calls="all").doubt(INPUTS, "strange", nothing) is None


# -- determinism and threads -------------------------------------------------------------------


def test_two_runs_are_equal():
    frames = scene()[:6]
    first = digest(run(FrontEnd(tiny_config()), frames))
    assert digest(run(FrontEnd(tiny_config()), frames)) == first != digest(run(FrontEnd(tiny_config()), frames[1:]))


def test_two_threads_share_the_engines():
    """``track`` and ``close_loops`` match with one engine, and give what one thread gives."""
    frames, settings = scene(), tiny_config(retrieval__exclude_s=0.3, runtime__threads=2)
    front_end, todo, loops, failed = FrontEnd(settings), queue.Queue(), [], []

    def close():
        try:
            while (tracked := todo.get()) is not None:
                loops.append(front_end.close_loops(tracked))
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=close)
    thread.start()
    tracked = []
    for f in frames:
        tracked.append(front_end.track(f))
        todo.put(tracked[-1])
    todo.put(None)
    thread.join(60)
    assert not thread.is_alive() and not failed
    alone = FrontEnd(settings)
    expected = run(alone, frames)
    assert sum(len(c.pairs) for _, c in expected) > 10
    assert digest(list(zip(tracked, loops))) == digest(expected)
    assert health(front_end).counts == health(alone).counts and health(front_end).counts.runs > 18
    assert not any(t.faults for t in tracked) and not any(c.faults for c in loops)


def test_a_global_descriptor_of_zeros_is_repeated_on_the_fallback():
    """All zero is what a blank image gives; a model that returns it of others loses every loop without an error."""
    good = run(FrontEnd(tiny_config()), scene()[:4])
    front_end = faulty("global", zero_calls="all")
    results = run(front_end, scene()[:4])
    counts = health(front_end, "global").counts
    assert (counts.empty, counts.recovered, counts.lost) == (4, 4, 0)
    for (_, loops), (_, expected) in zip(results, good):
        assert np.allclose(loops.keyframe.global_descriptor, expected.keyframe.global_descriptor, atol=1e-5)
