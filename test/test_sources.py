"""Recordings of every format and folders of images: what becomes a frame, and what is said of the rest."""

import shutil
import sys

import cv2
import numpy as np
import pytest
from bag_helpers import IMAGE, INFO, POSE, STEP, T0, Messages, stream, texture, write
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vslam_features.config import Config
from vslam_features.errors import BagError
from vslam_features.replay.image_source import natural_key
from vslam_features.replay.open_source import open_source


def check_stream(source, count=5):
    frames = list(source)
    assert len(frames) == len(source) == count
    for i, frame in enumerate(frames):
        assert frame.stamp_ns == T0 + i * STEP and frame.frame_id == "cam_optical"
        np.testing.assert_array_equal(frame.image, texture(i))
        assert frame.camera.K[0, 0] == 50 and frame.camera.size == (64, 48)
        assert frame.pose.t[0] == pytest.approx(i) and frame.pose.frame_id == "odom"
    assert source.complete and not source.skipped.total and not source.notes.total


@pytest.mark.parametrize(
    "storage, compression",
    [("mcap", "none"), ("mcap", "storage"), ("mcap", "message"), ("mcap", "file"),
     ("sqlite3", "none"), ("sqlite3", "message"), ("sqlite3", "file")],
)  # fmt: skip
def test_rosbag2(tmp_path, storage, compression):
    with open_source(write(tmp_path / "bag", stream(), storage, compression)) as source:
        check_stream(source)
        assert source.describe()["pose_topic"] == POSE


@pytest.mark.parametrize("storage, suffix", [("mcap", ".mcap"), ("sqlite3", ".db3")])
def test_bare_file(tmp_path, storage, suffix):
    write(tmp_path / "bag", stream(), storage)
    with open_source(tmp_path / "bag" / f"bag{suffix}") as source:
        check_stream(source)


def test_ros1(tmp_path):
    m = Messages(ros1=True)
    with open_source(write(tmp_path / "old.bag", stream(messages=m), messages=m)) as source:
        check_stream(source)


def test_compressed_images_and_odometry(tmp_path):
    m, items = Messages(), []
    for i in range(3):
        stamp = T0 + i * STEP
        items += [
            ("/odom", stamp, m.odometry(stamp, 2 * i)),
            ("/cam/image_raw/compressed", stamp, m.compressed(stamp, texture(i))),
        ]
        items += [(INFO, stamp, m.info(stamp))]
    with open_source(write(tmp_path / "bag", items)) as source:
        frames = list(source)
    assert [f.pose.t[0] for f in frames] == [0, 2, 4] and all(f.camera for f in frames)
    np.testing.assert_array_equal(frames[2].image, texture(2))


def test_late_camera_info_of_the_same_stamp_wins_over_an_earlier_one(tmp_path):
    m, items = Messages(), []
    for i in range(4):
        stamp = T0 + i * STEP
        items += [(IMAGE, stamp, m.image(stamp, texture(i))), (INFO, stamp + 1000, m.info(stamp, focal=50.0 + i))]
    with open_source(write(tmp_path / "bag", items)) as source:
        assert [f.camera.K[0, 0] for f in source] == [50, 51, 52, 53]


def test_latched_camera_info_serves_all_images(tmp_path):
    m = Messages()
    items = [(INFO, T0 - 5 * STEP, m.info(0))] + stream(4, infos=False, poses=False)
    with open_source(write(tmp_path / "bag", items)) as source:
        assert all(f.camera.K[0, 0] == 50 for f in source)


@pytest.mark.parametrize(
    "setting, topic, focal",
    [("auto", "/cam/image_rect", 51), ("auto", "/cam/image_raw", 50),
     ("yes", "/cam/image_raw", 51), ("no", "/cam/image_rect", 50)],
)  # fmt: skip
def test_rectified_images_use_P(tmp_path, setting, topic, focal):
    m = Messages()
    items = [(INFO, T0, m.info(T0)), (topic, T0, m.image(T0, texture()))]
    with open_source(write(tmp_path / "bag", items), Config(rectified=setting)) as source:
        (frame,) = source
    assert frame.camera.K[0, 0] == focal


