"""Tables and messages, in process."""

import numpy as np
import pytest

pytest.importorskip("rclpy")

from hypothesis import given, settings
from hypothesis import strategies as st
from nav_msgs.msg import Odometry
from rclpy.serialization import deserialize_message, serialize_message
from sensor_msgs.msg import CameraInfo, PointCloud2, PointField

from vslam_features.errors import CameraError, DataError, ImageError
from vslam_features.ros import codecs, messages
from vslam_features.ros.clouds import byte_array, from_cloud, to_cloud
from vslam_features.types import (
    Candidate,
    Features,
    Keyframe,
    Matches,
    ModelIdentity,
    PairKind,
    PairResult,
    Pose,
    Status,
)

STAMP = 1_760_000_000_123_456_789
MODEL = ModelIdentity.of_algorithm("features", "test", "grey8")
CONTRACT = {
    "KEYFRAMES": "x:7@0 y:7@4 z:7@8 score:7@12 idx:6@16 kf_id:6@20 step:24",
    "CANDIDATES": "kf_id:6@0 ref_kf_id:6@4 ref_sec:5@8 ref_nanosec:6@12 similarity:7@16 margin:7@20 rank:2@24 step:25",
    "PAIRS": "kind:2@0 status:2@1 kf_id:6@2 ref_kf_id:6@6 ref_sec:5@10 ref_nanosec:6@14 num_matches:6@18 "
    "num_inliers:6@22 covisibility:7@26 stopped_after_layer:2@30 qx:7@31 qy:7@35 qz:7@39 qw:7@43 tx:7@47 ty:7@51 "
    "tz:7@55 scale_known:2@59 step:60",
    "MATCHES": "x:7@0 y:7@4 z:7@8 ref_x:7@12 ref_y:7@16 score:7@20 idx:6@24 ref_idx:6@28 kf_id:6@32 ref_kf_id:6@36 "
    "inlier:2@40 step:41",
}


def keyframe(kf_id, points):
    points = np.asarray(points, np.float32).reshape(-1, 2)
    n = len(points)
    features = Features(points, np.arange(n, dtype=np.float32), np.zeros((n, 4), np.float32), (64, 48), MODEL)
    return Keyframe(kf_id, STAMP + kf_id, "cam", features)


@pytest.mark.parametrize("name", CONTRACT)
def test_contract_is_frozen(name):
    cloud = to_cloud(np.zeros(2, getattr(codecs, name)), messages.header(STAMP, "cam"))
    got = " ".join(f"{f.name}:{f.datatype}@{f.offset}" for f in cloud.fields) + f" step:{cloud.point_step}"
    assert got == CONTRACT[name]
    assert (cloud.height, cloud.width, cloud.row_step, cloud.is_bigendian) == (1, 2, 2 * cloud.point_step, False)
    assert all(f.count == 1 for f in cloud.fields) and cloud.is_dense


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_round_trip_of_any_bytes(data):
    dtype = getattr(codecs, data.draw(st.sampled_from(sorted(CONTRACT))))
    raw = data.draw(st.binary(max_size=4 * dtype.itemsize))
    table = np.frombuffer(raw[: len(raw) // dtype.itemsize * dtype.itemsize], dtype)
    cloud = deserialize_message(serialize_message(to_cloud(table, messages.header(STAMP, "cam"))), PointCloud2)
    assert from_cloud(cloud, dtype).tobytes() == table.tobytes()


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_foreign_layouts_read_the_same(data):
    """Fields in another order, with gaps, further fields, padding, several rows, either byte order."""
    dtype = codecs.CANDIDATES
    height, width = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 4))
    big = data.draw(st.booleans())
    names = data.draw(st.permutations([*dtype.names, "extra"]))
    offset, offsets = 0, {}
    for name in names:
        offset += data.draw(st.integers(0, 3))
        offsets[name] = offset
        offset += 8 if name == "extra" else dtype[name].itemsize
    step = offset + data.draw(st.integers(0, 5))
    row_step = step * width + data.draw(st.integers(0, 9))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    wanted = np.frombuffer(rng.bytes(height * width * dtype.itemsize), dtype)
    buffer = np.zeros(height * row_step, np.uint8)
    order = ">" if big else "<"
    for i, row in enumerate(wanted):
        base = i // max(width, 1) * row_step + i % max(width, 1) * step
        for name in dtype.names:
            value = np.array(row[name], order + dtype[name].str[1:])
            buffer[base + offsets[name] : base + offsets[name] + value.nbytes] = np.frombuffer(
                value.tobytes(), np.uint8
            )
    codes = {"u4": 6, "i4": 5, "f4": 7, "u1": 2}
    fields = [
        PointField(name=n, offset=offsets[n], datatype=8 if n == "extra" else codes[dtype[n].str[1:]], count=1)
        for n in names
    ]
    cloud = PointCloud2(
        height=height, width=width, fields=fields, is_bigendian=big, point_step=step, row_step=row_step,
        data=byte_array(buffer),
    )  # fmt: skip
    assert codecs.read_candidates(cloud).tobytes() == wanted.tobytes()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda c: c.fields.pop(0), "no field 'kf_id'"),
        (lambda c: setattr(c.fields[1], "datatype", PointField.FLOAT64), "must be one u4, got 1 x f8"),
        (lambda c: setattr(c.fields[1], "count", 2), "got 2 x u4"),
        (lambda c: setattr(c.fields[6], "offset", 25), "ends beyond point_step 25"),
        (lambda c: setattr(c, "data", c.data[:-1]), "need 50 bytes, got 49"),
        (lambda c: setattr(c, "width", 2**31), "got 50"),
    ],
)
def test_other_contracts_are_refused(change, text):
    cloud = to_cloud(np.zeros(2, codecs.CANDIDATES), messages.header(0, ""))
    change(cloud)
    with pytest.raises(DataError, match=text):
        codecs.read_candidates(cloud)


