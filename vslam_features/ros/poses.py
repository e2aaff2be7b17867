"""The pose at the stamp of an image: interpolated, or the nearest one by approximate synchronisation."""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

from ..errors import PluginError
from ..pose_track import PoseTrack
from ..types import Pose
from .messages import pose_of, stamp_of

JUMP_NS = 500_000_000
"""A stamp this much older than the one before is a jump back in time (a bag loops); less is bad order."""


class PoseSource(Protocol):
    """What :class:`~vslam_features.ros.pairing.Pairing` asks for poses.

    ``resets``: how often they began anew, by a jump back in time or another frame.
    """

    resets: int

    def add_image(self, stamp_ns: int, message) -> None:
        """An image came, for which a pose will be asked."""

    def add_pose(self, stamp_ns: int, message) -> None:
        """A pose came. Raises DataError where the message holds none."""

    def look(self, stamp_ns: int) -> tuple[bool, Pose | None]:
        """Whether waiting for longer is useless, and the pose, None where there is none."""

    def restart(self) -> None:
        """The time of the images jumped back."""


class _Newest:
    """The newest stamp of the poses, and whether they jumped back before the images did.

    Then they are of the new session already. ``image_ns``: stamp of the last image.
    """

    def __init__(self):
        self.stamp_ns: int | None = None
        self.image_ns: int | None = None
        self._jumped_from: int | None = None

    def add(self, stamp_ns: int) -> bool:
        """Whether this is a jump back in time."""
        newest = stamp_ns if self.stamp_ns is None else self.stamp_ns
        jumped = stamp_ns < newest - JUMP_NS
        if jumped:
            first = self.image_ns is not None and stamp_ns < self.image_ns - JUMP_NS
            self._jumped_from = newest if first else None
        elif self._jumped_from is not None and stamp_ns >= self._jumped_from:
            self._jumped_from = None  # one wrong stamp, and time goes on as before
        self.stamp_ns = stamp_ns if jumped else max(stamp_ns, newest)
        return jumped

    def restart(self) -> bool:
        """The images jumped: whether the poses that are there belong to the past, and are to be forgotten."""
        old, self._jumped_from = self._jumped_from is None, None
        if old:
            self.stamp_ns = None
        return old


class InterpolatedPoses:
    """``sync: exact``: the pose at the stamp itself, or between the two around it."""

    def __init__(self):
        self._track, self._newest = PoseTrack(jump_s=JUMP_NS / 1e9), _Newest()

    @property
    def resets(self) -> int:
        """See :class:`PoseSource`."""
        return self._track.resets

    def add_image(self, stamp_ns: int, message) -> None:
        """See :class:`PoseSource`."""
        self._newest.image_ns = stamp_ns

    def add_pose(self, stamp_ns: int, message) -> None:
        """See :class:`PoseSource`."""
        pose = pose_of(message)
        self._newest.add(stamp_ns)
        self._track.add(stamp_ns, pose)

    def look(self, stamp_ns: int) -> tuple[bool, Pose | None]:
        """See :class:`PoseSource`."""
        newest = self._track.newest_ns
        return newest is not None and newest >= stamp_ns, self._track.at(stamp_ns)

    def restart(self) -> None:
        """See :class:`PoseSource`."""
        if self._newest.restart():
            self._track.clear()


class ApproximatePoses:
    """``sync: approximate``: the pose that ``message_filters`` pairs with the image, at most ``slop_s`` away.

    ``message_filters.ApproximateTimeSynchronizer`` (6.0) never matches again
    after a jump back in time, and an exception in its callback leaves its lock
    held. So our callback only stores, and every restart makes a new one.

    Raises:
        PluginError: message_filters is not installed.
    """

    def __init__(self, slop_s: float, queue_size: int = 64):
        try:
            import message_filters
        except ImportError as error:
            raise PluginError(
                "sync: approximate needs the Python package message_filters: "
                "apt install ros-$ROS_DISTRO-message-filters, or set sync: exact"
            ) from error
        self._filters = message_filters
        self._slop_s, self._queue_size = slop_s, queue_size
        self._newest = _Newest()
        self.resets = 0
        self._renew()

    def add_image(self, stamp_ns: int, message) -> None:
        """See :class:`PoseSource`."""
        self._newest.image_ns = stamp_ns
        self._feed(self._images, message)

    def add_pose(self, stamp_ns: int, message) -> None:
        """See :class:`PoseSource`."""
        pose_of(message)  # a bad message must fail here, not when the pair is asked for
        if self._newest.add(stamp_ns):
            self._renew()
            self.resets += 1
        self._feed(self._poses, message)

    def look(self, stamp_ns: int) -> tuple[bool, Pose | None]:
        """See :class:`PoseSource`."""
        message = self._found.get(stamp_ns)
        newest = self._newest.stamp_ns
        late = newest is not None and newest > stamp_ns + self._slop_s * 1e9
        return message is not None or late, None if message is None else pose_of(message)

    def restart(self) -> None:
        """See :class:`PoseSource`."""
        if self._newest.restart():
            self._renew()

    def _renew(self) -> None:
        self._images, self._poses = self._filters.SimpleFilter(), self._filters.SimpleFilter()
        self._found: OrderedDict[int, object] = OrderedDict()
        synchroniser = self._filters.ApproximateTimeSynchronizer(
            [self._images, self._poses], self._queue_size, self._slop_s
        )
        synchroniser.registerCallback(self._matched)

    def _feed(self, side, message) -> None:
        try:
            side.signalMessage(message)
        except Exception:  # whatever went wrong inside, the synchroniser may hold its lock for ever now
            self._renew()
            raise

    def _matched(self, image, pose) -> None:
        self._found[stamp_of(image)] = pose
        if len(self._found) > self._queue_size:
            self._found.popitem(last=False)
