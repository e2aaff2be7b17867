"""Helpers of the ROS tests: synthetic frames, child processes, and a peer that publishes and records."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import cv2
import numpy as np
import rclpy
from diagnostic_msgs.msg import DiagnosticArray
from geometry_msgs.msg import PoseStamped
from rclpy.executors import SingleThreadedExecutor
from rclpy.qos import QoSProfile, ReliabilityPolicy
from sensor_msgs.msg import CameraInfo, CompressedImage, Image, PointCloud2

from vslam_features.camera import Camera
from vslam_features.ros.codecs import read_candidates, read_keyframes, read_matches, read_pairs
from vslam_features.ros.messages import header, image_message, quaternion
from vslam_features.types import Frame, Pose

START_NS = 1_760_000_000_123_456_789
PERIOD_NS = 100_000_007
CLOUDS = {"keyframes": read_keyframes, "loop_candidates": read_candidates, "pairs": read_pairs, "matches": read_matches}
RELIABLE = QoSProfile(depth=100, reliability=ReliabilityPolicy.RELIABLE)
BEST_EFFORT = QoSProfile(depth=100, reliability=ReliabilityPolicy.BEST_EFFORT)


def sequence(count: int = 6, size: tuple[int, int] = (320, 240), blank: tuple[int, ...] = ()) -> list[Frame]:
    """A walk along a textured wall and back, so that the last images see what the first ones saw.

    Poses follow the walk. Images whose number is in ``blank`` are black.
    """
    width, height = size
    rng = np.random.default_rng(7)
    wall = np.zeros((height + 80, width + 60 * count), np.float32)
    for scale in (4, 12, 40):  # blobs of several sizes, as SIFT likes them
        small = rng.random((wall.shape[0] // scale + 2, wall.shape[1] // scale + 2), np.float32)
        wall += cv2.resize(small, wall.shape[::-1], interpolation=cv2.INTER_CUBIC) * scale**0.5
    wall = cv2.normalize(wall, None, 0, 255, cv2.NORM_MINMAX).astype(np.uint8)
    K = np.array([[300, 0, (width - 1) / 2], [0, 300, (height - 1) / 2], [0, 0, 1.0]])
    camera = Camera(width, height, K, rectified=True)
    frames = []
    for i in range(count):
        step = min(i, count - 1 - i)
        x, y = 30 * step, 4 * (i % 3)
        image = np.ascontiguousarray(wall[y : y + height, x : x + width])
        if i in blank:
            image = np.zeros_like(image)
        pose = Pose(np.eye(3), np.array([0.1 * step, 0.0, 0.0]), "odom")
        frames.append(Frame(START_NS + i * PERIOD_NS, "left_optical", image, camera, pose))
    return frames


def environment(domain: int, log_dir: Path) -> dict[str, str]:
    """The whole environment, with DDS on this machine only, in a domain of its own."""
    return {
        **os.environ,
        "ROS_DOMAIN_ID": str(domain),
        "ROS_AUTOMATIC_DISCOVERY_RANGE": "LOCALHOST",
        "RMW_IMPLEMENTATION": "rmw_fastrtps_cpp",
        "ROS_LOG_DIR": str(log_dir),
    }


class Process:
    """A child process with what it wrote; killed at the end of the ``with`` block if it still runs."""

    def __init__(self, command: list[str], env: dict[str, str], folder: Path):
        self._log = folder / f"process-{time.monotonic_ns()}.txt"
        with self._log.open("wb") as log:
            self.popen = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
            self.popen.wait()

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def wait(self, timeout: float = 20) -> int:
        return self.popen.wait(timeout)

    def stop(self, number: int = signal.SIGINT) -> int:
        self.popen.send_signal(number)
        return self.wait()


def node_command(module: str, parameters: dict, remaps: dict | None = None, script: Path | None = None) -> list[str]:
    """The command line of a node, with parameters and remappings."""
    command = [sys.executable, str(script)] if script else [sys.executable, "-m", f"vslam_features.ros.{module}"]
    command.append("--ros-args")
    for name, value in parameters.items():
        value = str(value).lower() if isinstance(value, bool) else value
        command += ["-p", f"{name}:={value}"]
    for old, new in (remaps or {}).items():
        command += ["-r", f"{old}:={new}"]
    return command


class Peer:
    """The other side: publishes frames, records everything the front-end publishes."""

    def __init__(self, domain: int, qos: QoSProfile = RELIABLE, transport: str = "raw"):
        self.context = rclpy.Context()
        rclpy.init(context=self.context, domain_id=domain)
        self.node = rclpy.create_node("peer", context=self.context)
        self.executor = SingleThreadedExecutor(context=self.context)
        self.executor.add_node(self.node)
        self.clouds: dict[str, list[PointCloud2]] = defaultdict(list)
        self.order: list[tuple[str, int]] = []
        self._seen = 0
        self.status: dict[str, object] = {}
        self._transport = transport
        kind, name = (Image, "image") if transport == "raw" else (CompressedImage, "image/compressed")
        self.images = self.node.create_publisher(kind, name, qos)
        self.infos = self.node.create_publisher(CameraInfo, "camera_info", qos)
        self.poses = self.node.create_publisher(PoseStamped, "pose", qos)
        for topic in CLOUDS:
            self.node.create_subscription(
                PointCloud2, f"/frontend/{topic}", lambda m, t=topic: self._cloud(t, m), RELIABLE
            )
        self.node.create_subscription(DiagnosticArray, "/diagnostics", self._diagnostics, 10)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_) -> None:
        self.executor.shutdown()
        self.node.destroy_node()
        self.context.try_shutdown()

    def _cloud(self, topic: str, message: PointCloud2) -> None:
        self.clouds[topic].append(message)
        self.order.append((topic, message.header.stamp.sec * 10**9 + message.header.stamp.nanosec))

    def _diagnostics(self, message: DiagnosticArray) -> None:
        for status in message.status:
            self.status[status.name.removeprefix("frontend: ")] = status

    def value(self, status: str, key: str) -> str:
        """A value of the latest diagnostics, '' where it is not there."""
        values = self.status[status].values if status in self.status else []
        return next((v.value for v in values if v.key == key), "")

    def spin_until(self, condition, timeout: float = 15.0) -> None:
        """Spin until the condition holds; fails the test after the timeout."""
        end = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < end, f"timeout; got {[(k, len(v)) for k, v in self.clouds.items()]}"
            self.executor.spin_once(timeout_sec=0.02)

    def spin(self, seconds: float) -> None:
        """Spin for a while."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.executor.spin_once(timeout_sec=0.02)

    def wait_connected(self, poses: bool = False) -> None:
        """Wait until both directions are matched."""
        wanted = [self.images, self.infos] + [self.poses] * poses
        self.spin_until(
            lambda: (
                all(p.get_subscription_count() for p in wanted)
                and all(self.node.count_publishers(f"/frontend/{t}") for t in CLOUDS)
            )
        )
        self.spin(0.2)

    def publish(
        self, frames: list[Frame], info: bool = True, pose: bool = False, wait_s: float = 10.0, period_s: float = 0.0
    ) -> None:
        """Publish frames as messages, each when the keyframe of the one before is there (or ``wait_s`` has passed).

        So no frame is dropped on a slow machine. ``wait_s`` 0 only keeps the pace of ``period_s``.
        """
        for f in frames:
            if info and f.camera is not None:
                self.infos.publish(info_message(f))
            if pose:
                self.poses.publish(pose_message(f))
            self.images.publish(self._message(f))
            end = time.monotonic() + wait_s
            while ("keyframes", f.stamp_ns) not in self.order[self._seen :] and time.monotonic() < end:
                self.executor.spin_once(timeout_sec=0.02)
            self._seen = len(self.order) if wait_s else self._seen
            self.spin(period_s)

    def _message(self, f: Frame):
        if self._transport == "raw":
            return image_message(f.image, f.stamp_ns, f.frame_id)
        data = cv2.imencode(".png", f.image)[1].tobytes()
        return CompressedImage(header=header(f.stamp_ns, f.frame_id), format="mono8; png compressed ", data=data)

    def wait_keyframes(self, count: int, timeout: float = 15.0) -> None:
        """Wait until all messages of ``count`` keyframes are there."""
        self.spin_until(
            lambda: len(self.clouds["loop_candidates"]) >= count and len(self.clouds["matches"]) >= 2 * count, timeout
        )

    def call(self, kind: type, name: str, request, timeout: float = 5.0):
        """Call a service."""
        client = self.node.create_client(kind, name)
        self.spin_until(client.service_is_ready, timeout)
        future = client.call_async(request)
        self.spin_until(future.done, timeout)
        return future.result()


def info_message(f: Frame) -> CameraInfo:
    """CameraInfo of a frame."""
    K = f.camera.K
    return CameraInfo(
        header=header(f.stamp_ns, f.frame_id),
        width=f.camera.width,
        height=f.camera.height,
        distortion_model="plumb_bob",
        d=[0.0] * 5,
        k=K.ravel().tolist(),
        r=np.eye(3).ravel().tolist(),
        p=np.hstack([K, np.zeros((3, 1))]).ravel().tolist(),
    )


def pose_message(f: Frame) -> PoseStamped:
    """PoseStamped of a frame."""
    message = PoseStamped(header=header(f.stamp_ns, f.pose.frame_id))
    p, q = message.pose.position, message.pose.orientation
    p.x, p.y, p.z = map(float, f.pose.t)
    q.x, q.y, q.z, q.w = map(float, quaternion(f.pose.R))
    return message
