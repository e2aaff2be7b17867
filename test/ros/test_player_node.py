"""The player as a real process: everything arrives, unchanged, at the pace asked for."""

import signal
import time

import numpy as np
import pytest

pytest.importorskip("rclpy")

import cv2
import rclpy
from geometry_msgs.msg import PoseStamped
from rclpy.executors import SingleThreadedExecutor
from ros_helpers import RELIABLE, Process, environment, node_command, sequence
from rosgraph_msgs.msg import Clock
from sensor_msgs.msg import CameraInfo, Image

from vslam_features.replay.bag_writer import Topics, write_bag
from vslam_features.ros.messages import image_array, stamp_of

NAMES = Topics()


class Listener:
    """Records topics in order of arrival."""

    def __init__(self, domain, **topics):
        self.context = rclpy.Context()
        rclpy.init(context=self.context, domain_id=domain)
        self.node = rclpy.create_node("listener", context=self.context)
        self.executor = SingleThreadedExecutor(context=self.context)
        self.executor.add_node(self.node)
        self.got = {name: [] for name in topics}
        for name, (kind, topic) in topics.items():
            self.node.create_subscription(kind, topic, self.got[name].append, RELIABLE)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.executor.shutdown()
        self.node.destroy_node()
        self.context.try_shutdown()

    def spin_while(self, condition, timeout=20):
        end = time.monotonic() + timeout
        while condition():
            assert time.monotonic() < end, {k: len(v) for k, v in self.got.items()}
            self.executor.spin_once(timeout_sec=0.02)


def player(domain, tmp_path, parameters, remaps=None):
    command = node_command("player_node", parameters, remaps)
    return Process(command, environment(domain, tmp_path / "log"), tmp_path)


def test_a_bag_arrives_whole_and_unchanged(domain, tmp_path):
    frames = sequence(8)
    bag = write_bag(tmp_path / "bag", frames)
    topics = {
        "image": (Image, "/renamed"),
        "info": (CameraInfo, NAMES.camera_info),
        "pose": (PoseStamped, "/remapped"),
        "clock": (Clock, "/clock"),
    }
    parameters = {"path": bag, "rate": 4, "image_topic": "renamed"}
    with Listener(domain, **topics) as ear, player(domain, tmp_path, parameters, {NAMES.pose: "/remapped"}) as process:
        ear.spin_while(lambda: process.popen.poll() is None)
        assert process.wait() == 0, process.output
        ear.spin_while(lambda: len(ear.got["image"]) < 8, 5)
        for name in ("image", "info", "pose"):
            assert [stamp_of(m) for m in ear.got[name]] == [f.stamp_ns for f in frames]
        assert all(np.array_equal(image_array(m), f.image) for m, f in zip(ear.got["image"], frames))
        assert [m.pose.position.x for m in ear.got["pose"]] == [f.pose.t[0] for f in frames]
        ticks = [m.clock.sec * 10**9 + m.clock.nanosec for m in ear.got["clock"]]
        assert ticks == sorted(ticks) and {f.stamp_ns for f in frames} <= set(ticks)
        assert max(np.diff(ticks)) <= 20_000_000
    assert "Traceback" not in process.output


def test_loop_pace_and_signal(domain, tmp_path):
    frames = sequence(6)
    bag = write_bag(tmp_path / "bag", frames, storage="sqlite3", compression="zstd")
    with Listener(domain, image=(Image, NAMES.image)) as ear:
        with player(domain, tmp_path, {"path": bag, "loop": True, "qos": "sensor_data"}) as process:
            # best effort does not reach a reliable subscriber: the player says so and waits no longer than told
            ear.spin_while(lambda: "waiting for 1 subscribers" not in process.output)
            assert process.stop(signal.SIGTERM) == 0 and not ear.got["image"]
        with player(domain, tmp_path, {"path": bag, "loop": True}) as process:
            ear.spin_while(lambda: not ear.got["image"])
            start = time.monotonic()
            ear.spin_while(lambda: len(ear.got["image"]) < 12)
            assert 0.9 < time.monotonic() - start < 2.5  # two rounds of 0.5 s
            assert [stamp_of(m) for m in ear.got["image"][:12]] == 2 * [f.stamp_ns for f in frames]
            assert process.stop() == 0
    assert "Traceback" not in process.output


def test_an_image_folder(domain, tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    frames = sequence(4)
    for i, f in zip((1, 2, 10, 11), frames):
        cv2.imwrite(str(folder / f"{i}.png"), f.image)
    start = 1_760_000_000_123_456_789
    parameters = {"path": folder, "fps": 20.0, "start_stamp_ns": start, "frame_id": "left", "image_topic": "/cam/image"}
    with Listener(domain, image=(Image, "/cam/image")) as ear, player(domain, tmp_path, parameters) as process:
        ear.spin_while(lambda: process.popen.poll() is None or len(ear.got["image"]) < 4)
        assert process.wait() == 0
        assert [stamp_of(m) for m in ear.got["image"]] == [start + i * 50_000_000 for i in range(4)]
        assert all(np.array_equal(image_array(m), f.image) for m, f in zip(ear.got["image"], frames))
        assert {m.header.frame_id for m in ear.got["image"]} == {"left"}


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({}, "path: give a recording"),
        ({"path": "/no/such/bag"}, "/no/such/bag: no such file or folder"),
        ({"path": "BAG", "rate": -1.0}, "rate: expected a positive number"),
        ({"path": "BAG", "topics": "[/depth]"}, "no topic /depth; there are: /camera/camera/infra1/camera_info"),
        ({"path": "BAG", "lop": True}, "unknown parameter 'lop' (did you mean loop?); known: path, rate, loop"),
        ({"path": "BAG", "rate": "[]"}, "rate: expected a number, got nothing"),
        ({"path": "BAG", "topics": "[1]"}, "topics: expected a list of texts, got [1]"),
        (
            {"path": "BAG", "image_topic": '"//x y"', "topics": "[/camera/camera/infra1/image_rect_raw]"},
            "cannot publish on '//x y'",
        ),
        ({"path": "BAG", "wait_s": 0.3}, "nobody subscribed to /camera/camera/infra1/image_rect_raw within 0.3 s"),
    ],
)
def test_errors_are_one_line_and_exit_1(domain, tmp_path, parameters, text):
    if parameters.get("path") == "BAG":
        parameters = {**parameters, "path": write_bag(tmp_path / "bag", sequence(2))}
    with player(domain, tmp_path, parameters) as process:
        assert process.wait() == 1
    fatal = [line for line in process.output.splitlines() if "FATAL" in line]
    assert len(fatal) == 1 and text in fatal[0], process.output
    assert "Traceback" not in process.output


def test_those_who_subscribed_are_counted(domain, tmp_path):
    bag = write_bag(tmp_path / "bag", sequence(2))
    parameters = {"path": bag, "topics": "[]", "min_subscribers": 2, "wait_s": 3}
    with Listener(domain, image=(Image, NAMES.image)), player(domain, tmp_path, parameters) as process:
        assert process.wait() == 1
    assert f"only 1 subscribed to {NAMES.image} within 3 s (2 wanted)" in process.output, process.output


def test_a_damaged_bag_is_a_failure(domain, tmp_path):
    bag = write_bag(tmp_path / "bag", sequence(6))
    file = next(bag.glob("*.mcap"))
    file.write_bytes(file.read_bytes()[: file.stat().st_size * 2 // 3])
    with player(domain, tmp_path, {"path": bag, "min_subscribers": 0, "start_delay_s": 0, "rate": 100}) as process:
        assert process.wait() == 1
    assert "damaged" in process.output and "Traceback" not in process.output
