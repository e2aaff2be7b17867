"""What the player plays: the raw messages of a recording, or images of a folder as messages."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

from ..errors import BagError, ImageError
from ..replay.image_source import natural_key, read_any_image
from ..replay.recording import Recording
from ..replay.source import BAG_SUFFIXES, IMAGE_SUFFIXES
from .messages import image_message

IMAGES = ("sensor_msgs/msg/Image", "sensor_msgs/msg/CompressedImage")
CAMERA_INFOS = ("sensor_msgs/msg/CameraInfo",)
POSES = ("geometry_msgs/msg/PoseStamped", "nav_msgs/msg/Odometry")


class BagMessages:
    """The messages of a rosbag2 recording, byte for byte.

    Attributes:
        topics: {name: type}, of the topics asked for (all where none are).
        skipped: {name: type} of those whose type is not installed.
        damage: why it could not be read to its end; empty where it could.
    Raises:
        BagError: it cannot be read, or lacks a topic; names those that there are.
    """

    def __init__(self, path: Path, topics: list[str]):
        self._recording = Recording(path)
        if self._recording.is_ros1:
            self.close()
            raise BagError(
                f"{path}: a ROS 1 recording; convert it once: rosbags-convert --src {path} --dst {path.stem}"
            )
        have = {name: kind for name, (kind, count) in self._recording.topics.items() if count}
        missing = [name for name in topics if name not in have]
        if missing or not have:
            self.close()
            listed = ", ".join(f"{n} ({k})" for n, k in sorted(have.items())) or "no messages"
            raise BagError(f"{path}: no topic {', '.join(missing) or 'with messages'}; there are: {listed}")
        wanted = {name: kind for name, kind in have.items() if not topics or name in topics}
        self.topics = {name: kind for name, kind in wanted.items() if message_class(kind) is not None}
        self.skipped = {name: kind for name, kind in wanted.items() if name not in self.topics}

    @property
    def damage(self) -> str:
        """See the class."""
        return self._recording.damage

    def __iter__(self) -> Iterator[tuple[str, int, bytes]]:
        """(topic, time ns, serialised message) in recorded order; may be repeated."""
        for topic, stamp_ns, raw in self._recording.messages(self.topics):
            yield topic, stamp_ns, bytes(raw)

    def close(self) -> None:
        """Release the files."""
        self._recording.close()


class FolderMessages:
    """The images of a folder on the topic ``image``, in natural order.

    Args:
        fps: images a second.
        start_ns: stamp of the first one.
    Raises:
        BagError: there are no images.
    """

    skipped: dict[str, str] = {}

    def __init__(self, path: Path, fps: float, start_ns: int, frame_id: str):
        self._files = sorted((p for p in path.iterdir() if p.suffix.lower() in IMAGE_SUFFIXES), key=natural_key)
        if not self._files:
            raise BagError(f"{path}: neither a recording (metadata.yaml) nor images ({', '.join(IMAGE_SUFFIXES)})")
        self._period_ns, self._start_ns, self._frame_id = round(1e9 / fps), start_ns, frame_id
        self.topics = {"image": IMAGES[0]}
        self.damage = ""

    def __iter__(self) -> Iterator[tuple[str, int, object]]:
        """(topic, stamp ns, Image). An unreadable image is noted in ``damage`` and left out."""
        for i, path in enumerate(self._files):
            stamp_ns = self._start_ns + i * self._period_ns
            try:
                image = read_any_image(path)
            except ImageError as error:
                self.damage = str(error)
                continue
            yield "image", stamp_ns, image_message(image, stamp_ns, self._frame_id)

    def close(self) -> None:
        """Nothing to release."""


def open_messages(path: Path, topics: list[str], fps: float, start_ns: int, frame_id: str):
    """:class:`BagMessages` or :class:`FolderMessages` of a path. Raises BagError where it is neither."""
    if not path.exists():
        raise BagError(f"{path}: no such file or folder")
    if path.is_file() or (path / "metadata.yaml").exists():
        if path.is_file() and path.suffix not in BAG_SUFFIXES:
            raise BagError(f"{path}: not a recording by its name; expected {', '.join(BAG_SUFFIXES)} or a folder")
        return BagMessages(path, topics)
    return FolderMessages(path, fps, start_ns, frame_id)


def message_class(kind: str) -> type | None:
    """The Python class of a type such as ``sensor_msgs/msg/Image``; None where its package is not installed."""
    package, _, name = kind.split("/")
    try:
        return getattr(importlib.import_module(f"{package}.msg"), name, None)
    except ImportError:
        return None
