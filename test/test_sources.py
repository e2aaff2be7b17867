"""Recordings of every format and folders of images: what becomes a frame, and what is said of the rest."""

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
from bag_helpers import IMAGE, INFO, POSE, STEP, T0, Messages, stream, texture, write
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vslam_features.cli.common import load_config
from vslam_features.config import Config
from vslam_features.errors import BagError, ImageError
from vslam_features.replay.image_source import natural_key, read_any_image
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


@pytest.mark.parametrize("pose_of, child, notes", [("camera", "base", 1), ("body", "base", 0),
                                                   ("camera", "cam_optical", 0), ("camera", "", 0)])  # fmt: skip
def test_odometry_of_another_body_than_the_camera_is_noted_once(tmp_path, pose_of, child, notes):
    m, items = Messages(), []
    for i in range(3):
        odometry = m.odometry(T0 + i * STEP, i)
        odometry.child_frame_id = child
        items += [("/odom", T0 + i * STEP, odometry), (IMAGE, T0 + i * STEP, m.image(T0 + i * STEP, texture(i)))]
    with open_source(write(tmp_path / "bag", items), Config(pose_of=pose_of)) as source:
        assert all(frame.pose for frame in source)
    text = "poses are of 'base', images of 'cam_optical': set pose_of to body"
    assert [n for note, n in source.notes.counts.items() if note == text] == [1] * notes
    assert sum("pose_of" in note for note in source.notes.counts) == notes


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
        assert bare or len(source) == 60  # metadata.yaml still says how many there were
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


