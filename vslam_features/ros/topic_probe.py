"""Child of ``doctor``: what is published on the camera topics, and what one message of each is worth.

Only looks: it publishes nothing, and leaves no parameter services in the graph.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass, field

MESSAGES = (
    "builtin_interfaces diagnostic_msgs geometry_msgs lifecycle_msgs nav_msgs rcl_interfaces rosgraph_msgs sensor_msgs "
    "std_msgs std_srvs visualization_msgs"
).split()  # of package.xml
KINDS = {
    "sensor_msgs/msg/Image": "image",
    "sensor_msgs/msg/CompressedImage": "image",
    "sensor_msgs/msg/CameraInfo": "camera_info",
    "geometry_msgs/msg/PoseStamped": "pose",
    "nav_msgs/msg/Odometry": "pose",
}
_INTERNAL = ("doctor_probe", "_ros2cli")


def main() -> int:
    """The question and the answer are JSON, as ``cli/doctor_child.py`` has them."""
    print(json.dumps(_answer(json.loads(sys.argv[1]))), flush=True)
    return 0


def _answer(asked: dict) -> dict:
    """Question: ``node``, ``topics`` (label -> name, empty: find it), ``pose_type``, ``compressed``, ``reliable``,
    ``rectified``, ``discovery_s``, ``listen_s``, ``max_value``.
    """
    with tempfile.TemporaryDirectory() as logs:
        os.environ.setdefault("ROS_LOG_DIR", logs)
        try:
            import rclpy
        except Exception as error:  # ImportError, and what libraries of another ROS raise
            return {"import_error": f"{type(error).__name__}: {error}"}
        facts: dict = {"missing": [name for name in MESSAGES if not _imported(f"{name}.msg", f"{name}.srv")]}
        if facts["missing"]:
            return facts
        try:
            rclpy.init(args=[])
            node = rclpy.create_node(
                f"{_INTERNAL[0]}_{os.getpid()}", start_parameter_services=False, enable_rosout=False
            )
        except Exception as error:  # RCLError has no public name in all distributions
            return {**facts, "init_error": " ".join(str(error).split())}
        try:
            return {**facts, "rmw": rclpy.get_rmw_implementation_identifier(), **_Probe(rclpy, node, asked).facts()}
        finally:
            rclpy.shutdown()


def _imported(*names: str) -> bool:
    for name in names:
        try:
            importlib.import_module(name)
            return True
        except ImportError:
            continue
    return False


@dataclass
class _Heard:
    """Messages of a topic: arrivals in monotonic seconds, stamps in nanoseconds, the last message."""

    arrivals: list[float] = field(default_factory=list)
    stamps: list[int] = field(default_factory=list)
    ages_s: list[float] = field(default_factory=list)
    last: object = None


class _Probe:
    def __init__(self, rclpy, node, asked: dict):
        self._rclpy, self._node, self._asked = rclpy, node, asked

    def facts(self) -> dict:
        """Who is there, and what each topic brings."""
        self._spin(self._asked["discovery_s"], until=self._anybody)
        frontends = [n for n in self._others() if n.rpartition("/")[2] == self._asked["node"]]
        chosen = self._chosen(frontends[0] if frontends else "")
        heard = {label: self._listen(label, name) for label, name in chosen.items() if name}
        states = self._states(frontends)
        publishing = any(self._publishers(name) for name in chosen.values() if name)
        self._spin(self._asked["listen_s"] if publishing or frontends else 0.5)
        return {
            "nodes": self._others(),
            "frontends": frontends,
            "statuses": states,
            "clock": self._node.count_publishers("/clock"),
            "images": [n for n, kinds in self._topics() if KINDS.get(kinds[0]) == "image" and self._publishers(n)],
            "topics": {label: self._topic(label, chosen, found, heard) for label, found in heard.items()},
        }

    def _spin(self, seconds: float, until=lambda: False) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not until():
            self._rclpy.spin_once(self._node, timeout_sec=0.05)

    def _others(self) -> list[str]:
        found = {f"{space.rstrip('/')}/{name}" for name, space in self._node.get_node_names_and_namespaces()}
        return sorted(n for n in found if not n.rpartition("/")[2].startswith(_INTERNAL))

    def _anybody(self) -> bool:
        """Somebody is there, and was given the time to name its topics."""
        if not self._others():
            return False
        self._spin(0.7)
        return True

    def _topics(self) -> list[tuple[str, list[str]]]:
        return [(name, kinds) for name, kinds in self._node.get_topic_names_and_types() if kinds]

    def _publishers(self, name: str) -> int:
        return self._node.count_publishers(name)

    def _chosen(self, frontend: str) -> dict[str, str]:
        """Label -> topic: what was asked for, else what the running front-end reads, else what there is one of."""
        chosen = {label: name for label, name in self._asked["topics"].items()}
        read = []
        if frontend:
            space, _, name = frontend.rpartition("/")
            read = self._node.get_subscriber_names_and_types_by_node(name, space or "/")
        for found in (read, [t for t in self._topics() if self._publishers(t[0])]):
            for label in [label for label, name in chosen.items() if not name]:
                names = [n for n, kinds in found if KINDS.get(kinds[0]) == label and self._right_kind(kinds[0], label)]
                beside = f"{chosen['image'].rpartition('/')[0]}/camera_info"
                if label == "camera_info" and len(names) > 1 and beside in names:  # of several cameras
                    names = [beside]
                if len(names) == 1:
                    chosen[label] = names[0]
        return chosen

    def _right_kind(self, kind: str, label: str) -> bool:
        if label == "image":
            return ("Compressed" in kind) == self._asked["compressed"]
        return label != "pose" or ("Odometry" in kind) == (self._asked["pose_type"] == "odometry")

    def _listen(self, label: str, name: str) -> _Heard:
        from geometry_msgs.msg import PoseStamped
        from nav_msgs.msg import Odometry
        from rclpy.qos import QoSProfile, ReliabilityPolicy
        from sensor_msgs.msg import CameraInfo, CompressedImage, Image

        from .messages import stamp_of

        kinds = {
            "image": CompressedImage if self._asked["compressed"] else Image,
            "camera_info": CameraInfo,
            "pose": Odometry if self._asked["pose_type"] == "odometry" else PoseStamped,
        }
        heard = _Heard()

        def arrived(message) -> None:
            heard.arrivals.append(time.monotonic())
            heard.stamps.append(stamp_of(message))
            heard.ages_s.append(time.time() - stamp_of(message) / 1e9)
            heard.last = message

        reliability = ReliabilityPolicy.RELIABLE if self._asked["reliable"] else ReliabilityPolicy.BEST_EFFORT
        qos = QoSProfile(depth=10, reliability=reliability)
        self._node.create_subscription(kinds[label], name, arrived, qos)
        return heard

    def _states(self, frontends: list[str]) -> dict[str, list]:
        """Status name -> [level, message], filled while listening: what a running front-end says of itself."""
        from diagnostic_msgs.msg import DiagnosticArray

        states: dict[str, list] = {}

        def arrived(message) -> None:
            for status in message.status:
                if any(status.name.startswith(f"{f.strip('/')}: ") for f in frontends):
                    states[status.name] = [int.from_bytes(status.level, "little"), status.message]

        if frontends:
            self._node.create_subscription(DiagnosticArray, "/diagnostics", arrived, 10)
        return states

    def _topic(self, label: str, chosen: dict[str, str], found: _Heard, heard: dict[str, _Heard]) -> dict:
        name = chosen[label]
        offers = self._node.get_publishers_info_by_topic(name)
        facts = {
            "name": name,
            "publishers": len(offers),
            "types": sorted({offer.topic_type for offer in offers}),
            "best_effort": sum(offer.qos_profile.reliability.name == "BEST_EFFORT" for offer in offers),
            "received": len(found.arrivals),
            "expected": self._expected(label),
        }
        if len(found.arrivals) > 1:
            facts["rate_hz"] = (len(found.arrivals) - 1) / max(1e-9, found.arrivals[-1] - found.arrivals[0])
        if found.last is not None:
            backward = sum(b <= a for a, b in zip(found.stamps, found.stamps[1:]))
            ages = sorted(found.ages_s)
            facts |= {"stamp_ns": found.stamps[-1], "age_s": ages[len(ages) // 2], "backward": backward}
            facts |= {"frame_id": found.last.header.frame_id, **self._worth(label, chosen["image"], found.last, heard)}
        return facts

    def _expected(self, label: str) -> str:
        kind = {"image": "CompressedImage" if self._asked["compressed"] else "Image", "camera_info": "CameraInfo"}
        return kind.get(label) or ("Odometry" if self._asked["pose_type"] == "odometry" else "PoseStamped")

    def _worth(self, label: str, image_topic: str, message, heard: dict[str, _Heard]) -> dict:
        """Whether the front-end can take a message: what it is, or ``problem``."""
        from ..errors import VslamFeaturesError
        from .messages import camera_of, image_array, pose_of

        try:
            if label == "image":
                image = image_array(message, self._asked["max_value"] or None)
                encoding = message.format if self._asked["compressed"] else message.encoding
                return {"what": f"{image.shape[1]}x{image.shape[0]} {encoding}"}
            if label == "pose":
                pose_of(message)
                return {"what": f"poses in '{message.header.frame_id}'"}
            image = heard["image"].last if "image" in heard else None
            size = (message.width, message.height)
            if image is not None:
                array = image_array(image, self._asked["max_value"] or None)
                size = (array.shape[1], array.shape[0])
            rectified = {"yes": True, "no": False}.get(self._asked["rectified"])
            if rectified is None:
                rectified = "_rect" in image_topic
            camera = camera_of(message, size, rectified)
        except VslamFeaturesError as error:
            return {"problem": str(error)}
        if camera is None:
            return {"problem": "K is 0, which says that the camera is not calibrated"}
        return {"what": f"{camera.width}x{camera.height} {camera.model}, fx {camera.K[0, 0]:.1f}"}
