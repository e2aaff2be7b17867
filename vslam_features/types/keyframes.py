"""Frames that are kept, and the pairs that are attempted with them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from ..camera import Camera
from .frames import Features, Frame, Pose
from .matches import Matches


class PairKind(IntEnum):
    """What a pair was attempted for. The numbers are frozen (``docs/topics.md``)."""

    TRACK = 0
    LOOP = 1
    RELOCALISATION = 2
    STEREO = 3


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