@pytest.mark.parametrize("old, new", [("message_count", "messages"), ("message_count: 60", "message_count: many")])
def test_a_cut_recording_with_odd_metadata_counts_what_is_there(tmp_path, old, new):
    path = write(tmp_path / "bag", stream(60))
    file, text = path / "bag.mcap", (path / "metadata.yaml").read_text()
    file.write_bytes(file.read_bytes()[: file.stat().st_size * 6 // 10])
    (path / "metadata.yaml").write_text(text.replace(old, new))
    with open_source(path) as source:
        assert len(list(source)) == len(source) < 60
    assert not source.complete


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


# Images that share a page, that fill one, and that go on in overflow pages.
SIZES = [(8, 8), (48, 64), (60, 70), (96, 128)]


@pytest.fixture(scope="module")
def databases(tmp_path_factory):
    """Bytes of a .db3 for each image size."""
    folder, m, out = tmp_path_factory.mktemp("databases"), Messages(), {}
    for h, w in SIZES:
        items = [
            (topic, log, m.image(log, texture(i // 3, h, w)) if topic == IMAGE else message)
            for i, (topic, log, message) in enumerate(stream(60))
        ]
        items = [(t, log, m.info(log, w, h) if t == INFO else message) for t, log, message in items]
        out[h, w] = (write(folder / f"{h}", items, "sqlite3") / f"{h}.db3").read_bytes()
    return out


def read_cut(file, content, cut, size):
    """The frames of a cut file, checked to be what was written; none where nothing can be read."""
    file.write_bytes(content[:cut])
    try:
        with open_source(file) as source:
            frames = list(source)
    except BagError as error:
        assert str(file) in str(error)
        return []
    assert not source.complete
    for i, frame in enumerate(frames):
        np.testing.assert_array_equal(frame.image, texture(i, *size))
        assert frame.camera is None or (frame.camera.K[0, 0] == 50 and frame.camera.size == size[::-1])
        assert frame.pose is None or frame.pose.t[0] == pytest.approx(i)
    return frames


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(size=st.sampled_from(SIZES), data=st.data())
def test_a_database_cut_anywhere_gives_only_what_was_written(databases, tmp_path, size, data):
    content = databases[size]
    read_cut(tmp_path / "c.db3", content, data.draw(st.integers(0, len(content) - 1)), size)


@pytest.mark.parametrize("size", SIZES)
def test_a_cut_inside_a_page_costs_only_the_rows_of_that_page(databases, tmp_path, size):
    content = databases[size]
    page = len(content) * 3 // 4 // 4096 * 4096
    at_page = len(read_cut(tmp_path / "c.db3", content, page, size))
    inside = len(read_cut(tmp_path / "c.db3", content, page + 123, size))
    fit = 4096 // min(size[0] * size[1], 489)  # images that can share a page
    assert at_page > 10 and at_page - fit - 1 <= inside <= at_page + 1


def test_a_database_of_which_nothing_is_left_says_so(databases, tmp_path):
    file = tmp_path / "c.db3"
    file.write_bytes(databases[48, 64][: 4096 * 8 + 123])
    with pytest.raises(BagError, match="cut before the end of its first messages"):
        open_source(file)


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
    source = open_source(folder, Config(), explicit=frozenset({"keyframes.every"}))
    c = source.config
    assert (c.keyframes.every, c.retrieval.exclude_frames) == (0, 10)
    (note,) = source.notes.counts
    assert "retrieval.exclude_frames=10, retrieval.exclude_s=0" in note and "--set" in note and "every" not in note


def test_a_file_that_repeats_the_defaults_keeps_the_folder_defaults_and_set_does_not(tmp_path):
    folder = write_images(tmp_path / "f", ["1.png"])
    default = Path(__file__).resolve().parents[1] / "config" / "default.yaml"
    (tmp_path / "mine.yaml").write_text("keyframes: {every: 0, match_last: 1}\nretrieval: {exclude_s: 3}\n")
    for file, settings_given, expected in (
        (default, [], (1, 10, 0.0)),
        (default, ["keyframes.every=0"], (0, 10, 0.0)),
        (tmp_path / "mine.yaml", [], (1, 10, 3.0)),
    ):
        config, explicit = load_config(SimpleNamespace(config=file, set=settings_given))
        c = open_source(folder, config, explicit=explicit).config
        assert (c.keyframes.every, c.retrieval.exclude_frames, c.retrieval.exclude_s) == expected


@pytest.mark.parametrize("shape", [(48, 64), (48, 64, 3), (48, 64, 4)])
def test_16_bit_tiff_is_scaled_as_png_is(tmp_path, shape):
    pixels = np.random.default_rng(0).integers(0, 4096, shape, np.uint16)
    for name in ("a.tif", "b.png"):
        assert cv2.imwrite(str(tmp_path / name), pixels)
    for top in (None, 4095):
        tiff, png = (read_any_image(tmp_path / name, top) for name in ("a.tif", "b.png"))
        np.testing.assert_array_equal(tiff, png)
    assert tiff.dtype == np.uint8 and tiff.max() > 250


def test_tiff_and_webp_in_colour_and_what_is_refused(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (48, 64, 3), np.uint8)
    for name in ("a.tif", "b.webp"):
        assert cv2.imwrite(str(tmp_path / name), pixels, [cv2.IMWRITE_WEBP_QUALITY, 101] if "webp" in name else [])
        np.testing.assert_array_equal(read_any_image(tmp_path / name), pixels[..., ::-1])
    assert cv2.imwrite(str(tmp_path / "f.tif"), pixels.astype(np.float32))
    with pytest.raises(ImageError, match="f.tif: expected .* got 3 of float32"):
        read_any_image(tmp_path / "f.tif")


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


def test_sub_folders_with_images_are_noted_beside_a_picture(tmp_path):
    folder = write_images(tmp_path / "parent", ["cover.png"])
    write_images(folder / "images", ["1.png", "2.png"])
    (folder / "logs").mkdir()
    source = open_source(folder)
    assert len(list(source)) == 1 and source.complete
    assert any("sub-folders with images are not read (images)" in note for note in source.notes.counts)
    assert not any("sub-folders" in note for note in open_source(folder / "images").notes.counts)


def test_natural_key():
    names = ["a10", "a9", "A1", "b", "a1b2", "a1b10"]
    assert sorted(names, key=lambda n: natural_key(Path(n))) == ["A1", "a1b2", "a1b10", "a9", "a10", "b"]


def test_a_copied_bag_needs_all_files(tmp_path):
    path = write(tmp_path / "bag", stream())
    (path / "bag.mcap").unlink()
    with pytest.raises(BagError, match="copy the whole folder"):
        open_source(path)
    shutil.rmtree(path)