def test_frames_outside_the_poses_are_counted_not_extrapolated(tmp_path):
    m = Messages()
    items = stream(6, poses=False) + [(POSE, T0 + i * STEP, m.pose(T0 + i * STEP, i)) for i in (2, 3)]
    items.sort(key=lambda item: item[1])
    with open_source(write(tmp_path / "bag", items)) as source:
        assert [f.pose is not None for f in source] == [False, False, True, True, False, False]
        assert source.notes.counts == {"frames without a pose near their stamp": 4} and source.complete


def test_no_pose_leaves_them_out(tmp_path):
    with open_source(write(tmp_path / "bag", stream()), use_pose=False) as source:
        assert all(f.pose is None for f in source) and not source.notes.total


def test_duplicate_backward_undecodable_and_mismatching_inputs_are_counted(tmp_path):
    m = Messages()
    items = stream(3, poses=False)
    add = [(T0 + 2 * STEP, texture(9), "mono8"), (T0, texture(9), "mono8"), (T0 + 3 * STEP, texture(9), "nonsense"),
           (T0 + 4 * STEP, texture(9, 24, 64), "mono8"), (T0 + 5 * STEP, texture(9), "mono8")]  # fmt: skip
    items += [(IMAGE, T0 + (3 + i) * STEP, m.image(s, p, e)) for i, (s, p, e) in enumerate(add)]
    with open_source(write(tmp_path / "bag", items)) as source:
        assert [f.stamp_ns for f in source] == [T0 + i * STEP for i in (0, 1, 2, 5)]
        assert source.position == 7
    assert source.skipped.counts == {
        "duplicate stamp": 1, "stamp before the last one": 1, "undecodable image": 1,
        "camera_info does not fit the image": 1,
    }  # fmt: skip
    assert not source.complete and "1 x undecodable image" in source.reason and "duplicate" not in source.reason
    assert "nonsense" in source.skipped.examples["undecodable image"][0]


def test_a_duplicate_alone_loses_nothing(tmp_path):
    m = Messages()
    items = stream(2, poses=False) + [(IMAGE, T0 + 2 * STEP, m.image(T0 + STEP, texture()))]
    with open_source(write(tmp_path / "bag", items)) as source:
        assert len(list(source)) == 2 and source.skipped.total == 1 and source.complete


def test_unset_stamps_fall_back_to_log_time(tmp_path):
    m = Messages()
    items = [(IMAGE, T0 + i, m.image(0, texture(i))) for i in range(3)]
    with open_source(write(tmp_path / "bag", items)) as source:
        assert [f.stamp_ns for f in source] == [T0, T0 + 1, T0 + 2]
        assert source.notes.counts["images without a stamp, log time used"] == 3


# -- topics ------------------------------------------------------------------------------------


def test_depth_and_a_second_transport_do_not_confuse(tmp_path):
    m = Messages()
    items = stream(2) + [("/cam/depth/image_rect_raw", T0, m.image(T0, texture()))]
    items += [(IMAGE + "/compressed", T0, m.compressed(T0, texture()))]
    with open_source(write(tmp_path / "bag", items)) as source:
        assert source.topics.image == IMAGE and len(list(source)) == 2


def test_several_image_topics_are_listed_with_the_option(tmp_path):
    m = Messages()
    path = write(tmp_path / "bag", stream(2) + [("/right/image_raw", T0, m.image(T0, texture()))])
    with pytest.raises(BagError) as error:
        open_source(path)
    for text in ("--image-topic", "/cam/image_raw", "/right/image_raw", "sensor_msgs/msg/Image, 2 messages"):
        assert text in str(error.value)
    with open_source(path, image_topic="/right/image_raw") as source:
        assert [f.camera for f in source] == [None]
        assert any("uncalibrated" in note for note in source.notes.counts)


@pytest.mark.parametrize("option, topic, expected", [
    ("image_topic", "/nope", "is not in the recording"),
    ("image_topic", POSE, "is of type geometry_msgs/msg/PoseStamped"),
    ("camera_info_topic", "/nope", INFO),
    ("pose_topic", IMAGE, "is of type sensor_msgs/msg/Image"),
])  # fmt: skip
def test_a_wrong_topic_is_refused_and_the_right_ones_listed(tmp_path, option, topic, expected):
    with pytest.raises(BagError) as error:
        open_source(write(tmp_path / "bag", stream(2)), **{option: topic})
    assert expected in str(error.value) and "--" + option.replace("_", "-") in str(error.value)


