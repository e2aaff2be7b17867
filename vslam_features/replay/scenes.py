"""Synthetic sequences with exact geometry: true intrinsics, poses, depth, correspondences and loops.

``room`` (an open hall, walked in circles), ``corridor`` (a ring corridor,
walked till the camera is back where it was) and ``twin_rooms`` (two rooms
that look exactly the same, one after the other: a trap for place
recognition). The same name and options give the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from fractions import Fraction

import numpy as np

from ..camera import Camera
from ..errors import ConfigError, DataError
from ..types import Frame, Pose
from .ground_truth import GroundTruth
from .render import Renderer
from .trajectories import walk
from .worlds import WORLDS, World

SCENES = tuple(WORLDS)
START_NS = 1_760_000_000_123_456_789
FRAME_ID = "camera_optical"


@dataclass(frozen=True)
class SceneOptions:
    """How a scene is walked and filmed.

    Args:
        width, height: image size in pixels. hfov_deg: horizontal field of view.
        fps: frames a second. num_frames: only the first n; 0: the whole walk.
        seed: of textures and noise.
        speed: m/s. turn_rate_deg: most degrees/s in turns. rounds: laps of ``room`` and ``corridor``.
        camera_height: metres; furniture is flat on top, so above 0.95.
        noise_sigma: of Gaussian image noise, grey levels.
        exposure_s: motion blur, the mean of ``blur_samples`` views along the
            true motion, centred on the stamp; 0: none.
        exposure_steps: (frame, gain) pairs; from that frame on, grey values are multiplied by the gain.
    Raises:
        ConfigError: a value out of range.
    """

    width: int = 640
    height: int = 480
    hfov_deg: float = 75.0
    fps: float = 10.0
    num_frames: int = 0
    seed: int = 0
    speed: float = 1.2
    turn_rate_deg: float = 45.0
    rounds: float = 1.3
    camera_height: float = 1.4
    noise_sigma: float = 0.0
    exposure_s: float = 0.0
    blur_samples: int = 8
    exposure_steps: tuple[tuple[int, float], ...] = ()

    def __post_init__(self):
        ranges = {
            "width": (16, 8192), "height": (16, 8192), "hfov_deg": (10, 150), "fps": (0.1, 1000),
            "num_frames": (0, 1_000_000), "seed": (0, 2**63 - 1), "speed": (0.01, 20), "turn_rate_deg": (1, 720),
            "rounds": (0.1, 100), "camera_height": (0.95, 2.0), "noise_sigma": (0, 128), "exposure_s": (0, 1),
            "blur_samples": (4, 256),
        }  # fmt: skip
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise ConfigError(f"scene option {name}: {value} is outside [{low}, {high}]")
        if any(gain < 0 or frame < 0 or not math.isfinite(gain) for frame, gain in self.exposure_steps):
            raise ConfigError(f"scene option exposure_steps: negative frame or gain in {self.exposure_steps}")


def make_scene(name: str, options: SceneOptions | None = None, **changes) -> Scene:
    """Build a scene; ``changes`` are options by name: ``make_scene("room", seed=3)``.

    Raises:
        ConfigError: unknown scene or option, value out of range, more frames than the walk has.
    """
    if name not in WORLDS:
        raise ConfigError(f"unknown scene '{name}'; there are {', '.join(SCENES)}")
    known = {f.name for f in fields(SceneOptions)}
    if unknown := set(changes) - known:
        raise ConfigError(f"unknown scene option {sorted(unknown)}; known: {', '.join(sorted(known))}")
    values = {f: getattr(options or SceneOptions(), f) for f in known}
    return Scene(name, SceneOptions(**{**values, **changes}))


class Scene:
    """A filmed walk. Frames are rendered when asked for, in any order, each always the same.

    Attributes:
        name, options: what it was made from.
        camera: pinhole without distortion, ``rectified``.
        stamps_ns: list of int, from 1760000000.123456789 s on.
        poses: camera (optical frame) in ``map`` at the stamps, metres.
    """

    def __init__(self, name: str, options: SceneOptions):
        self.name, self.options = name, options
        focal = options.width / 2 / math.tan(math.radians(options.hfov_deg) / 2)
        K = [[focal, 0, (options.width - 1) / 2], [0, focal, (options.height - 1) / 2], [0, 0, 1]]
        self.camera = Camera(options.width, options.height, np.array(K, float), rectified=True)
        self._walk = walk(
            name, speed=options.speed, turn_rate=math.radians(options.turn_rate_deg),
            height=options.camera_height, fps=options.fps, rounds=options.rounds,
        )  # fmt: skip
        whole = round(self._walk.duration * options.fps) + 1
        if options.num_frames > whole:
            raise ConfigError(
                f"scene '{name}': {options.num_frames} frames asked for, the walk has {whole} at {options.fps:g} "
                "frames a second; raise fps or rounds, or lower speed"
            )
        period = Fraction(10**9) / Fraction(options.fps).limit_denominator(10**6)
        self.stamps_ns = [START_NS + round(i * period) for i in range(options.num_frames or whole)]
        self.poses = [self._walk.pose(i / options.fps) for i in range(len(self.stamps_ns))]
        self.world = World.build(WORLDS[name](), options.seed)
        self._renderer = Renderer(self.world, self.camera.K, self.camera.size)

    def __len__(self) -> int:
        return len(self.stamps_ns)

    def frame(self, i: int) -> Frame:
        """Render frame ``i``: grey uint8 (H, W) with stamp, camera and pose. Raises DataError on a bad number."""
        self._check(i)
        options = self.options
        image = self._renderer.image(self._exposure(i))
        gains = [gain for start, gain in sorted(options.exposure_steps) if start <= i]
        if gains:
            image *= np.float32(gains[-1])
        if options.noise_sigma:
            rng = np.random.default_rng([options.seed, i])
            image += np.float32(options.noise_sigma) * rng.standard_normal(image.shape, dtype=np.float32)
        image = np.clip(np.rint(image), 0, 255).astype(np.uint8)
        return Frame(self.stamps_ns[i], FRAME_ID, image, self.camera, self.poses[i])

    def frames(self) -> Iterator[Frame]:
        """All frames in order."""
        return (self.frame(i) for i in range(len(self)))

    __iter__ = frames

    def depth(self, i: int) -> np.ndarray:
        """Depth along the optical axis at pixel centres, f32 (H, W) metres, 0 where nothing is."""
        self._check(i)
        w = self._renderer.hits(self.poses[i]).inverse_depth
        return np.divide(1, w, out=np.zeros_like(w), where=w > 0)

    def surface_points(self, i: int, points: np.ndarray) -> np.ndarray:
        """The points (N, 3) f64 in ``map`` that pixels ``points`` (N, 2) of frame ``i`` see, NaN where none."""
        self._check(i)
        points = np.asarray(points, np.float64)
        if points.ndim != 2 or points.shape[1] != 2:
            raise DataError(f"scene: points must be (N, 2), got {points.shape}")
        pose = self.poses[i]
        directions = self._rays(points) @ pose.R.T
        depth, _ = self.world.cast(pose.t, directions)
        depth[~np.isfinite(depth)] = np.nan
        return pose.t + depth[:, None] * directions

    def correspondences(self, i: int, j: int, points: np.ndarray) -> np.ndarray:
        """Where pixels of frame ``i`` are in frame ``j``.

        Args:
            points: (N, 2) pixels of ``i``.
        Returns:
            (N, 2) f64, NaN where out of view or occluded. Exact up to f64.
        """
        return self._project(j, self.surface_points(i, points))

    def covisibility(self, i: int, j: int, grid: tuple[int, int] = (16, 12)) -> float:
        """The share of a pixel grid of one frame that the other sees, of both directions the smaller."""
        points = self._grid(grid)
        shares = [np.isfinite(self.correspondences(a, b, points)[:, 0]).mean() for a, b in ((i, j), (j, i))]
        return float(min(shares))

    def ground_truth(self, grid: tuple[int, int] = (16, 12)) -> GroundTruth:
        """Poses and the covisibility of all pairs, some 10 ms a frame."""
        points = self._grid(grid)
        n = len(self)
        seen = np.stack([self.surface_points(i, points) for i in range(n)])
        share = np.empty((n, n))
        # Blocks small enough that BLAS stays on one thread: its workers stall where other jobs keep the cores busy.
        for block in np.array_split(np.arange(n), -(-n // 100)):
            flat = seen[block].reshape(-1, 3)
            for j in range(n):
                visible = np.isfinite(self._project(j, flat)[:, 0])
                share[block, j] = visible.reshape(len(block), -1).mean(axis=1)
        return GroundTruth(
            scene=self.name,
            stamps_ns=np.array(self.stamps_ns, np.int64),
            positions=np.stack([p.t for p in self.poses]),
            rotations=np.stack([p.R for p in self.poses]),
            K=self.camera.K,
            image_size=self.camera.size,
            covisibility=np.minimum(share, share.T).astype(np.float32),
        )

    def _project(self, j: int, points: np.ndarray) -> np.ndarray:
        """Pixels (N, 2) f64 of points (N, 3) in ``map`` that frame ``j`` sees, NaN elsewhere."""
        self._check(j)
        pose, (width, height) = self.poses[j], self.camera.size
        local = (points - pose.t) @ pose.R
        with np.errstate(divide="ignore", invalid="ignore"):
            pixels = local @ self.camera.K.T
            pixels = pixels[:, :2] / pixels[:, 2:]
            inside = (
                (local[:, 2] > 0) & (pixels >= -0.5).all(axis=1) & (pixels < (width - 0.5, height - 0.5)).all(axis=1)
            )
        pick = np.flatnonzero(inside)
        pick = pick[self.world.sees(pose.t, points[pick])]
        out = np.full((len(points), 2), np.nan)
        out[pick] = pixels[pick]
        return out

    def _exposure(self, i: int) -> list[Pose]:
        options = self.options
        if not options.exposure_s:
            return [self.poses[i]]
        parts = (np.arange(options.blur_samples) + 0.5) / options.blur_samples - 0.5
        return [self._walk.pose(i / options.fps + options.exposure_s * part) for part in parts]

    def _grid(self, grid: tuple[int, int]) -> np.ndarray:
        columns, rows = ((np.arange(n) + 0.5) * size / n - 0.5 for n, size in zip(grid, self.camera.size))
        return np.stack(np.meshgrid(columns, rows), axis=-1).reshape(-1, 2)

    def _rays(self, points: np.ndarray) -> np.ndarray:
        """Directions (N, 3) of pixels in the optical frame, z = 1."""
        return np.column_stack([points, np.ones(len(points))]) @ np.linalg.inv(self.camera.K).T

    def _check(self, i: int) -> None:
        if not 0 <= i < len(self):
            raise DataError(f"scene '{self.name}': frame {i} asked for, it has 0 to {len(self) - 1}")
