"""PoseTrack: interpolation, its limits, disorder, jumps and bounded memory."""

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vslam_features.errors import DataError
from vslam_features.pose_track import PoseTrack, interpolate, pose_from_quaternion
from vslam_features.types import Pose

T0 = 1760000000_123456789
MS = 1_000_000


def pose(x=0.0, angle_deg=0.0, frame_id="map"):
    R, _ = cv2.Rodrigues(np.array([0, 0, np.radians(angle_deg)]))
    return Pose(R, np.array([x, 0, 0]), frame_id)


def yaw_deg(p):
    return np.degrees(np.arctan2(p.R[1, 0], p.R[0, 0]))


def test_exact_stamps_come_back_unchanged():
    track, given_pose = PoseTrack(), pose(1.0, 30)
    track.add(T0, given_pose)
    assert track.at(T0) is given_pose


def test_interpolates_position_linearly_and_rotation_by_slerp():
    track = PoseTrack()
    track.add(T0, pose(0, 170))
    track.add(T0 + 100 * MS, pose(1, -170))  # the short way passes 180 degrees
    at = track.at(T0 + 25 * MS)
    assert at.t[0] == pytest.approx(0.25)
    assert yaw_deg(at) == pytest.approx(175)
    assert at.frame_id == "map" and at.scale_known


def test_outside_is_held_for_a_moment_only():
    track = PoseTrack(hold_s=0.01)
    track.add(T0, pose(1))
    assert track.at(T0 + 10 * MS).t[0] == 1
    assert track.at(T0 - 10 * MS).t[0] == 1
    assert track.at(T0 + 10 * MS + 1) is None
    assert track.at(T0 - 10 * MS - 1) is None


def test_a_gap_is_not_bridged():
    track = PoseTrack(max_gap_s=0.2)
    track.add(T0, pose(0))
    track.add(T0 + 300 * MS, pose(1))
    assert track.at(T0 + 150 * MS) is None
    assert track.at(T0 + 295 * MS).t[0] == 1


def test_disorder_is_sorted_and_a_jump_back_resets():
    track = PoseTrack(jump_s=1.0)
    for ms in (0, 200, 100):
        track.add(T0 + ms * MS, pose(ms))
    assert track.at(T0 + 150 * MS).t[0] == pytest.approx(150) and track.newest_ns == T0 + 200 * MS
    track.add(T0 - 5000 * MS, pose(7))
    assert len(track) == 1 and track.resets == 1 and track.at(T0) is None


def test_another_frame_resets():
    track = PoseTrack()
    track.add(T0, pose(frame_id="map"))
    track.add(T0 + MS, pose(frame_id="odom"))
    assert len(track) == 1 and track.at(T0 + MS).frame_id == "odom"


def test_empty_and_cleared():
    track = PoseTrack()
    assert track.at(T0) is None and track.newest_ns is None
    track.add(T0, pose())
    track.clear()
    assert track.at(T0) is None and len(track) == 0


def test_memory_is_bounded():
    track = PoseTrack(max_poses=100)
    for i in range(1000):
        track.add(T0 + i * MS, pose(i))
        assert len(track) <= 100
    assert track.at(T0 + 999 * MS).t[0] == 999


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-3, 3), min_size=3, max_size=3),
    st.lists(st.floats(-3, 3), min_size=3, max_size=3),
    st.floats(0, 1),
)
def test_interpolation_stays_a_rotation_and_meets_its_ends(a, b, share):
    first, second = (Pose(cv2.Rodrigues(np.array(r))[0], np.array(r)) for r in (a, b))
    between = interpolate(first, second, share)
    np.testing.assert_allclose(between.R @ between.R.T, np.eye(3), atol=1e-9)
    np.testing.assert_allclose(interpolate(first, second, 0).R, first.R, atol=1e-9)
    # OpenCV's logarithm takes turns whose sine is under 1e-5 for none, and loses digits near half a turn.
    np.testing.assert_allclose(interpolate(first, second, 1).R, second.R, atol=1.1e-5)


def test_quaternions_follow_ros_order_and_are_normalised():
    half = np.radians(45)
    p = pose_from_quaternion(0, 0, 2 * np.sin(half), 2 * np.cos(half), [1, 2, 3], "odom")
    assert yaw_deg(p) == pytest.approx(90) and p.frame_id == "odom"


@pytest.mark.parametrize("q", [(0, 0, 0, 0), (float("nan"), 0, 0, 1)])
def test_a_zero_or_non_finite_quaternion_is_refused(q):
    with pytest.raises(DataError, match="quaternion"):
        pose_from_quaternion(*q, [0, 0, 0])
