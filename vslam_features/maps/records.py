"""What rows of a map file stand for."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..camera import Camera
from ..errors import DataError
from ..types import Features, Matches, ModelIdentity, Pose, Status
from .rows import Row

ReadArray = Callable[[Row, str], "np.ndarray | None"]


def identity_of(row: Row) -> ModelIdentity:
    """A row of ``models``."""
    return ModelIdentity(row["role"], row["name"], row["sha256"], row["preprocessing"])


def camera_of(row: Row) -> Camera:
    """A row of ``cameras``. Raises CameraError for values that no camera has."""
    return Camera(row["width"], row["height"], row.array("K"), row.array("D"), row["model"], bool(row["rectified"]))


def matrix_of(pose: Pose | None) -> np.ndarray | None:
    """(3, 4) f64 [R | t]."""
    return None if pose is None else np.hstack([pose.R, pose.t[:, None]])


def pose_of(matrix: np.ndarray | None, frame_id: str, scale_known: bool) -> Pose | None:
    """The pose of a (3, 4) matrix."""
    return None if matrix is None else Pose(matrix[:, :3], matrix[:, 3], frame_id, scale_known)


def member_of(kind, number: int):
    """The member of an enum. Raises DataError for a number that has none."""
    try:
        return kind(number)
    except ValueError as error:
        raise DataError(f"{kind.__name__.lower()} {number} is none") from error


def features_of(row: Row, image_size: tuple[int, int], model: ModelIdentity, array: ReadArray = Row.array) -> Features:
    """A row of ``features``. Raises DataError."""
    keypoints, scores, descriptors = (array(row, name) for name in ("keypoints", "scores", "descriptors"))
    return Features(keypoints, scores, descriptors, image_size, model, row["pixel_scale"], row["recovered"])


def matches_of(row: Row, array: ReadArray = Row.array) -> Matches:
    """A row of ``matches``. Raises DataError."""
    known, hypotheses = bool(row["scale_known"]), array(row, "hypotheses")
    return Matches(
        array(row, "pairs"),
        array(row, "scores"),
        array(row, "inliers"),
        member_of(Status, row["status"]),
        row["covisibility"],
        row["stopped_after_layer"],
        pose_of(array(row, "pose"), "", known),
        tuple(pose_of(h, "", known) for h in hypotheses) if hypotheses is not None else (),
        row["geometry"],
        row["elapsed_ms"],
        row["runtime"],
        row["detail"],
    )
