"""Listens to a running front-end until it has seen enough pairs for ``models collect``.

What is published tells which pairs there are, and when there are enough. Descriptors are not published: they are in the
front-end's map, whose file the diagnostics name.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import rclpy
from diagnostic_msgs.msg import DiagnosticArray
from rclpy.exceptions import InvalidTopicNameException
from rclpy.executors import ExternalShutdownException, SingleThreadedExecutor
from rclpy.node import Node
from rclpy.qos import QoSProfile, ReliabilityPolicy
from rclpy.signals import SignalHandlerOptions
from sensor_msgs.msg import PointCloud2

from ..errors import ConfigError, DataError, MapError
from ..replay.collect import SeenPair, choose, enough
from ..types import PairKind, Status
from . import codecs
from .messages import stamp_of
from .topic_diagnostics import TopicDiagnostics

RELIABLE = QoSProfile(depth=200, reliability=ReliabilityPolicy.RELIABLE)
WAIT_S = 5.0
"""Discovery takes a part of a second; and diagnostics come once a second."""
_POLL_S = 0.1
_SETTLE_S = 2.0  # pairs are published before they are in the map, and diagnostics are a second old
_MODEL = "model "
_PLUGINS = {"describe": "features", "match": "matcher"}  # part of the diagnostics -> group of the configuration


@dataclass(frozen=True)
class Heard:
    """What is known of a front-end.

    ``matcher``: name of its matcher's model, None where it runs none. ``plugins``: dotted name of a plug-in's choice,
    such as ``matcher.name``, and what was chosen. ``notes``: remarks.
    """

    map_path: Path
    matcher: str | None
    plugins: dict[str, str]
    notes: tuple[str, ...]


def listen(
    name: str,
    wanted: int,
    seconds: float,
    progress: Callable[[int, int], None] = lambda done, total: None,
    wait_s: float = WAIT_S,
) -> Heard:
    """Listen until there are enough pairs, the time is over, or Ctrl-C.

    Args:
        name: full name of the front-end's node, such as /frontend.
        wanted: pairs of all kinds. progress: called with (pairs so far, wanted).
        wait_s: for the first sign of the node. One that is being configured, where models are compared or built, has
            ``seconds`` for that.
    Raises:
        ConfigError: there is no such front-end, or it keeps no map. MapError: its map is not on this machine.
    """
    context = rclpy.Context()
    rclpy.init(context=context, signal_handler_options=SignalHandlerOptions.NO)  # Ctrl-C is Python's own
    try:
        node = CollectorNode(name, context=context)
        executor = SingleThreadedExecutor(context=context)
        executor.add_node(node)
        try:
            _find(node, executor, wait_s, seconds)
            notes: list[str] = []
            try:
                if not _spin(executor, seconds, lambda: _told(node.pairs, wanted, progress)):
                    notes.append(f"{name} did not bring enough pairs in {seconds:g} s")
                _spin(executor, _SETTLE_S, lambda: False)
            except (KeyboardInterrupt, ExternalShutdownException):
                notes.append("interrupted: what had come by then is used")
            return node.heard(notes)
        finally:
            executor.shutdown()
            node.destroy_node()
    finally:
        context.try_shutdown()


class CollectorNode(Node):
    """Subscribes to ``pairs`` of a front-end and to the diagnostics.

    Attributes:
        pairs: those that came, without those of keyframes that a reset made it forget.
        diagnostics: the front-end's latest.
        rejected: why messages were left out, the latest of each.
    Raises:
        ConfigError: the name is none.
    """

    def __init__(self, frontend: str, **options):
        super().__init__("collector", **options)
        self.frontend = "/" + frontend.strip("/")
        self.pairs: list[SeenPair] = []
        self.diagnostics = TopicDiagnostics()
        self.rejected: dict[str, str] = {}
        self.topic = f"{self.frontend}/pairs"
        try:
            self.create_subscription(PointCloud2, self.topic, self._on_pairs, RELIABLE)
        except InvalidTopicNameException as error:
            reason = str(error).splitlines()[0].rstrip(":")
            raise ConfigError(f"--node {frontend}: is no name of a node: {reason}") from error
        self.create_subscription(DiagnosticArray, "/diagnostics", self._on_diagnostics, RELIABLE)

    @property
    def present(self) -> bool:
        """Somebody publishes pairs, and has told where the map is."""
        return bool(self.count_publishers(self.topic)) and "map" in self.diagnostics.parts

    @property
    def absent(self) -> str:
        """Why it is not ``present``, and what to do."""
        if self.diagnostics.configuring:
            return f"{self.frontend} is still being configured: try again when it is active"
        if self.count_publishers(self.topic):
            return f"{self.frontend} publishes pairs, but no diagnostics came: is /diagnostics remapped?"
        suffix, cloud = "/pairs", "sensor_msgs/msg/PointCloud2"
        topics = [t for t, kinds in self.get_topic_names_and_types() if t.endswith(suffix) and cloud in kinds]
        others = sorted(t.removesuffix(suffix) for t in topics if self.count_publishers(t))
        there = f"there are {', '.join(others)}" if others else "no front-end is up: start it, and check ROS_DOMAIN_ID"
        return f"nothing publishes {self.topic}; {there}"

    def heard(self, notes: list[str]) -> Heard:
        """What is known by now. Raises ConfigError, MapError."""
        values = self.diagnostics.parts["map"]
        remedy = "collect from a recording instead (models collect BAG)"
        if values.get("mode") == "localization":
            raise ConfigError(
                f"{self.frontend} localises, and keeps nothing of its keyframes: call its set_localization with false, "
                f"or {remedy}"
            )
        if not values.get("path"):
            raise ConfigError(f"{self.frontend} has its map in memory only, where nobody else can read it: {remedy}")
        path = Path(values["path"])
        if not path.is_file():
            raise MapError(
                f"{path}, the map of {self.frontend}, is not on this machine: run the command where the node runs, or "
                f"copy the map and collect from it (models collect FILE.vmap)"
            )
        rejected = [f"a message on {topic} was left out: {why}" for topic, why in self.rejected.items()]
        parts = self.diagnostics.parts
        chosen = {f"{group}.name": parts.get(stage, {}).get("plugin", "") for stage, group in _PLUGINS.items()}
        plugins = {name: plugin for name, plugin in chosen.items() if plugin}
        return Heard(path, self._matcher(), plugins, (*notes, *rejected))

    def _matcher(self) -> str | None:
        parts = self.diagnostics.parts
        names = [
            p.removeprefix(_MODEL) for p, v in parts.items() if p.startswith(_MODEL) and v.get("role") == "matcher"
        ]
        return names[0] if names else None

    def _on_pairs(self, message: PointCloud2) -> None:
        try:
            stamp = stamp_of(message)
            found = [_seen(row, stamp) for row in codecs.read_pairs(message)]
        except DataError as error:
            self.rejected[self.topic] = str(error)
            return
        self.pairs += found

    def _on_diagnostics(self, message: DiagnosticArray) -> None:
        for status in message.status:
            node, _, part = status.name.partition(": ")
            if node != self.frontend.lstrip("/"):
                continue
            values = {v.key: v.value for v in status.values}
            before = self.diagnostics.parts.get("map", {}).get("path")
            try:
                self.diagnostics.set(part, values)
            except DataError as error:
                self.rejected["/diagnostics"] = str(error)
                continue
            if part == "map" and before and values.get("path") != before:
                self.pairs.clear()  # they are in the map of before


def _find(node: CollectorNode, executor: SingleThreadedExecutor, wait_s: float, seconds: float) -> None:
    """Returns when the front-end is there. Raises ConfigError after ``wait_s``; while it is configured, ``seconds``."""
    started = busy = time.monotonic()
    while not node.present:
        now = time.monotonic()
        if node.diagnostics.configuring and now - started < seconds:
            busy = now
        if now - busy > wait_s:
            raise ConfigError(f"--node: {node.absent}")
        executor.spin_once(timeout_sec=_POLL_S)


def _spin(executor: SingleThreadedExecutor, seconds: float, done: Callable[[], bool]) -> bool:
    """Spin until it is ``done``; False where the time is over first."""
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end:
            return False
        executor.spin_once(timeout_sec=_POLL_S)
    return True


def _told(pairs: list[SeenPair], wanted: int, progress: Callable[[int, int], None]) -> bool:
    """Whether these are enough pairs."""
    progress(len(choose(pairs, wanted).pairs), wanted)
    return enough(pairs, wanted)


def _seen(row, stamp_ns: int) -> SeenPair:
    """A row of ``~/pairs``. Raises DataError."""
    try:
        kind, status = PairKind(int(row["kind"])), Status(int(row["status"]))
    except ValueError as error:
        raise DataError(f"a pair of unknown kind or status: {error}") from None
    ref_stamp_ns = int(row["ref_sec"]) * 10**9 + int(row["ref_nanosec"])
    counts = int(row["num_matches"]), int(row["num_inliers"])
    return SeenPair(int(row["kf_id"]), int(row["ref_kf_id"]), stamp_ns, ref_stamp_ns, kind, status, *counts)
