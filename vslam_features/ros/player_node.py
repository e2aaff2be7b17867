"""Node ``player``: a recording or an image folder to topics, paced, with ``/clock``; for desks without ros2 bag."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

from rclpy.duration import Duration
from rclpy.exceptions import InvalidTopicNameException
from rclpy.node import Node
from rclpy.qos import QoSProfile, ReliabilityPolicy
from rosgraph_msgs.msg import Clock

from ..errors import BagError, ConfigError, VslamFeaturesError
from .fixed_parameters import read_fixed_parameters
from .messages import stamp_message
from .player_source import CAMERA_INFOS, IMAGES, POSES, message_class, open_messages
from .process import run

PARAMETERS = {
    "path": ("", "rosbag2 folder, .mcap, .db3, or a folder of images."),
    "rate": (1.0, "Speed over the recorded one."),
    "loop": (False, "Play again from the start for ever; stamps jump back then."),
    "topics": ([], "Recorded topics to play; empty: all."),
    "image_topic": ("", "Name to publish the image topic under; empty: as recorded (folder: image)."),
    "camera_info_topic": ("", "Name to publish the camera_info topic under; empty: as recorded."),
    "pose_topic": ("", "Name to publish the pose or odometry topic under; empty: as recorded."),
    "qos": ("reliable", "reliable or sensor_data (best effort)."),
    "clock": (True, "Publish /clock, for nodes with use_sim_time."),
    "min_subscribers": (1, "Wait until an image topic has this many subscribers; 0: do not wait."),
    "wait_s": (30.0, "Longest wait for them; then the player fails."),
    "start_delay_s": (0.5, "Further wait before the first message, until discovery has settled."),
    "fps": (10.0, "Image folder: images a second."),
    "frame_id": ("camera", "Image folder: frame id of the images."),
    "start_stamp_ns": (0, "Image folder: stamp of the first image; 0: now."),
}
CLOCK_STEP_NS = 20_000_000


class PlayerNode(Node):
    """Publishes what was recorded, unchanged, at the recorded pace. Raises VslamFeaturesError on wrong parameters."""

    busy = False

    def __init__(self, **options):
        super().__init__("player", **options)
        self.failure = ""
        self._halt = threading.Event()
        self._thread: threading.Thread | None = None
        p = self._values = self._read_parameters()
        start_ns = p["start_stamp_ns"] or time.time_ns()
        topics = [name for name in p["topics"] if name]
        self._source = open_messages(Path(p["path"]).expanduser(), topics, p["fps"], start_ns, p["frame_id"])
        for name, kind in self._source.skipped.items():
            self.get_logger().warning(f"{name} is not played: {kind} is not installed")
        self._outlets = self._advertise()
        self._clock_outlet = self.create_publisher(Clock, "/clock", 10) if p["clock"] else None

    def start(self, stop: threading.Event) -> None:
        """Play in a thread; ``stop`` is set at the end."""

        def work() -> None:
            try:
                self._play()
            except VslamFeaturesError as error:
                self.failure = str(error)
            except Exception as error:  # else the process would wait for ever
                self.failure = f"{type(error).__name__}: {error}"
            finally:
                stop.set()

        self._thread = threading.Thread(target=work, name="play", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._halt.set()
        if self._thread is not None:
            self._thread.join()
        self._source.close()

    def _read_parameters(self) -> dict:
        values = read_fixed_parameters(self, PARAMETERS)
        if not values["path"]:
            raise ConfigError("path: give a recording or an image folder, -p path:=...")
        for name in ("rate", "fps"):
            if not 0 < values[name] < float("inf"):
                raise ConfigError(f"{name}: expected a positive number, got {values[name]}")
        for name, most in (("wait_s", float("inf")), ("start_delay_s", 86400.0)):
            if not 0 <= values[name] <= most:
                raise ConfigError(f"{name}: expected seconds from 0 to {most:g}, got {values[name]}")
        if values["qos"] not in ("reliable", "sensor_data"):
            raise ConfigError(f"qos: '{values['qos']}' is not one of reliable, sensor_data")
        return values

    def _advertise(self) -> dict:
        """{recorded topic: publisher}"""
        names = {topic: topic for topic in self._source.topics}
        for parameter, kinds in (("image_topic", IMAGES), ("camera_info_topic", CAMERA_INFOS), ("pose_topic", POSES)):
            found = sorted(t for t, kind in self._source.topics.items() if kind in kinds)
            if not self._values[parameter]:
                continue
            if len(found) != 1:
                there = ", ".join(found) or "none"
                raise BagError(f"{parameter}: needs one topic of its type, there are: {there}; choose with topics")
            names[found[0]] = self._values[parameter]
        reliable = self._values["qos"] == "reliable"
        reliability = ReliabilityPolicy.RELIABLE if reliable else ReliabilityPolicy.BEST_EFFORT
        qos = QoSProfile(depth=100, reliability=reliability)
        return {
            topic: self._publisher(message_class(kind), names[topic], qos)
            for topic, kind in self._source.topics.items()
        }

    def _publisher(self, kind: type, name: str, qos: QoSProfile):
        try:
            return self.create_publisher(kind, name, qos)
        except InvalidTopicNameException as error:
            reason = str(error).splitlines()[0].rstrip(":")
            raise ConfigError(f"cannot publish on '{name}': {reason}; choose another name") from error

    # -- the playing thread ----------------------------------------------------------------

    def _play(self) -> None:
        self._wait_for_subscribers()
        self._halt.wait(self._values["start_delay_s"])
        rounds = 0
        while not self._halt.is_set():
            count = self._play_once()
            if self._source.damage:
                raise BagError(f"partial: {count} messages played, then: {self._source.damage}")
            rounds += 1
            if not self._halt.is_set():
                self.get_logger().info(f"round {rounds}: {count} messages played")
            if not self._values["loop"]:
                break
        self._wait_for_delivery()

    def _wait_for_subscribers(self) -> None:
        wanted = self._values["min_subscribers"]
        images = [t for t, kind in self._source.topics.items() if kind in IMAGES] or list(self._outlets)
        outlets = [self._outlets[t] for t in images]
        names = ", ".join(o.topic_name for o in outlets)
        end = time.monotonic() + self._values["wait_s"]
        while (count := max(o.get_subscription_count() for o in outlets)) < wanted and not self._halt.is_set():
            if time.monotonic() > end:
                who = f"only {count}" if count else "nobody"
                raise BagError(
                    f"{who} subscribed to {names} within {self._values['wait_s']:g} s ({wanted} wanted): check the "
                    "remapping and ROS_DOMAIN_ID, or set min_subscribers lower (0: do not wait)"
                )
            self.get_logger().info(f"waiting for {wanted} subscribers of {names}", throttle_duration_sec=5.0)
            self._halt.wait(0.05)

    def _play_once(self) -> int:
        first_ns, clock_ns, began, count = None, 0, time.monotonic(), 0
        for topic, stamp_ns, message in self._source:
            if first_ns is None:
                first_ns = clock_ns = stamp_ns
            while stamp_ns - clock_ns > CLOCK_STEP_NS:  # the clock also runs between messages
                clock_ns += CLOCK_STEP_NS
                self._pace(began, clock_ns - first_ns)
                self._publish_clock(clock_ns)
                if self._halt.is_set():
                    return count
            self._pace(began, stamp_ns - first_ns)
            if self._halt.is_set():
                return count
            clock_ns = max(clock_ns, stamp_ns)
            self._publish_clock(clock_ns)
            self._outlets[topic].publish(message)
            count += 1
        return count

    def _pace(self, began: float, elapsed_ns: int) -> None:
        self._halt.wait(max(0.0, began + elapsed_ns / 1e9 / self._values["rate"] - time.monotonic()))

    def _publish_clock(self, stamp_ns: int) -> None:
        if self._clock_outlet is not None:
            self._clock_outlet.publish(Clock(clock=stamp_message(stamp_ns)))

    def _wait_for_delivery(self) -> None:
        for topic, outlet in self._outlets.items():
            if not self._halt.is_set() and not outlet.wait_for_all_acked(Duration(seconds=5)):
                self.get_logger().warning(f"{topic}: a subscriber has not confirmed all messages within 5 s")


def main(args: list[str] | None = None) -> int:
    """Entry point ``player_node``."""
    return run(PlayerNode, "player", args)


if __name__ == "__main__":
    sys.exit(main())
