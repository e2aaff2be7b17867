"""What ``doctor`` says of camera topics: with a real publisher, and of what the probe of another graph would find."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
import rclpy
from rclpy.executors import SingleThreadedExecutor
from ros_helpers import BEST_EFFORT, RELIABLE, Process, environment, node_command, sequence
from sensor_msgs.msg import CameraInfo, Image

from vslam_features.cli.doctor_topics import Topics, check_topics, start_probe
from vslam_features.config import Config
from vslam_features.ros.messages import header, image_message

IMAGE, INFO = "/cam/image_raw", "/cam/camera_info"


class Camera:
    """Publishes images and calibration at 10 Hz from a thread, stamped with now plus ``shift_s``."""

    def __init__(self, domain: int, qos=BEST_EFFORT, info=True, shift_s: float = 0.0, size=(320, 240), info_size=None):
        self._context = rclpy.Context()
        rclpy.init(context=self._context, domain_id=domain)
        self._node = rclpy.create_node("camera", context=self._context)
        self._images = self._node.create_publisher(Image, IMAGE, qos)
        self._infos = self._node.create_publisher(CameraInfo, INFO, qos) if info else None
        self._frame, self._shift = sequence(1, size)[0], shift_s
        self._info_size = info_size or size
        self._stop = threading.Event()
        self._executor = SingleThreadedExecutor(context=self._context)
        self._executor.add_node(self._node)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def publish_also(self, topic: str) -> None:
        """Another calibration is there, too."""
        self._others = [self._node.create_publisher(CameraInfo, topic, BEST_EFFORT)]

    def _run(self) -> None:
        K = self._frame.camera.K.ravel().tolist()
        width, height = self._info_size
        while not self._stop.wait(0.1):
            stamp = time.time_ns() + int(self._shift * 1e9)
            self._images.publish(image_message(self._frame.image, stamp, "cam_optical"))
            if self._infos is not None:
                info = CameraInfo(header=header(stamp, "cam_optical"), width=width, height=height, k=K)
                info.distortion_model, info.d = "plumb_bob", [0.0] * 5
                self._infos.publish(info)
            self._executor.spin_once(0)

    def __exit__(self, *_) -> None:
        self._stop.set()
        self._thread.join()
        self._node.destroy_node()
        rclpy.shutdown(context=self._context)


ANY = Topics()


def looked_at(config: Config, topics: Topics = ANY) -> dict[str, tuple[str, str, str]]:
    """Lines by name."""
    probe = start_probe(config, topics)
    try:
        probe.result(60.0)  # a busy machine
        return {c.name: (c.state, c.text, c.fix) for c in check_topics(config, topics, probe)}
    finally:
        probe.end()


SIFT = Config.from_flat({"features.name": "sift"})
RELIABLY = replace(SIFT, image_qos="reliable")


def test_a_good_camera_is_found_by_itself(domain):
    with Camera(domain):
        found = looked_at(SIFT)
    assert set(found) == {"image", "camera_info"}
    state, text, _ = found["image"]
    assert state == "OK" and f"{IMAGE}: 320x240 mono8" in text and "frame 'cam_optical'" in text and " Hz" in text
    state, text, _ = found["camera_info"]
    assert state == "OK" and f"{INFO}: 320x240" in text and "fx 300.0" in text


def test_a_best_effort_camera_and_a_reliable_front_end(domain):
    with Camera(domain, qos=BEST_EFFORT):
        found = looked_at(RELIABLY)
    state, text, fix = found["image"]
    assert state == "FAIL" and "best effort" in text and "image_qos to sensor_data" in fix
    with Camera(domain, qos=RELIABLE):
        assert looked_at(RELIABLY)["image"][0] == "OK"


def test_nobody_publishes(domain):
    assert looked_at(SIFT)["topics"][:2] == (
        "OK", "no other node is up: camera topics are looked at while a camera runs",
    )  # fmt: skip
    state, text, fix = looked_at(SIFT, Topics(image="cam/image"))["topics"]
    assert state == "WARN" and "no other node is up" in text and "ROS_DOMAIN_ID" in fix
    with Camera(domain):
        state, text, fix = looked_at(SIFT, Topics(image="/other/image"))["image"]
    assert state == "WARN" and "/other/image: nobody publishes" in text and "image:=TOPIC" in fix


def test_calibration_that_does_not_fit_or_is_not_there(domain):
    with Camera(domain, info_size=(640, 400)):
        state, text, _ = looked_at(SIFT)["camera_info"]
    assert state == "WARN" and "640" in text and "320" in text
    with Camera(domain, info=False):
        state, text, fix = looked_at(SIFT)["camera_info"]
    assert state == "WARN" and "uncalibrated" in text and "--camera-info-topic" in fix


@pytest.mark.parametrize("shift, said", [(-30.0, "s old"), (20.0, "s ahead of this machine's clock")])
def test_stamps_of_another_clock(shift, said, domain):
    with Camera(domain, shift_s=shift):
        state, text, fix = looked_at(SIFT)["image"]
    assert state == "WARN" and said in text and "exposure" in fix


def test_the_wrong_transport(domain):
    with Camera(domain):
        found = looked_at(replace(SIFT, image_transport="compressed"), Topics(image=IMAGE))
    state, text, fix = found["image"]
    assert state == "FAIL" and "brings sensor_msgs/msg/Image, expected CompressedImage" in text
    assert "image_transport" in fix


def test_of_several_calibrations_the_one_beside_the_image_is_taken(domain):
    with Camera(domain) as camera:
        camera.publish_also("/other/camera_info")
        found = looked_at(SIFT)
    assert found["camera_info"][0] == "OK" and found["camera_info"][1].startswith(INFO)


def test_a_running_front_end_is_asked_which_topics_it_reads(domain, tmp_path):
    """And says in its diagnostics what it lacks: here the calibration."""
    command = node_command("frontend_node", {"features.name": "sift"}, {"image": IMAGE, "camera_info": "/nowhere/info"})
    with Camera(domain, qos=RELIABLE), Process(command, environment(domain, tmp_path / "log"), tmp_path) as node:
        end = time.monotonic() + 60
        while "active with" not in node.output and time.monotonic() < end:
            time.sleep(0.2)
        time.sleep(1.5)  # the diagnostics of a second
        found = looked_at(SIFT)
        assert node.stop() == 0, node.output
    state, text, _ = found["front-end"]
    assert state == "WARN" and "frontend: inputs: no camera_info yet on /nowhere/info" in text
    assert found["image"][0] == "OK" and IMAGE in found["image"][1]
    assert found["camera_info"][:2] == ("WARN", "/nowhere/info: nobody publishes")
