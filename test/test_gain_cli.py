"""``vslam-features models gain``: the table, its files, maps, and what is said of arguments that do not fit."""

import csv
import json
import shutil
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
from gain_helpers import CHECKED, PLAIN, STOPS, place_matchers, write_scene
from model_helpers import (
    _tiny_cache,  # noqa: F401 (fixtures)
    card,
    command,
    matcher_model,
    own_cache,  # noqa: F401
    save,
    tiny,  # noqa: F401
)

from vslam_features.artifacts.store import model_path
from vslam_features.cli import models_gain

TINY = {
    "features.name": "xfeat",
    "features.options.model": "tiny-features",
    "features.max_keypoints": 150,
    "features.long_side": 0,
    "matcher.name": "lighterglue",
    "runtime.threads": 1,
    "threads": 1,
}
SET = [part for name, value in TINY.items() for part in ("--set", f"{name}={value}")]
LEAST = ["--set", "matcher.options.min_score=0"]


@pytest.fixture(autouse=True)
def _models(tiny):  # noqa: F811
    place_matchers()


@pytest.fixture
def scenes(tmp_path):
    return [write_scene(tmp_path / name, seed, 5) for seed, name in enumerate(("hall", "yard"), 1)]


def gain(capsys, *args) -> tuple[int, str, str]:
    code = command("models", "gain", *map(str, (*args, *SET, *LEAST)))
    return code, *capsys.readouterr()


