"""Bags as written, read back with rosbags."""

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rosbags.highlevel import AnyReader
from rosbags.typesys import Stores, get_typestore

from vslam_features.camera import Camera
from vslam_features.errors import BagError
from vslam_features.replay.bag_writer import Topics, _quaternion, write_bag, write_scene_bag
from vslam_features.replay.ground_truth import GroundTruth
from vslam_features.replay.scenes import make_scene
from vslam_features.types import Frame, Pose

START = 1760000000123456789
STORAGE = [("mcap", "none"), ("mcap", "zstd"), ("sqlite3", "none"), ("sqlite3", "zstd")]


def make_frames(n=4, shape=(24, 32), calibrated=True):
    rng = np.random.default_rng(1)
    camera = Camera(32, 24, np.array([[40.0, 0, 15.5], [0, 41, 11.5], [0, 0, 1]]), np.array([0.1, -0.2, 0, 0, 0.01]))
    for i in range(n):
        pose = Pose(cv2.Rodrigues(rng.normal(size=3))[0], rng.normal(size=3), frame_id="map")
        image = rng.integers(0, 256, shape, dtype=np.uint8)
        known = (camera, pose) if calibrated else (None, None)
        yield Frame(START + i * 33333333, "camera_optical", image, *known)


def read(path):
    """Topic -> [(bag time, message)] of a bag."""
    out = {}
    with AnyReader([path], default_typestore=get_typestore(Stores.ROS2_HUMBLE)) as reader:
        for connection, time, raw in reader.messages():
            out.setdefault(connection.topic, []).append((time, reader.deserialize(raw, connection.msgtype)))
    return out


def stamp_ns(message):
    return message.header.stamp.sec * 10**9 + message.header.stamp.nanosec


@pytest.mark.parametrize("storage, compression", STORAGE)
def test_everything_comes_back_exactly(tmp_path, storage, compression):
    frames, seen = list(make_frames()), []
    path = write_bag(
        tmp_path / "bag", frames, storage=storage, compression=compression, progress=lambda *done: seen.append(done)
    )
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    bag, topics = read(path), Topics()
    assert set(bag) == {topics.image, topics.camera_info, topics.pose}
    for messages in bag.values():
        assert [time for time, _ in messages] == [stamp_ns(m) for _, m in messages] == [f.stamp_ns for f in frames]
    for frame, (_, image), (_, info), (_, pose) in zip(frames, *(bag[t] for t in vars(topics).values())):
        assert image.header.frame_id == info.header.frame_id == "camera_optical"
        assert (image.encoding, image.width, image.height, image.step) == ("mono8", 32, 24, 32)
        assert image.data.tobytes() == frame.image.tobytes()
        assert (info.width, info.height, info.distortion_model) == (32, 24, "plumb_bob")
        assert (info.k.reshape(3, 3) == frame.camera.K).all() and (info.d == frame.camera.D).all()
        assert (info.p.reshape(3, 4)[:, :3] == frame.camera.K).all()
        assert pose.header.frame_id == "map"
        p, q = pose.pose.position, pose.pose.orientation
        assert (np.array([p.x, p.y, p.z]) == frame.pose.t).all()
        assert np.allclose(matrix(np.array([q.x, q.y, q.z, q.w])), frame.pose.R, atol=1e-12)
    assert [p.name for p in tmp_path.iterdir()] == ["bag"]


def test_info_and_pose_come_before_their_image(tmp_path):
    write_bag(tmp_path / "bag", make_frames(2))
    with AnyReader([tmp_path / "bag"]) as reader:
        order = [connection.topic for connection, _, _ in reader.messages()]
    topics = Topics()
    assert order == [topics.camera_info, topics.pose, topics.image] * 2


@pytest.mark.parametrize("encoding", ["mono8", "rgb8", "bgr8"])
@pytest.mark.parametrize("shape", [(24, 32), (24, 32, 3)])
def test_encodings(tmp_path, encoding, shape):
    (frame,) = make_frames(1, shape)
    write_bag(tmp_path / "bag", iter([frame]), image_encoding=encoding, topics=Topics(image="/picture"))
    ((_, message),) = read(tmp_path / "bag")["/picture"]
    channels = 1 if encoding == "mono8" else 3
    assert (message.encoding, message.step) == (encoding, 32 * channels)
    got = message.data.reshape(24, 32, channels)
    if encoding == "mono8":
        expected = frame.image if len(shape) == 2 else cv2.cvtColor(frame.image, cv2.COLOR_RGB2GRAY)
    else:
        colour = frame.image if len(shape) == 3 else np.stack([frame.image] * 3, -1)
        expected = colour if encoding == "rgb8" else colour[..., ::-1]
    assert (got.squeeze() == expected).all()


