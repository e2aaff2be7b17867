"""``vslam-features models collect``: recordings, maps and dense maps to files that ``models verify --inputs`` takes."""

import json
import shutil

import cv2
import numpy as np
import pytest
from dense_models import DENSE, place_dense_models
from helpers import image
from model_helpers import (
    GLOBAL_CARD,
    TINY,
    _tiny_cache,  # noqa: F401 (fixtures)
    command,
    global_model,
    learned,  # noqa: F401
    own_cache,  # noqa: F401
    save,
    tiny,  # noqa: F401
)

from vslam_features.artifacts.saved_pairs import load, pairs_in
from vslam_features.cli import models_collect
from vslam_features.config import Config
from vslam_features.maps.reader import MapReader
from vslam_features.replay.bag_writer import Topics, write_scene_bag
from vslam_features.replay.ground_truth import GroundTruth
from vslam_features.replay.image_source import ImageSource
from vslam_features.replay.open_source import open_source
from vslam_features.replay.runner import replay
from vslam_features.replay.scenes import make_scene
from vslam_features.types import PairKind, Status


def settings_of(values) -> list[str]:
    return [part for name, value in values.items() for part in ("--set", f"{name}={value}")]


SET = settings_of(TINY)


def collect(capsys, *args) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    code = command("models", "collect", *map(str, args))
    return code, *capsys.readouterr()


@pytest.fixture
def walk(tmp_path):
    """20 pictures along a wall and back, 25 pixels apart: the way back sees what the way there saw."""
    folder, wall = tmp_path / "walk", image(200, 600, seed=2)
    folder.mkdir()
    for i in range(20):
        x = 25 * min(i, 19 - i)
        cv2.imwrite(str(folder / f"{i:03d}.png"), wall[:, x : x + 300])
    return folder


def test_a_folder_of_images_gives_pairs_of_all_kinds(tiny, walk, tmp_path, capsys):  # noqa: F811
    out = tmp_path / "new" / "saved"
    code, text, err = collect(capsys, walk, "--out", out, *SET)
    assert code == 0, err
    saved = pairs_in(out)
    assert sorted(p.kind for p in saved.values()) == ["control"] * 2 + ["revisit"] * 3 + ["wide"] * 3
    assert {p.name for p in out.iterdir()} == {p.name for p in saved}, "the map of the replay is gone"
    lines = text.splitlines()
    assert lines[0].split() == ["kind", "keyframes", "s", "apart", "matches", "inliers", "file"] and len(lines) == 10
    for line, kind in zip(lines[1:9], ["wide"] * 3 + ["revisit"] * 3 + ["control"] * 2):
        cells = line.split()
        pair = load(out / cells[-1])
        assert cells[0] == kind == pair.kind and tuple(map(int, cells[1:3])) == pair.keyframes
        assert cells[3:6] == [f"{pair.seconds_apart:.1f}", str(pair.matches), str(pair.inliers)]
        newer, older = pair.keyframes
        assert pair.seconds_apart == pytest.approx((newer - older) / 10), "10 images a second"
        assert (kind == "revisit") == (newer - older >= 10) and (kind == "control") == (newer - older == 1)
        shown = [25 * min(i, 19 - i) for i in pair.keyframes]
        assert abs(shown[0] - shown[1]) < 300, "both look at the same wall"
        assert pair.source == "walk" and pair.matcher == "tiny-matcher" and pair.features.name == "tiny-features"
    assert (
        lines[-1]
        == f"8 pairs of tiny-features features in {out}: vslam-features models verify tiny-matcher --inputs {out}"
    )
    wide = [p for p in saved.values() if p.kind == "wide"]
    controls = [p for p in saved.values() if p.kind == "control"]
    assert max(p.matches for p in wide) < min(p.matches for p in controls)


