"""The front-end node as a real process, over DDS."""

import dataclasses
import os
import signal
import sys
import time
from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("rclpy")

from lifecycle_msgs.msg import Transition
from lifecycle_msgs.srv import ChangeState
from rcl_interfaces.msg import Parameter, ParameterValue
from rcl_interfaces.srv import SetParameters
from ros_helpers import (
    BEST_EFFORT,
    CLOUDS,
    RELIABLE,
    START_NS,
    Peer,
    Process,
    environment,
    info_message,
    node_command,
    sequence,
)
from sensor_msgs.msg import CameraInfo, Image
from std_srvs.srv import SetBool, Trigger
from visualization_msgs.msg import Marker, MarkerArray

from vslam_features.config import Config
from vslam_features.frontend import FrontEnd
from vslam_features.ros import codecs
from vslam_features.ros.markers import Markers
from vslam_features.ros.messages import header, image_message, stamp_of
from vslam_features.ros.outputs import Outputs
from vslam_features.types import PairKind, Pose, Status

PARAMETERS = {
    "features.name": "sift",
    "features.max_keypoints": 400,
    "keyframes.every": 1,
    "retrieval.exclude_s": 0.25,
    "rectified": "yes",
}


@contextmanager
def node(domain, tmp_path, parameters=None, script=None):
    command = node_command("frontend_node", {**PARAMETERS, **(parameters or {})}, script=script)
    with Process(command, environment(domain, tmp_path / "log"), tmp_path) as process:
        yield process


def core_tables(frames, parameters=None):
    """What the core computes from the same frames: {topic: [table, ...]} in order."""
    frontend = FrontEnd(Config.from_flat({**PARAMETERS, **(parameters or {})}))
    out = {topic: [] for topic in CLOUDS}
    for frame in frames:
        if frontend.config.pose_type == "none":
            frame = dataclasses.replace(frame, pose=None)
        tracked, loops = frontend.process(frame)
        for result in (tracked, loops):
            out["pairs"].append(codecs.pairs_table(result.pairs))
            out["matches"].append(codecs.matches_table(result.pairs, lambda i: frontend.keyframes[i]))
        out["keyframes"].append(codecs.keyframe_table(tracked.keyframe))
        out["loop_candidates"].append(codecs.candidates_table(loops.candidates))
    return out


def by_stamp(peer, topic):
    """Tables in the order of the core: by keyframe, track before loops."""
    return [CLOUDS[topic](m) for m in sorted(peer.clouds[topic], key=stamp_of)]


def assert_equal_to_core(peer, frames, parameters=None):
    for topic, wanted in core_tables(frames, parameters).items():
        got = by_stamp(peer, topic)
        assert len(got) == len(wanted), topic
        for a, b in zip(got, wanted):
            assert a.tobytes() == b.tobytes(), topic


