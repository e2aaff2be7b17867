"""What a recorder makes of the published tables, whichever order they come in; and as a process."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("rclpy", reason="needs ROS 2: pip install 'vslam_features[ros]'")

from vslam_features.replay.ground_truth import GroundTruth
from vslam_features.replay.metrics import metrics
from vslam_features.ros import codecs
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


@pytest.mark.slow
def test_the_process_writes_on_sigint_also_without_a_front_end(domain, tmp_path):
    out = tmp_path / "out"
    command = [sys.executable, "-m", "vslam_features.ros.recorder_node", "--ros-args", "-p", f"out:={out}"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while not (out / "progress.json").exists():
        assert process.poll() is None, process.stderr.read()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 0 and "Traceback" not in errors
    assert json.loads((out / "metrics.json").read_text())["frames"] == 0
    assert "Nothing was processed" in (out / "report.html").read_text()


def test_a_missing_folder_parameter_is_named(domain):
    command = [sys.executable, "-m", "vslam_features.ros.recorder_node"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "out: give a folder" in done.stderr + done.stdout
    assert "Traceback" not in done.stderr