def test_uncalibrated_frames_give_images_only(tmp_path):
    write_bag(tmp_path / "bag", make_frames(2, calibrated=False))
    assert set(read(tmp_path / "bag")) == {Topics().image}


def test_an_existing_path_is_safe_unless_told(tmp_path):
    path = tmp_path / "bag"
    write_bag(path, make_frames(3))
    with pytest.raises(BagError, match="exists already"):
        write_bag(path, make_frames(1))
    assert len(read(path)[Topics().image]) == 3
    write_bag(path, make_frames(1), overwrite=True)
    assert len(read(path)[Topics().image]) == 1
    other = tmp_path / "photos"
    other.mkdir()
    (other / "a.txt").write_text("keep")
    with pytest.raises(BagError, match="is no bag"):
        write_bag(other, make_frames(1), overwrite=True)
    assert (other / "a.txt").read_text() == "keep"


def test_a_failure_leaves_nothing_and_keeps_the_old_bag(tmp_path):
    def broken():
        yield from make_frames(2)
        raise RuntimeError("camera unplugged")

    with pytest.raises(RuntimeError, match="unplugged"):
        write_bag(tmp_path / "new" / "bag", broken())
    assert list((tmp_path / "new").iterdir()) == []
    write_bag(tmp_path / "bag", make_frames(3))
    with pytest.raises(RuntimeError):
        write_bag(tmp_path / "bag", broken(), overwrite=True)
    assert len(read(tmp_path / "bag")[Topics().image]) == 3


@pytest.mark.parametrize(
    "options, text",
    [
        ({"storage": "rosbag1"}, "mcap, sqlite3"),
        ({"compression": "lz4"}, "none, zstd"),
        ({"image_encoding": "mono16"}, "mono8, rgb8, bgr8"),
    ],
)
def test_unknown_choices_are_named(tmp_path, options, text):
    with pytest.raises(BagError, match=text):
        write_bag(tmp_path / "bag", make_frames(1), **options)
    assert list(tmp_path.iterdir()) == []


def test_no_frames_and_unwritable_places_are_errors(tmp_path):
    with pytest.raises(BagError, match="no frames"):
        write_bag(tmp_path / "bag", [])
    (tmp_path / "file").write_text("")
    with pytest.raises(BagError, match="cannot be written"):
        write_bag(tmp_path / "file" / "bag", make_frames(1))


def test_scene_bag_holds_its_truth(tmp_path):
    scene = make_scene("corridor", width=96, height=64, num_frames=5)
    path = write_scene_bag(scene, tmp_path / "bag", compression="zstd")
    truth, images = GroundTruth.load(path), read(path)[Topics().image]
    assert [time for time, _ in images] == scene.stamps_ns == truth.stamps_ns.tolist()
    for i, (_, message) in enumerate(images):
        assert message.data.tobytes() == scene.frame(i).image.tobytes()
    assert truth.is_true(scene.stamps_ns[0], scene.stamps_ns[4])
    with pytest.raises(BagError, match="exists already"):
        write_scene_bag(scene, path)
    write_scene_bag(scene, path, overwrite=True)


def matrix(q):
    """Rotation of a unit quaternion x, y, z, w, by the textbook."""
    v, w = q[:3], q[3]
    cross = np.array([[0, -v[2], v[1]], [v[2], 0, -v[0]], [-v[1], v[0], 0]])
    return np.eye(3) + 2 * w * cross + 2 * cross @ cross


@given(st.lists(st.floats(-1, 1), min_size=4, max_size=4).filter(lambda q: np.linalg.norm(q) > 0.1))
def test_quaternions_return_their_rotation(q):
    q = np.array(q) / np.linalg.norm(q)
    back = _quaternion(matrix(q))
    assert np.linalg.norm(back) == pytest.approx(1) and back[3] >= 0
    assert np.allclose(matrix(back), matrix(q), atol=1e-9)
