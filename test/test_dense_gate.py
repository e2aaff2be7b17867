"""The parity gate of dense features and of their matcher."""

import json
from dataclasses import replace

import cv2
import numpy as np
import pytest
from dense_models import (
    FEATURES_CARD,
    MAP,
    MATCHER_CARD,
    PICTURES,
    SET,
    _dense_cache,  # noqa: F401
    dense,  # noqa: F401
    dense_config,
    map_matcher,
    map_model,
    place_dense_models,
    renamed,
    run,
)
from helpers import frame
from model_helpers import (
    learned,  # noqa: F401 (fixtures)
    own_cache,  # noqa: F401
    save,
)

from vslam_features.artifacts.binding import Binding
from vslam_features.artifacts.cases import Case
from vslam_features.artifacts.dense_cases import dense_cases
from vslam_features.artifacts.gate import run_gate
from vslam_features.config import Config
from vslam_features.errors import (
    ParityError,
)
from vslam_features.frontend import FrontEnd
from vslam_features.models import Models
from vslam_features.runtimes.base import LoadRequest
from vslam_features.runtimes.ort import OnnxRuntime

# -- the gate ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("dense")
def test_the_gate_of_a_matcher_of_maps_runs_on_pictures(capsys, tmp_path, caplog):
    run("models", "verify", "dense-matcher", "--json")
    report = json.loads(capsys.readouterr().out)
    assert report["passed"] and [p["name"] for p in report["pairs"]] == ["cup", "stars-dim", "corridor-turn"]
    assert all(p["matches"][0] > 25 and p["evidence"] for p in report["pairs"])
    for i, image in enumerate((*PICTURES["room-step"], *PICTURES["cat"])):
        cv2.imwrite(str(tmp_path / f"{i}.png"), image)
    run("models", "verify", "dense-matcher", "--images", tmp_path, *SET, "--json")
    report = json.loads(capsys.readouterr().out)
    assert report["passed"] and [p["name"] for p in report["pairs"]][3:] == ["0 1", "1 2", "2 3"]
    assert report["pairs"][3]["matches"][0] > 100
    run("models", "verify", "dense-features")
    assert "PASSED" in capsys.readouterr().out


def test_both_images_have_another_number_of_keypoints():
    """Else a matcher that returns as many matches as the other image has keypoints would pass."""
    seen = dense_cases(lambda image: np.zeros((4, 3, 3), np.float32))
    for case in (*seen, *dense_cases(None, (16, 12, 20))):
        assert len(case.runs[0]["keypoints0"]) != len(case.runs[0]["keypoints1"]), case.name


@pytest.mark.usefixtures("own_cache")
def test_without_the_features_model_the_gate_runs_on_seeded_maps(tmp_path):
    path = save(map_matcher(), MATCHER_CARD, tmp_path / "matcher.onnx")
    report = Models(dense_config()).verify(str(path))
    assert report.passed and all(
        row.name.startswith("seeded") and row.comparison.matches[0] > 50 for row in report.rows
    )


def test_seeded_maps_have_the_matches_of_their_motion(tmp_path):
    """Keypoints of the same cells of the scene, in whatever order; the image covers its map in cells of 8 pixels."""
    run = Binding(OnnxRuntime().load(save(map_matcher(shape=(16, 12, 20)), MATCHER_CARD, tmp_path / "m.onnx"),
                                     LoadRequest(threads=1)), MATCHER_CARD).run  # fmt: skip
    for case in dense_cases(None, (16, 12, 20)):
        inputs = case.runs[0]
        assert inputs["image_size0"].tolist() == [160, 96] and inputs["descriptors0"].shape == (16, 12, 20)
        found = run(inputs)["matches0"]
        moved = inputs["keypoints1"][found[found >= 0]] - inputs["keypoints0"][found >= 0]
        assert (found >= 0).sum() > 50
        values, counts = np.unique(moved, axis=0, return_counts=True)
        step = values[counts.argmax()]
        assert counts.max() > 0.9 * len(moved) and (step % 8 == 0).all() and step.any()


@pytest.mark.parametrize("fault", ["noise", "shift", "nan", "constant", "shape"])
def test_maps_that_are_not_the_references_fail_the_gate(fault, tmp_path):
    run = Binding(OnnxRuntime().load(save(map_model(), FEATURES_CARD, tmp_path / "m.onnx"), LoadRequest(threads=1)),
                  FEATURES_CARD).run  # fmt: skip
    cases = [Case(n, tuple({"image": FEATURES_CARD.preprocessing.apply(i)} for i in v)) for n, v in PICTURES.items()][
        :2
    ]

    def wrong(inputs):
        d = run(inputs)["descriptors"]
        rng = np.random.default_rng(0)
        return {
            "noise": lambda: d + 0.05 * np.abs(d).mean() * rng.normal(size=d.shape).astype(np.float32),
            "shift": lambda: np.roll(d, 1, axis=2),
            "nan": lambda: np.where(d == d.max(), np.float32(np.nan), d),
            "constant": lambda: np.ones_like(d),
            "shape": lambda: d.transpose(0, 2, 1).copy(),
        }[fault]()

    report = run_gate(lambda inputs: {"descriptors": wrong(inputs)}, cases, FEATURES_CARD, run)
    assert not report.passed
    assert run_gate(run, cases, FEATURES_CARD, run).passed
    if fault == "constant":  # a reference that says the same of all proves nothing
        same = {"descriptors": np.ones(MAP, np.float32)}
        report = run_gate(lambda i: same, cases, FEATURES_CARD, lambda i: same)
        assert not report.passed and "proves nothing" in report.reasons[0]


@pytest.mark.usefixtures("dense")
def test_a_matcher_that_reads_keypoints_otherwise_is_another_record(tmp_path):
    """The same file under a card that gives keypoints otherwise fails or passes for itself."""
    path = save(map_matcher(keypoints="unit"), replace(MATCHER_CARD, keypoints="unit"), tmp_path / "unit.onnx")
    assert Models(dense_config()).open("matcher", str(path)).model.linked
    shape = renamed(map_matcher(keypoints="unit"), {})
    path = save(shape, MATCHER_CARD, tmp_path / "unit.onnx")  # pixels far outside of the unit square
    with pytest.raises(ParityError, match="proves nothing|does not compute"):
        Models(dense_config()).open("matcher", str(path))


@pytest.mark.usefixtures("learned")
def test_keypoints_of_the_real_xfeat():
    place_dense_models()
    found = FrontEnd(dense_config(features__options__detector="xfeat", loops__enabled=False)).extract(
        frame(PICTURES["room-step"][0])
    )
    assert len(found) == 400 and found.descriptors.shape == MAP and found.model.name == "dense-features"


def test_options_of_a_matcher_that_nobody_named_are_those_of_the_one_that_suits_the_features():
    given = {"features.name": "flexglue", "matcher.options.min_covisibility": 0.25}
    config = Config.from_flat(given)
    assert config.matcher.name == "flexglue" and config.matcher.options["min_covisibility"] == 0.25
    assert config.matcher.options["model"] == "flexglue-matcher"
    assert Config.from_flat({"features.name": "xfeat"}, base=config).matcher.name == "lighterglue"
    assert Config.from_flat({"features.name": "flexglue", "matcher.name": "nearest"}).matcher.name == "nearest"
    own = Config.from_flat({"matcher.name": "nearest"})
    assert Config.from_flat({"features.name": "flexglue"}, base=own).matcher.name == "nearest"  # somebody chose it