@pytest.mark.parametrize(
    ("qos", "transport", "asked"),
    [(BEST_EFFORT, "raw", "sensor_data"), (RELIABLE, "raw", "sensor_data"), (RELIABLE, "compressed", "reliable")],
)
def test_all_clouds_equal_the_core(domain, tmp_path, qos, transport, asked):
    """Also: stamps and frame ids to the nanosecond, order of messages, empty pairs, counts."""
    frames = sequence(6, blank=(2,))
    parameters = {"image_transport": transport, "image_qos": asked}
    with node(domain, tmp_path, parameters) as process, Peer(domain, qos, transport) as peer:
        peer.wait_connected()
        peer.publish(frames)
        peer.wait_keyframes(6)
        stamps = [f.stamp_ns for f in frames]
        for topic, clouds in peer.clouds.items():
            repeat = 2 if topic in ("pairs", "matches") else 1
            assert sorted(map(stamp_of, clouds)) == sorted(repeat * stamps), topic
            assert {c.header.frame_id for c in clouds} == {"left_optical"}
        for stamp in stamps:
            order = [topic for topic, s in peer.order if s == stamp]
            # between topics DDS promises no order, within one it does
            assert Counter(order) == Counter(["keyframes", "loop_candidates"] + 2 * ["pairs", "matches"])
        assert_equal_to_core(peer, frames, parameters)
        pairs = np.concatenate(by_stamp(peer, "pairs"))
        empty = pairs[pairs["status"] == Status.NO_KEYPOINTS]
        assert {(1, 2), (2, 3)} <= {tuple(sorted((int(p["kf_id"]), int(p["ref_kf_id"])))) for p in empty}
        assert not empty["num_matches"].any() and np.isnan(empty["qw"]).all()
        assert (pairs["kind"] == PairKind.LOOP).any()
        peer.spin_until(lambda: peer.value("frames", "processed") == "6")
        counts = {k: peer.value("frames", k) for k in ("received", "dropped", "waiting", "missing", "uncalibrated")}
        assert counts == {"received": "6", "dropped": "0", "waiting": "0", "missing": "0", "uncalibrated": "0"}
        assert process.stop() == 0
    assert "Traceback" not in process.output


@pytest.mark.slow
def test_a_bag_played_twice_gives_the_same_twice(domain, tmp_path):
    """And poses: interpolated, without_pose, markers in their frame."""
    frames = sequence(6)
    with node(domain, tmp_path, {"pose_type": "pose"}) as process, Peer(domain) as peer:
        markers = []
        peer.node.create_subscription(MarkerArray, "/frontend/markers", markers.append, RELIABLE)
        peer.wait_connected(poses=True)
        peer.publish(frames, pose=True)
        peer.wait_keyframes(6)
        assert_equal_to_core(peer, frames, {"pose_type": "pose"})
        first = {topic: [t.tobytes() for t in by_stamp(peer, topic)] for topic in CLOUDS}
        peer.clouds.clear()
        peer.publish(frames[:1], pose=True, wait_s=0, period_s=0.2)  # held until the next one confirms the jump
        peer.publish(frames[1:], pose=True)
        peer.wait_keyframes(6)
        assert {topic: [t.tobytes() for t in by_stamp(peer, topic)] for topic in CLOUDS} == first
        peer.spin_until(lambda: peer.value("frames", "processed") == "12")
        assert (peer.value("frames", "resets"), peer.value("frames", "without_pose")) == ("1", "0")
        assert peer.value("map", "keyframes") == "6"

        def drawn():  # at most once a second, so it may be one message or several
            last = {m.ns: m for m in markers[-1].markers if m.action == Marker.ADD} if markers else {}
            return "keyframes" in last and len(last["keyframes"].points) == 6 and last

        peer.spin_until(drawn)
        assert {m.header.frame_id for m in drawn().values()} == {"odom"}
        assert process.stop(signal.SIGTERM) == 0
    assert "Traceback" not in process.output


@pytest.mark.slow
def test_services_and_match_image(domain, tmp_path):
    frames = sequence(8)
    with node(domain, tmp_path) as process, Peer(domain) as peer:
        pictures = []
        peer.node.create_subscription(Image, "/frontend/match_image", pictures.append, RELIABLE)
        peer.wait_connected()
        peer.publish(frames[:2])
        peer.wait_keyframes(2)
        peer.spin_until(lambda: pictures)
        assert pictures[-1].encoding == "rgb8" and stamp_of(pictures[-1]) in (START_NS, frames[1].stamp_ns)

        assert peer.call(SetBool, "/frontend/pause", SetBool.Request(data=True)).success
        peer.publish(frames[2:4], wait_s=0, period_s=0.1)
        assert peer.call(SetBool, "/frontend/pause", SetBool.Request(data=False)).success
        peer.publish(frames[4:6])
        peer.wait_keyframes(4)
        assert [t["kf_id"][0] for t in by_stamp(peer, "keyframes")] == [0, 1, 2, 3]

        answer = peer.call(Trigger, "/frontend/reset", Trigger.Request())
        assert answer.success and "4 keyframes" in answer.message
        peer.publish(frames[6:])
        peer.wait_keyframes(6)
        assert [t["kf_id"][0] for t in by_stamp(peer, "keyframes")] == [0, 1, 2, 3, 0, 1]
        peer.spin_until(lambda: peer.value("frames", "processed") == "6")
        assert (peer.value("frames", "resets"), peer.value("frames", "missing")) == ("1", "0")
        assert process.stop() == 0