def test_the_files_replay_and_say_what_they_are(tiny, walk, tmp_path, capsys):  # noqa: F811
    out = tmp_path / "saved"
    assert collect(capsys, walk, "--out", out, *SET)[0] == 0
    assert command("models", "verify", "tiny-matcher", "--inputs", str(out)) == 0
    text = capsys.readouterr().out
    assert "PASSED" in text
    for path, pair in pairs_in(out).items():
        (line,) = [line for line in text.splitlines() if line.startswith(path.name)]
        assert f": {pair.kind}, keyframes " in line and all(str(stamp) in line for stamp in pair.stamps_ns)
        (row,) = [line for line in text.splitlines() if line.startswith(path.stem + " ")]
        assert f"{pair.matches} / {pair.matches}" in row, "the model finds again what the front-end found"


def test_json_and_the_same_twice(tiny, walk, tmp_path, capsys):  # noqa: F811
    out = tmp_path / "saved"
    code, text, err = collect(capsys, walk, "--out", out, "--json", "--pairs", 5, *SET)
    assert code == 0 and "images" not in err
    found = json.loads(text)
    assert found["matcher"] == "tiny-matcher" and found["features"]["name"] == "tiny-features" and found["notes"] == []
    assert [row["kind"] for row in found["pairs"]] == ["wide", "wide", "revisit", "revisit", "control"]
    first = {p: p.read_bytes() for p in out.iterdir()}
    assert {row["file"] for row in found["pairs"]} == {str(p) for p in first}
    assert collect(capsys, walk, "--out", out, "--pairs", 5, *SET)[0] == 0
    assert {p: p.read_bytes() for p in out.iterdir()} == first, "the same recording gives the same files"


def test_what_there_is_less_of_is_said(tiny, walk, tmp_path, capsys):  # noqa: F811
    code, text, _ = collect(capsys, walk, "--out", tmp_path / "saved", "--max-frames", 8, *SET)
    assert code == 0 and "note: 0 of 3 revisit pairs wanted were found" in text
    assert "note: more of others instead: " in text and "revisit-" not in text
    code, _, err = collect(capsys, walk, "--out", tmp_path / "none", "--max-frames", 1, *SET)
    assert code == 1 and f"error: {walk.name}: fewer than two keyframes, and a pair has two" in err
    for path in walk.iterdir():
        cv2.imwrite(str(path), np.zeros((200, 300), np.uint8))
    code, _, err = collect(capsys, walk, "--out", tmp_path / "none", *SET)
    assert (
        code == 1
        and "walk: none of its 20 keyframes match each other" in err
        and not list((tmp_path / "none").iterdir())
    )


def test_pairs_of_other_models_are_not_mixed_and_force_replaces_them(tiny, walk, tmp_path, capsys):  # noqa: F811
    out = tmp_path / "saved"
    assert collect(capsys, walk, "--out", out, "--pairs", 2, *SET)[0] == 0
    before = sorted(p.name for p in out.iterdir())
    (out / "mine.npz").write_bytes(b"of the user")
    code, _, err = collect(capsys, walk, "--out", out, *SET)
    assert code == 1 and "mine.npz: cannot be read as .npz" in err
    (out / "mine.npz").unlink()
    (out / "notes.txt").write_text("of the user")
    place_dense_models()
    save(global_model(), GLOBAL_CARD)
    dense = settings_of(DENSE)
    code, _, err = collect(capsys, walk, "--out", out, *dense)
    assert code == 1 and "features 'tiny-features'" in err and "the new pairs are of dense-features" in err
    assert sorted(p.name for p in out.iterdir()) == sorted([*before, "notes.txt"]), "nothing was touched"
    assert collect(capsys, walk, "--out", out, "--force", "--pairs", 3, *dense)[0] == 0
    assert [p.features.name for p in pairs_in(out).values()] == ["dense-features"] * 3
    assert len(list(out.iterdir())) == 4 and (out / "notes.txt").is_file()