def test_the_table_of_two_scenes_and_its_files(scenes, tmp_path, capsys):
    matrix = np.zeros((10, 10), np.uint8)
    matrix[0, 1] = matrix[9, 5] = 255
    cv2.imwrite(str(tmp_path / "truth.png"), matrix)
    out = tmp_path / "new" / "gain"
    code, text, err = gain(
        capsys, STOPS.name, "--images", *scenes, "--scenes", "--truth", tmp_path / "truth.png", "--out", out,
        "--thresholds", "0.5,0.9", "--decays", "0,0.5", "--time-pairs", 2,
        "--set", "matcher.options.early_stop_decay=1",  # none is configured
    )  # fmt: skip
    assert code == 0, err
    found = json.loads((out / "gain.json").read_text())
    assert (found["pairs"], found["all_pairs"], found["checked_layers"]) == (45, 45, list(CHECKED))
    assert found["known"] == {"unknown": 18, "marked": 2, "apart": 25} and found["verified"] == 20
    assert found["plain"] == "tiny-plain fp32 (tiny-plain.fp32.onnx)" and found["configured"] is None
    rows = {(row["min_covisibility"], row["early_stop_decay"]): row for row in found["rows"]}
    assert sorted(rows) == [(0.5, 0.0), (0.5, 0.5), (0.9, 0.0), (0.9, 0.5)]
    assert rows[0.5, 0.5]["stopped"] == 25 and rows[0.5, 0.5]["verified_lost"]["count"] == 0
    assert all(row["time_of_plain"] > 0 for row in rows.values())

    with open(out / "gain.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert len(table) == 45 and table[0]["image0"] == "hall/1" and table[0]["image1"] == "hall/0"
    assert table[0]["truth"] == "overlaps" and table[-1]["truth"] == "unknown"
    for (threshold, decay), row in rows.items():
        lost = [[p["image0"], p["image1"]] for p in table if f"{threshold:g}/{decay:g}" in p["lost_at"].split()]
        assert lost == row["verified_lost"]["pairs"] and len(lost) == row["verified_lost"]["count"]
        below = [float(p["covisibility_score"]) < threshold for p in table if p["status"] == "ok"]
        assert row["verified_lost"]["count"] >= sum(below)
    assert rows[0.9, 0.0]["verified_lost"]["count"] > 0
    assert cv2.imread(str(out / "gain.png")) is not None

    lines = text.splitlines()
    assert lines[0].startswith("tiny-stop on onnxruntime") and lines[0].endswith("45 pairs of 10 images")
    assert "marked as overlapping in" in text and "the other pairs may overlap too" in text
    assert "of different scenes, known not to overlap: 25" in text
    head = next(line for line in lines if line.startswith("min_cov"))
    assert head.split()[:5] == ["min_cov", "decay", "stopped", "after", "2"] and "marked" in head and "apart" in head
    row = next(line for line in lines if line.startswith("0.5 ")).split()
    assert row[:3] == ["0.5", "0", "55.56%"]
    name = rows[0.9, 0.0]["verified_lost"]["pairs"][0]
    assert any(line.startswith("  0.9/0: ") and " - ".join(name) in line for line in lines)


def test_the_configured_setting_is_in_the_table_and_has_a_star(scenes, capsys):
    own = ["--set", "matcher.options.min_covisibility=0.6", "--set", "matcher.options.early_stop_decay=0.4"]
    code, text, err = gain(capsys, STOPS.name, "--images", scenes[0], "--time-pairs", 0, *own)
    assert code == 0, err
    rows = [line.split() for line in text.splitlines() if line.startswith("0.6")]
    assert [row[1] for row in rows] == ["0", "0.2", "0.3", "0.4", "0.5"] and rows[3][0] == "0.6*"
    assert all(row[-1] == "-" for row in rows) and "apart" not in text and "marked" not in text
    code, text, _ = gain(capsys, STOPS.name, "--images", scenes[0], "--json", "--thresholds", "0.1", "--max-pairs", 3,
                         "--time-pairs", 0, *own)  # fmt: skip
    found = json.loads(text)
    assert found["configured"] == [0.6, 0.4] and found["pairs"] == 3 and found["all_pairs"] == 10
    assert [row["min_covisibility"] for row in found["rows"]].count(0.6) == 1 and found["times"] == {}


def test_without_a_plain_twin_times_are_of_the_same_file(scenes, capsys):
    model_path(PLAIN.name, "fp32").unlink()
    code, text, err = gain(capsys, STOPS.name, "--images", scenes[0], "--time-pairs", 1)
    assert code == 0, err
    assert "against tiny-stop itself without a stop, for its plain twin is not here" in text
    code, _, err = gain(capsys, STOPS.name, "--images", scenes[0], "--plain", STOPS.name)
    assert code == 1 and "--plain tiny-stop: stops early itself" in err


def test_keyframes_of_a_map_are_matched_with_the_features_that_they_have(scenes, tmp_path, capsys):
    map_file = tmp_path / "walk.vmap"
    own = [*SET, "--set", "matcher.options.model=tiny-matcher", "--set", "loops.enabled=false"]
    made = ["--map", str(map_file), "--out", str(tmp_path / "o"), "--no-report"]
    assert command("replay", str(scenes[0]), *made, *own) == 0
    capsys.readouterr()
    images = gain(capsys, STOPS.name, "--images", scenes[0], "--json", "--time-pairs", 0)[1]
    shutil.rmtree(scenes[0])
    model_path("tiny-features", "fp32").unlink()  # nothing is extracted
    code, text, err = gain(capsys, STOPS.name, "--map", map_file, "--json", "--time-pairs", 0)
    assert code == 0, err
    found, of_images = json.loads(text), json.loads(images)
    assert found["title"].endswith("10 pairs of 5 keyframes of walk.vmap")
    assert found["verified"] == of_images["verified"] == 10
    counts = ("stopped", "below_at_the_end", "stopped_after_layer")
    assert [[row[c] for c in counts] for row in found["rows"]] == [
        [row[c] for c in counts] for row in of_images["rows"]
    ]


@pytest.mark.parametrize(
    "args, said",
    [
        (["tiny-matcher", "--images", "hall"], "does not tell its score after each layer"),
        (["tiny-stop", "--images", "hall", "--scenes"], "name at least two"),
        (["tiny-stop", "--images", "hall", "hall"], "a folder is there twice"),
        (["tiny-stop", "--images", "none"], "no such file or folder"),
        (["tiny-stop", "--map", "none.vmap"], "there is no such map"),
        (["tiny-stop", "--map", "none.vmap", "--camera", "1,1,1,1"], "--camera: keyframes of a map have theirs"),
        (["tiny-stop", "--images", "hall", "--truth", "small.png"], "is of 2 images, there are 5"),
        (["tiny-stop", "--images", "hall", "--truth", "none.png"], "cannot be read as a loop matrix"),
        (["tiny-stop", "--images", "hall", "--out", "small.png"], "is a file or lies in one"),
        (["no-such-model", "--images", "hall"], "no model is named 'no-such-model'"),
    ],
)
def test_arguments_that_do_not_fit(scenes, tmp_path, monkeypatch, capsys, args, said):
    monkeypatch.chdir(tmp_path)
    cv2.imwrite("small.png", np.zeros((2, 2), np.uint8))
    assert command("models", "gain", *args, *SET, *LEAST) == 1 and said in capsys.readouterr().err


@pytest.mark.parametrize(
    "args, said",
    [
        ([], "Nearest: knows no early stop"),
        (["tiny-stop"], "matcher 'nearest' runs no model"),
        (["tiny-stop", "--matcher", "lighterglue"], "matches features of tiny-features"),
    ],
)
def test_features_that_do_not_fit(scenes, capsys, args, said):
    assert command("models", "gain", *args, "--images", str(scenes[0]), "--features", "orb") == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "takes, given, features, matcher",
    [
        ("aliked-n16", {}, "aliked", "lightglue"),
        ("xfeat", {}, "xfeat", "lighterglue"),
        ("of others", {}, "xfeat", "lighterglue"),
        ("aliked-n16", {"set": ["features.name=xfeat"]}, "xfeat", "lighterglue"),
        ("aliked-n16", {"features": "xfeat", "matcher": "lightglue"}, "xfeat", "lightglue"),
        ("flexglue", {"set": ["matcher.options.min_covisibility=0.25"]}, "flexglue", "flexglue"),
        ("aliked-n16", {"set": ["matcher.options.min_covisibility=0.25"]}, "aliked", "lightglue"),
    ],
)
def test_the_plug_ins_are_those_that_the_model_was_made_for(takes, given, features, matcher):
    save(matcher_model(), card("matcher", "glue", features_model=takes))
    args = {"model": "glue", "features": None, "matcher": None, "config": None, "set": []} | given
    own = "matcher.options.min_covisibility=0.25" in args["set"]
    config = models_gain._config(SimpleNamespace(**args | {"set": [*args["set"]]}))
    assert (config.matcher.options["min_covisibility"] == 0.25) is own
    assert (config.features.name, config.matcher.name) == (features, matcher)
    assert config.matcher.options["model"] == "glue" and config.models.if_missing == "error"


@pytest.mark.parametrize("args", [["--decays", "0,2"], ["--thresholds", "x"], ["--max-pairs", "-1"], []])
def test_values_that_are_none_and_no_images_are_refused_at_once(args, capsys):
    assert command("models", "gain", STOPS.name, *args, *(["--images", "hall"] if args else [])) == 2
    assert "usage" in capsys.readouterr().err