@pytest.mark.slow
def test_bad_inputs_are_counted_and_shown(domain, tmp_path):
    """No camera_info, then one that does not fit; a broken image; bad order; a missing image."""
    frames = sequence(12)
    with node(domain, tmp_path) as process, Peer(domain) as peer:
        peer.wait_connected()
        peer.spin_until(
            lambda: "no camera_info yet on /camera_info" in getattr(peer.status.get("inputs"), "message", "")
        )
        peer.publish(frames[:1], info=False)
        peer.spin(0.5)  # the first image waits for a calibration
        peer.publish(frames[1:6], info=False)
        peer.wait_keyframes(6)
        for f in (frames[6], frames[2]):  # the second is older than the last image
            peer.infos.publish(
                CameraInfo(header=header(f.stamp_ns, "c"), width=9, height=9, k=[1.0, 0, 4, 0, 1, 4, 0, 0, 1])
            )
            peer.spin(0.1)  # nothing waits for it here, so it must come first
            peer.images.publish(image_message(f.image, f.stamp_ns, f.frame_id))
            peer.spin(0.2)
        broken = image_message(frames[7].image, frames[7].stamp_ns, "cam")
        broken.step = 1
        peer.images.publish(broken)
        peer.spin(0.7)  # it waits for a calibration, since the one before came with one
        peer.infos.publish(info_message(frames[9]))
        peer.spin(0.1)
        peer.publish(frames[9:10], info=False)
        peer.wait_keyframes(8)
        peer.spin_until(lambda: peer.value("frames", "processed") == "9")
        values = {
            k: peer.value("frames", k) for k in ("received", "dropped", "out_of_order", "missing", "uncalibrated")
        }
        assert values == {"received": "10", "dropped": "1", "out_of_order": "1", "missing": "1", "uncalibrated": "7"}
        assert "step 1 is too small" in peer.value("decode", "last_fault")
        assert peer.value("decode", "faults") == "1"
        assert int(peer.value("camera", "faults")) >= 1 and "P is zero" in peer.value("camera", "last_fault")
        assert process.stop() == 0
    assert "Traceback" not in process.output


def test_incompatible_qos_and_silence_are_shown(domain, tmp_path):
    with node(domain, tmp_path, {"image_qos": "reliable"}) as process, Peer(domain, BEST_EFFORT) as peer:

        def shown(*texts):
            status = peer.status.get("inputs")
            return status is not None and status.level == b"\x02" and all(t in status.message for t in texts)

        peer.spin_until(lambda: shown("QoS does not fit", "nothing for", "/image"))
        assert int(peer.value("inputs", "image.incompatible_qos")) >= 1
        assert process.stop() == 0
    assert "set image_qos to sensor_data" in process.output


FAULTY = """
import sys
from vslam_features.ros import frontend_node, process

class Faulty(frontend_node.FrontEndNode):
    def _make_frontend(self, config):
        frontend = super()._make_frontend(config)
        extract, match, seen = frontend.features.extract, frontend.matcher.match, []
        def failing_extract(frame):
            seen.append(frame)
            if len(seen) == 2:
                raise RuntimeError("injected into describe")
            return extract(frame)
        def failing_match(*args, **overlapping):
            if len(seen) == 4:
                raise RuntimeError("injected into match")
            return match(*args, **overlapping)
        frontend.features.extract, frontend.matcher.match = failing_extract, failing_match
        return frontend

sys.exit(process.run(Faulty, "frontend"))
"""


