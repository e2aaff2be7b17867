"""Plain data that flows between the stages (numpy arrays in frozen dataclasses).

Pixels follow the OpenCV convention: (0, 0) is the centre of the top-left
pixel, x right, y down, always in the coordinates of the *input* image.
``*_size`` means (width, height); array shapes are (H, W). Stamps are integer
nanoseconds. See ``docs/conventions.md``.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from .camera import Camera
from .errors import DataError


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


class PairKind(IntEnum):
    """What a pair was attempted for. The numbers are frozen (``docs/topics.md``)."""

    TRACK = 0
    LOOP = 1
    RELOCALISATION = 2
    STEREO = 3


@dataclass(frozen=True)
class ModelIdentity:
    """What makes descriptors comparable: only equal identities may be matched.

    Precision, runtime and engine are provenance and not part of it.
    """

    role: str
    name: str
    sha256: str
    preprocessing: str

    @classmethod
    def of_algorithm(cls, role: str, name: str, preprocessing: str, **parameters) -> ModelIdentity:
        """Identity of a method without weights: the hash covers the parameters that shape descriptors."""
        text = json.dumps({"name": name, **parameters}, sort_keys=True)
        return cls(role, name, hashlib.sha256(text.encode()).hexdigest(), preprocessing)

    def __str__(self) -> str:
        return f"{self.role} '{self.name}' (weights {self.sha256[:12]}, preprocessing {self.preprocessing})"


@dataclass(frozen=True)
class Pose:
    """A rigid transform x_parent = R x_child + t (R (3, 3) f64, t (3,) f64, metres if ``scale_known``).

    Of a frame: camera (optical frame) in ``frame_id``. Of a pair: current
    camera in the reference camera, where ``t`` has unit length unless
    ``scale_known``, and length zero for a pure rotation.
    """

    R: np.ndarray
    t: np.ndarray
    frame_id: str = ""
    scale_known: bool = True

    def __post_init__(self):
        R, t = np.asarray(self.R, np.float64), np.asarray(self.t, np.float64).reshape(-1)
        if R.shape != (3, 3) or t.shape != (3,):
            raise DataError(f"pose: expected R (3, 3) and t (3,), got {R.shape} and {t.shape}")
        if not (np.isfinite(R).all() and np.isfinite(t).all()):
            raise DataError("pose: R or t is not finite")
        object.__setattr__(self, "R", R)
        object.__setattr__(self, "t", t)

    @staticmethod
    def comparable(a: Pose | None, b: Pose | None) -> bool:
        """True where both are there and in the same frame, so that their difference is a motion."""
        return a is not None and b is not None and a.frame_id == b.frame_id


@dataclass(frozen=True)
class Frame:
    """One camera image. ``image``: uint8 (H, W) grey or (H, W, 3) RGB.

    ``camera`` None means uncalibrated; ``pose`` None means no odometry.
    ``mask``: bool (H, W), True where keypoints are allowed.
    """

    stamp_ns: int
    frame_id: str
    image: np.ndarray
    camera: Camera | None = None
    pose: Pose | None = None
    mask: np.ndarray | None = None

    def __post_init__(self):
        image = self.image
        if image.dtype != np.uint8 or image.ndim not in (2, 3) or (image.ndim == 3 and image.shape[2] != 3):
            raise DataError(f"frame: expected a uint8 image (H, W) or (H, W, 3), got {image.dtype} {image.shape}")
        if image.size == 0:
            raise DataError(f"frame: the image is empty, shape {image.shape}")
        if self.camera is not None and self.camera.size != self.image_size:
            raise DataError(
                f"frame: camera is for {self.camera.size[0]}x{self.camera.size[1]} pixels, "
                f"the image has {self.image_size[0]}x{self.image_size[1]}: "
                "check camera_info (ROI, binning) or scale the camera to the image"
            )
        mask = self.mask
        if mask is not None and (mask.shape != image.shape[:2] or mask.dtype != bool):
            raise DataError(f"frame: mask must be bool {image.shape[:2]} as the image, got {mask.dtype} {mask.shape}")

    @property
    def image_size(self) -> tuple[int, int]:
        """(width, height) of the image."""
        return self.image.shape[1], self.image.shape[0]


@dataclass(frozen=True)
class Features:
    """Local features of one image.

    Args:
        keypoints: (N, 2) f32, pixels of the input image. Never fp16.
        scores: (N,) f32, higher is better, detector's own unit.
        descriptors: (N, D) f16, f32 or u8 (bit-packed), or a dense map (C, h, w).
        image_size: (width, height) of the input image.
        model: identity of what computed them.
        pixel_scale: input pixels per pixel of the image that was searched
            (> 1 where it was shrunk first); scales geometric thresholds.
        recovered: the fault after which the fallback computed them, else empty.
    Raises:
        DataError: shapes or dtypes that break the contract, non-finite keypoints.
    """

    keypoints: np.ndarray
    scores: np.ndarray
    descriptors: np.ndarray
    image_size: tuple[int, int]
    model: ModelIdentity
    pixel_scale: float = 1.0
    recovered: str = ""

    def __post_init__(self):
        n = len(self.keypoints)
        if self.keypoints.shape != (n, 2) or self.keypoints.dtype != np.float32:
            raise DataError(
                f"features: keypoints must be (N, 2) f32, got {self.keypoints.dtype} {self.keypoints.shape}"
            )
        if self.scores.shape != (n,):
            raise DataError(f"features: scores must be ({n},), got {self.scores.shape}")
        if self.descriptors.ndim not in (2, 3) or (self.descriptors.ndim == 2 and len(self.descriptors) != n):
            raise DataError(f"features: descriptors must be ({n}, D) or (C, h, w), got {self.descriptors.shape}")
        if not np.isfinite(self.keypoints).all():
            raise DataError("features: keypoints are not finite")

    def __len__(self) -> int:
        return len(self.keypoints)


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


@dataclass(frozen=True)
class KeyframeHeader:
    """A keyframe without its arrays: of these a map holds all in memory. Fields as in :class:`Keyframe`."""

    id: int
    session: int
    stamp_ns: int
    frame_id: str
    camera: Camera | None
    pose: Pose | None
    image_size: tuple[int, int]
    num_keypoints: int


@dataclass(frozen=True)
class Keyframe:
    """A frame kept in the map. ``thumbnail``: uint8, small, for people. ``id`` counts from 0.

    ``session``: how often the map had been continued when the keyframe came. Stamps and odometry frames of different
    sessions have nothing to do with one another.
    """

    id: int
    stamp_ns: int
    frame_id: str
    features: Features
    camera: Camera | None = None
    pose: Pose | None = None
    global_descriptor: np.ndarray | None = None
    thumbnail: np.ndarray | None = None
    session: int = 0

    @property
    def header(self) -> KeyframeHeader:
        """The keyframe without its arrays."""
        f = self.features
        return KeyframeHeader(
            self.id, self.session, self.stamp_ns, self.frame_id, self.camera, self.pose, f.image_size, len(f)
        )


@dataclass(frozen=True)
class Candidate:
    """A place that retrieval proposes for a keyframe, before verification.

    ``similarity``: cosine. ``margin``: similarity minus that of the best
    candidate of a different place (NaN where there is none). ``rank`` from 0.
    """

    kf_id: int
    ref_kf_id: int
    ref_stamp_ns: int
    similarity: float
    margin: float
    rank: int


@dataclass(frozen=True)
class PairResult:
    """An attempted pair of keyframes, also an empty one."""

    kind: PairKind
    kf_id: int
    ref_kf_id: int
    ref_stamp_ns: int
    matches: Matches


@dataclass(frozen=True)
class Tracked:
    """What ``FrontEnd.track`` returns for a frame.

    ``keyframe`` is None where the frame adds nothing new. ``latency_ms``: wall
    time a stage. ``faults``: stage -> text, of the stages that failed.
    """

    frame: Frame
    features: Features | None
    keyframe: Keyframe | None
    pairs: tuple[PairResult, ...] = ()
    latency_ms: dict[str, float] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Loops:
    """What ``FrontEnd.close_loops`` returns for a keyframe.

    ``gated``: candidates that odometry makes impossible, which were not tried.
    """

    keyframe: Keyframe
    candidates: tuple[Candidate, ...] = ()
    pairs: tuple[PairResult, ...] = ()
    gated: tuple[Candidate, ...] = ()
    latency_ms: dict[str, float] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class MapModels:
    """Identities of what a map's descriptors were computed by. ``global_descriptor`` None: the map has none."""

    features: ModelIdentity
    global_descriptor: ModelIdentity | None = None


@dataclass(frozen=True)
class MapEntry:
    """A keyframe with all that a map keeps of it, stored together or not at all.

    ``pairs``: attempted pairs with older keyframes. ``candidates``, ``gated``: as in :class:`Loops`.
    """

    keyframe: Keyframe
    pairs: tuple[PairResult, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    gated: tuple[Candidate, ...] = ()
