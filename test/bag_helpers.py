"""Little recordings for tests, in every format that is read."""

import cv2
import numpy as np
from rosbags.rosbag1 import Writer as Writer1
from rosbags.rosbag2 import CompressionFormat, CompressionMode, StoragePlugin
from rosbags.rosbag2 import Writer as Writer2
from rosbags.typesys import Stores, get_typestore

T0 = 1760000000_123456789
STEP = 100_000_000
IMAGE, INFO, POSE = "/cam/image_raw", "/cam/camera_info", "/vio/pose"


def texture(i=0, height=48, width=64):
    """uint8 (H, W) noise, another one for each i."""
    return np.random.default_rng(i).integers(0, 256, (height, width), np.uint8)


class Messages:
    """Builds messages of one ROS generation; stamps are integer nanoseconds."""

    def __init__(self, ros1=False):
        self.ros1 = ros1
        self.store = get_typestore(Stores.ROS1_NOETIC if ros1 else Stores.ROS2_HUMBLE)

    def new(self, kind, **values):
        return self.store.types[kind](**values)

    def header(self, stamp, frame_id):
        time = self.new("builtin_interfaces/msg/Time", sec=stamp // 10**9, nanosec=stamp % 10**9)
        extra = {"seq": 0} if self.ros1 else {}
        return self.new("std_msgs/msg/Header", stamp=time, frame_id=frame_id, **extra)

    def image(self, stamp, pixels, encoding="mono8", frame_id="cam_optical"):
        return self.new(
            "sensor_msgs/msg/Image", header=self.header(stamp, frame_id), height=pixels.shape[0], width=pixels.shape[1],
            encoding=encoding, is_bigendian=0, step=pixels.strides[0], data=pixels.reshape(-1),
        )  # fmt: skip

    def compressed(self, stamp, pixels, frame_id="cam_optical"):
        data = cv2.imencode(".png", pixels)[1].reshape(-1)
        return self.new(
            "sensor_msgs/msg/CompressedImage", header=self.header(stamp, frame_id), format="mono8; png compressed",
            data=data,
        )  # fmt: skip

    def info(self, stamp, width=64, height=48, focal=50.0):
        K = np.array([focal, 0, width / 2, 0, focal, height / 2, 0, 0, 1.0])
        P = np.array([focal + 1, 0, width / 2, 0, 0, focal + 1, height / 2, 0, 0, 0, 1.0, 0])
        roi = self.new("sensor_msgs/msg/RegionOfInterest", x_offset=0, y_offset=0, height=0, width=0, do_rectify=False)
        matrices = {"D": np.zeros(5), "K": K, "R": np.eye(3).reshape(-1), "P": P}
        if not self.ros1:
            matrices = {k.lower(): v for k, v in matrices.items()}
        return self.new(
            "sensor_msgs/msg/CameraInfo", header=self.header(stamp, "cam_optical"), height=height, width=width,
            distortion_model="plumb_bob", binning_x=0, binning_y=0, roi=roi, **matrices,
        )  # fmt: skip

    def pose_value(self, x, w=1.0):
        p = self.new("geometry_msgs/msg/Point", x=float(x), y=0.0, z=0.0)
        q = self.new("geometry_msgs/msg/Quaternion", x=0.0, y=0.0, z=0.0, w=w)
        return self.new("geometry_msgs/msg/Pose", position=p, orientation=q)

    def pose(self, stamp, x, w=1.0):
        return self.new("geometry_msgs/msg/PoseStamped", header=self.header(stamp, "odom"), pose=self.pose_value(x, w))

    def odometry(self, stamp, x):
        zero = self.new("geometry_msgs/msg/Vector3", x=0.0, y=0.0, z=0.0)
        twist = self.new("geometry_msgs/msg/Twist", linear=zero, angular=zero)
        return self.new(
            "nav_msgs/msg/Odometry", header=self.header(stamp, "odom"), child_frame_id="base",
            pose=self.new("geometry_msgs/msg/PoseWithCovariance", pose=self.pose_value(x), covariance=np.zeros(36)),
            twist=self.new("geometry_msgs/msg/TwistWithCovariance", twist=twist, covariance=np.zeros(36)),
        )  # fmt: skip


def write(path, items, storage="mcap", compression="none", messages=None):
    """Write ``items`` = [(topic, log_ns, message)] and return the path to open."""
    m = messages or Messages()
    if m.ros1:
        writer = Writer1(path)
    else:
        writer = Writer2(path, version=8, storage_plugin=StoragePlugin[storage.upper()])
        writer.set_compression(CompressionMode[compression.upper()], CompressionFormat.ZSTD)
    connections = {}
    with writer:
        for topic, log_ns, message in items:
            kind = message.__msgtype__
            if topic not in connections:
                connections[topic] = writer.add_connection(topic, kind, typestore=m.store)
            raw = m.store.serialize_ros1(message, kind) if m.ros1 else m.store.serialize_cdr(message, kind)
            writer.write(connections[topic], log_ns, raw)
    return path


def stream(count=5, messages=None, infos=True, poses=True, stamp0=T0):
    """Images with camera_info and poses half a period beside them."""
    m, items = messages or Messages(), []
    for i in range(count):
        stamp = stamp0 + i * STEP
        if poses:
            items.append((POSE, stamp - STEP // 2, m.pose(stamp - STEP // 2, i - 0.5)))
        if infos:
            items.append((INFO, stamp, m.info(stamp)))
        items.append((IMAGE, stamp, m.image(stamp, texture(i))))
    if poses:
        stamp = stamp0 + count * STEP - STEP // 2
        items.append((POSE, stamp, m.pose(stamp, count - 0.5)))
    return items
