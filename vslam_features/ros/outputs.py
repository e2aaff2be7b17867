"""What the node publishes about keyframes: clouds, markers, match image."""

from __future__ import annotations

from collections.abc import Callable

from rclpy.lifecycle import LifecycleNode
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy
from sensor_msgs.msg import Image, PointCloud2
from visualization_msgs.msg import MarkerArray

from ..types import Keyframe, Loops, PairResult, Tracked
from . import codecs
from .clouds import to_cloud
from .markers import Markers
from .match_image import MatchImages
from .messages import header, image_message
from .slot import Slot
from .workers import Worker

RELIABLE = QoSProfile(depth=50, reliability=ReliabilityPolicy.RELIABLE)
LATCHED = QoSProfile(depth=1, reliability=ReliabilityPolicy.RELIABLE, durability=DurabilityPolicy.TRANSIENT_LOCAL)


class Outputs:
    """Publishers under the node's name. Callable from the worker threads.

    A keyframe brings ``keyframes``, ``pairs``, ``matches`` when it is tracked,
    then ``loop_candidates``, ``pairs``, ``matches`` when its loops were
    searched for, each also where it has no rows.
    """

    def __init__(self, node: LifecycleNode):
        self._node = node
        self._publishers = {
            name: node.create_lifecycle_publisher(kind, f"~/{name}", qos)
            for name, kind, qos in (
                ("keyframes", PointCloud2, RELIABLE),
                ("loop_candidates", PointCloud2, RELIABLE),
                ("pairs", PointCloud2, RELIABLE),
                ("matches", PointCloud2, RELIABLE),
                ("match_image", Image, RELIABLE),
                ("markers", MarkerArray, LATCHED),
            )
        }
        self._markers = Markers()
        self._images = MatchImages()
        self._drawings = Slot()
        self._drawer = Worker("draw", self._drawings, self._draw, lambda error: None, niceness=15)

    def start(self) -> None:
        """Begin to draw."""
        self._drawer.start()

    def stop(self) -> None:
        """End the drawing thread. Safe to call twice."""
        self._drawer.stop()

    def destroy(self) -> None:
        """Remove the publishers."""
        self.stop()
        # Humble and Jazzy have no method of their own for lifecycle publishers,
        # and would go on to activate those that are gone.
        destroy = getattr(self._node, "destroy_lifecycle_publisher", self._node.destroy_publisher)
        for publisher in self._publishers.values():
            destroy(publisher)
            self._node._managed_entities.discard(publisher)
        self._publishers = {}

    def tracked(self, result: Tracked, keyframe: Callable[[int], Keyframe]) -> None:
        """Publish a tracked frame, where it is a keyframe. ``keyframe``: the keyframe of an id, in the map of now."""
        if result.keyframe is None:
            return
        self._publish("keyframes", result.keyframe, codecs.keyframe_table(result.keyframe))
        self._publish_pairs(result.keyframe, result.pairs, keyframe)
        self._markers.add_keyframe(result.keyframe)
        self._draw_later(result.frame.image, result.keyframe, result.pairs, keyframe)

    def loops(self, result: Loops, keyframe: Callable[[int], Keyframe]) -> None:
        """Publish the candidates and the attempted loops of a keyframe."""
        self._publish("loop_candidates", result.keyframe, codecs.candidates_table(result.candidates))
        self._publish_pairs(result.keyframe, result.pairs, keyframe)
        self._markers.add_loops(result, keyframe)
        verified = tuple(p for p in result.pairs if p.matches.verified)
        if verified:
            self._draw_later(None, result.keyframe, verified, keyframe)

    def reset(self) -> None:
        """The keyframes were forgotten: so are their markers."""
        self._markers.clear()

    def publish_markers(self, unheard: bool = False) -> None:
        """Publish the markers where they changed; once a second is enough for a message that grows.

        Nothing is made while nobody subscribes, but with ``unheard``; who comes later gets all within a second.
        """
        heard = self._publishers["markers"].get_subscription_count() > 0
        message = self._markers.message() if heard or unheard else None
        if message is not None:
            self._publishers["markers"].publish(message)

    def _publish_pairs(self, kf: Keyframe, pairs: tuple[PairResult, ...], keyframe) -> None:
        self._publish("pairs", kf, codecs.pairs_table(pairs))
        self._publish("matches", kf, codecs.matches_table(pairs, keyframe))

    def _publish(self, name: str, keyframe: Keyframe, table) -> None:
        self._publishers[name].publish(to_cloud(table, header(keyframe.stamp_ns, keyframe.frame_id)))

    def _draw_later(self, image, kf: Keyframe, pairs: tuple[PairResult, ...], keyframe) -> None:
        if self._publishers["match_image"].get_subscription_count() > 0:
            references = {p.ref_kf_id: keyframe(p.ref_kf_id) for p in pairs}  # when it is drawn the map may be closed
            self._drawings.put((image, kf, pairs, references))

    def _draw(self, job) -> None:
        image, kf, pairs, references = job
        picture = self._images.draw(image, kf, pairs, references.__getitem__)
        self._publishers["match_image"].publish(image_message(picture, kf.stamp_ns, kf.frame_id))
