"""Images, calibration, poses and stamps: ROS messages <-> core types. Stamps are integers throughout."""

from __future__ import annotations

import numpy as np
from builtin_interfaces.msg import Time
from sensor_msgs.msg import CameraInfo, CompressedImage, Image
from std_msgs.msg import Header

from .. import images
from ..camera import Camera
from ..errors import DataError, ImageError
from ..pose_track import pose_from_quaternion
from ..types import Pose
from .clouds import byte_array


def split_stamp(stamp_ns: int) -> tuple[int, int]:
    """(sec, nanosec) of integer nanoseconds. Raises DataError outside what ``builtin_interfaces/Time`` holds."""
    sec, nanosec = divmod(stamp_ns, 10**9)
    if not -(2**31) <= sec < 2**31:
        raise DataError(f"stamp {stamp_ns} ns does not fit the 32-bit seconds of a ROS message")
    return sec, nanosec


def stamp_message(stamp_ns: int) -> Time:
    """Integer nanoseconds as a ``builtin_interfaces/Time``, exactly."""
    sec, nanosec = split_stamp(stamp_ns)
    return Time(sec=sec, nanosec=nanosec)


def stamp_of(message) -> int:
    """Integer nanoseconds of a message's header stamp, exactly."""
    return message.header.stamp.sec * 10**9 + message.header.stamp.nanosec


def header(stamp_ns: int, frame_id: str) -> Header:
    """A ``std_msgs/Header``."""
    return Header(stamp=stamp_message(stamp_ns), frame_id=frame_id)


def image_array(message: Image | CompressedImage, max_value: float | None = None) -> np.ndarray:
    """uint8 (H, W) or (H, W, 3) RGB of a message; ``max_value`` as in ``images.decode``. Raises ImageError."""
    if isinstance(message, CompressedImage):
        return images.decode_compressed(message.data, message.format, max_value=max_value)
    return images.decode(
        message.data,
        message.width,
        message.height,
        message.encoding,
        message.step,
        bool(message.is_bigendian),
        max_value=max_value,
        fallback=_cv_bridge,
    )


def image_message(image: np.ndarray, stamp_ns: int, frame_id: str) -> Image:
    """A uint8 (H, W) or (H, W, 3) RGB image as ``mono8`` or ``rgb8``. Raises ImageError on other arrays."""
    if image.dtype != np.uint8 or image.ndim not in (2, 3) or image.shape[2:] not in ((), (3,)):
        raise ImageError(f"image: expected uint8 (H, W) or (H, W, 3), got {image.dtype} {image.shape}")
    height, width = image.shape[:2]
    return Image(
        header=header(stamp_ns, frame_id),
        height=height,
        width=width,
        encoding="mono8" if image.ndim == 2 else "rgb8",
        is_bigendian=0,
        step=width * (1 if image.ndim == 2 else 3),
        data=byte_array(image),
    )


def camera_of(info: CameraInfo, image_size: tuple[int, int], rectified: bool) -> Camera | None:
    """Camera of an image (width, height); None where the message says uncalibrated. Raises CameraError."""
    roi = info.roi
    return Camera.from_info(
        width=info.width,
        height=info.height,
        K=info.k,
        D=info.d,
        P=info.p,
        distortion_model=info.distortion_model,
        binning_x=info.binning_x,
        binning_y=info.binning_y,
        roi=(roi.x_offset, roi.y_offset, roi.width, roi.height),
        image_size=image_size,
        rectified=rectified,
    )


def pose_of(message) -> Pose:
    """The pose of a PoseStamped or Odometry in its header's frame. Raises DataError on a wrong quaternion.

    Whether it is that of the camera or of a body is parameter ``pose_of``.
    """
    pose = getattr(message.pose, "pose", message.pose)  # Odometry nests it once more, beside the covariance
    p, q = pose.position, pose.orientation
    return pose_from_quaternion(q.x, q.y, q.z, q.w, (p.x, p.y, p.z), message.header.frame_id)


def quaternion(R: np.ndarray) -> np.ndarray:
    """(4,) f64 unit quaternion (x, y, z, w), w >= 0, of a (3, 3) rotation."""
    # The largest of the four candidates divides without loss at every angle (Shepperd 1978).
    trace = np.trace(R)
    k = int(np.argmax([R[0, 0], R[1, 1], R[2, 2], trace]))
    if k == 3:
        q = np.array([R[2, 1] - R[1, 2], R[0, 2] - R[2, 0], R[1, 0] - R[0, 1], 1 + trace])
    else:
        i, j = (k + 1) % 3, (k + 2) % 3
        q = np.empty(4)
        q[k] = 1 + 2 * R[k, k] - trace
        q[i], q[j], q[3] = R[i, k] + R[k, i], R[j, k] + R[k, j], R[j, i] - R[i, j]
    q /= np.linalg.norm(q)
    return -q if q[3] < 0 else q


def _cv_bridge(data, width, height, encoding, step, is_bigendian) -> np.ndarray:
    """Decode an encoding outside our table with cv_bridge, as mono8 or rgb8."""
    try:
        from cv_bridge import CvBridge
    except ImportError as error:
        known = ", ".join(images.ENCODINGS)
        raise ImageError(
            f"known without cv_bridge: {known}; for others: apt install ros-$ROS_DISTRO-cv-bridge"
        ) from error
    message = Image(width=width, height=height, encoding=encoding, step=step, is_bigendian=int(is_bigendian), data=data)
    bridge = CvBridge()
    raw = bridge.imgmsg_to_cv2(message)
    return bridge.imgmsg_to_cv2(message, "mono8" if raw.ndim == 2 else "rgb8")