@pytest.mark.slow
def test_a_fault_in_a_stage_costs_one_result(domain, tmp_path):
    script = tmp_path / "faulty.py"
    script.write_text(FAULTY)
    with node(domain, tmp_path, script=script) as process, Peer(domain) as peer:
        peer.wait_connected()
        peer.publish(sequence(6), wait_s=1.0)
        peer.wait_keyframes(5)
        peer.spin_until(lambda: peer.value("frames", "processed") == "6")
        assert (peer.value("describe", "faults"), peer.value("match", "faults")) == ("1", "1")
        assert peer.value("describe", "last_fault") == "RuntimeError: injected into describe"
        pairs = np.concatenate(by_stamp(peer, "pairs"))
        track = pairs[pairs["kind"] == PairKind.TRACK]
        assert track["status"].tolist() == [0, Status.BACKEND_ERROR, 0, 0]
        assert process.stop() == 0
    assert "injected into describe" in process.output and "Traceback" not in process.output


@pytest.mark.parametrize(
    ("parameters", "texts"),
    [
        ({"features.name": "superpoint"}, ["features.name", "superpoint", "orb, sift"]),
        ({"keyframes.evry": 2}, ["unknown parameter 'keyframes.evry' (did you mean keyframes.every"]),
        (
            {"retrieval.top_k": 0, "image_qos": "best", "geometry.threshold_px": "one"},
            ["retrieval.top_k: 0 is outside", "sensor_data, reliable", "geometry.threshold_px: expected float"],
        ),
        ({"map_path": "/no/such/folder/a.vmap"}, ["map_path", "/no/such/folder", "create it"]),
        ({"sync": "approximate", "pose_type": "pose"}, ["ros-$ROS_DISTRO-message-filters"]),
    ],
)
def test_configure_fails_with_the_choices_in_one_line(domain, tmp_path, parameters, texts):
    if "sync" in parameters:
        try:
            import message_filters  # noqa: F401
        except ImportError:
            pass
        else:
            pytest.skip("message_filters is installed")
    with node(domain, tmp_path, parameters) as process:
        assert process.wait() == 1
        lines = [line for line in process.output.splitlines() if line.strip()]
    assert len(lines) == 1 and "configure failed" in lines[0], lines
    assert all(text in lines[0] for text in texts), lines


def test_a_missing_parameter_file_is_named(domain, tmp_path):
    command = [sys.executable, "-m", "vslam_features.ros.frontend_node", "--ros-args", "--params-file", "/no/such.yaml"]
    with Process(command, environment(domain, tmp_path), tmp_path) as process:
        assert process.wait() == 1
    assert "/no/such.yaml" in process.output and "Traceback" not in process.output


@pytest.mark.parametrize(
    ("code", "arguments", "text"),
    [
        ("frontend_node as n; n.main()", ["-p", "features.name:=[]"], "a parameter was given without a value"),
        ("frontend_node as n; n.main()", ["--foo"], "unknown ROS arguments: ['--foo']"),
        ("process; process.run(lambda: process.rclpy.create_node('x y'), 'x')", [], "Invalid node name"),
        ("process; process.run(lambda: open('/no/such'), 'x')", [], "No such file or directory: '/no/such'"),
    ],
)
def test_wrong_arguments_end_it_with_one_line(domain, tmp_path, code, arguments, text):
    code = f"import sys; from vslam_features.ros import {code.replace('; ', '; sys.exit(')})"
    command = [sys.executable, "-W", "ignore", "-c", code, "--ros-args", *arguments]
    with Process(command, environment(domain, tmp_path / "log"), tmp_path) as process:
        assert process.wait() == 1
    lines = [line for line in process.output.splitlines() if "[rcl]" not in line]
    assert len(lines) == 1 and text in lines[0], lines


