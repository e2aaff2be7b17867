"""What a recorder makes of the published tables, whichever order they come in; and as a process."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("rclpy", reason="needs ROS 2: pip install 'vslam_features[ros]'")

import rclpy
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus, KeyValue
from rclpy.executors import SingleThreadedExecutor
from ros_helpers import node_command
from sensor_msgs.msg import PointCloud2

from vslam_features.errors import DataError
from vslam_features.health import Counts
from vslam_features.replay.ground_truth import GroundTruth
from vslam_features.replay.loop_truth import LoopTruth
from vslam_features.replay.metrics import metrics
from vslam_features.replay.report import write_report
from vslam_features.ros import codecs
from vslam_features.ros.clouds import to_cloud
from vslam_features.ros.messages import header
from vslam_features.ros.recorder_node import RecorderNode
from vslam_features.ros.topic_diagnostics import MODEL_COUNTS
from vslam_features.ros.topic_log import TopicLog
from vslam_features.types import PairKind, Pose, Status

T0, STEP = 1_760_000_000_123_456_789, 100_000_000


def truth(n: int) -> GroundTruth:
    stamps = T0 + STEP * np.arange(n, dtype=np.int64)
    return GroundTruth("test", stamps, np.zeros((n, 3)), np.tile(np.eye(3), (n, 1, 1)), np.eye(3), (64, 48), np.eye(n))


def keyframe(kf_id: int, n: int = 4) -> np.ndarray:
    table = np.zeros(n, codecs.KEYFRAMES)
    table["kf_id"] = kf_id
    return table


def pair(kf_id: int, ref: int, n: int, inliers: int, kind=PairKind.TRACK, status=Status.OK) -> np.ndarray:
    table = np.zeros(1, codecs.PAIRS)
    table["kind"], table["status"], table["kf_id"], table["ref_kf_id"] = kind, status, kf_id, ref
    table["num_matches"], table["num_inliers"], table["covisibility"] = n, inliers, np.nan
    return table


def matches(kf_id: int, ref: int, n: int, inliers: int) -> np.ndarray:
    table = np.zeros(n, codecs.MATCHES)
    table["kf_id"], table["ref_kf_id"], table["inlier"] = kf_id, ref, np.arange(n) < inliers
    table["x"], table["ref_x"] = np.arange(n), np.arange(n) + 10
    return table


def messages() -> list[tuple]:
    """(method, stamp, table) of three keyframes: two tracked pairs, one verified loop, one empty loop."""
    s = [T0, T0 + 3 * STEP, T0 + 6 * STEP]
    return [
        *(("add_keyframe", s[i], keyframe(i)) for i in range(3)),
        ("add_pairs", s[0], np.empty(0, codecs.PAIRS)),
        ("add_pairs", s[1], pair(1, 0, 30, 25)),
        ("add_matches", s[1], matches(1, 0, 30, 25)),
        ("add_pairs", s[2], pair(2, 1, 20, 18)),
        ("add_matches", s[2], matches(2, 1, 20, 18)),
        ("add_candidates", s[2], np.zeros(1, codecs.CANDIDATES)),
        ("add_pairs", s[2], np.concatenate([
            pair(2, 0, 40, 33, PairKind.LOOP), pair(2, 0, 0, 0, PairKind.LOOP, Status.NO_MATCHES)])),
        ("add_matches", s[2], matches(2, 0, 40, 33)),
    ]  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(st.randoms(use_true_random=False))
def test_tables_are_joined_in_any_order(order: random.Random):
    items = messages()
    keyframes, rest = items[:3], items[3:]
    order.shuffle(rest)
    log = TopicLog("test", truth(8))
    image = np.zeros((48, 64), np.uint8)
    for i, (method, stamp, table) in enumerate([*keyframes, *rest]):
        if order.random() < 0.5 or i == len(items) - 1:
            for stamp_ns in (T0, T0 + 3 * STEP, T0 + 6 * STEP):
                log.add_image(stamp_ns, image)
        getattr(log, method)(stamp, "cam", table)
    log.set_diagnostics("frames", {"received": "8", "processed": "8", "dropped": "0", "missing": "0", "waiting": "0"})
    run = log.finish()
    numbers = metrics(run)
    assert (numbers["keyframes"], numbers["pairs"], numbers["frames"]) == (3, 4, 8)
    assert numbers["statuses"] == {"ok": 3, "no_matches": 1} and numbers["loops"]["pairs"] == [[2, 0]]
    assert [k.position for k in run.keyframes] == [0, 3, 6] and not run.incomplete and not run.notes
    drawn = {(p.kf_id, p.ref_kf_id): points for p, points in run.pictured("worst") + run.pictured("loops")}
    assert {ids: len(points.points) for ids, points in drawn.items()} == {(1, 0): 30, (2, 1): 20, (2, 0): 40}
    assert drawn[2, 0].inliers.sum() == 33 and (drawn[2, 0].ref_points[:, 0] - drawn[2, 0].points[:, 0] == 10).all()
    assert all(k.picture for k in run.keyframes)


def test_what_was_lost_is_said():
    log = TopicLog("test", truth(8))
    log.add_keyframe(T0, "cam", keyframe(0))
    log.add_keyframe(T0 + STEP, "cam", keyframe(1))
    log.add_pairs(T0, "cam", pair(1, 0, 30, 25))  # its matches never come
    log.rejected("/frontend/pairs", "no field 'kind'")
    log.set_diagnostics("frames", {"received": "7", "processed": "5", "dropped": "2", "missing": "1", "waiting": "0"})
    log.set_diagnostics("match", {"faults": "3", "last_fault": "ValueError: x"})
    run = log.finish()
    assert run.incomplete == "5 of 8 images were processed"
    assert run.skipped == {"image dropped": 2, "image missing": 1} and run.fault_counts == {"match": 3}
    assert run.notes == {"message on /frontend/pairs rejected": 1, "pair whose matches did not come": 1}
    assert len(run.pairs) == 1 and metrics(run)["pairs"] == 1


def test_poses_reach_the_keyframes():
    log = TopicLog("test", truth(8))
    log.add_pose(T0, Pose(np.eye(3), [1, 2, 3], "map"))
    log.add_keyframe(T0, "cam", keyframe(0))
    np.testing.assert_array_equal(log.finish().keyframes[0].pose.t, [1, 2, 3])


def test_who_joins_late_gets_a_report_of_what_it_saw(tmp_path):
    log = TopicLog("test", truth(100))
    for i in (57, 58):
        log.add_keyframe(T0 + i * STEP, "cam", keyframe(i))
        log.add_pairs(T0 + i * STEP, "cam", np.concatenate([
            pair(i, i - 1, 30, 25), pair(i, 3, 40, 33, PairKind.LOOP)]))  # fmt: skip
        log.add_matches(T0 + i * STEP, "cam", np.concatenate([matches(i, i - 1, 30, 25), matches(i, 3, 40, 33)]))
        candidates = np.zeros(1, codecs.CANDIDATES)
        candidates["kf_id"], candidates["ref_kf_id"] = i, 3
        log.add_candidates(T0 + i * STEP, "cam", candidates)
    log.add_keyframe(T0 + 59 * STEP, "cam", keyframe(59, n=0))  # the next, as it has no keypoints
    log.set_diagnostics("frames", {"received": "100", "processed": "100"})
    run = log.finish()
    assert [k.id for k in run.keyframes] == [57, 58, 59]
    assert run.incomplete == "joined late: keyframes 0 to 56 were not seen"
    reason = "pair left out: one of its keyframes was not seen"
    assert run.notes == {reason: 3}
    assert run.examples[reason] == ["keyframe 3 was not seen", "keyframe 56 was not seen"]
    loops = LoopTruth(np.eye(100, dtype=bool))
    numbers = metrics(run, loops)
    assert numbers["pairs"] == 1 and numbers["input"]["complete"] is False and numbers["loop_truth"]["queries"] == 0
    page = write_report(tmp_path / "report.html", run, numbers).read_text()
    assert "joined late" in page and "58 with 57" in page


@pytest.mark.parametrize("without_keypoints", [False, True])
def test_a_reset_starts_a_new_session(without_keypoints):
    log = TopicLog("test", truth(8))
    log.set_diagnostics("frames", {"received": "8", "processed": "8", "resets": "2"})  # before we came
    for method, stamp, table in messages():
        getattr(log, method)(stamp, "cam", table)
    log.set_diagnostics("frames", {"received": "9", "processed": "9", "resets": "3"})
    assert log.progress()["keyframes"] == 3, "until the next keyframe there is nothing newer to report"
    log.add_keyframe(T0, "cam", keyframe(0, n=0 if without_keypoints else 4))
    log.add_keyframe(T0 + STEP, "cam", keyframe(1))
    log.add_pairs(T0 + STEP, "cam", pair(1, 0, 0, 0, status=Status.NO_MATCHES))
    log.set_diagnostics("frames", {"received": "10", "processed": "10", "resets": "3"})
    run = log.finish()
    assert [k.id for k in run.keyframes] == [0, 1] and len(run.pairs) == 1
    assert run.incomplete.startswith("1 earlier session before a reset is not in this report")
    assert (run.frames, run.expected) == (10, 10)


def test_ids_of_a_continued_map_begin_behind_its_keyframes():
    log = TopicLog("test", truth(8))
    log.set_diagnostics("map", {"keyframes": "42", "first_id": "40"})
    for i, n in ((0, 0), (1, 4)):  # the first has no keypoints, so it does not tell its id
        log.add_keyframe(T0 + i * STEP, "cam", keyframe(40 + i, n=n))
    log.set_diagnostics("frames", {"received": "8", "processed": "8"})
    run = log.finish()
    assert [k.id for k in run.keyframes] == [40, 41] and not run.incomplete


MODEL = {
    "role": "matcher", "precision": "fp32", "runtime": "onnxruntime", "device": "a CPU", "linked": "true",
    "verified": "passed on 8 pairs", "note": "", "runs": "9", "non_finite": "2", "errors": "0", "empty": "1",
    "empty_agreed": "4", "recovered": "2", "lost": "1", "incidents": "2", "last_fault": "NaN in 'scores'",
}  # fmt: skip


def test_pairs_with_keyframes_of_the_map_that_is_localised_in_are_reported(tmp_path):
    """Those keyframes were never published: they are no gap, and their pictures are empty."""
    log = TopicLog("test", None)
    log.set_diagnostics("map", {"keyframes": "42", "first_id": "40"})
    log.add_keyframe(T0, "cam", keyframe(40))
    log.add_pairs(T0, "cam", pair(40, 7, 30, 25, PairKind.RELOCALISATION))
    log.add_matches(T0, "cam", matches(40, 7, 30, 25))
    done = log.finish()
    assert [(p.kf_id, p.ref_kf_id) for p in done.pairs] == [(40, 7)] and done.first_id == 40
    assert "was not seen" not in done.incomplete + str(done.notes)
    numbers = metrics(done)
    assert numbers["relocalisation"]["verified"] == 1
    write_report(tmp_path / "report.html", done, numbers)
    assert "keyframes 40 and 7" in (tmp_path / "report.html").read_text()


def test_models_are_read_from_diagnostics():
    log = TopicLog("test", truth(8))
    log.set_diagnostics("models", {"instead": "running sift"})
    log.set_diagnostics("model lighterglue", {**MODEL, "runs": "1", "non_finite": "0"})
    log.set_diagnostics("model lighterglue", MODEL)
    log.set_diagnostics("model xfeat", {**MODEL, "role": "features", "linked": "false", "lost": "0"})
    numbers = metrics(log.finish())
    matcher, features = numbers["engines"]
    assert (matcher["name"], features["name"], features["role"]) == ("lighterglue", "xfeat", "features")
    counts = {n: int(MODEL[n]) for n in MODEL_COUNTS if n != "incidents"}
    texts = {n: MODEL[n] for n in ("role", "precision", "runtime", "device", "verified", "note", "last_fault")}
    assert matcher == {"name": "lighterglue", "linked": True, **counts, **texts} and features["linked"] is False
    assert numbers["provenance"]["instead"] == "running sift"
    assert numbers["provenance"]["run"]["incidents"] == {"lighterglue": 2, "xfeat": 2}


def test_every_count_of_a_model_is_read():
    assert set(MODEL_COUNTS) == {field.name for field in dataclasses.fields(Counts)}


def test_models_of_an_earlier_configuration_are_not_those_of_the_run():
    log = TopicLog("test", truth(8))
    for name in ("lighterglue", "lightglue-aliked"):
        log.set_diagnostics("models", {"state": "configuring"})
        log.set_diagnostics("models", {"instead": ""})
        log.set_diagnostics(f"model {name}", MODEL)
    log.set_diagnostics("models", {"state": "configuring"})
    log.set_diagnostics("models", {"state": "failed"})  # and it ended
    assert [e.name for e in log.finish().engines] == ["lightglue-aliked"]


@pytest.mark.parametrize("state", ["configuring", "failed"])
def test_a_front_end_that_never_was_configured_is_nothing(state):
    log = TopicLog("test", truth(8))
    log.set_diagnostics("models", {"state": state})
    assert log.nothing_came == "/frontend did not get beyond its configuration: see its log"
    assert log.progress()["active"] == 0
    log.set_diagnostics("models", {"instead": ""})
    assert log.nothing_came == ""


def set_in(table: np.ndarray, **values) -> np.ndarray:
    for name, value in values.items():
        table[name][-1] = value
    return table


@pytest.mark.parametrize(
    ("method", "arguments", "text"),
    [
        ("add_pairs", (T0, "cam", pair(1, 0, 3, 2, status=77)), "77"),
        ("add_pairs", (T0, "cam", pair(1, 0, 3, 2, kind=9)), "9"),
        ("add_pairs", (T0, "cam", pair(1, 0, 3, 4)), "4 inliers of 3"),
        ("add_matches", (T0, "cam", set_in(matches(1, 0, 3, 2), x=np.nan)), "not finite"),
        ("add_matches", (T0, "cam", set_in(matches(1, 0, 3, 2), ref_y=1e30)), "far outside"),
        ("add_matches", (T0, "cam", set_in(matches(1, 0, 3, 2), kf_id=2)), "more than one keyframe"),
        ("add_keyframe", (T0, "cam", set_in(keyframe(1), kf_id=2)), "more than one keyframe"),
        ("add_candidates", (T0, "cam", set_in(np.zeros(2, codecs.CANDIDATES), similarity=np.inf)), "similarity"),
        ("set_diagnostics", ("frames", {"received": "many"}), "frames: received must be a count, got 'many'"),
        ("set_diagnostics", ("map", {"loops_gated": "-1"}), "loops_gated"),
        ("set_diagnostics", ("match", {"faults": "1.5"}), "faults"),
        ("set_diagnostics", ("model x", {"runs": "nan"}), "model x: runs must be a count, got 'nan'"),
        ("set_diagnostics", ("model x", {"runs": "3", "lost": "-1"}), "model x: lost must be a count"),
        ("set_diagnostics", ("model x", {"recovered": "9" * 20}), "recovered"),
    ],
)
def test_foreign_values_are_refused_and_change_nothing(method, arguments, text):
    log = TopicLog("test", truth(8))
    with pytest.raises(DataError, match=text):
        getattr(log, method)(*arguments)
    run = log.finish()
    assert not run.keyframes and not run.pairs and not run.candidates and "nothing came" in run.incomplete


@pytest.mark.slow
def test_the_process_writes_on_sigint_also_without_a_front_end(domain, tmp_path):
    out = tmp_path / "out"
    command = [sys.executable, "-m", "vslam_features.ros.recorder_node", "--ros-args", "-p", f"out:={out}"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while not (out / "progress.json").exists():
        assert process.poll() is None, process.stderr.read()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 1 and "Traceback" not in errors
    assert "nothing came from /frontend: start the front-end" in errors
    numbers = json.loads((out / "metrics.json").read_text())
    assert numbers["frames"] == 0 and numbers["input"]["complete"] is False
    assert numbers["input"]["reason"].startswith("nothing came from /frontend")
    assert "Nothing was processed" in (out / "report.html").read_text()


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({}, "out: give a folder"),
        ({"out": 5}, "out: expected a text (in quotes where it looks like a number"),
        ({"out": "FILE/x"}, "out: cannot make the folder"),
        ({"out": "OUT", "truht": "x"}, "unknown parameter 'truht' (did you mean truth?)"),
        ({"out": "OUT", "exclude_s": 10, "frontend": '"//x y"'}, "cannot subscribe to '//x y/keyframes'"),
    ],
)
def test_wrong_parameters_are_one_line(domain, tmp_path, parameters, text):
    (tmp_path / "file").touch()
    words = {"FILE/x": tmp_path / "file" / "x", "OUT": tmp_path / "out"}
    command = node_command("recorder_node", {n: words.get(v, v) for n, v in parameters.items()})
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and text in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_whoever_publishes_nonsense_the_recorder_lives_and_a_lost_report_is_a_failure(domain, tmp_path):
    out = tmp_path / "out"
    context = rclpy.Context()
    rclpy.init(context=context, domain_id=domain)
    try:
        recorder = RecorderNode(cli_args=["--ros-args", "-p", f"out:={out}"], context=context)
        executor = SingleThreadedExecutor(context=context)
        executor.add_node(recorder)
        clouds = recorder.create_publisher(PointCloud2, "/frontend/pairs", 10)
        statuses = recorder.create_publisher(DiagnosticArray, "/diagnostics", 10)
        end = time.monotonic() + 20
        while not (clouds.get_subscription_count() and statuses.get_subscription_count()):
            assert time.monotonic() < end
            executor.spin_once(timeout_sec=0.02)
        clouds.publish(to_cloud(pair(1, 0, 3, 2, status=77), header(T0, "cam")))
        bad = DiagnosticStatus(name="frontend: frames", values=[KeyValue(key="received", value="many")])
        statuses.publish(DiagnosticArray(status=[bad]))
        while recorder.rejected < 2:
            assert time.monotonic() < end
            executor.spin_once(timeout_sec=0.02)
        recorder.stop()
        assert recorder.failure == ""
        notes = json.loads((out / "metrics.json").read_text())["input"]["notes"]
        assert notes == {"message on /frontend/pairs rejected": 1, "message on /diagnostics rejected": 1}
        shutil.rmtree(out)
        recorder.stop()
        assert f"no report in {out}: " in recorder.failure and "No such file" in recorder.failure
        executor.shutdown()
        recorder.destroy_node()
    finally:
        context.try_shutdown()
