"""Small data with known answers for the tests of the core."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import cv2
import numpy as np

from vslam_features import registry
from vslam_features.camera import Camera
from vslam_features.config import GeometryConfig
from vslam_features.geometry import Verification, Verifier
from vslam_features.types import Features, Frame, Keyframe, Matches, ModelIdentity, Pose, Status

IDENTITY = ModelIdentity("features", "test", "0" * 64, "none")
T0 = 1_760_000_000_123_456_789
SECOND = 1_000_000_000


def image(height: int = 120, width: int = 160, seed: int = 0) -> np.ndarray:
    """A grey picture with corners and blobs of many sizes."""
    rng = np.random.default_rng(seed)
    out = np.zeros((height, width), np.float32)
    for level in range(2, 7):
        coarse = rng.normal(size=(height // 2**level + 2, width // 2**level + 2)).astype(np.float32)
        out += cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC)
    return cv2.normalize(out, None, 0, 255, cv2.NORM_MINMAX).astype(np.uint8)


def frame(picture=None, stamp_ns: int = T0, **fields) -> Frame:
    """A frame of a picture (default: ``image()``)."""
    return Frame(stamp_ns, "cam", image() if picture is None else picture, **fields)


def features(descriptors, keypoints=None, size=(640, 480), model=IDENTITY, **fields) -> Features:
    """Features with given descriptors; keypoints are spread at random unless given."""
    d = np.asarray(descriptors)
    if keypoints is None:
        keypoints = np.random.default_rng(1).uniform(0, size, (len(d), 2))
    keypoints = np.asarray(keypoints, np.float32).reshape(-1, 2)
    return Features(keypoints, np.linspace(1, 0, len(d)).astype(np.float32), d, size, model, **fields)


def unit(rng, n: int, dim: int = 32) -> np.ndarray:
    """(n, dim) f32 random unit vectors."""
    d = rng.normal(size=(n, dim))
    return (d / np.linalg.norm(d, axis=1, keepdims=True)).astype(np.float32)


def matches(inliers: int = 50, status: Status = Status.OK, total: int | None = None) -> Matches:
    """Matches i-i, of which the first ``inliers`` are inliers."""
    n = inliers if total is None else total
    index = np.arange(n, dtype=np.int32)
    return Matches(np.stack([index, index], 1), np.ones(n, np.float32), index < inliers, status)


def pose(x: float = 0.0, y: float = 0.0, yaw_deg: float = 0.0, frame_id: str = "map") -> Pose:
    """Camera in the plane, turned about the z axis."""
    return Pose(rotation((0, 0, yaw_deg)), np.array([x, y, 0.0]), frame_id)


def keyframe(stamp_ns: int = T0, pose: Pose | None = None, n: int = 100) -> Keyframe:
    """A keyframe with ``n`` random features; the map gives it its id."""
    rng = np.random.default_rng(stamp_ns % 2**32)
    return Keyframe(0, stamp_ns, "cam", features(unit(rng, n)), None, pose)


def rotation(vector_deg) -> np.ndarray:
    """(3, 3) rotation by a vector in degrees."""
    return cv2.Rodrigues(np.radians(np.asarray(vector_deg, np.float64)))[0]


K = np.array([[500.0, 0, 319.5], [0, 500.0, 239.5], [0, 0, 1]])
CAMERA = Camera(640, 480, K)


@dataclass
class TwoViews:
    """Correspondences p0, p1 (M, 2) with their truth: x1 = R x0 + t, and which are right."""

    p0: np.ndarray
    p1: np.ndarray
    R: np.ndarray
    t: np.ndarray
    right: np.ndarray
    camera0: Camera
    camera1: Camera

    def verify(self, calibrated: bool = True, **config) -> Verification:
        """Run the verifier on them."""
        cameras = (self.camera0, self.camera1) if calibrated else (None, None)
        return Verifier(replace(GeometryConfig(), **config)).verify(self.p0, self.p1, *cameras)

    def errors_deg(self, found: Pose) -> tuple[float, float]:
        """Angles of rotation and direction between a pose and the truth."""
        cosine = (np.trace(found.R.T @ self.R) - 1) / 2
        direction = found.t @ self.t / np.linalg.norm(found.t) / np.linalg.norm(self.t)
        return tuple(np.degrees(np.arccos(np.clip([cosine, direction], -1, 1))))


def two_views(
    n: int = 200,
    rotation_deg=(2.0, 8.0, 1.0),
    t=(-0.5, 0.05, 0.1),
    depth=(2.0, 8.0),
    plane: bool = False,
    noise: float = 0.2,
    outliers: float = 0.0,
    seed: int = 0,
    camera0: Camera = CAMERA,
    camera1: Camera = CAMERA,
) -> TwoViews:
    """``n`` correspondences in sight of both cameras, the last share of ``outliers`` at random places."""
    rng = np.random.default_rng(seed)
    R, t = rotation(rotation_deg), np.asarray(t, np.float64)
    rays = camera0.bearings(rng.uniform((0, 0), (639, 479), (40 * n, 2)))
    z = 1 / (0.25 + 0.1 * rays[:, 0] + 0.05 * rays[:, 1]) if plane else rng.uniform(*depth, len(rays))
    x0 = rays / rays[:, 2:] * np.asarray(z)[:, None]
    p0, p1 = camera0.project(x0), camera1.project(x0 @ R.T + t)
    seen = ((p1 > 0) & (p1 < (639, 479))).all(axis=1) & np.isfinite(p0).all(axis=1)
    p0, p1 = p0[seen][:n], p1[seen][:n]
    assert len(p0) == n, f"only {len(p0)} points are in both views"
    p0, p1 = (p + rng.normal(0, noise, p.shape) for p in (p0, p1))
    right = np.arange(n) < round(n * (1 - outliers))
    p1[~right] = rng.uniform((0, 0), (639, 479), ((~right).sum(), 2))
    return TwoViews(p0, p1, R, t, right, camera0, camera1)


def plugin_distribution(tmp_path, monkeypatch, roles: dict[str, dict[str, str]], source: str) -> None:
    """An installed package with plug-ins: role -> entry point name -> class in ``source``."""
    module = f"plugins_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{module}.py").write_text(source)
    info = tmp_path / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module.replace('_', '-')}\nVersion: 1.0\n")
    lines = []
    for role, entries in roles.items():
        lines += [f"[vslam_features.{role}]", *(f"{name} = {module}:{cls}" for name, cls in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    # a cache of its own: the names found here are forgotten with the folder
    monkeypatch.setattr(registry, "_external", cache(registry._external.__wrapped__))