def test_further_signals_while_it_ends_change_nothing(domain, tmp_path):
    with node(domain, tmp_path) as process, Peer(domain) as peer:
        peer.wait_connected()
        while process.popen.poll() is None:
            process.popen.send_signal(signal.SIGINT)
            time.sleep(0.005)
        assert process.wait() == 0
    assert "Traceback" not in process.output, process.output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_it_cleanly_while_it_works(domain, tmp_path, number):
    with node(domain, tmp_path) as process, Peer(domain) as peer:
        peer.wait_connected()
        peer.publish(sequence(4), wait_s=0, period_s=0.02)
        start = time.monotonic()
        assert process.stop(number) == 0
        assert time.monotonic() - start < 5
    assert "Traceback" not in process.output and "rror" not in process.output, process.output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("entry", ["frontend", "player", "recorder"])
def test_a_signal_during_the_imports_ends_cleanly(tmp_path, number, entry):
    code = (
        "import importlib, os, sys; from vslam_features.ros import entry;"
        f"importlib.import_module = lambda name: os.kill(os.getpid(), {int(number)});"
        f"sys.exit(entry.{entry}())"
    )
    with Process([sys.executable, "-c", code], dict(os.environ), tmp_path) as process:
        assert process.wait() == 0
    assert not process.output


def remote(peer):
    """change(transition) and set_parameter(name, value) of the node."""

    def change(transition):
        request = ChangeState.Request(transition=Transition(id=transition))
        return peer.call(ChangeState, "/frontend/change_state", request).success

    def set_parameter(name, value):
        kinds = {str: (4, "string_value"), int: (2, "integer_value"), float: (3, "double_value")}
        kind, field = kinds[type(value)]
        parameter = Parameter(name=name, value=ParameterValue(type=kind, **{field: value}))
        answer = peer.call(SetParameters, "/frontend/set_parameters", SetParameters.Request(parameters=[parameter]))
        return answer.results[0]

    return change, set_parameter


def test_a_failed_activation_is_told_and_leaves_it_configured(domain, tmp_path):
    """With autostart, too, where only failures of the start itself are left to the one line at the end."""
    with node(domain, tmp_path) as process, Peer(domain) as peer:
        change, set_parameter = remote(peer)
        peer.wait_connected()
        peer.publish(sequence(1))
        peer.wait_keyframes(1)
        assert change(Transition.TRANSITION_DEACTIVATE)
        assert set_parameter("map_path", "/no/such/folder/a.vmap").successful
        assert not change(Transition.TRANSITION_ACTIVATE)
        assert "activate failed: map_path: the folder /no/such/folder does not exist" in process.output
        peer.status.clear()
        peer.spin_until(lambda: (peer.value("inputs", "state"), peer.value("map", "keyframes")) == ("inactive", "1"))
        assert set_parameter("map_path", "").successful
        assert change(Transition.TRANSITION_ACTIVATE)
        peer.spin_until(lambda: (peer.value("inputs", "state"), peer.value("map", "keyframes")) == ("active", "1"))
        assert process.stop() == 0
    assert "Traceback" not in process.output


