"""Node ``recorder``: what a front-end publishes, as ``metrics.json`` and ``report.html``."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

from diagnostic_msgs.msg import DiagnosticArray
from geometry_msgs.msg import PoseStamped
from rclpy.exceptions import InvalidTopicNameException
from rclpy.node import Node
from rclpy.qos import QoSProfile, ReliabilityPolicy
from sensor_msgs.msg import Image, PointCloud2

from ..errors import ConfigError, VslamFeaturesError
from ..replay.files import write_json, write_whole
from ..replay.ground_truth import GroundTruth
from ..replay.loop_truth import LoopTruth
from ..replay.metrics import metrics
from ..replay.report import write_report
from . import codecs
from .fixed_parameters import read_fixed_parameters
from .messages import image_array, pose_of, stamp_of
from .process import run
from .topic_log import TopicLog

PARAMETERS = {
    "frontend": ("/frontend", "Full name of the front-end node."),
    "out": ("", "Folder for metrics.json, report.html and progress.json."),
    "name": ("live", "Title of the report."),
    "truth": ("", "Bag folder or ground_truth.npz of a rendered scene: loops are judged against it."),
    "exclude_s": (10.0, "With truth: images less than this apart are no loop (as retrieval.exclude_s)."),
}
RELIABLE = QoSProfile(depth=200, reliability=ReliabilityPolicy.RELIABLE)
BEST_EFFORT = QoSProfile(depth=50, reliability=ReliabilityPolicy.BEST_EFFORT)


class RecorderNode(Node):
    """Listens until it is stopped, then writes. ``progress.json`` is renewed twice a second for whoever waits.

    Relative inputs ``image`` and ``pose`` (PoseStamped) give pictures and the trajectory; both are optional.
    """

    busy = False

    def __init__(self, **options):
        super().__init__("recorder", **options)
        self.failure = ""
        self.rejected = 0
        values = read_fixed_parameters(self, PARAMETERS)
        if not 0 <= values["exclude_s"] < float("inf"):
            raise ConfigError(f"exclude_s: expected seconds, 0 or more, got {values['exclude_s']}")
        self._out = _output_folder(values["out"])
        self._frontend = values["frontend"].lstrip("/")
        truth = GroundTruth.load(values["truth"]) if values["truth"] else None
        self._loops = LoopTruth.load(values["truth"], exclude_s=values["exclude_s"]) if values["truth"] else None
        self._log = TopicLog(values["name"], truth, values["frontend"])
        self._outputs: list[str] = []
        clouds = (
            ("keyframes", codecs.read_keyframes, self._log.add_keyframe),
            ("loop_candidates", codecs.read_candidates, self._log.add_candidates),
            ("pairs", codecs.read_pairs, self._log.add_pairs),
            ("matches", codecs.read_matches, self._log.add_matches),
        )
        for topic, read, add in clouds:
            name = f"{values['frontend']}/{topic}"
            self._outputs.append(name)
            self._listen(PointCloud2, name, RELIABLE, lambda m, r=read, a=add: self._cloud(m, r, a))
        self._listen(Image, "image", BEST_EFFORT, lambda m: self._log.add_image(stamp_of(m), image_array(m)))
        self._listen(PoseStamped, "pose", BEST_EFFORT, lambda m: self._log.add_pose(stamp_of(m), pose_of(m)))
        self._listen(DiagnosticArray, "/diagnostics", RELIABLE, self._on_diagnostics)
        self.create_timer(0.5, self._write_progress)

    def start(self, stop: threading.Event) -> None:
        """Nothing to do: the subscriptions are there."""

    def stop(self) -> None:
        """Write what was recorded; ``failure`` tells what kept it from that."""
        self.failure = self._log.nothing_came
        try:
            log = self._log.finish()
            numbers = metrics(log, self._loops)
            write_json(self._out / "metrics.json", numbers)
            write_report(self._out / "report.html", log, numbers)
        except Exception as error:  # whatever it is, the user has to learn that there is no report, and why
            text = (
                str(error) if isinstance(error, (VslamFeaturesError, OSError)) else f"{type(error).__name__}: {error}"
            )
            self.failure = f"no report in {self._out}: {text}"
        self._write_progress()

    def _listen(self, kind, topic: str, qos: QoSProfile, use) -> None:
        def callback(message) -> None:
            try:
                use(message)
            except VslamFeaturesError as error:
                reject(str(error))
            except Exception as error:  # anybody may publish anything: it must not end the recording
                reject(f"{type(error).__name__}: {error}")

        def reject(reason: str) -> None:
            self.rejected += 1
            self._log.rejected(topic, reason)
            self.get_logger().warning(f"{topic}: {reason}", throttle_duration_sec=5.0)

        try:
            self.create_subscription(kind, topic, callback, qos)
        except InvalidTopicNameException as error:
            reason = str(error).splitlines()[0].rstrip(":")
            raise ConfigError(f"cannot subscribe to '{topic}': {reason}; check the parameter frontend") from error

    def _cloud(self, message: PointCloud2, read, add) -> None:
        add(stamp_of(message), message.header.frame_id, read(message))

    def _on_diagnostics(self, message: DiagnosticArray) -> None:
        for status in message.status:
            node, _, part = status.name.partition(": ")
            if node == self._frontend:
                self._log.set_diagnostics(part, {v.key: v.value for v in status.values})

    def _write_progress(self) -> None:
        connected = all(self.count_publishers(topic) for topic in self._outputs)
        progress = {**self._log.progress(), "connected": int(connected)}
        try:
            write_whole(self._out / "progress.json", json.dumps(progress).encode())
        except OSError as error:  # a full disk may be freed before the end, when the report is written
            self.get_logger().warning(f"progress.json: {error}", throttle_duration_sec=5.0)


def _output_folder(text: str) -> Path:
    if not text:
        raise ConfigError("out: give a folder to write to, -p out:=...")
    out = Path(text).expanduser()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"out: cannot make the folder {out}: {error.strerror}; give another one") from error
    return out


def main(args: list[str] | None = None) -> int:
    """Entry point ``recorder_node``."""
    return run(RecorderNode, "recorder", args)


if __name__ == "__main__":
    sys.exit(main())
