"""Keyframes and loops as RViz markers, in the frame of the poses."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from geometry_msgs.msg import Point
from std_msgs.msg import ColorRGBA, Header
from visualization_msgs.msg import Marker, MarkerArray

from ..types import Keyframe, Loops, Status
from .messages import header

_GREY = ColorRGBA(r=0.6, g=0.6, b=0.6, a=1.0)
_BLUE = ColorRGBA(r=0.2, g=0.5, b=1.0, a=1.0)
_GREEN = ColorRGBA(r=0.1, g=0.9, b=0.2, a=1.0)
_ORANGE = ColorRGBA(r=1.0, g=0.6, b=0.0, a=1.0)

MAX_POINTS = 50_000
"""Of a marker, the newest: a localisation goes on for days. Even, since lines have two."""


@dataclass
class _Shape:
    """A marker to be; its points are appended at the end and leave at the start, and never change."""

    kind: int
    width: float
    colour: ColorRGBA
    header: Header | None = None
    points: list[Point] = field(default_factory=list)

    def add(self, *points: Point) -> None:
        """Append; in steps, the oldest leave."""
        self.points += points
        if len(self.points) >= MAX_POINTS + MAX_POINTS // 10:
            del self.points[:-MAX_POINTS]

    def marker(self, name: str) -> Marker:
        marker = Marker(header=self.header, ns=name, type=self.kind, action=Marker.ADD, color=self.colour)
        marker.pose.orientation.w = 1.0
        marker.scale.x = marker.scale.y = marker.scale.z = self.width
        marker.points = self.points
        return marker


class Markers:
    """Grows with the keyframes that have a pose; safe between threads.

    Blue points: keyframes; grey line: their order; green lines: verified
    loops; orange lines: ambiguous ones. Only keyframes of this session: the
    poses of another one are in a frame of their own.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._shapes: dict[str, _Shape] = {}
        self._changed = self._cleared = False

    def add_keyframe(self, keyframe: Keyframe) -> None:
        """A new keyframe."""
        if keyframe.pose is None:
            return
        point = _point(keyframe)
        with self._lock:
            self._get(keyframe, "path", Marker.LINE_STRIP, 0.02, _GREY).add(point)
            self._get(keyframe, "keyframes", Marker.POINTS, 0.06, _BLUE).add(point)

    def add_loops(self, result: Loops, keyframe: Callable[[int], Keyframe]) -> None:
        """The judged loops of a keyframe."""
        for pair in result.pairs:
            ambiguous = pair.matches.status == Status.AMBIGUOUS
            if result.keyframe.pose is None or not (pair.matches.verified or ambiguous):
                continue
            ref = keyframe(pair.ref_kf_id)
            if ref.pose is None or ref.session != result.keyframe.session:
                continue
            name, colour = ("ambiguous", _ORANGE) if ambiguous else ("loops", _GREEN)
            with self._lock:
                shape = self._get(result.keyframe, name, Marker.LINE_LIST, 0.03, colour)
                shape.add(_point(result.keyframe), _point(ref))

    def clear(self) -> None:
        """Remove all of them."""
        with self._lock:
            self._cleared |= bool(self._shapes)
            self._shapes, self._changed = {}, False

    def message(self) -> MarkerArray | None:
        """All markers if anything changed since the last call, else None."""
        with self._lock:
            if not (self._changed or self._cleared):
                return None
            out = [Marker(action=Marker.DELETEALL)] if self._cleared else []
            # RViz complains about a line of one point
            shapes = {n: replace(s, points=s.points[:]) for n, s in self._shapes.items() if len(s.points) > 1}
            self._changed = self._cleared = False
        # A long list takes its time, which the worker threads need not wait for.
        return MarkerArray(markers=out + [shape.marker(name) for name, shape in shapes.items()])

    def _get(self, keyframe: Keyframe, name: str, kind: int, width: float, colour: ColorRGBA) -> _Shape:
        shape = self._shapes.setdefault(name, _Shape(kind, width, colour))
        shape.header = header(keyframe.stamp_ns, keyframe.pose.frame_id)
        self._changed = True
        return shape


def _point(keyframe: Keyframe) -> Point:
    x, y, z = map(float, keyframe.pose.t)
    return Point(x=x, y=y, z=z)