def test_lifecycle_and_parameters(domain, tmp_path):
    """unconfigured -> wrong parameter -> corrected -> active -> changes refused -> inactive -> changed -> active."""
    parameters = {"autostart": False, "features.name": "surf"}
    with node(domain, tmp_path, parameters) as process, Peer(domain) as peer:
        change, set_parameter = remote(peer)
        assert not change(Transition.TRANSITION_CONFIGURE)
        assert "surf" in process.output
        result = set_parameter("features.name", "surf2")
        assert not result.successful and "orb, sift" in result.reason
        assert set_parameter("features.name", "orb").successful
        assert set_parameter("geometry.threshold_px", 2).successful  # an int where a float is meant
        result = set_parameter("keyframes.every", -1)
        assert not result.successful
        assert change(Transition.TRANSITION_CONFIGURE)
        assert change(Transition.TRANSITION_ACTIVATE)
        result = set_parameter("features.options.levels", 4)
        assert not result.successful and "deactivate" in result.reason
        frames = sequence(4)
        peer.wait_connected()
        peer.publish(frames[:2])
        peer.wait_keyframes(2)
        assert change(Transition.TRANSITION_DEACTIVATE)
        assert set_parameter("features.options.levels", 4).successful
        peer.publish(frames[2:3], wait_s=0, period_s=0.1)
        assert change(Transition.TRANSITION_ACTIVATE)
        peer.wait_connected()
        peer.publish(frames[3:])
        peer.wait_keyframes(3)
        parameters = {"features.name": "orb", "geometry.threshold_px": 2.0, "features.options.levels": 4}
        wanted = core_tables(frames[3:], parameters)["keyframes"][0]
        assert by_stamp(peer, "keyframes")[-1].tobytes() == wanted.tobytes()
        assert change(Transition.TRANSITION_DEACTIVATE)
        assert change(Transition.TRANSITION_CLEANUP)
        assert not peer.node.count_publishers("/frontend/pairs") or peer.spin(1) is None
        assert change(Transition.TRANSITION_CONFIGURE)
        assert change(Transition.TRANSITION_INACTIVE_SHUTDOWN)
        assert process.stop() == 0
    assert "Traceback" not in process.output


def marker_keyframe(i):
    return SimpleNamespace(stamp_ns=i, pose=Pose(np.eye(3), np.array([i, 0.0, 0.0]), "odom"))


def test_many_markers_hold_no_thread_up():
    markers = Markers()
    for i in range(20_000):
        markers.add_keyframe(marker_keyframe(i))
    held, lock = [], markers._lock

    class Watch:
        def __enter__(self):
            lock.acquire()
            self.start = time.perf_counter()

        def __exit__(self, *_):
            held.append(time.perf_counter() - self.start)
            lock.release()

    markers._lock = Watch()
    message = markers.message()
    assert len(held) == 1 and held[0] < 0.05  # a copy of each point took 0.3 s
    markers.add_keyframe(marker_keyframe(20_000))
    assert {m.ns: (len(m.points), m.scale.x) for m in message.markers} == {
        "path": (20_000, 0.02),
        "keyframes": (20_000, pytest.approx(0.06)),
    }
    assert len(markers.message().markers[0].points) == 20_001 and markers.message() is None
    markers.clear()
    assert [m.action for m in markers.message().markers] == [Marker.DELETEALL]


class OldNode:
    """As of Humble and Jazzy: no destroy_lifecycle_publisher."""

    def __init__(self):
        self._managed_entities, self.messages, self.subscribers = set(), [], 0

    def create_lifecycle_publisher(self, kind, name, qos):
        publisher = FakePublisher(publish=self.messages.append, get_subscription_count=lambda: self.subscribers)
        self._managed_entities.add(publisher)
        return publisher

    def destroy_publisher(self, publisher):
        pass


class FakePublisher(SimpleNamespace):
    __hash__ = object.__hash__


def test_markers_are_made_for_subscribers_only_and_publishers_leave_nothing():
    node = OldNode()
    outputs = Outputs(node)
    for i in range(2):
        outputs._markers.add_keyframe(marker_keyframe(i))
    outputs.publish_markers()
    assert not node.messages
    node.subscribers = 1  # it comes late, and gets all
    outputs.publish_markers(), outputs.publish_markers()
    assert [len(m.markers[0].points) for m in node.messages] == [2]
    node.subscribers = 0
    outputs._markers.add_keyframe(marker_keyframe(2))
    outputs.publish_markers(unheard=True)
    assert len(node.messages[-1].markers[0].points) == 3
    outputs.destroy()
    assert not node._managed_entities
