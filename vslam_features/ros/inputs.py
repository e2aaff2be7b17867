"""Subscriptions: image, camera_info and pose into the pairing, with what can be said about each topic."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from geometry_msgs.msg import PoseStamped
from nav_msgs.msg import Odometry
from rclpy.node import Node
from rclpy.qos import QoSProfile, ReliabilityPolicy
from sensor_msgs.msg import CameraInfo, CompressedImage, Image

from ..config import Config
from .messages import stamp_of
from .pairing import Pairing
from .statistics import Rate

try:
    from rclpy.event_handler import SubscriptionEventCallbacks
except ImportError:  # Humble
    from rclpy.qos_event import SubscriptionEventCallbacks


@dataclass
class Topic:
    """What is known about an input: ``name`` resolved, ``last`` arrival (monotonic seconds) or None."""

    label: str
    name: str
    qos: str
    rate: Rate = field(default_factory=Rate)
    received: int = 0
    last: float | None = None
    incompatible: int = 0
    rejected: int = 0
    last_error: str = ""
    since: float = field(default_factory=time.monotonic)

    def arrived(self) -> None:
        """A message came."""
        self.received += 1
        self.last = time.monotonic()
        self.rate.tick()

    def silent_s(self) -> float:
        """Seconds since the last message, or since the subscription."""
        return time.monotonic() - (self.since if self.last is None else self.last)


class Inputs:
    """Subscribes on construction, until ``destroy``. Callbacks only hand over: images are decoded by a worker.

    ``paused``: images are let go uncounted; calibration and poses still come in.
    """

    def __init__(self, node: Node, config: Config, pairing: Pairing):
        self._node, self._pairing = node, pairing
        self.paused = False
        self._pose_of_camera = config.pose_of == "camera"
        self._image_frame: str | None = None
        self._pose_frame = ""
        self.topics: list[Topic] = []
        self._subscriptions = []
        # Best effort works with both kinds of publishers; the depth bridges a busy executor.
        reliable = config.image_qos == "reliable"
        reliability = ReliabilityPolicy.RELIABLE if reliable else ReliabilityPolicy.BEST_EFFORT
        kind = CompressedImage if config.image_transport == "compressed" else Image
        self.image_topic = image_topic(node, config)
        self._subscribe("image", kind, self.image_topic, QoSProfile(depth=10, reliability=reliability), self._on_image)
        small = QoSProfile(depth=100, reliability=reliability)
        self._subscribe("camera_info", CameraInfo, "camera_info", small, pairing.add_info)
        if config.pose_type != "none":
            pose = PoseStamped if config.pose_type == "pose" else Odometry
            self._subscribe("pose", pose, "pose", small, self._on_pose)

    def destroy(self) -> None:
        """Unsubscribe."""
        for subscription in self._subscriptions:
            self._node.destroy_subscription(subscription)
        self._subscriptions = []

    def publishers(self, topic: Topic) -> int:
        """How many publishers of a topic are known now."""
        return self._node.count_publishers(topic.name)

    @property
    def other_body(self) -> str:
        """What to say where poses of a body are about to be taken for those of the camera; else empty."""
        image = (self._image_frame or "").strip("/")
        if not self._pose_of_camera or self._image_frame is None or self._pose_frame in ("", image):
            return ""
        return f"poses are of '{self._pose_frame}', images of '{self._image_frame}': set pose_of to body"

    def _subscribe(self, label: str, kind: type, name: str, qos: QoSProfile, add: Callable) -> None:
        reliability = qos.reliability.name.lower()
        topic = Topic(label, self._node.resolve_topic_name(name), reliability)

        def arrived(message) -> None:
            topic.arrived()
            try:
                add(stamp_of(message), message)
            except Exception as error:  # whatever is wrong with one message, the next ones must come in
                topic.rejected += 1
                topic.last_error = str(error)
                self._node.get_logger().error(f"{label} ignored: {error}", throttle_duration_sec=5.0)

        def incompatible(event) -> None:
            topic.incompatible = event.total_count
            self._node.get_logger().error(
                f"{label}: a publisher on {topic.name} offers a QoS that does not fit (we ask for {reliability}); "
                "nothing comes from it: set image_qos to sensor_data, or make the publisher reliable"
            )

        self.topics.append(topic)
        self._subscriptions.append(
            self._node.create_subscription(
                kind, name, arrived, qos, event_callbacks=SubscriptionEventCallbacks(incompatible_qos=incompatible)
            )
        )

    def _on_pose(self, stamp_ns: int, message) -> None:
        self._pose_frame = getattr(message, "child_frame_id", "").strip("/")  # only Odometry says whose pose it is
        self._pairing.add_pose(stamp_ns, message)

    def _on_image(self, stamp_ns: int, message) -> None:
        self._image_frame = message.header.frame_id
        if not self.paused:
            self._pairing.add_image(stamp_ns, message)


def image_topic(node: Node, config: Config) -> str:
    """The resolved name of the image topic.

    With ``image_transport: compressed`` it is ``<image>/compressed`` of the
    remapped ``image``, as image_transport does it, unless ``image/compressed``
    is remapped itself.
    """
    if config.image_transport == "raw":
        return node.resolve_topic_name("image")
    own = node.resolve_topic_name("image/compressed")
    if own != node.resolve_topic_name("image/compressed", only_expand=True):
        return own
    return node.resolve_topic_name("image") + "/compressed"
