"""When an empty match is in doubt: images that look alike, a streak, and how often the fallback is asked."""

import dataclasses

import cv2
import numpy as np
import pytest
from helpers import T0, features, frame, image, keyframe, matches, unit

from vslam_features.config import ModelsConfig
from vslam_features.empty_guard import EmptyGuard, KeypointGuard, alike
from vslam_features.images import read_image, thumbnail
from vslam_features.replay.scenes import make_scene
from vslam_features.types import Matches, Status

WALL = np.clip(np.random.default_rng(0).normal(128, 2, (120, 160)), 0, 255).astype(np.uint8)


def seen(number: int, picture: np.ndarray):
    """A keyframe with this thumbnail."""
    return dataclasses.replace(keyframe(T0 + number), id=number, thumbnail=thumbnail(picture))


def asked(guard: EmptyGuard, pictures, status=Status.NO_MATCHES, agreed=True) -> list[int]:
    """Numbers of the keyframes whose empty match with the one before was in doubt."""
    out = []
    for i in range(1, len(pictures)):
        if guard.doubt(seen(i, pictures[i]), seen(i - 1, pictures[i - 1]), Matches.empty(status)):
            out.append(i)
            guard.answered(agreed)
    return out


@pytest.mark.parametrize(
    "status, doubted",
    [
        (Status.NO_MATCHES, True),
        (Status.NOT_COVISIBLE, True),
        (Status.STOPPED_EARLY, True),
        (Status.NO_KEYPOINTS, False),
        (Status.NON_FINITE, False),
        (Status.BACKEND_ERROR, False),
    ],
)
def test_only_a_result_that_says_nothing_is_there_is_in_doubt(status, doubted):
    assert asked(EmptyGuard(ModelsConfig()), [image()] * 2, status) == [1] * doubted


@pytest.mark.parametrize("status", [Status.OK, Status.TOO_FEW_INLIERS])
def test_matches_are_never_in_doubt(status):
    guard = EmptyGuard(ModelsConfig())
    assert not guard.doubt(seen(1, image()), seen(0, image()), matches(20, status))


def test_the_text_names_keyframes_status_and_likeness():
    text = EmptyGuard(ModelsConfig()).doubt(seen(8, image()), seen(7, image()), Matches.empty(Status.NOT_COVISIBLE))
    assert "(not_covisible) between keyframes 7 and 8" in text and "correlation 1.00" in text


def test_where_the_fallback_agrees_it_is_asked_half_as_often_each_time():
    """After the n-th agreement 2^n - 1 keyframes pass, at most 63."""
    assert asked(EmptyGuard(ModelsConfig()), [image()] * 260) == [1, 3, 7, 15, 31, 63, 127, 191, 255]


def test_where_the_fallback_finds_matches_it_is_asked_each_time():
    assert asked(EmptyGuard(ModelsConfig()), [image()] * 6, agreed=False) == [1, 2, 3, 4, 5]


def test_a_blank_wall_ends_with_the_first_match():
    guard = EmptyGuard(ModelsConfig())
    asked(guard, [image()] * 100)
    assert asked(guard, [image()] * 3) == []
    guard.doubt(seen(1, image()), seen(0, image()), matches(20))
    assert asked(guard, [image()] * 3) == [1]


def test_a_streak_as_long_as_configured_and_without_gaps():
    guard = EmptyGuard(ModelsConfig(zero_matches=3))
    assert asked(guard, [image()] * 6, agreed=False) == [3, 4, 5]
    guard.doubt(seen(1, image()), seen(0, image()), matches(20))
    assert asked(guard, [image()] * 3, agreed=False) == []  # two in a row
    guard.doubt(seen(1, image(seed=1)), seen(0, image(seed=2)), Matches.empty(Status.NO_MATCHES))  # a cut
    assert asked(guard, [image()] * 4, agreed=False) == [3]


def test_the_guard_can_be_switched_off():
    assert asked(EmptyGuard(ModelsConfig(zero_matches=0)), [image()] * 5) == []


def test_a_scene_cut_is_not_in_doubt():
    pictures = [image(seed=1)] * 3 + [image(seed=2)] * 3
    assert asked(EmptyGuard(ModelsConfig()), pictures, agreed=False) == [1, 2, 4, 5]


def test_images_of_another_size_are_not_in_doubt():
    assert asked(EmptyGuard(ModelsConfig()), [image(120, 160), image(160, 120), image(90, 160)]) == []


# -- images without keypoints -------------------------------------------------------------------


def found(count: int):
    return features(unit(np.random.default_rng(0), count))


def asked_of(guard: KeypointGuard, counts, picture=None, agreed=True, mask=None) -> list[int]:
    """Numbers of the images whose number of keypoints was in doubt."""
    out = []
    for i, count in enumerate(counts):
        if guard.doubt(frame(picture, mask=mask), found(count)):
            out.append(i)
            guard.answered(agreed)
    return out


