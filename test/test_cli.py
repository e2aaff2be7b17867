"""The command line: every verb, its exit codes, its JSON, its errors."""

import argparse
import json
import os
import subprocess
import sys

import cv2
import numpy as np
import pytest
from bag_helpers import stream, texture, write
from skimage import data as skimage_data

from vslam_features.cli.common import load_config, read_camera
from vslam_features.cli.main import COMMANDS, main
from vslam_features.cli.match_text import _pose_text
from vslam_features.cli.replay import _out_name
from vslam_features.errors import CameraError, ConfigError

MATCH_KEYS = {
    "status", "num_keypoints0", "num_keypoints1", "num_matches", "num_inliers", "covisibility", "features", "matcher",
    "runtime", "elapsed_ms",
}  # fmt: skip


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Files: black, two unrelated pictures, and one seen from a little to the left."""
    folder = tmp_path_factory.mktemp("images")
    chelsea, coins = skimage_data.chelsea(), skimage_data.coins()
    cv2.imwrite(str(folder / "black.png"), np.zeros((240, 320), np.uint8))
    cv2.imwrite(str(folder / "cat.png"), chelsea[:, :400, ::-1])
    cv2.imwrite(str(folder / "cat2.png"), chelsea[:, 30:430, ::-1])
    cv2.imwrite(str(folder / "coins.png"), coins)
    return folder


def run_json(capsys, *argv):
    code = main([str(a) for a in argv])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "a, b, statuses",
    [("black", "cat", {"no_keypoints"}), ("black", "black", {"no_keypoints"}), ("cat", "cat", {"ok"}),
     ("cat", "cat2", {"ok"}), ("cat", "coins", {"no_matches", "too_few_inliers"})],
)  # fmt: skip
@pytest.mark.parametrize("features", ["sift", "orb"])
def test_match_says_why(images, capsys, a, b, statuses, features):
    code, r = run_json(capsys, "match", images / f"{a}.png", images / f"{b}.png", "--json", "--features", features)
    assert code == 0 and r["status"] in statuses and MATCH_KEYS <= set(r)
    assert r["covisibility"] is None and r["features"] == features and r["matcher"] == "nearest"
    assert r["num_inliers"] <= r["num_matches"] <= min(r["num_keypoints0"], r["num_keypoints1"])
    assert (r["num_inliers"] > 100) == (r["status"] == "ok") and r["elapsed_ms"] > 0


def test_match_draws_and_prints(images, tmp_path, capsys):
    for name in ("m.png", "m.jpg"):
        assert main(["match", str(images / "cat.png"), str(images / "coins.png"), "--viz", str(tmp_path / name)]) == 0
        assert cv2.imread(str(tmp_path / name)).shape[1] > 700
    out = capsys.readouterr().out
    assert "inliers of" in out and "m.jpg" in out and "400x300" in out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.jpg", "m.png"]


def test_match_takes_a_camera_as_numbers_or_file(images, tmp_path, capsys):
    pair = [images / "cat.png", images / "cat2.png", "--json"]
    _, r = run_json(capsys, "match", *pair, "--camera", "400,400,200,150")
    assert r["status"] in ("ok", "degenerate")
    file = tmp_path / "camera.yaml"
    file.write_text("image_width: 400\nimage_height: 300\ncamera_matrix: {data: [400,0,200,0,400,150,0,0,1]}\n")
    _, from_file = run_json(capsys, "match", *pair, "--camera", file)
    assert from_file["num_inliers"] == r["num_inliers"] and from_file["pose"] == r["pose"]


@pytest.mark.parametrize("text", ["1,2,3", "a,b,c,d", "missing.yaml", "nan,1,1,1", "1,inf,1,1", "0,1,1,1", "1,-1,1,1"])
def test_a_wrong_camera_says_what_is_expected(text):
    with pytest.raises(CameraError, match="--camera-b .*"):
        read_camera(text, "--camera-b")


def test_a_camera_file_of_no_camera_is_named(tmp_path):
    file = tmp_path / "k.yaml"
    file.write_text("image_width: 4\nimage_height: 3\ncamera_matrix: {data: [-4,0,2,0,4,1,0,0,1]}\n")
    with pytest.raises(CameraError, match="--camera .*k.yaml.*focal"):
        read_camera(str(file))


def test_match_of_an_elongated_image_draws_a_picture(images, tmp_path, capsys):
    cv2.imwrite(str(tmp_path / "wide.png"), texture(1, 1, 8000))
    for name in ("m.png", "m.jpg"):
        assert main(["match", str(tmp_path / "wide.png"), str(images / "cat.png"), "--viz", str(tmp_path / name)]) == 0
        assert cv2.imread(str(tmp_path / name)).size < 10_000_000


def test_match_says_why_there_is_no_pose(images, tmp_path, capsys):
    camera = ["--camera", "400,400,200,150"]
    assert main(["match", str(images / "cat.png"), str(images / "cat.png"), *camera]) == 0
    assert "pose of A in B: pure rotation by 0.00 degrees" in capsys.readouterr().out
    assert main(["match", str(images / "cat.png"), str(images / "cat.png")]) == 0
    assert "pose of A" not in capsys.readouterr().out


def test_pose_texts():
    turned = {"R": [[0.0, -1, 0], [1, 0, 0], [0, 0, 1]], "t": [0.0, 0, 0], "scale_known": False}
    r = {"pose": turned, "hypotheses": [turned], "status": "ok"}
    assert _pose_text(r) == "pure rotation by 90.00 degrees"
    assert _pose_text({**r, "pose": {**turned, "t": [1.0, 0, 0]}}) == "t = (1.000, 0.000, 0.000), direction only"
    r |= {"pose": None, "hypotheses": [turned] * 2}
    assert _pose_text(r) == "none, a plane determines no single pose: 2 hypotheses"
    assert _pose_text({**r, "status": "degenerate"}) == "none, 2 motions explain the matches about equally well"
    assert "on a line" in _pose_text({**r, "status": "degenerate", "hypotheses": []})


def test_a_dark_image_of_16_bit_gets_a_hint(images, tmp_path, capsys):
    cv2.imwrite(str(tmp_path / "dark.png"), texture(1, 240, 320).astype(np.uint16))
    pair = ["match", tmp_path / "dark.png", images / "cat.png", "--json"]
    _, r = run_json(capsys, *pair)
    assert r["status"] == "no_keypoints" and "--set image_max_value=255" in r["detail"]
    _, r = run_json(capsys, *pair, "--set", "image_max_value=255")
    assert r["status"] != "no_keypoints" and r["detail"] == ""


def failing(capsys, *argv):
    code = main([str(a) for a in argv])
    captured = capsys.readouterr()
    assert captured.out == "" and "Traceback" not in captured.err
    return code, captured.err


def test_errors_are_one_message_with_the_next_step(images, tmp_path, capsys):
    a, b = images / "cat.png", images / "coins.png"
    (tmp_path / "bad.png").write_bytes(b"no picture")
    (tmp_path / "bad.yaml").write_text("a: [")
    for argv, words in [
        (["match", a, tmp_path / "none.png"], ["none.png", "No such file"]),
        (["match", a, tmp_path / "bad.png"], ["bad.png"]),
        (["match", a, b, "--viz", tmp_path / "no" / "m.png"], ["no", "make it first"]),
        (["match", a, b, "--viz", tmp_path / "m.gif"], [".png"]),
        (["match", a, b, "--features", "nope"], ["nope", "sift", "orb"]),
        (["match", a, b, "--set", "matcher.options.min_score=7"], ["matcher.options.min_score", "7"]),
        (["match", a, b, "--set", "nothing"], ["NAME=VALUE"]),
        (["match", a, b, "--set", "no.such=1"], ["no.such"]),
        (["match", a, b, "--config", tmp_path / "bad.yaml"], ["bad.yaml"]),
        (["replay", tmp_path / "none"], ["none", "no such file or folder"]),
        (["replay", images, "--loop-matrix", tmp_path / "none.png", "--out", tmp_path / "o"], ["none.png"]),
    ]:
        code, err = failing(capsys, *argv)
        assert code == 1 and err.startswith("error: ") and all(w in err for w in words), err


@pytest.mark.parametrize(
    ("assignments", "name", "expected"),
    [
        (["map_path=2024"], "map_path", "2024"),
        (["map_path=007"], "map_path", "007"),
        (["map_path=2024-01-02"], "map_path", "2024-01-02"),
        (["map_path=true"], "map_path", "true"),
        (["map_path="], "map_path", ""),
        (["map_path='2024'"], "map_path", "2024"),
        (["map_path=*.vmap"], "map_path", "*.vmap"),
        (["map_path=a = b"], "map_path", "a = b"),
        (["runtime.name=fake", "runtime.options.nan_calls=3"], "runtime.options", {"nan_calls": "3"}),
        (["runtime.options.nan_calls=3,5-7", "runtime.name=fake"], "runtime.options", {"nan_calls": "3,5-7"}),
        (["runtime.name=fake", "runtime.options.delay_ms=3"], "runtime.options", {"delay_ms": 3.0}),
        (["matcher.options.min_score=0.5"], "matcher.options", {"min_score": 0.5}),
        (["rectified=true"], "rectified", "yes"),
        (["rectified=no"], "rectified", "no"),
        (["loops.enabled=no"], "loops.enabled", False),
        (["threads=2"], "threads", 2),
    ],
)
def test_values_on_the_command_line_have_the_type_of_the_parameter(assignments, name, expected):
    config, given = load_config(argparse.Namespace(config=None, set=assignments))
    assert given == {a.partition("=")[0] for a in assignments}
    value = config.to_dict()
    for part in name.split("."):
        value = value[part]
    if isinstance(expected, dict):
        value = {n: value[n] for n in expected}
    assert value == expected


@pytest.mark.parametrize(
    ("assignments", "text"),
    [
        (["runtime.options.nan_calls=3"], "no option ['nan_calls']"),
        (["runtime.name=fake", "runtime.options.delay_ms=x"], "delay_ms: expected float, got str ('x')"),
        (["features.name=5", "keyframes.every=-1"], "features.name: '5' is not one of"),
        (["features.name=5", "keyframes.every=-1"], "keyframes.every: -1 is outside"),
        (["threads={"], "--set threads={: the value is no YAML"),
        (["threads="], "threads: expected int"),
    ],
)
def test_wrong_values_on_the_command_line(assignments, text):
    with pytest.raises(ConfigError) as error:
        load_config(argparse.Namespace(config=None, set=assignments))
    assert text in str(error.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_unwritable_folder_is_refused(images, tmp_path, capsys):
    tmp_path.chmod(0o500)
    code, err = failing(capsys, "match", images / "cat.png", images / "cat.png", "--viz", tmp_path / "m.png")
    assert code == 1 and "cannot be written" in err


def test_debug_shows_the_traceback_before_or_after_the_verb(tmp_path, capsys):
    for argv in (["--debug", "replay", str(tmp_path / "x")], ["replay", str(tmp_path / "x"), "--debug"]):
        assert main(argv) == 1
        assert "Traceback" in capsys.readouterr().err


def test_a_bug_is_named_as_one(images, capsys, monkeypatch):
    monkeypatch.setattr("vslam_features.cli.match.load_config", lambda args: 1 / 0)
    code, err = failing(capsys, "match", images / "cat.png", images / "cat.png")
    assert code == 70 and "ZeroDivisionError" in err and "--debug" in err


def test_interrupt_is_130(images, capsys, monkeypatch):
    def stop(args):
        raise KeyboardInterrupt

    monkeypatch.setattr("vslam_features.cli.match.load_config", stop)
    assert failing(capsys, "match", images / "cat.png", images / "cat.png")[0] == 130


# -- replay ------------------------------------------------------------------------------------


def test_replay_of_a_folder_writes_metrics_and_report(images, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["replay", str(images), "--out", str(out)]) == 0
    captured = capsys.readouterr()
    m = json.loads((out / "metrics.json").read_text())
    assert m["frames"] == m["keyframes"] == 4 and m["provenance"]["config"]["retrieval"]["exclude_frames"] == 10
    assert "report.html" in captured.out and "4 of 4" in captured.out and "img" in captured.err
    assert sorted(p.name for p in out.iterdir()) == ["metrics.json", "report.html"]


def test_replay_options_reach_the_run(images, tmp_path, capsys):
    code, m = run_json(capsys, "replay", images, "--out", tmp_path / "o", "--json", "--no-report", "--max-frames", "3",
                       "--rate", "100", "--fps", "20", "--set", "retrieval.exclude_frames=1")  # fmt: skip
    assert code == 0 and m["frames"] == 3 and m["provenance"]["run"]["rate"] == 100
    assert m["provenance"]["source"]["fps"] == 20 and m["loops"]["candidates"] > 0
    assert m == json.loads((tmp_path / "o" / "metrics.json").read_text())
    assert [p.name for p in (tmp_path / "o").iterdir()] == ["metrics.json"]


def test_replay_of_a_config_file_keeps_what_it_sets(images, tmp_path, capsys):
    (tmp_path / "c.yaml").write_text("/**:\n  ros__parameters:\n    retrieval: {exclude_s: 12.0}\n")
    _, m = run_json(capsys, "replay", images, "--out", tmp_path / "o", "--json", "--config", tmp_path / "c.yaml")
    config = m["provenance"]["config"]["retrieval"]
    assert config["exclude_s"] == 12.0 and config["exclude_frames"] == 10


def cut_bag(path):
    """A recording of 40 images whose end is missing."""
    file = write(path, stream(40)) / f"{path.name}.mcap"
    file.write_bytes(file.read_bytes()[:-40_000])
    return path


def test_a_partial_read_writes_everything_and_exits_1(tmp_path, capsys):
    bag = cut_bag(tmp_path / "bag")
    out = tmp_path / "out"
    assert main(["replay", str(bag), "--out", str(out)]) == 1
    captured = capsys.readouterr()
    assert "not read whole" in captured.err and "Partial" in captured.out
    assert not json.loads((out / "metrics.json").read_text())["input"]["complete"] and (out / "report.html").exists()


def test_an_unreadable_image_makes_it_partial_and_none_at_all_an_error(tmp_path, capsys):
    folder = tmp_path / "f"
    folder.mkdir()
    (folder / "1.png").write_bytes(b"x")
    assert main(["replay", str(folder), "--out", str(tmp_path / "o")]) == 1
    assert "no image was processed" in capsys.readouterr().err
    cv2.imwrite(str(folder / "2.png"), texture(1, 100, 100))
    assert main(["replay", str(folder), "--out", str(tmp_path / "o")]) == 1
    captured = capsys.readouterr()
    assert "1 x unreadable image" in captured.err and "1 x unreadable image" in captured.out
    assert "1.png: " in captured.out and str(tmp_path / "f") not in captured.out
    (text,) = json.loads((tmp_path / "o" / "metrics.json").read_text())["input"]["examples"]["unreadable image"]
    assert text.startswith("1.png: ")


def test_a_run_of_nothing_takes_no_nan(tmp_path, capsys):
    (tmp_path / "1.png").write_bytes(b"x")
    assert main(["replay", str(tmp_path), "--out", str(tmp_path / "o")]) == 1
    assert "nan" not in capsys.readouterr().out


def test_max_frames_leaves_a_trace(images, tmp_path, capsys):
    code, m = run_json(capsys, "replay", images, "--out", tmp_path / "o", "--json", "--max-frames", "2")
    assert code == 0 and m["provenance"]["max_frames"] == 2
    assert m["input"]["notes"]["stopped after 2 of 4 images as asked"] == 1 and m["input"]["complete"]
    _, m = run_json(capsys, "replay", images, "--out", tmp_path / "o", "--json", "--max-frames", "4")
    assert not any("as asked" in note for note in m["input"]["notes"])


def test_a_truth_of_another_sequence_is_refused_before_the_run(images, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("vslam_features.replay.runner.replay", lambda *_, **__: 1 / 0)
    for size in (3, 5):
        cv2.imwrite(str(tmp_path / "m.png"), np.zeros((size, size), np.uint8))
        code, err = failing(capsys, "replay", images, "--loop-matrix", tmp_path / "m.png", "--max-frames", "3",
                            "--out", tmp_path / "o")  # fmt: skip
        assert code == 1 and f"of {size} images" in err and "has 4" in err and "--loop-matrix" in err
    assert not (tmp_path / "o").exists()


def test_a_damaged_recording_may_have_fewer_images_than_its_truth(tmp_path, capsys):
    file = cut_bag(tmp_path / "bag") / "bag.mcap"  # without metadata.yaml nobody knows how many there were
    cv2.imwrite(str(tmp_path / "m.png"), np.zeros((40, 40), np.uint8))
    argv = ["replay", str(file), "--loop-matrix", str(tmp_path / "m.png"), "--out", str(tmp_path / "o")]
    assert main(argv) == 1
    captured = capsys.readouterr()
    frames = json.loads((tmp_path / "o" / "metrics.json").read_text())["frames"]
    assert f"{frames}, the input is damaged" in captured.out and f"{frames} of {frames}" not in captured.out


def test_an_earlier_run_does_not_shine_through(images, tmp_path, capsys):
    for name in ("metrics.json", "report.html", "mine.txt"):
        (tmp_path / name).write_text("old")
    assert main(["replay", str(images), "--out", str(tmp_path), "--no-report", "--max-frames", "1"]) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.json", "mine.txt"]


def test_an_interrupt_keeps_what_was_done(images, tmp_path, capsys, monkeypatch):
    from vslam_features.frontend import FrontEnd

    process, calls = FrontEnd.process, []

    def stops(self, frame):
        calls.append(frame)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return process(self, frame)

    monkeypatch.setattr(FrontEnd, "process", stops)
    assert main(["replay", str(images), "--out", str(tmp_path)]) == 130
    captured = capsys.readouterr()
    m = json.loads((tmp_path / "metrics.json").read_text())
    assert m["frames"] == 2 and not m["input"]["complete"]
    assert m["input"]["reason"] == "interrupted after 2 of 4 images" and m["input"]["reason"] in captured.err
    assert "interrupted after 2" in (tmp_path / "report.html").read_text() and "2 of 4" in captured.out


def test_an_unusable_out_is_refused_before_the_run(images, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("vslam_features.replay.runner.replay", lambda *_, **__: 1 / 0)
    (tmp_path / "file").write_text("")
    outs = [tmp_path / "file", tmp_path / "file" / "under"]
    if os.geteuid() != 0:  # root may write anywhere
        (tmp_path / "locked").mkdir(mode=0o500)
        outs += [tmp_path / "locked", tmp_path / "locked" / "new"]
    (tmp_path / "odd" / "metrics.json").mkdir(parents=True)
    for out in [*outs, tmp_path / "odd"]:
        code, err = failing(capsys, "replay", images, "--out", out)
        assert code == 1 and f"--out {out}: " in err and "folder" in err


def test_parts_of_a_recording_go_to_different_folders(tmp_path):
    for name in ("run.1.mcap", "run.2.mcap"):
        (tmp_path / name).write_bytes(b"")
    assert _out_name(tmp_path / "run.1.mcap", "run") == "run.1" != _out_name(tmp_path / "run.2.mcap", "run")
    assert _out_name(tmp_path, "folder") == "folder"


def test_faults_exit_3(images, tmp_path, capsys, monkeypatch):
    from vslam_features.retrieval.vlad import Vlad

    def broken(*_):
        raise ValueError("broken on purpose")

    monkeypatch.setattr(Vlad, "describe", broken)
    assert main(["replay", str(images), "--out", str(tmp_path / "o")]) == 3
    captured = capsys.readouterr()
    assert "4 faults in global" in captured.err and "Traceback" not in captured.err


def test_several_image_topics_are_listed(tmp_path, capsys):
    from bag_helpers import T0, Messages

    bag = write(tmp_path / "bag", stream(2) + [("/b/image", T0, Messages().image(T0, texture()))])
    code, err = failing(capsys, "replay", bag, "--out", tmp_path / "o")
    assert code == 1 and "--image-topic" in err and "/b/image" in err and not (tmp_path / "o").exists()


# -- the rest -----------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["", "match", "replay", "doctor"])
def test_every_help_has_an_example(verb, capsys):
    assert main([*([verb] if verb else []), "--help"]) == 0
    assert "example: vslam-features" in (out := capsys.readouterr().out)
    # The epilog keeps its lines.
    assert verb != "doctor" or "example: vslam-features doctor\n" in out


def test_wrong_usage_is_2(capsys):
    assert main([]) == 2 and main(["nope"]) == 2 and main(["match"]) == 2
    assert main(["replay", "x", "--rate", "-1"]) == 2 and main(["replay", "x", "--max-frames", "-5"]) == 2
    assert main(["replay", "x", "--pose-topic", "/pose", "--no-pose"]) == 2
    assert "match" in COMMANDS and "usage" in capsys.readouterr().err


def test_as_a_process(images, tmp_path):
    command = [sys.executable, "-m", "vslam_features"]
    classical = ["--features", "sift", "--set", "loops.enabled=false"]
    command_line = [*command, "match", images / "cat.png", images / "cat2.png", "--json", *classical]
    done = subprocess.run(command_line, capture_output=True)
    assert done.returncode == 0 and json.loads(done.stdout)["status"] == "ok" and done.stderr == b""
    done = subprocess.run([*command, "replay", tmp_path / "none"], capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == "" and done.stderr.count("\n") == 1
    # A reader that leaves early is no error to complain about.
    text = f"{sys.executable} -m vslam_features match {images}/cat.png {images}/cat2.png --features sift | true"
    assert subprocess.run(text, shell=True, capture_output=True).stderr == b""