def test_dense_maps_are_saved_as_they_go_in(tiny, walk, tmp_path, capsys):  # noqa: F811
    place_dense_models()
    out = tmp_path / "saved"
    code, text, err = collect(capsys, walk, "--out", out, "--pairs", 4, "--max-frames", 16, *settings_of(DENSE))
    assert code == 0, err
    for pair in pairs_in(out).values():
        assert pair.inputs["descriptors0"].shape == pair.inputs["descriptors1"].shape == (96, 48, 64)
    assert command("models", "verify", "dense-matcher", "--inputs", str(out)) == 0
    assert "PASSED" in capsys.readouterr().out
    code = command("models", "verify", "tiny-matcher", "--inputs", str(out))
    err = capsys.readouterr().err
    assert code == 1 and "holds features of dense-features, tiny-matcher matches features of tiny-features" in err


def test_a_recording_gives_its_stamps_and_topics_are_chosen(tiny, tmp_path, capsys):  # noqa: F811
    scene = make_scene("room", width=320, height=240, num_frames=10, fps=5.0)
    bag, topics = write_scene_bag(scene, tmp_path / "room"), Topics()
    stamps = GroundTruth.load(bag).stamps_ns
    out = tmp_path / "saved"
    code, _, err = collect(capsys, bag, "--out", out, "--image-topic", topics.image, "--no-pose", *SET)
    assert code == 0, err
    saved = pairs_in(out).values()
    assert saved and {p.source for p in saved} == {"room"}
    for pair in saved:
        assert pair.stamps_ns == tuple(int(stamps[i]) for i in pair.keyframes), "each image is a keyframe"
        assert tuple(pair.inputs["image_size0"]) == (320, 240)
    code, _, err = collect(capsys, bag, "--out", out, "--image-topic", "/none", *SET)
    assert code == 1 and "/none" in err


def test_an_interrupted_replay_gives_what_was_seen(tiny, walk, tmp_path, capsys, monkeypatch):  # noqa: F811
    whole = ImageSource.__iter__

    def interrupted(self):
        for i, frame in enumerate(whole(self)):
            if i == 8:
                raise KeyboardInterrupt
            yield frame

    monkeypatch.setattr(ImageSource, "__iter__", interrupted)
    code, text, _ = collect(capsys, walk, "--out", tmp_path / "saved", *SET)
    assert code == 130 and "note: the input was not read whole: interrupted after 8 of 20 images" in text
    assert max(p.keyframes[0] for p in pairs_in(tmp_path / "saved").values()) == 7


def test_pairs_on_which_the_matcher_fails_are_the_first_to_be_saved(tiny, walk, tmp_path, capsys):  # noqa: F811
    """Every third run of the matcher gives NaN, which the fallback makes good."""
    fake = {
        "runtime.name": "fake",
        "runtime.options.only": "tiny-matcher",
        "runtime.options.nan_calls": "3,6,9,12,15,18",
    }
    code, text, err = collect(capsys, walk, "--out", tmp_path / "saved", *SET, *settings_of(fake))
    assert code == 0, err
    assert "note: tiny-matcher: 6 runs failed, 6 made good" in text and "searches failed" in text
    saved = pairs_in(tmp_path / "saved").values()
    config = Config.from_flat({**TINY, **fake})
    with open_source(walk, config) as source:
        log = replay(source)
    failed = {
        (p.kf_id, p.ref_kf_id) for p in log.pairs if p.status is Status.FAULT_RECOVERED and p.kind is PairKind.LOOP
    }
    revisits = {p.keyframes for p in saved if p.kind == "revisit"}
    assert failed and failed & revisits and not failed & {p.keyframes for p in saved if p.kind == "control"}
    assert len(saved) == 8