def test_no_keypoint_in_an_image_with_texture_is_in_doubt():
    guard = KeypointGuard(ModelsConfig())
    assert asked_of(guard, [0, 0, 1, 0, 200, 0], agreed=False) == [0, 1, 3, 5]
    assert "no keypoint in an image with texture (contrast " in guard.doubt(frame(), found(0))


@pytest.mark.parametrize("picture", [WALL, np.zeros((120, 160), np.uint8), np.full((1, 1), 9, np.uint8)], ids=range(3))
def test_a_blank_image_is_not_in_doubt(picture):
    assert asked_of(KeypointGuard(ModelsConfig()), [0] * 4, picture) == []


def test_texture_counts_where_keypoints_are_allowed():
    half = np.hstack([image(120, 80), np.full((120, 80), 128, np.uint8)])
    left = np.arange(160)[None].repeat(120, 0) < 78
    assert asked_of(KeypointGuard(ModelsConfig()), [0], half, mask=left) == [0]
    assert asked_of(KeypointGuard(ModelsConfig()), [0], half, mask=np.arange(160)[None].repeat(120, 0) > 90) == []
    assert asked_of(KeypointGuard(ModelsConfig()), [0], half, mask=np.zeros((120, 160), bool)) == []


def test_it_is_asked_half_as_often_each_time_until_there_are_keypoints():
    guard = KeypointGuard(ModelsConfig())
    assert asked_of(guard, [0] * 40) == [0, 2, 6, 14, 30]
    assert asked_of(guard, [5, 0, 0, 0]) == [1, 3]


def test_a_streak_of_images_as_long_as_configured_or_never():
    assert asked_of(KeypointGuard(ModelsConfig(zero_matches=3)), [0, 0, 9, 0, 0, 0, 0], agreed=False) == [5, 6]
    assert asked_of(KeypointGuard(ModelsConfig(zero_matches=0)), [0] * 5) == []


# -- likeness ----------------------------------------------------------------------------------


def test_likeness_of_moved_and_dimmed_images():
    """What moved by a tenth of the image is found again; contrast and brightness do not count, the sign does."""
    big = image(140, 190)
    here, there = big[10:130, 10:170], big[18:138, 0:160]
    assert alike(here, here) == pytest.approx(1.0, abs=1e-4)
    assert alike(here, there) > 0.95
    assert alike(here, np.rint(here * 0.5 + 30).astype(np.uint8)) > 0.99
    assert alike(here, 255 - here) < 0.75
    assert alike(here, image(120, 160, seed=1)) < 0.75


def test_parts_that_move_differently_are_found_each():
    """As with parallax: the left half moves to the left, the right half to the right."""
    big = cv2.GaussianBlur(image(120, 200), (0, 0), 1.0)
    here, there = big[:, 20:180], np.hstack([big[:, 30:110], big[:, 90:170]])
    assert alike(here, there) > 0.95


def test_colour_is_compared_by_brightness():
    rgb = np.dstack([image(seed=1), image(seed=2), image(seed=3)])
    assert alike(rgb, cv2.cvtColor(rgb, cv2.COLOR_RGB2GRAY)) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize(
    "other", [None, WALL, np.zeros((120, 160), np.uint8), image(60, 80), image(120, 159)], ids=range(5)
)
def test_nothing_is_like_an_image_that_is_missing_blank_or_of_another_size(other):
    assert alike(image(), other) == alike(other, image()) == 0.0


def test_tiny_images_are_like_nothing():
    assert alike(image(12, 12), image(12, 12)) == 0.0


@pytest.mark.slow
@pytest.mark.endurance
def test_neighbours_of_a_video_are_alike_and_different_rooms_are_not():
    videos = {}
    for name in ("room", "corridor"):
        made = make_scene(name, width=320, height=240, fps=5.0)
        videos[name] = [thumbnail(made.frame(i).image) for i in range(0, 40)]
    for frames in videos.values():
        assert min(alike(a, b) for a, b in zip(frames, frames[1:])) > ModelsConfig().alike
    different = [alike(a, b) for a in videos["room"][::5] for b in videos["corridor"][::5]]
    assert 0.3 < max(different) < ModelsConfig().alike


@pytest.mark.data
def test_neighbours_on_a_real_road_are_alike(data_dir):
    road = [thumbnail(read_image(f)) for f in sorted((data_dir / "kitti_snippet/left").iterdir())[:20]]
    assert min(alike(a, b) for a, b in zip(road, road[1:])) > ModelsConfig().alike


def test_descriptors_do_not_matter():
    """Keyframes without any descriptor in common are doubted just the same: it is the matcher that is judged."""
    rng = np.random.default_rng(0)
    a, b = (dataclasses.replace(seen(i, image()), features=features(unit(rng, 50))) for i in (0, 1))
    assert EmptyGuard(ModelsConfig()).doubt(b, a, Matches.empty(Status.NO_MATCHES))