def test_several_pose_topics_are_a_remark_and_an_option(tmp_path):
    m = Messages()
    path = write(tmp_path / "bag", stream(2) + [("/odom", T0, m.odometry(T0, 7))])
    with open_source(path) as source:
        assert all(f.pose is None for f in source)
        assert any("--pose-topic" in note for note in source.notes.counts)
    with open_source(path, pose_topic="/odom") as source:
        assert next(iter(source)).pose.t[0] == 7


def test_no_images_at_all(tmp_path):
    m = Messages()
    with pytest.raises(BagError, match="no image topic"):
        open_source(write(tmp_path / "bag", [(POSE, T0, m.pose(T0, 0))]))


# -- damage ------------------------------------------------------------------------------------


def test_missing_metadata_names_both_ways_out(tmp_path):
    path = write(tmp_path / "bag", stream())
    (path / "metadata.yaml").unlink()
    with pytest.raises(BagError) as error:
        open_source(path)
    assert "ros2 bag reindex" in str(error.value) and "bag.mcap" in str(error.value)


@pytest.mark.parametrize(
    "storage, compression, bare",
    [("mcap", "none", False), ("mcap", "none", True), ("mcap", "storage", True), ("mcap", "message", False),
     ("sqlite3", "none", False), ("sqlite3", "none", True), ("sqlite3", "message", False)],
)  # fmt: skip
def test_a_cut_recording_gives_what_it_has_and_says_so(tmp_path, storage, compression, bare):
    path = write(tmp_path / "bag", stream(60), storage, compression)
    (file,) = [p for p in path.iterdir() if p.suffix in (".mcap", ".db3")]
    data = file.read_bytes()
    file.write_bytes(data[: len(data) * 6 // 10])
    with open_source(file if bare else path) as source:
        frames = list(source)
    assert 10 < len(frames) < 60 and not source.complete and "damaged" in source.reason
    np.testing.assert_array_equal(frames[10].image, texture(10))


def test_damage_in_the_middle_is_noticed(tmp_path):
    path = write(tmp_path / "bag", stream(60), "mcap", "storage")
    file = path / "bag.mcap"
    data = bytearray(file.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 8000] = bytes(8000)  # two images and more, so records break
    file.write_bytes(data)
    with open_source(path) as source:
        assert len(list(source)) < 60
    assert not source.complete


def test_fewer_messages_than_promised_is_partial(tmp_path):
    path = write(tmp_path / "bag", stream(3))
    text = (path / "metadata.yaml").read_text()
    (path / "metadata.yaml").write_text(text.replace("message_count: 3", "message_count: 4"))
    with open_source(path) as source:
        assert len(list(source)) == 3
    assert "4 images promised" in source.reason


def test_an_unmerged_sqlite_log_is_noticed(tmp_path):
    path = write(tmp_path / "bag", stream(3), "sqlite3")
    (path / "bag.db3-wal").write_bytes(b"x" * 100)
    with open_source(path) as source:
        assert len(list(source)) == 3 and "bag.db3-wal" in source.reason


def test_a_cut_ros1_bag_names_the_repair(tmp_path):
    m = Messages(ros1=True)
    path = write(tmp_path / "old.bag", stream(messages=m), messages=m)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(BagError, match="rosbag reindex"):
        open_source(path)


def test_without_rosbags_it_says_so(tmp_path, monkeypatch):
    path = write(tmp_path / "bag", stream(2))
    monkeypatch.setitem(sys.modules, "rosbags.rosbag2", None)
    with pytest.raises(BagError, match="pip install rosbags"):
        open_source(path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Bytes of a little recording in each format."""
    folder, m = tmp_path_factory.mktemp("whole"), Messages(ros1=True)
    out = {}
    for name, storage, compression in (("a", "mcap", "none"), ("b", "mcap", "storage"), ("c", "sqlite3", "none")):
        path = write(folder / name, stream(8), storage, compression)
        file = next(p for p in path.iterdir() if p.suffix in (".mcap", ".db3"))
        out[f"{name}{file.suffix}"] = file.read_bytes()
    out["d.bag"] = write(folder / "d.bag", stream(8, messages=m), messages=m).read_bytes()
    return out


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(["a.mcap", "b.mcap", "c.db3", "d.bag"]), data=st.data())
def test_cut_anywhere_it_is_an_error_or_partial_never_a_crash(whole, tmp_path, name, data):
    content = whole[name]
    cut = data.draw(st.integers(0, len(content) - 1))
    file = tmp_path / name
    file.write_bytes(content[:cut])
    try:
        with open_source(file) as source:
            frames = list(source)
    except BagError as error:
        assert str(file) in str(error)
        return
    assert len(frames) <= 8 and not source.complete
    for i, frame in enumerate(frames):
        np.testing.assert_array_equal(frame.image, texture(i))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(["a.mcap", "b.mcap", "c.db3", "d.bag"]), data=st.data())
def test_damaged_anywhere_it_never_crashes(whole, tmp_path, name, data):
    content = bytearray(whole[name])
    at = data.draw(st.integers(0, len(content) - 1))
    patch = data.draw(st.binary(min_size=1, max_size=64))
    content[at : at + len(patch)] = patch
    file = tmp_path / name
    file.write_bytes(content)
    try:
        with open_source(file) as source:
            list(source)
    except BagError as error:
        assert str(file) in str(error)


@pytest.mark.parametrize("name", ["missing", "notes.txt", "empty", "photo.jpg", "empty.mcap", "empty.db3", "empty.bag"])
def test_what_is_no_recording_says_what_is_expected(tmp_path, name):
    path = tmp_path / name
    if name == "empty":
        path.mkdir()
    elif name != "missing":
        path.write_bytes(b"")
    with pytest.raises(BagError, match=str(name)):
        open_source(path)


# -- folders of images ---------------------------------------------------------------------------


def write_images(folder, names):
    folder.mkdir(exist_ok=True)
    for i, name in enumerate(names):
        assert cv2.imwrite(str(folder / name), texture(i))
    return folder


def test_images_come_in_natural_order_with_folder_defaults(tmp_path):
    folder = write_images(tmp_path / "f", ["img2.png", "img10.png", "img1.PNG", "img3.tif", "img4.bmp"])
    (folder / "notes.txt").write_text("x")
    source = open_source(folder, fps=20)
    frames = list(source)
    assert [f.stamp_ns for f in frames] == [i * 50_000_000 for i in range(5)]
    for frame, i in zip(frames, (2, 0, 3, 4, 1)):
        np.testing.assert_array_equal(frame.image, texture(i))
    c = source.config
    assert (c.keyframes.every, c.retrieval.exclude_frames, c.retrieval.exclude_s) == (1, 10, 0.0)


def test_what_the_user_sets_wins_over_folder_defaults(tmp_path):
    folder = write_images(tmp_path / "f", ["1.png"])
    c = open_source(folder, Config().with_values(retrieval__exclude_frames=3)).config
    assert (c.keyframes.every, c.retrieval.exclude_frames) == (1, 3)
    c = open_source(folder, Config(), explicit=frozenset({"keyframes.every"})).config
    assert (c.keyframes.every, c.retrieval.exclude_frames) == (0, 10)


def test_an_unreadable_image_is_counted_and_keeps_its_index(tmp_path):
    folder = write_images(tmp_path / "f", ["1.png", "2.png", "3.png"])
    (folder / "2.png").write_bytes((folder / "2.png").read_bytes()[:100])
    source = open_source(folder)
    assert [f.stamp_ns for f in source] == [0, 200_000_000]
    assert source.skipped.counts == {"unreadable image": 1} and not source.complete


def test_camera_by_numbers_and_topics_refused(tmp_path):
    folder = write_images(tmp_path / "f", ["1.png"])
    (frame,) = open_source(folder, camera=(50.0, 51.0, 32.0, 24.0))
    assert frame.camera.K[1, 1] == 51 and frame.camera.size == (64, 48)
    with pytest.raises(BagError, match="--image-topic"):
        open_source(folder, image_topic="/x")


def test_a_parent_folder_names_its_folders(tmp_path):
    write_images(tmp_path / "images", ["1.png"])
    with pytest.raises(BagError, match="images"):
        open_source(tmp_path)


def test_natural_key():
    from pathlib import Path

    names = ["a10", "a9", "A1", "b", "a1b2", "a1b10"]
    assert sorted(names, key=lambda n: natural_key(Path(n))) == ["A1", "a1b2", "a1b10", "a9", "a10", "b"]


def test_a_copied_bag_needs_all_files(tmp_path):
    path = write(tmp_path / "bag", stream())
    (path / "bag.mcap").unlink()
    with pytest.raises(BagError, match="copy the whole folder"):
        open_source(path)
    shutil.rmtree(path)