def test_a_map_gives_its_pairs_and_stays_as_it_is(tiny, walk, tmp_path, capsys):  # noqa: F811
    path = tmp_path / "house.vmap"
    assert command("replay", str(walk), "--map", str(path), "--out", str(tmp_path / "run"), "--no-report", *SET) == 0
    content, capsys_ = path.read_bytes(), capsys.readouterr()
    code, _, err = collect(capsys, path, "--out", tmp_path / "of_map", *SET)
    assert code == 0, capsys_.err + err
    assert path.read_bytes() == content
    assert collect(capsys, walk, "--out", tmp_path / "of_walk", *SET)[0] == 0
    for name in ("map", "walk"):
        pairs = pairs_in(tmp_path / f"of_{name}").values()
        assert {p.source for p in pairs} == {"house" if name == "map" else "walk"}
    with MapReader(path) as reader:
        for pair in pairs:
            for side, kf_id in enumerate(pair.keyframes):
                features = reader.keyframe(kf_id).features
                np.testing.assert_array_equal(pair.inputs[f"keypoints{side}"], features.keypoints)
                np.testing.assert_array_equal(pair.inputs[f"descriptors{side}"], features.descriptors.astype("f4"))
    kept = [{(p.kind, p.keyframes) for p in pairs_in(tmp_path / f"of_{n}").values()} for n in ("map", "walk")]
    assert kept[0] == kept[1]
    code, _, err = collect(capsys, tmp_path / "no.vmap", "--out", tmp_path / "x", *SET)
    assert code == 1 and "there is no such map" in err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ["WALK", "--set", "matcher.name=nearest"],
            "matcher 'nearest' runs no model, so that there is nothing to verify",
        ),
        (["WALK", "--model", "nothing"], "nothing"),
        (["WALK", "--pairs", "0"], "--pairs: expected one at least"),
        (["WALK/none"], "no such file or folder"),
        (["WALK", "--image-topic", "/image"], "is a folder of images and has no topics"),
        (["WALK/000.png"], "not a recording by its name"),
    ],
)
def test_what_does_not_fit_is_one_line(tiny, walk, tmp_path, capsys, arguments, text):  # noqa: F811
    arguments = [a.replace("WALK", str(walk)) for a in arguments]
    chosen = [] if "--set" in arguments else SET
    code, out, err = collect(capsys, *chosen, *arguments, "--out", tmp_path / "saved")
    assert code == 1 and not out and text in err and "Traceback" not in err


def test_without_ros_a_node_cannot_be_asked(tiny, tmp_path, monkeypatch, capsys):  # noqa: F811
    monkeypatch.setattr(models_collect, "find_spec", lambda name: None)
    code, _, err = collect(capsys, "--node", "/frontend", "--out", tmp_path / "saved")
    assert code == 1 and "--node needs ROS 2, and rclpy is not there: source your ROS installation" in err


@pytest.mark.parametrize("arguments", [[], ["bag", "--node", "/frontend"]])
def test_it_is_one_source(arguments, tmp_path, capsys):
    code, _, err = collect(capsys, *arguments, "--out", tmp_path)
    assert code == 2 and "--node" in err.splitlines()[-1]


@pytest.mark.data
@pytest.mark.endurance
@pytest.mark.timeout(600)
def test_pairs_of_a_real_corridor_with_the_default_models(learned, data_dir, tmp_path, capsys):  # noqa: F811
    """A corridor that is walked twice, each second image of it."""
    if not (learned / "models" / "lighterglue.fp32.onnx").exists():
        pytest.skip("no lighterglue here: run vslam-features models fetch lighterglue")
    images = sorted((data_dir / "corridor_loop" / "images").iterdir())[::2]
    (tmp_path / "corridor").mkdir()
    for file in images:
        shutil.copy(file, tmp_path / "corridor")
    out = tmp_path / "saved"
    code, text, err = collect(capsys, tmp_path / "corridor", "--out", out, "--set", "features.max_keypoints=512")
    assert code == 0, err
    saved = pairs_in(out)
    kinds = [p.kind for p in saved.values()]
    assert (kinds.count("wide"), kinds.count("revisit"), kinds.count("control")) == (3, 3, 2), text
    assert {p.features.name for p in saved.values()} == {"xfeat"}
    matches = {kind: [p.matches for p in saved.values() if p.kind == kind] for kind in kinds}
    assert max(matches["wide"]) < min(matches["control"]) and min(matches["wide"]) >= 15
    assert all(p.inliers >= 15 for p in saved.values())
    for model in ("lighterglue", "lighterglue-early-stop"):
        assert command("models", "verify", model, "--inputs", str(out)) == 0
        assert "NaN on 0 of 8 pairs, no match on 0 of 8" in capsys.readouterr().out
