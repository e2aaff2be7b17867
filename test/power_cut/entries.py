"""Keyframes with known content: what number n must hold, wherever it is read."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from functools import cache

import numpy as np

from vslam_features.camera import Camera
from vslam_features.types import (
    Candidate,
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

MODELS = MapModels(
    ModelIdentity("features", "test", "0" * 64, "none"), ModelIdentity("global", "test", "1" * 64, "none")
)
_K = np.array([[500.0, 0, 319.5], [0, 500.0, 239.5], [0, 0, 1]])


@cache
def entry(n: int, keypoints: int = 12, salt: int = 0) -> MapEntry:
    """Keyframe n with pairs and loops; every seventh has 150 times as many keypoints. ``salt``: another map's."""
    rng = np.random.default_rng([n, salt])
    count = keypoints * (150 if n % 7 == 5 else 1)
    descriptors = rng.normal(size=(count, 16)).astype(np.float32)
    xy = rng.uniform(0, 480, (count, 2)).astype(np.float32)
    features = Features(xy, rng.random(count, np.float32), descriptors, (640, 480), MODELS.features)
    pose = Pose(np.eye(3), np.array([0.1 * n, 0.0, salt]), "odom", True)
    unit = rng.normal(size=8).astype(np.float32)
    keyframe = Keyframe(
        n,
        1_760_000_000_000_000_000 + n * 100_000_000,
        "cam",
        features,
        Camera(640, 480, _K + n // 10 * np.diag([1.0, 1.0, 0])),
        pose,
        unit / np.linalg.norm(unit),
        rng.integers(0, 255, (12, 16), np.uint8),
    )
    if n == 0:
        return MapEntry(keyframe)
    pairs = [_pair(PairKind.TRACK, n, n - 1, rng)]
    candidates = gated = ()
    if n > 3:
        candidates = (Candidate(n, n - 3, _stamp(n - 3), 0.75, float("nan"), 0),)
        gated = (Candidate(n, n - 4, _stamp(n - 4), 0.5, 0.25, 1),)
        pairs.append(_pair(PairKind.LOOP, n, n - 3, rng))
    return MapEntry(keyframe, tuple(pairs), candidates, gated)


def assert_same(got, want, where: str = "entry") -> None:
    """Raises AssertionError naming the first field in which they differ; NaN equals NaN."""
    if isinstance(want, np.ndarray):
        assert np.array_equal(got, want), where
    elif is_dataclass(want):
        for f in fields(want):
            assert_same(getattr(got, f.name), getattr(want, f.name), f"{where}.{f.name}")
    elif isinstance(want, tuple):
        assert len(got) == len(want), where
        for i, (g, w) in enumerate(zip(got, want)):
            assert_same(g, w, f"{where}[{i}]")
    else:
        assert got == want or (got != got and want != want), f"{where}: {got!r}, not {want!r}"


def _stamp(n: int) -> int:
    return 1_760_000_000_000_000_000 + n * 100_000_000


def _pair(kind: PairKind, n: int, reference: int, rng) -> PairResult:
    index = rng.integers(0, 12, (6, 2)).astype(np.int32)
    matches = Matches(index, rng.random(6, np.float32), np.arange(6) < 5, Status.OK, 0.5, 0, None, (), "essential")
    return PairResult(kind, n, reference, _stamp(reference), matches)
