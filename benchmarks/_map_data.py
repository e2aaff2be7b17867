"""Keyframes for the benchmark of map files: dense fp16 descriptors, a global descriptor, matches, some loops."""

from __future__ import annotations

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
    ModelIdentity("features", "dense", "0" * 64, "rgb"), ModelIdentity("global", "vlad", "1" * 64, "rgb")
)
GLOBAL_SIZE = 8448
LOOP_EVERY = 20
_GRID, _CHANNELS, _MATCHES = 64, 256, 500
_STEP_NS = 200_000_000


class Keyframes:
    """Entries by id. Descriptors come from a small pool, as making random numbers takes longer than storing them.

    Args:
        own_arrays: each entry gets descriptors of its own, as in a real run, where memory counts.
    """

    def __init__(self, pool: int = 8, own_arrays: bool = False):
        rng = np.random.default_rng(4)
        shape = (_CHANNELS, _GRID, _GRID)
        self._dense = [_unit(rng.standard_normal(shape, np.float32)).astype(np.float16) for _ in range(pool)]
        self._global = [_unit(rng.standard_normal(GLOBAL_SIZE, np.float32)).astype(np.float16) for _ in range(pool)]
        rows, columns = np.mgrid[:_GRID, :_GRID]
        self._keypoints = np.stack([columns.ravel() * 10, rows.ravel() * 7.5], axis=1).astype(np.float32)
        self._scores = rng.random(_GRID * _GRID, np.float32)
        self._pairs = np.stack([np.arange(_MATCHES), np.arange(_MATCHES)[::-1]], axis=1).astype(np.int32)
        self._camera = Camera(640, 480, np.array([[500.0, 0, 320], [0, 500, 240], [0, 0, 1]]), np.zeros(5))
        self._own = own_arrays

    def keyframe(self, kf_id: int) -> Keyframe:
        """A keyframe of a walk along a line; its global descriptor is that of its place in the pool."""
        dense = self._dense[kf_id % len(self._dense)]
        if self._own:
            dense = dense.copy()
        features = Features(self._keypoints, self._scores, dense, (640, 480), MODELS.features)
        pose = Pose(np.eye(3), np.array([0.2 * kf_id, 0, 0]), "odom")
        descriptor = self._global[kf_id % len(self._global)]
        return Keyframe(kf_id, (kf_id + 1) * _STEP_NS, "camera", features, self._camera, pose, descriptor)

    def entry(self, kf_id: int) -> MapEntry:
        """With a pair of the keyframe before, and each ``LOOP_EVERY``-th with a confirmed loop to the first."""
        keyframe, pairs, candidates = self.keyframe(kf_id), [], []
        if kf_id:
            pairs.append(self._pair(kf_id, kf_id - 1, PairKind.TRACK))
        if kf_id and kf_id % LOOP_EVERY == 0:
            pairs.append(self._pair(kf_id, 0, PairKind.LOOP))
            candidates.append(Candidate(kf_id, 0, _STEP_NS, 0.9, 0.1, 0))
        return MapEntry(keyframe, tuple(pairs), tuple(candidates))

    def _pair(self, kf_id: int, ref_id: int, kind: PairKind) -> PairResult:
        pose = Pose(np.eye(3), np.array([1.0, 0, 0]), "", False)
        matches = Matches(
            self._pairs,
            np.ones(_MATCHES, np.float32),
            np.ones(_MATCHES, bool),
            Status.OK,
            pose=pose,
            hypotheses=(pose,),
            model="essential",
        )
        return PairResult(kind, kf_id, ref_id, (ref_id + 1) * _STEP_NS, matches)


def arrays_of(entry: MapEntry) -> dict[str, np.ndarray]:
    """What all contenders store of an entry; those that reading a keyframe returns come first."""
    keyframe = entry.keyframe
    arrays = arrays_of_keyframe(keyframe)
    for i, pair in enumerate(entry.pairs):
        m = pair.matches
        found = {"pairs": m.pairs, "scores": m.scores, "inliers": m.inliers}
        arrays |= {f"{name}_{i}": array for name, array in found.items()}
    return arrays


def arrays_of_keyframe(keyframe: Keyframe) -> dict[str, np.ndarray]:
    """What reading a keyframe returns."""
    f = keyframe.features
    return {
        "keypoints": f.keypoints,
        "scores": f.scores,
        "descriptors": f.descriptors,
        "global_descriptor": keyframe.global_descriptor,
    }


def _unit(array: np.ndarray) -> np.ndarray:
    return array / np.linalg.norm(array, axis=0, keepdims=True)
