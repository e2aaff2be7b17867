"""What the diagnostics say, in process: each finding while it is true, and no longer."""

import itertools
import logging
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("rclpy")

import rclpy
from builtin_interfaces.msg import Time
from nav_msgs.msg import Odometry
from ros_helpers import sequence
from sensor_msgs.msg import CameraInfo

from vslam_features.config import Config
from vslam_features.frontend import FrontEnd
from vslam_features.health import Counts, Health
from vslam_features.ros.diagnostics import ERROR, OK, WARN, Diagnostics
from vslam_features.ros.frames import FrameBuilder
from vslam_features.ros.inputs import Inputs, Topic
from vslam_features.ros.logs import RosHandler
from vslam_features.ros.messages import header, image_message, stamp_of
from vslam_features.ros.model_diagnostics import ModelDiagnostics
from vslam_features.ros.pairing import Input, Pairing
from vslam_features.ros.poses import InterpolatedPoses
from vslam_features.ros.slot import Slot
from vslam_features.ros.statistics import Statistics
from vslam_features.running_map import MapStatus
from vslam_features.types import Loops, Matches, PairKind, PairResult, Status

MS = 1_000_000


class Bench:
    """Diagnostics of a node without a node. ``said(part)``: level and text of the last second; sets ``values``."""

    def __init__(self):
        self.statistics, self.now = Statistics(), 0.0
        self.pipeline = SimpleNamespace(frames=Slot(), keyframes=Slot())
        self.pairing = Pairing(self.pipeline.frames.put, InterpolatedPoses(), clock=lambda: self.now)
        self.topic = Topic("image", "/image", "reliable")
        self.inputs = SimpleNamespace(
            topics=[self.topic], paused=False, other_body="", publishers=lambda topic: self.publishers
        )
        self.publishers = 1
        self.map = MapStatus()
        self._diagnostics = Diagnostics("frontend", self.statistics, FrontEnd(Config()), lambda: self.map)

    def said(self, part):
        message = self._diagnostics.message(Time(), "active", self.pairing, self.pipeline, self.inputs)
        status = next(s for s in message.status if s.name == f"frontend: {part}")
        self.values = {v.key: v.value for v in status.values}
        return status.level, status.message


def test_qos_is_an_error_while_it_keeps_images_away():
    b = Bench()
    b.topic.arrived()
    b.topic.incompatible = 1
    level, text = b.said("inputs")
    assert level == ERROR and "QoS does not fit" in text
    assert b.said("inputs") == (OK, "receiving")  # a good publisher delivers
    b.topic.last -= 5
    assert "QoS does not fit" in b.said("inputs")[1]
    b.publishers = 0
    level, text = b.said("inputs")
    assert level == ERROR and "QoS" not in text and "check the remapping" in text


def test_losses_are_told_by_their_reason():
    b = Bench()
    b.pairing.add_image(1000 * MS, "image")
    b.pairing.add_image(1000 * MS, "image")
    b.pairing.add_image(900 * MS, "image")
    assert b.said("frames") == (WARN, "2 images dropped: their stamps do not go on from those before")
    b.pairing.add_image(1100 * MS, "image")
    b.now += 1  # both have waited in vain, and go on together
    b.pairing.release()
    text = b.said("frames")[1]
    assert "1 images dropped: complete at once with newer ones" in text and "2 images without a pose" in text
    b.pairing.add_image(1200 * MS, "image")
    assert "1 images dropped: too slow for the image rate" in b.said("frames")[1]
    b.pipeline.frames.take(), b.pipeline.frames.done()
    for ms in (10**12, 10**12 + 100):
        b.pairing.add_image(ms * MS, "image")
    assert b.said("frames")[1].startswith("a gap of 999999999 s between the stamps of two images")
    assert b.said("frames") == (OK, "keeping up")


def test_poses_of_two_frames_are_told():
    b = Bench()
    for i in range(4):
        message = Odometry(header=header(i * 100 * MS, f"odom{i % 2}"))
        message.pose.pose.orientation.w = 1.0
        b.pairing.add_pose(stamp_of(message), message)
    assert b.said("frames") == (WARN, "poses began anew 3 times: another frame_id, or a jump back in time")


def test_a_camera_info_without_calibration_is_told():
    b, frame = Bench(), sequence(1)[0]
    message = image_message(frame.image, frame.stamp_ns, "cam")
    build = FrameBuilder(Config(), "/image", b.statistics)
    assert build(Input(0, frame.stamp_ns, message, CameraInfo(width=320, height=240))).camera is None
    assert b.said("frames") == (WARN, "1 images without calibration: camera_info says uncalibrated (K is 0)")
    assert not b.statistics.stages


@pytest.mark.parametrize(
    ("pose_of", "child", "text"),
    [
        ("camera", "base_link", "poses are of 'base_link', images of 'left_optical': set pose_of to body"),
        ("camera", "left_optical", ""),
        ("camera", "", ""),
        ("body", "base_link", ""),
    ],
)
def test_poses_of_a_body_are_told(domain, pose_of, child, text):
    context = rclpy.Context()
    rclpy.init(context=context)
    node = rclpy.create_node("inputs", context=context)
    config = Config.from_flat({"pose_type": "odometry", "pose_of": pose_of})
    inputs = Inputs(node, config, Pairing(lambda item: None))
    frame = sequence(1)[0]
    inputs._on_pose(0, Odometry(child_frame_id=child))
    assert inputs.other_body == ""  # no image yet
    inputs._on_image(0, image_message(np.zeros_like(frame.image), 0, "left_optical"))
    assert inputs.other_body == text
    inputs.destroy()
    node.destroy_node()
    context.try_shutdown()


