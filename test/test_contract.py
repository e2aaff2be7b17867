"""What outputs must be, whatever a reference says."""

import numpy as np
import pytest

from vslam_features.artifacts.card import ModelCard
from vslam_features.artifacts.contract import breaches

IMAGE = {"image": np.zeros((1, 1, 48, 64), np.float32)}
POINTS = np.array([[0, 0], [63, 47], [10.5, 20.25]], np.float32)
FOUND = {"keypoints": POINTS, "scores": np.ones(3, np.float32), "descriptors": np.ones((3, 8), np.float32)}
SIDES = {"keypoints0": np.zeros((3, 2), np.float32), "keypoints1": np.zeros((5, 2), np.float32)}
MATCHED = {"matches0": np.array([4, -1, 0]), "mscores0": np.array([0.9, 0, 0.5], np.float32)}
UNIT = {"descriptor": np.full(4, 0.5, np.float32)}


def of(role, **changes):
    inputs, outputs = {"features": (IMAGE, FOUND), "matcher": (SIDES, MATCHED), "global": (IMAGE, UNIT)}[role]
    outputs = {k: v for k, v in {**outputs, **changes}.items() if v is not None}
    return "; ".join(breaches(ModelCard(role, "any", ""), inputs, outputs))


@pytest.mark.parametrize("role", ["features", "matcher", "global"])
def test_what_keeps_it(role):
    assert of(role) == ""


def test_what_else_keeps_it():
    assert of("matcher", matches0=np.array([4, -1, 0], np.int32)) == ""
    assert of("features", **{k: v[:0] for k, v in FOUND.items()}) == ""
    assert of("global", descriptor=UNIT["descriptor"][None]) == ""
    # Rows that are no keypoints may hold anything, and refined positions leave the image by less than a pixel.
    off = POINTS + np.array([[-0.9, 0], [0.9, 0.9], [500, 0]], np.float32)
    assert of("features", keypoints=off, scores=np.array([1, 1, 0], np.float32)) == ""


@pytest.mark.parametrize(
    "role, changes, words",
    [
        ("features", {"scores": None}, "output 'scores' is missing, there are descriptors, keypoints"),
        ("features", {"keypoints": np.ones((3, 3))}, "keypoints has shape (3, 3), expected (N, 2)"),
        ("features", {"scores": np.ones((3, 1))}, "scores has shape (3, 1), expected (3,)"),
        ("features", {"descriptors": np.ones((3, 0))}, "descriptors has shape (3, 0), expected (3, D)"),
        ("features", {"descriptors": np.ones((4, 8))}, "descriptors has shape (4, 8), expected (3, D)"),
        ("features", {"keypoints": POINTS + [2, 0]}, "1 of 3 keypoints lie outside of 64x48 pixels"),
        ("features", {"keypoints": POINTS - [0, 2]}, "1 of 3 keypoints lie outside of 64x48 pixels"),
        ("matcher", {"mscores0": None}, "output 'mscores0' is missing"),
        ("matcher", {"matches0": MATCHED["matches0"][None]}, "matches0 has shape (1, 3), expected (3,)"),
        ("matcher", {"mscores0": np.ones(2)}, "mscores0 has shape (2,), expected (3,)"),
        ("matcher", {"matches0": MATCHED["matches0"] + 0.7}, "matches0 is float64, expected whole numbers"),
        ("matcher", {"matches0": np.array([5, -1, 0])}, "matches0 goes from -1 to 5 for 5 keypoints"),
        ("matcher", {"matches0": np.array([2**32, -1, 0])}, "matches0 goes from -1 to 4294967296"),
        ("matcher", {"matches0": np.array([-2, -1, 0])}, "matches0 goes from -2 to 0"),
        ("global", {"descriptor": np.ones((2, 2))}, "descriptor has shape (2, 2), expected (D,)"),
        ("global", {"descriptor": np.ones(0)}, "descriptor has shape (0,)"),
    ],
)
def test_what_breaks_it(role, changes, words):
    assert words in of(role, **changes)
