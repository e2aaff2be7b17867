"""types: what cannot be constructed, and the frozen numbers."""

import dataclasses

import numpy as np
import pytest
from helpers import CAMERA, IDENTITY, features, frame, image, matches, pose
from hypothesis import given
from hypothesis import strategies as st

from vslam_features.errors import DataError
from vslam_features.types import Features, Frame, Matches, ModelIdentity, PairKind, Pose, Status


def test_status_numbers_are_frozen():
    assert {s.label: int(s) for s in Status} == {
        "ok": 0,
        "no_keypoints": 1,
        "no_matches": 2,
        "too_few_inliers": 3,
        "degenerate": 4,
        "not_covisible": 5,
        "stopped_early": 6,
        "ambiguous": 7,
        "non_finite": 8,
        "backend_error": 9,
        "fault_recovered": 10,
    }


def test_pair_kind_numbers_are_frozen():
    assert {k.name: int(k) for k in PairKind} == {"TRACK": 0, "LOOP": 1, "RELOCALISATION": 2, "STEREO": 3}


@pytest.mark.parametrize("status", [Status.OK, Status.FAULT_RECOVERED])
def test_an_empty_result_without_a_reason_cannot_be_constructed(status):
    with pytest.raises(DataError, match="must say why"):
        Matches.empty(status)
    with pytest.raises(DataError, match="must say why"):
        matches(inliers=0, total=30, status=status)
    with pytest.raises(DataError, match="must say why"):
        dataclasses.replace(Matches.empty(Status.NO_MATCHES), status=status)
    assert status.confirms and matches(inliers=1, status=status).verified


@pytest.mark.parametrize("status", [s for s in Status if s not in (Status.OK, Status.FAULT_RECOVERED)])
def test_every_reason_may_be_empty(status):
    empty = Matches.empty(status, detail="why")
    assert (len(empty), empty.num_inliers, empty.verified, empty.covisibility) == (0, 0, False, None)
    assert empty.pairs.shape == (0, 2) and empty.pairs.dtype == np.int32
    assert not (status.confirms or matches(inliers=30, status=status).verified)


@pytest.mark.parametrize(
    "change",
    [
        {"pairs": np.zeros((3, 2), np.int64)},
        {"pairs": np.zeros((3, 3), np.int32)},
        {"scores": np.zeros(2, np.float32)},
        {"inliers": np.ones(3, np.uint8)},
        {"inliers": np.ones((3, 1), bool)},
    ],
)
def test_matches_of_wrong_shape(change):
    good = dict(pairs=np.zeros((3, 2), np.int32), scores=np.zeros(3, np.float32), inliers=np.ones(3, bool))
    assert Matches(**good, status=Status.OK).num_inliers == 3
    with pytest.raises(DataError, match="matches: "):
        Matches(**{**good, **change}, status=Status.OK)


@pytest.mark.parametrize(
    "change",
    [
        {"keypoints": np.zeros((3, 2), np.float16)},
        {"keypoints": np.zeros((3, 2), np.float64)},
        {"keypoints": np.zeros((3, 3), np.float32)},
        {"keypoints": np.full((3, 2), np.nan, np.float32)},
        {"keypoints": np.full((3, 2), np.inf, np.float32)},
        {"scores": np.zeros((3, 1), np.float32)},
        {"scores": np.zeros(4, np.float32)},
        {"descriptors": np.zeros((4, 8), np.float32)},
        {"descriptors": np.zeros(3, np.float32)},
    ],
)
def test_features_outside_the_contract(change):
    good = dict(
        keypoints=np.zeros((3, 2), np.float32), scores=np.zeros(3, np.float32), descriptors=np.zeros((3, 8), np.float32)
    )
    assert len(Features(**good, image_size=(9, 9), model=IDENTITY)) == 3
    with pytest.raises(DataError, match="features: "):
        Features(**{**good, **change}, image_size=(9, 9), model=IDENTITY)


def test_dense_descriptors_and_no_keypoints_are_within_the_contract():
    dense = np.zeros((64, 15, 20), np.float32)
    assert len(Features(np.zeros((3, 2), np.float32), np.zeros(3, np.float32), dense, (160, 120), IDENTITY)) == 3
    assert len(features(np.empty((0, 8), np.float32))) == 0


@pytest.mark.parametrize(
    "picture",
    [
        np.zeros((4, 5), np.float32),
        np.zeros((4, 5), np.uint16),
        np.zeros((4, 5, 4), np.uint8),
        np.zeros((4, 5, 1), np.uint8),
        np.zeros(5, np.uint8),
        np.zeros((0, 5), np.uint8),
        np.zeros((4, 0, 3), np.uint8),
    ],
)
def test_images_outside_the_contract(picture):
    with pytest.raises(DataError, match="frame: "):
        Frame(0, "cam", picture)


def test_a_camera_of_another_size_is_refused_and_both_sizes_are_named():
    with pytest.raises(DataError, match="640x480.*160x120.*camera_info"):
        frame(camera=CAMERA)
    assert frame(camera=CAMERA.scaled_to((160, 120))).image_size == (160, 120)


@pytest.mark.parametrize(
    "mask", [np.ones((160, 120), bool), np.ones((120, 160), np.uint8), np.ones((120, 160, 1), bool)]
)
def test_masks_outside_the_contract(mask):
    with pytest.raises(DataError, match="mask must be bool"):
        frame(mask=mask)


@pytest.mark.parametrize(
    "R, t",
    [
        (np.eye(4), np.zeros(3)),
        (np.eye(3), np.zeros(2)),
        (np.eye(3) * np.nan, np.zeros(3)),
        (np.eye(3), [0, 0, np.inf]),
    ],
)
def test_poses_outside_the_contract(R, t):
    with pytest.raises(DataError, match="pose: "):
        Pose(R, t)


def test_poses_compare_in_one_frame_only():
    assert Pose.comparable(pose(frame_id="odom"), pose(1, frame_id="odom"))
    assert not Pose.comparable(pose(frame_id="odom"), pose(frame_id="map"))
    assert not Pose.comparable(pose(), None) and not Pose.comparable(None, None)


@given(
    st.dictionaries(st.text("abc", min_size=1, max_size=3), st.integers(), max_size=3),
    st.dictionaries(st.text("abc", min_size=1, max_size=3), st.integers(), max_size=3),
)
def test_identities_of_algorithms_are_equal_exactly_for_equal_parameters(a, b):
    one, two = (ModelIdentity.of_algorithm("features", "x", "grey8", **p) for p in (a, b))
    assert (one == two) == (a == b)
    reordered = ModelIdentity.of_algorithm("features", "x", "grey8", **dict(reversed(a.items())))
    assert reordered == one and hash(reordered) == hash(one)


def test_records_are_immutable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        frame(image()).stamp_ns = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        matches().status = Status.DEGENERATE