def test_rejected_pairs_are_counted_by_their_status():
    b, keyframe = Bench(), None
    statuses = [Status.STOPPED_EARLY] * 3 + [Status.NOT_COVISIBLE]
    pairs = tuple(PairResult(PairKind.LOOP, 9, i, 0, Matches.empty(s)) for i, s in enumerate(statuses))
    b.statistics.loops(Loops(keyframe, pairs=pairs))
    b.statistics.loops(Loops(keyframe, pairs=pairs[:1]))
    assert b.said("verify") == (OK, "not used yet")  # rejections of loop candidates are nothing to worry about
    assert (b.values["status.stopped_early"], b.values["status.not_covisible"]) == ("4", "1")
    b.said("match")
    assert "status.stopped_early" not in b.values


def test_a_fault_in_any_stage_is_told():
    b = Bench()
    for stage in ("keyframe", "judge", "track", "one of tomorrow"):
        b.statistics.fault(stage, "ValueError: a name \udcff")
        assert b.said(stage) == (ERROR, "1 faults, the last: ValueError: a name ?")
        assert b.said(stage) == (OK, "not used yet")


def health(name="xfeat", role="features", linked=True, note="", **counts) -> Health:
    texts = {"sha256": "ab" * 32, "precision": "fp32", "runtime": "onnxruntime", "device": "cpu"}
    return Health(
        role,
        name,
        file=f"{name}.onnx",
        **texts,
        note=note,
        verified="passed on 8 pairs" if linked else "failed: 3 % off",
        linked=linked,
        fallback="ready",
        counts=Counts(**{"runs": 9, **counts}),
        last_fault="NaN in 'scores'",
    )


def said_of(models, *healths, warning=""):
    """{status: (level, message)} of what models say now."""
    messages = [r.message("frontend") for r in models.reports(list(healths), warning)]
    return {m.name.removeprefix("frontend: "): (m.level, m.message) for m in messages}


def test_faults_of_a_model_are_told_once_and_lost_ones_as_errors():
    models = ModelDiagnostics()
    fine = {"models": (OK, "verified"), "model xfeat": (OK, "running on onnxruntime")}
    assert said_of(models, health()) == fine
    recovered = health(runs=12, non_finite=2, errors=1, recovered=3)
    text = "3 runs failed and were repeated on the fallback: NaN in 'scores'"
    assert said_of(models, recovered)["model xfeat"] == (WARN, text)
    assert said_of(models, recovered) == fine
    lost = health(runs=14, non_finite=3, errors=2, recovered=4, lost=1)
    text = "1 runs failed, and no fallback made them good: NaN in 'scores'"
    assert said_of(models, lost)["model xfeat"] == (ERROR, text)
    assert said_of(models, lost) == fine
    agreed = health(runs=15, non_finite=3, errors=2, recovered=4, lost=1, empty_agreed=1)
    assert said_of(models, agreed) == fine, "the fallback found nothing either: no fault"


def test_models_of_one_name_in_two_roles_are_counted_apart():
    models = ModelDiagnostics()
    pair = health(name="m", errors=5, recovered=5), health(name="m", role="matcher")
    levels = [[r.level for r in models.reports(list(pair), "")] for _ in range(2)]
    assert levels == [[OK, WARN, OK], [OK, OK, OK]]


def test_models_that_are_not_what_was_asked_for_warn_all_the_time():
    models = ModelDiagnostics()
    assert said_of(models) == {"models": (OK, "none in use")}
    assert said_of(models, warning="running sift instead") == {"models": (WARN, "running sift instead")}
    for _ in range(2):
        said = said_of(models, health(linked=False), health("lighterglue", "matcher", note="cuda is not there"))
        assert said == {
            "models": (OK, "not all are verified"),
            "model xfeat": (WARN, "runs unverified: failed: 3 % off"),
            "model lighterglue": (WARN, "cuda is not there"),
        }


def test_what_a_model_status_holds():
    report = ModelDiagnostics().reports([health(non_finite=1, lost=1, linked=False)], "")[1].message("frontend")
    values = {v.key: v.value for v in report.values}
    assert values.pop("verified") == "failed: 3 % off" and values.pop("last_fault") == "NaN in 'scores'"
    assert values == {
        "role": "features", "file": "xfeat.onnx", "engine_id": "ab" * 8, "precision": "fp32", "linked": "false",
        "runtime": "onnxruntime", "device": "cpu", "note": "", "fallback": "ready", "runs": "9", "non_finite": "1",
        "errors": "0", "empty": "0", "empty_agreed": "0", "recovered": "0", "lost": "1", "incidents": "0",
    }  # fmt: skip


def test_a_log_record_that_cannot_be_sent_ends_no_thread(monkeypatch):
    heard = []

    def send(text):
        text.encode()
        if "refuse" in text:
            raise RuntimeError("the logger is gone")
        heard.append(text)

    handler = RosHandler(
        SimpleNamespace(error=send, debug=lambda text: text.encode()), clock=itertools.count(0, 10).__next__
    )
    lost = []
    monkeypatch.setattr(handler, "handleError", lost.append)
    log = logging.Logger("test")
    log.addHandler(handler)
    for text in ("\udcff", "refuse"):
        try:
            raise ValueError(text)
        except ValueError:
            log.exception("lost")
    assert heard == ["lost: ValueError: ?"]
    assert len(lost) == 1
