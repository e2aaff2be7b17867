"""Write frames as a rosbag2 folder (mcap or sqlite3) with Image, CameraInfo and PoseStamped."""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Callable, Iterable, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
from rosbags.rosbag2 import CompressionFormat, CompressionMode, StoragePlugin, Writer
from rosbags.typesys import Stores, get_typestore

from ..camera import Camera
from ..errors import BagError
from ..types import Frame, Pose
from .ground_truth import FILE_NAME
from .scenes import Scene

# Humble cannot read the QoS lists of version 9; newer distributions read 8.
_BAG_VERSION = 8
_STORAGE = {"mcap": StoragePlugin.MCAP, "sqlite3": StoragePlugin.SQLITE3}
# mcap compresses its own chunks, which every mcap tool reads; sqlite3 has no such mode.
_COMPRESSION = {
    ("mcap", "none"): CompressionMode.NONE,
    ("mcap", "zstd"): CompressionMode.STORAGE,
    ("sqlite3", "none"): CompressionMode.NONE,
    ("sqlite3", "zstd"): CompressionMode.MESSAGE,
}
_ENCODINGS = ("mono8", "rgb8", "bgr8")


@dataclass(frozen=True)
class Topics:
    """Where the messages go; the defaults are those of the Looper camera."""

    image: str = "/camera/camera/infra1/image_rect_raw"
    camera_info: str = "/camera/camera/infra1/camera_info"
    pose: str = "/camera/camera/vio_image"


def write_bag(
    path,
    frames: Iterable[Frame],
    *,
    topics: Topics | None = None,
    storage: str = "mcap",
    compression: str = "none",
    image_encoding: str = "mono8",
    overwrite: bool = False,
    progress: Callable[[int, int | None], None] | None = None,
) -> Path:
    """Write a bag; it appears at ``path`` only when it is complete.

    A frame's CameraInfo and PoseStamped (where it has camera and pose) come
    before its Image, all with the frame's stamp, which is also the bag time.

    Neither storage has checksums (rosbags writes 0 for the CRC of an mcap
    chunk and has no option for it): a reader notices that a bag was cut, but
    not that pixels in the middle of an uncompressed one were overwritten.

    Args:
        path: the folder to make.
        storage: ``mcap`` or ``sqlite3``. compression: ``none`` or ``zstd``.
        image_encoding: ``mono8``, ``rgb8`` or ``bgr8``; frames are converted.
        overwrite: replace a bag that is there.
        progress: called with frames done and their total (None if unknown).
    Returns:
        ``path``.
    Raises:
        BagError: ``path`` exists, an unknown choice, no frames, a disk error.
    """
    if (storage, compression) not in _COMPRESSION:
        raise BagError(
            f"bag {path}: storage '{storage}' with compression '{compression}' is unknown; "
            f"storage: {', '.join(_STORAGE)}; compression: none, zstd"
        )
    if image_encoding not in _ENCODINGS:
        raise BagError(f"bag {path}: image encoding '{image_encoding}' is not one of {', '.join(_ENCODINGS)}")
    total = len(frames) if isinstance(frames, Sized) else None
    done = 0
    with _new_folder(Path(path), overwrite) as folder:
        writer = Writer(folder, version=_BAG_VERSION, storage_plugin=_STORAGE[storage])
        writer.set_compression(_COMPRESSION[storage, compression], CompressionFormat.ZSTD)
        with writer:
            messages = _Messages(writer, topics or Topics())
            for frame in frames:
                messages.write(frame, image_encoding)
                done += 1
                if progress:
                    progress(done, total)
            if not done:
                raise BagError(f"bag {path}: there are no frames to write")
    return Path(path)


def write_scene_bag(scene: Scene, path, *, overwrite: bool = False, **options) -> Path:
    """Write a scene, and its truth into the bag's folder (``GroundTruth.load(path)`` reads it).

    ``options`` are those of :func:`write_bag`.
    """
    with _new_folder(Path(path), overwrite) as folder:
        write_bag(folder, scene, **options)
        scene.ground_truth().save(folder / FILE_NAME)
    return Path(path)


