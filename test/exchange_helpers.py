"""Small maps with known content for the tests of imports and exports."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from helpers import IDENTITY, SECOND, T0

from vslam_features.config import GeometryConfig
from vslam_features.features.sift import Sift
from vslam_features.geometry import Verifier
from vslam_features.maps.writer import MapWriter
from vslam_features.matching.nearest import Nearest
from vslam_features.matching.verified import VerifiedMatcher
from vslam_features.replay.scenes import Scene
from vslam_features.types import (
    Features,
    Keyframe,
    MapEntry,
    MapModels,
    Matches,
    ModelIdentity,
    PairKind,
    PairResult,
    Pose,
    Status,
)

GLOBAL = ModelIdentity("global", "test", "1" * 64, "none")


def keyframe(kf_id: int, n: int = 12, camera=None, size=(640, 480), **fields) -> Keyframe:
    """A keyframe with ``n`` random keypoints; scores descend."""
    rng = np.random.default_rng(kf_id)
    keypoints = rng.uniform(0, np.array(size) - 1, (n, 2)).astype(np.float32)
    descriptors = rng.normal(size=(n, 8)).astype(np.float32)
    model = fields.pop("model", IDENTITY)
    features = Features(keypoints, np.linspace(1, 0.5, n).astype(np.float32), descriptors, size, model)
    return Keyframe(kf_id, T0 + kf_id * SECOND, "cam", features, camera, **fields)


def matches(pairs, inliers=None, status: Status = Status.OK, **fields) -> Matches:
    """Matches of index pairs; all are inliers unless told."""
    pairs = np.asarray(pairs, np.int32).reshape(-1, 2)
    inliers = np.ones(len(pairs), bool) if inliers is None else np.asarray(inliers, bool)
    return Matches(pairs, np.linspace(0.9, 0.6, len(pairs)).astype(np.float32), inliers, status, **fields)


def pair(kf: Keyframe, ref: Keyframe, found: Matches, kind: PairKind = PairKind.TRACK) -> PairResult:
    return PairResult(kind, kf.id, ref.id, ref.stamp_ns, found)


def write_map(path: Path, entries, models: MapModels | None = None) -> Path:
    with MapWriter(path, models or MapModels(IDENTITY, GLOBAL), create=True) as writer:
        for entry in entries:
            writer.append(entry)
    return path


def scene_map(
    path: Path, scene: Scene, frames, last: int = 3, calibrated: bool = True, max_keypoints: int = 800
) -> Path:
    """A map of frames of a scene by SIFT, each matched with the ``last`` ones before it."""
    sift = Sift(max_keypoints, 0, Sift.Options())
    matcher = VerifiedMatcher(Nearest(Nearest.Options()), Verifier(GeometryConfig()))
    keyframes: list[Keyframe] = []
    entries = []
    for i in frames:
        frame = scene.frame(i)
        camera = frame.camera if calibrated else None
        kf = Keyframe(len(keyframes), frame.stamp_ns, "cam", sift.extract(frame), camera, frame.pose)
        refs = keyframes[: -last - 1 : -1]
        found = [pair(kf, r, matcher.match(kf.features, r.features, kf.camera, r.camera)) for r in refs]
        entries.append(MapEntry(kf, tuple(found)))
        keyframes.append(kf)
    return write_map(path, entries, MapModels(sift.identity))


def relative(scene: Scene, i: int, j: int) -> Pose:
    """The true pose of camera ``i`` in camera ``j``."""
    a, b = scene.poses[i], scene.poses[j]
    return Pose(b.R.T @ a.R, b.R.T @ (a.t - b.t))
