"""Every way a frame becomes a keyframe or not, and the map that keeps them."""

from dataclasses import replace

import numpy as np
import pytest
from helpers import SECOND, T0, features, frame, image, keyframe, matches, pose, unit
from hypothesis import given
from hypothesis import strategies as st

from vslam_features.config import KeyframesConfig
from vslam_features.keyframes import KeyframePolicy
from vslam_features.maps.keyframe_map import KeyframeMap
from vslam_features.types import Matches, Status

DIAGONAL = np.hypot(160, 120)


def policy(**config) -> KeyframePolicy:
    return KeyframePolicy(KeyframesConfig(**config))


def moved_by(shift_px: float, n=100):
    """Features of a keyframe, and of a frame whose keypoints moved."""
    d, points = unit(np.random.default_rng(0), n), np.random.default_rng(1).uniform(20, 100, (n, 2))
    last = replace(keyframe(), features=features(d, points, (160, 120)))
    return features(d, points + (shift_px, 0), (160, 120)), last


def decide(p, found=None, last=None, shared=None, stamp_ns=T0 + SECOND, at=None) -> bool:
    now, default = moved_by(0)
    return p.decide(
        frame(stamp_ns=stamp_ns, pose=at), now if found is None else found, default if last is None else last, shared
    )


# -- by count ----------------------------------------------------------------------------------


@given(every=st.integers(1, 7), n=st.integers(1, 40))
def test_each_nth_frame(every, n):
    p, last = policy(every=every), None
    for i in range(n):
        assert not p.by_appearance(frame(), last)
        kept = p.decide(frame(stamp_ns=T0 + i), moved_by(0)[0], last, None)
        assert kept == (i % every == 0)
        last = keyframe() if kept else last


def test_the_count_starts_again_after_a_reset():
    p = policy(every=3)
    assert [decide(p) for _ in range(4)] == [True, False, False, True]
    p.reset()
    assert decide(p)


def test_the_first_frame_always():
    for config in ({}, {"every": 5}, {"max_interval_s": 0.0}):
        assert policy(**config).decide(frame(), moved_by(0)[0], None, None)


# -- by pose -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "at, expected",
    [(pose(), False), (pose(0.29), False), (pose(0.301), True), (pose(0.2, 0.23), True), (pose(-5), True),
     (pose(yaw_deg=9.9), False), (pose(yaw_deg=10.1), True), (pose(yaw_deg=-10.1), True), (pose(yaw_deg=180), True),
     (pose(0.29, yaw_deg=9.9), False)],
)  # fmt: skip
@pytest.mark.parametrize("start", [pose(), pose(100, -30, 77)])
def test_by_translation_and_rotation(start, at, expected):
    moved = replace(start, R=start.R @ at.R, t=start.t + at.t)
    p, last = policy(), replace(keyframe(), pose=start)
    assert not p.by_appearance(frame(pose=moved), last)
    assert decide(p, last=last, at=moved) is expected


def test_poses_of_different_frames_are_not_a_motion():
    """A change of the odometry frame is a jump of coordinates, not of the camera."""
    p, last = policy(), replace(moved_by(0)[1], pose=pose(frame_id="odom"))
    assert p.by_appearance(frame(pose=pose(50, frame_id="map")), last)
    assert not decide(p, last=last, at=pose(50, frame_id="map"), shared=matches(100))


@pytest.mark.parametrize("at, then", [(None, pose()), (pose(), None), (None, None)])
def test_without_both_poses_appearance_decides(at, then):
    p, last = policy(), replace(keyframe(), pose=then)
    assert p.by_appearance(frame(pose=at), last)
    assert policy(every=1).by_appearance(frame(pose=at), last) is False


# -- by time -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "interval, age_s, expected", [(5.0, 4.99, False), (5.0, 5.0, True), (0.0, 1e6, False), (0.1, 0.1, True)]
)
def test_after_the_interval_a_fifth_of_the_motion_is_enough(interval, age_s, expected):
    stamp = T0 + round(age_s * SECOND)
    found, last = moved_by(0.21 * 0.05 * DIAGONAL)
    assert decide(policy(max_interval_s=interval), found, last, matches(100), stamp_ns=stamp) is expected
    last = replace(keyframe(), pose=pose())
    assert decide(policy(max_interval_s=interval), last=last, at=pose(0.061), stamp_ns=stamp) is expected
    assert decide(policy(max_interval_s=interval), last=last, at=pose(yaw_deg=2.1), stamp_ns=stamp) is expected


def test_standing_still_brings_no_keyframe_however_long():
    stamp = T0 + 86_400 * SECOND
    found, last = moved_by(0.19 * 0.05 * DIAGONAL)
    assert decide(policy(), found, last, matches(100), stamp_ns=stamp) is False
    assert decide(policy(), last=replace(keyframe(), pose=pose()), at=pose(0.05), stamp_ns=stamp) is False


