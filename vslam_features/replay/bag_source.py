"""Frames from a recording: images with the calibration and the pose that belong to them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..camera import Camera
from ..config import Config
from ..errors import BagError, CameraError, DataError, ImageError
from ..images import decode, decode_compressed
from ..pose_track import PoseTrack, pose_from_quaternion
from ..types import Frame
from .recording import Recording
from .source import DUPLICATE, Source
from .topics import COMPRESSED, ODOMETRY, choose_topics

_LOOKAHEAD_NS = 1_000_000_000
_MAX_WAITING = 64


@dataclass
class _Waiting:
    """An image that waits for its camera_info and pose."""

    position: int
    log_ns: int
    message: object

    @property
    def stamp_ns(self) -> int:
        return stamp_of(self.message) or self.log_ns


class BagSource(Source):
    """Images of one topic of a recording; memory does not grow with its length.

    An image waits until its camera_info and the pose after it were read, at
    most one second of recording time. The camera_info of the image's stamp
    counts, else the latest valid one. Without a camera_info topic frames are
    uncalibrated, outside the poses they have none; both are counted in ``notes``.

    Raises:
        BagError: unreadable, or the topics cannot be told; lists them.
    """

    def __init__(
        self,
        path: Path,
        config: Config,
        image_topic: str | None = None,
        camera_info_topic: str | None = None,
        pose_topic: str | None = None,
        use_pose: bool = True,
    ):
        super().__init__(path, config)
        self.recording = Recording(path)
        try:
            self.topics = choose_topics(
                path, self.recording.topics, image_topic, camera_info_topic, pose_topic, use_pose
            )
        except BagError:
            self.recording.close()
            raise
        self.damage = self.recording.damage
        self.rectified = config.is_rectified(self.topics.image)
        for remark in self.topics.remarks:
            self.notes.add(remark)
        self._pose_of: str | None = None  # the frame whose pose it is, where the messages say so
        self._max_value = config.image_max_value or None
        self._track = PoseTrack()
        self._infos: deque[tuple[int, object]] = deque(maxlen=2 * _MAX_WAITING)
        self._latest_info = None
        self._cameras: dict[tuple, Camera | None] = {}
        self._last_ns: int | None = None

    def __len__(self) -> int:
        return self.recording.topics[self.topics.image][1]

    def __iter__(self) -> Iterator[Frame]:
        waiting: deque[_Waiting] = deque()
        names = [n for n in (self.topics.image, self.topics.camera_info, self.topics.pose) if n]
        count = 0
        for topic, log_ns, raw in self.recording.messages(names):
            try:
                message = self.recording.deserialize(raw, self.recording.topics[topic][0])
            except BagError as error:
                count += topic == self.topics.image
                self.skipped.add("unreadable message", f"{topic}: {error}")
                continue
            if topic == self.topics.image:
                waiting.append(_Waiting(count, log_ns, message))
                count += 1
            elif topic == self.topics.pose:
                self._add_pose(log_ns, message)
            else:
                self._add_info(message)
            while waiting and (self._ready(waiting[0], log_ns) or len(waiting) > _MAX_WAITING):
                yield from self._frame(waiting.popleft())
        while waiting:
            yield from self._frame(waiting.popleft())
        self._check_end(count)

    def describe(self) -> dict:
        """See :meth:`Source.describe`."""
        t = self.topics
        return {
            "kind": "recording",
            "name": self.name,
            "images": len(self),
            "image_topic": t.image,
            "camera_info_topic": t.camera_info,
            "pose_topic": t.pose,
            "rectified": self.rectified,
        }

    def close(self) -> None:
        """See :meth:`Source.close`."""
        self.recording.close()

    def _ready(self, image: _Waiting, log_ns: int) -> bool:
        """True when nothing that belongs to the image can be expected any more."""
        if log_ns - image.log_ns > _LOOKAHEAD_NS:
            return True
        newest_pose, newest_info = self._track.newest_ns, self._infos[-1][0] if self._infos else None
        pose = not self.topics.pose or (newest_pose is not None and newest_pose >= image.stamp_ns)
        info = not self.topics.info_each_image or (newest_info is not None and newest_info >= image.stamp_ns)
        return pose and info

    def _frame(self, image: _Waiting) -> Iterator[Frame]:
        """The frame of an image, or nothing and an entry in the ledger."""
        message, stamp = image.message, image.stamp_ns
        self.position = image.position
        if self._last_ns is not None and stamp <= self._last_ns:
            reason = DUPLICATE if stamp == self._last_ns else "stamp before the last one"
            self.skipped.add(reason, f"image {image.position}: {stamp} ns after {self._last_ns} ns")
            return
        try:
            pixels = self._decode(message)
            camera = self._camera(stamp, (pixels.shape[1], pixels.shape[0]))
            pose = self._track.at(stamp) if self.topics.pose else None
            frame = Frame(stamp, message.header.frame_id, pixels, camera, pose)
        except ImageError as error:
            self.skipped.add("undecodable image", f"image {image.position}: {error}")
            return
        except (CameraError, DataError) as error:
            self.skipped.add("camera_info does not fit the image", f"image {image.position}: {error}")
            return
        if not stamp_of(message):
            self.notes.add("images without a stamp, log time used")
        if self.topics.camera_info and camera is None:
            self.notes.add("frames without a valid camera_info")
        if self.topics.pose and pose is None:
            self.notes.add("frames without a pose near their stamp", f"image {image.position} at {stamp} ns")
        if pose is not None:
            self._note_other_body(frame.frame_id)
        self._last_ns = stamp
        yield frame

    def _decode(self, message):
        if self.recording.topics[self.topics.image][0] == COMPRESSED:
            return decode_compressed(message.data, message.format, max_value=self._max_value)
        m = message
        return decode(m.data, m.width, m.height, m.encoding, m.step, bool(m.is_bigendian), max_value=self._max_value)

    def _camera(self, stamp_ns: int, size: tuple[int, int]) -> Camera | None:
        info = next((m for s, m in reversed(self._infos) if s == stamp_ns), self._latest_info)
        if info is None:
            return None
        # ROS 1 spells the matrices in capitals.
        K, D, P = (getattr(info, n, getattr(info, n.upper(), None)) for n in "kdp")
        roi = (info.roi.x_offset, info.roi.y_offset, info.roi.width, info.roi.height)
        plain = (info.width, info.height, info.distortion_model, info.binning_x, info.binning_y, roi, size)
        key = (*plain, K.tobytes(), D.tobytes(), P.tobytes())
        if key not in self._cameras:
            self._cameras.clear()  # one camera at a time; a zoom makes a new one
            width, height, model, bx, by, roi, size = plain
            self._cameras[key] = Camera.from_info(width, height, K, D, P, model, bx, by, roi, size, self.rectified)
        return self._cameras[key]

    def _add_info(self, message) -> None:
        K = getattr(message, "k", getattr(message, "K", None))
        if K[0] > 0 or self._latest_info is None:
            self._latest_info = message
        if K[0] > 0:
            self._infos.append((stamp_of(message), message))

    def _add_pose(self, log_ns: int, message) -> None:
        pose = message.pose
        if self.recording.topics[self.topics.pose][0] == ODOMETRY:
            pose, self._pose_of = pose.pose, message.child_frame_id.strip("/") or None
        q, p = pose.orientation, pose.position
        try:
            value = pose_from_quaternion(q.x, q.y, q.z, q.w, [p.x, p.y, p.z], message.header.frame_id)
        except DataError as error:
            self.notes.add("invalid poses left out", str(error))
            return
        self._track.add(stamp_of(message) or log_ns, value)

    def _note_other_body(self, frame_id: str) -> None:
        """Say once that poses of a body are about to be taken for those of the camera."""
        if self.config.pose_of == "camera" and self._pose_of not in (None, frame_id.strip("/")):
            note = f"poses are of '{self._pose_of}', images of '{frame_id}': set pose_of to body"
            if note not in self.notes.counts:
                self.notes.add(note)

    def _check_end(self, count: int) -> None:
        self.damage = self.damage or self.recording.damage
        if not self.damage and count < len(self):
            self.damage = f"damaged: {len(self)} images promised on {self.topics.image}, {count} there"


def stamp_of(message) -> int:
    """Header stamp in integer nanoseconds; 0 where it was never set."""
    stamp = message.header.stamp
    return stamp.sec * 1_000_000_000 + stamp.nanosec