class _Messages:
    """Turns frames into messages; topics are made when first needed."""

    def __init__(self, writer: Writer, topics: Topics):
        self._writer, self._topics = writer, topics
        self._store = get_typestore(Stores.ROS2_HUMBLE)
        self._connections = {}

    def write(self, frame: Frame, encoding: str) -> None:
        header = self._new(
            "std_msgs/msg/Header",
            stamp=self._new("builtin_interfaces/msg/Time", **_time(frame.stamp_ns)),
            frame_id=frame.frame_id,
        )
        if frame.camera is not None:
            self._send(self._topics.camera_info, self._camera_info(header, frame.camera), frame.stamp_ns)
        if frame.pose is not None:
            self._send(self._topics.pose, self._pose(header, frame.pose), frame.stamp_ns)
        self._send(self._topics.image, self._image(header, frame.image, encoding), frame.stamp_ns)

    def _send(self, topic: str, message, stamp_ns: int) -> None:
        kind = message.__msgtype__
        if topic not in self._connections:
            self._connections[topic] = self._writer.add_connection(topic, kind, typestore=self._store)
        self._writer.write(self._connections[topic], stamp_ns, self._store.serialize_cdr(message, kind))

    def _new(self, kind: str, **values):
        return self._store.types[kind](**values)

    def _image(self, header, image: np.ndarray, encoding: str):
        image = _encode(image, encoding)
        return self._new(
            "sensor_msgs/msg/Image", header=header, height=image.shape[0], width=image.shape[1], encoding=encoding,
            is_bigendian=0, step=image.strides[0], data=image.reshape(-1),
        )  # fmt: skip

    def _camera_info(self, header, camera: Camera):
        roi = self._new("sensor_msgs/msg/RegionOfInterest", x_offset=0, y_offset=0, height=0, width=0, do_rectify=False)
        return self._new(
            "sensor_msgs/msg/CameraInfo", header=header, height=camera.height, width=camera.width,
            distortion_model=camera.model, d=camera.D if camera.D.size else np.zeros(5), k=camera.K.reshape(-1),
            r=np.eye(3).reshape(-1), p=np.hstack([camera.K, np.zeros((3, 1))]).reshape(-1),
            binning_x=0, binning_y=0, roi=roi,
        )  # fmt: skip

    def _pose(self, header, pose: Pose):
        position = self._new("geometry_msgs/msg/Point", **dict(zip("xyz", map(float, pose.t))))
        orientation = self._new("geometry_msgs/msg/Quaternion", **dict(zip("xyzw", map(float, _quaternion(pose.R)))))
        header = self._new("std_msgs/msg/Header", stamp=header.stamp, frame_id=pose.frame_id)
        value = self._new("geometry_msgs/msg/Pose", position=position, orientation=orientation)
        return self._new("geometry_msgs/msg/PoseStamped", header=header, pose=value)


@contextmanager
def _new_folder(path: Path, overwrite: bool):
    """A path to make a folder at, which is moved to ``path`` on success and removed on failure."""
    path = path.absolute()
    if path.exists() and not overwrite:
        raise BagError(f"bag {path}: exists already; choose another path or allow overwriting")
    if path.exists() and not (path / "metadata.yaml").is_file():
        raise BagError(f"bag {path}: exists and is no bag (no metadata.yaml), so it is not overwritten")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Inside a folder of its own, as the writer names its files after the bag's folder.
        with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as scratch:
            yield Path(scratch) / path.name
            if path.exists():
                path.rename(Path(scratch) / "replaced")
            (Path(scratch) / path.name).rename(path)
    except (OSError, sqlite3.Error) as error:
        raise BagError(f"bag {path}: cannot be written: {error}") from error


def _encode(image: np.ndarray, encoding: str) -> np.ndarray:
    """uint8 (H, W) or (H, W, 3) RGB to a contiguous image of the encoding."""
    if image.ndim == 2:
        conversion = None if encoding == "mono8" else cv2.COLOR_GRAY2RGB
    else:
        conversion = {"mono8": cv2.COLOR_RGB2GRAY, "rgb8": None, "bgr8": cv2.COLOR_RGB2BGR}[encoding]
    return np.ascontiguousarray(image if conversion is None else cv2.cvtColor(image, conversion))


def _time(stamp_ns: int) -> dict[str, int]:
    sec, nanosec = divmod(stamp_ns, 10**9)
    return {"sec": sec, "nanosec": nanosec}


def _quaternion(R: np.ndarray) -> np.ndarray:
    """Unit quaternion x, y, z, w (w >= 0) of a rotation.

    The eigenvector of Bar-Itzhack's matrix: no case needs its own branch.
    """
    (a, b, c), (d, e, f), (g, h, i) = R
    lower = np.array(
        [[a - e - i, 0, 0, 0], [d + b, e - a - i, 0, 0], [g + c, h + f, i - a - e, 0], [h - f, c - g, d - b, a + e + i]]
    )
    q = np.linalg.eigh(lower, UPLO="L")[1][:, -1]
    return -q if q[3] < 0 else q