def test_a_view_is_still_where_verified_matches_hardly_move():
    p = policy()
    for share, expected in ((0.0, True), (0.19, True), (0.21, False)):
        found, last = moved_by(share * 0.05 * DIAGONAL)
        assert p.still(found, last.features, matches(100)) is expected
    found, last = moved_by(0)
    assert p.still(found, last.features, Matches.empty(Status.NO_MATCHES)) is False


# -- by appearance -----------------------------------------------------------------------------


@pytest.mark.parametrize("share, expected", [(-0.5, False), (0.9, False), (1.1, True), (3.0, True)])
def test_parallax(share, expected):
    """``share`` of the limit, which is 5 % of the diagonal, in the median."""
    found, last = moved_by(abs(share) * 0.05 * DIAGONAL * np.sign(share))
    assert decide(policy(), found, last, matches(100)) is expected


def test_parallax_is_that_of_the_inliers():
    found, last = moved_by(0)
    jumped = found.keypoints.copy()
    jumped[60:] += 50
    found = replace(found, keypoints=jumped)
    assert not decide(policy(), found, last, matches(60, total=100))
    assert decide(policy(), found, last, matches(30, total=100)) is False  # the median of the inliers, all at rest
    outliers_only = matches(0, Status.TOO_FEW_INLIERS, total=100)
    assert not decide(policy(), found, last, outliers_only)  # the median of all


def test_shared_ratio_is_of_what_the_first_frame_after_the_keyframe_shared():
    p, (found, last) = policy(), moved_by(0)
    assert not decide(p, found, last, matches(50))  # half of 100 keypoints: ratio test and noise
    assert not decide(p, found, last, matches(31))
    assert decide(p, found, last, matches(29))
    newer = replace(last, id=1)  # the next keyframe has its own baseline
    assert not decide(p, found, newer, matches(29))
    assert not decide(p, found, newer, matches(18))
    assert decide(p, found, newer, matches(17))


def test_no_match_makes_a_keyframe_where_there_is_something_to_match():
    nothing = Matches.empty(Status.NO_MATCHES)
    blank = features(np.empty((0, 32), np.float32), size=(160, 120))
    assert decide(policy(), shared=nothing) and decide(policy(), shared=None)
    assert not decide(policy(), blank, shared=Matches.empty(Status.NO_KEYPOINTS))
    assert decide(policy(), blank, shared=None, stamp_ns=T0 + 6 * SECOND)


# -- the map -----------------------------------------------------------------------------------


def test_ids_are_positions():
    m = KeyframeMap()
    added = [m.add(keyframe(T0 + i * SECOND)) for i in range(5)]
    assert [k.id for k in added] == [0, 1, 2, 3, 4] and len(m) == 5
    assert all(m[i] is k for i, k in enumerate(added))
    assert [k.id for k in m.last(2)] == [4, 3] and [k.id for k in m.last(9)] == [4, 3, 2, 1, 0]
    for bad in (-1, 5):
        with pytest.raises(IndexError):
            m[bad]
    assert KeyframeMap().last(3) == []


def test_bytes_are_those_of_the_arrays():
    kept, thumb = KeyframeMap(), np.zeros((12, 16), np.uint8)
    one = replace(keyframe(n=50), thumbnail=thumb)
    f = one.features
    each = f.keypoints.nbytes + f.scores.nbytes + f.descriptors.nbytes + thumb.nbytes
    for _ in range(3):
        kept.add(one)
    kept.describe(1, np.zeros(64, np.float32))
    assert kept.nbytes == 3 * each + 256


def test_a_descriptor_comes_later():
    m = KeyframeMap()
    m.add(keyframe())
    d = np.ones(4, np.float32)
    m.describe(0, d)
    assert m[0].global_descriptor is d and m.last(1)[0] is m[0]


def test_travelled_is_the_length_of_the_track():
    m = KeyframeMap()
    for at in (pose(0), pose(3), pose(3, 4), None, pose(100), pose(7, frame_id="other"), pose(8, frame_id="other")):
        m.add(keyframe(pose=at))
    assert [m.travelled(0, i) for i in range(7)] == [0, 3, 7, 7, 7, 7, 8]
    assert m.travelled(6, 1) == m.travelled(1, 6) == 5


@given(st.lists(st.integers(1, 3 * SECOND), min_size=1, max_size=30), st.floats(0, 20), st.integers(0, 10))
def test_the_newest_old_enough(steps, seconds, count):
    m = KeyframeMap()
    stamps = T0 + np.cumsum(steps)
    for s in stamps:
        last = m.add(keyframe(int(s), n=1))
    old = [i for i in range(len(m)) if stamps[-1] - stamps[i] >= round(seconds * 1e9) and last.id - i >= max(count, 1)]
    assert m.newest_older_than(last, seconds, count) == max(old, default=-1)


def test_pictures_are_small():
    from vslam_features.images import thumbnail

    assert max(thumbnail(image(480, 640)).shape) == 160
