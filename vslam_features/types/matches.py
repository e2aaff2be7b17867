"""What a pair of images has in common, and why it is what it is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from ..errors import DataError
from .frames import Pose


class Status(IntEnum):
    """Why a pair has the result it has. The numbers are frozen (``docs/topics.md``)."""

    OK = 0
    NO_KEYPOINTS = 1
    NO_MATCHES = 2
    TOO_FEW_INLIERS = 3
    DEGENERATE = 4
    NOT_COVISIBLE = 5
    STOPPED_EARLY = 6
    AMBIGUOUS = 7
    NON_FINITE = 8
    BACKEND_ERROR = 9
    FAULT_RECOVERED = 10

    @property
    def label(self) -> str:
        """The name used in JSON, reports and documents, e.g. ``too_few_inliers``."""
        return self.name.lower()

    @property
    def confirms(self) -> bool:
        """True where geometry confirms that both images see the same scene."""
        return self in (Status.OK, Status.FAULT_RECOVERED)


@dataclass(frozen=True)
class Matches:
    """Result of matching a current image (0) with a reference image (1); always says why.

    Args:
        pairs: (M, 2) int32, indices into the keypoints of image 0 and 1.
        scores: (M,) f32 in [0, 1], higher is better.
        inliers: (M,) bool, consistent with the verified geometry.
        status: why the result is what it is.
        covisibility: in [0, 1], None where the matcher has none.
        stopped_after_layer: of an early-stopped matcher, else 0.
        pose: image 0's camera in image 1's, None where not determined.
        hypotheses: poses that the data allows: ``pose`` alone where it is
            determined, several for planes and degenerate pairs, none where
            uncalibrated.
        model: geometric model that explains the inliers: ``essential``,
            ``fundamental``, ``homography`` or None.
        elapsed_ms: matching and verification, wall time.
        runtime: what computed it, e.g. ``opencv``.
        detail: one line for people where the status needs one (an error's text).
        layer_scores: layer and covisibility score of each checked layer that
            ran, in order; empty where the matcher does not tell, and in pairs
            that were read from a map.
    Raises:
        DataError: on a broken shape, or on an OK result without an inlier:
            an empty result without a reason cannot be constructed.
    """

    pairs: np.ndarray
    scores: np.ndarray
    inliers: np.ndarray
    status: Status
    covisibility: float | None = None
    stopped_after_layer: int = 0
    pose: Pose | None = None
    hypotheses: tuple[Pose, ...] = ()
    model: str | None = None
    elapsed_ms: float = 0.0
    runtime: str = ""
    detail: str = ""
    layer_scores: tuple[tuple[int, float], ...] = ()

    def __post_init__(self):
        m = len(self.pairs)
        if self.pairs.shape != (m, 2) or self.pairs.dtype != np.int32:
            raise DataError(f"matches: pairs must be (M, 2) int32, got {self.pairs.dtype} {self.pairs.shape}")
        if self.scores.shape != (m,) or self.inliers.shape != (m,) or self.inliers.dtype != bool:
            raise DataError(
                f"matches: scores and inliers must be ({m},), got {self.scores.shape}, {self.inliers.shape}"
            )
        if self.status.confirms and not self.inliers.any():
            raise DataError("matches: a result without inliers must say why; status OK is for verified pairs")

    @classmethod
    def empty(cls, status: Status, **fields) -> Matches:
        """A result without correspondences, for the given reason."""
        return cls(np.empty((0, 2), np.int32), np.empty(0, np.float32), np.empty(0, bool), status, **fields)

    def __len__(self) -> int:
        return len(self.pairs)

    @property
    def num_inliers(self) -> int:
        """Count of inliers."""
        return int(self.inliers.sum())

    @property
    def verified(self) -> bool:
        """``status.confirms``."""
        return self.status.confirms