def test_tables_of_core_types():
    ref, now = keyframe(3, [[1, 2], [3.25, 4]]), keyframe(7, [[5, 6], [7, 8], [9.5, 10]])
    table = codecs.keyframe_table(now)
    assert table["x"].tolist() == [5, 7, 9.5] and table["idx"].tolist() == [0, 1, 2] and set(table["kf_id"]) == {7}

    candidates = [Candidate(7, 3, ref.stamp_ns, 0.5, float("nan"), 0), Candidate(7, 2, -1, 0.25, 0.125, 300)]
    table = codecs.candidates_table(candidates)
    assert (table["ref_sec"][0], table["ref_nanosec"][0]) == (1760000000, 123456792)
    assert (table["ref_sec"][1], table["ref_nanosec"][1]) == (-1, 999_999_999)
    assert np.isnan(table["margin"][0]) and table["rank"].tolist() == [0, 255]

    pose = Pose(np.diag([1.0, -1, -1]), [0, 0, 1], scale_known=False)
    pairs = np.array([[0, 1], [2, 0]], np.int32)
    scores, inliers = np.array([0.5, 1], np.float32), np.array([True, False])
    found = Matches(pairs, scores, inliers, Status.OK, 0.75, 2, pose)
    empty = Matches.empty(Status.NOT_COVISIBLE)
    results = [
        PairResult(PairKind.LOOP, 7, 3, ref.stamp_ns, found),
        PairResult(PairKind.TRACK, 7, 3, ref.stamp_ns, empty),
    ]
    table = codecs.pairs_table(results)
    assert table["status"].tolist() == [0, 5] and table["kind"].tolist() == [1, 0]
    assert table["num_matches"].tolist() == [2, 0] and table["num_inliers"].tolist() == [1, 0]
    assert table["covisibility"][0] == 0.75 and np.isnan(table["covisibility"][1])
    assert table["stopped_after_layer"].tolist() == [2, 0]
    assert [table[n][0] for n in ("qx", "qy", "qz", "qw", "tz")] == [1, 0, 0, 0, 1]
    assert np.isnan([table[n][1] for n in ("qx", "qy", "qz", "qw", "tx", "ty", "tz")]).all()

    table = codecs.matches_table(results, {3: ref, 7: now}.__getitem__)
    assert table["x"].tolist() == [5, 9.5] and table["ref_x"].tolist() == [3.25, 1]
    assert table["ref_idx"].tolist() == [1, 0] and table["inlier"].tolist() == [1, 0]
    for build in (codecs.candidates_table, codecs.pairs_table):
        assert len(build([])) == 0


@given(st.integers(-(2**31) * 10**9, 2**31 * 10**9 - 1))
def test_stamps_are_exact(stamp_ns):
    message = Odometry(header=messages.header(stamp_ns, "odom"))
    assert messages.stamp_of(message) == stamp_ns


def test_stamps_beyond_the_message_are_refused():
    with pytest.raises(DataError, match="32-bit seconds"):
        messages.stamp_message(2**31 * 10**9)


@settings(deadline=None)
@given(st.lists(st.floats(-1, 1), min_size=4, max_size=4).filter(lambda q: np.linalg.norm(q) > 0.1))
def test_rotations_round_trip(q):
    q = np.array(q) / np.linalg.norm(q)
    message = Odometry()
    o = message.pose.pose.orientation
    o.x, o.y, o.z, o.w = map(float, q)
    back = messages.quaternion(messages.pose_of(message).R)
    assert min(np.abs(back - q).max(), np.abs(back + q).max()) < 1e-9
    assert back[3] >= 0


@pytest.mark.parametrize("shape", [(5, 7), (5, 7, 3)])
def test_images_round_trip(shape):
    image = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    message = messages.image_message(image, STAMP, "cam")
    assert (message.header.frame_id, messages.stamp_of(message)) == ("cam", STAMP)
    assert np.array_equal(messages.image_array(message), image)


def test_unknown_encoding_names_the_known_ones_and_the_package():
    message = messages.image_message(np.zeros((2, 2), np.uint8), STAMP, "cam")
    message.encoding = "yuv444"
    with pytest.raises(ImageError, match="mono8.*cv-bridge|fallback decoder failed"):
        messages.image_array(message)


def test_camera_info():
    info = CameraInfo(width=64, height=48, k=[50.0, 0, 31, 0, 51, 23, 0, 0, 1], d=[0.1, 0, 0, 0, 0])
    info.p = [40.0, 0, 30, 0, 0, 41, 22, 0, 0, 0, 1, 0]
    info.distortion_model = "plumb_bob"
    assert messages.camera_of(info, (64, 48), True).K[0, 0] == 40
    raw = messages.camera_of(info, (64, 48), False)
    assert raw.K[0, 0] == 50 and raw.D[0] == 0.1
    with pytest.raises(CameraError, match="64x48.*got an image of 32x24"):
        messages.camera_of(info, (32, 24), True)
    assert messages.camera_of(CameraInfo(width=64, height=48), (64, 48), False) is None
