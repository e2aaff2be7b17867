"""Exact rasteriser for textured rectangles: per-pixel ray intersection, z-buffer, filtered texture lookup.

Over the image a plane's inverse depth w = 1/z, and its texture coordinates
times w, are linear in the pixel, so each costs one outer sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import numpy as np

from ..types import Pose
from .worlds import PX_PER_M, Surface, World

# Four points with four different offsets along both axes: edges and grazing planes, which are
# compressed along one axis, get a sample each quarter pixel.
SUBPIXELS = np.array([(-0.375, -0.125), (0.125, -0.375), (0.375, 0.125), (-0.125, 0.375)])
_MIN_DEPTH_M = 0.02
# Rectangles reach this far beyond their edges: f32 would leave pin holes where two of them meet.
_SEAM_M = 2e-5
_REMAP_WIDTH = 1024
_NOTHING = 255


@dataclass(frozen=True)
class Hits:
    """What each pixel sees: ``surface`` (H, W) u8, 255 where nothing; ``inverse_depth`` (H, W) f32, 1/m, 0 there."""

    surface: np.ndarray
    inverse_depth: np.ndarray


class Renderer:
    """Renders a world for a pinhole camera.

    Args:
        K: (3, 3) f64. size: (width, height) pixels.
    """

    def __init__(self, world: World, K: np.ndarray, size: tuple[int, int]):
        self._world = world
        self._K_inv = np.linalg.inv(K)
        self._K = K
        self._size = size

    def hits(self, pose: Pose, offset=(0.0, 0.0)) -> Hits:
        """Nearest surfaces along the rays through pixel centres, moved by ``offset`` (x, y) pixels."""
        width, height = self._size
        surface = np.full((height, width), _NOTHING, np.uint8)
        nearest = np.zeros((height, width), np.float32)
        for index, s in enumerate(self._world.surfaces):
            area = self._area(s, pose)
            if area is None:
                continue
            x0, y0, x1, y1 = area
            x, y = _grid(x0, x1, offset[0]), _grid(y0, y1, offset[1])
            w, a, b = (_plane(line, x, y) for line in self._lines(s, pose))
            view = nearest[y0:y1, x0:x1]
            seam = np.float32(_SEAM_M) * w
            inside = (a >= -seam) & (b >= -seam) & (a <= s.size[0] * w + seam) & (b <= s.size[1] * w + seam)
            hit = (w > view) & inside
            np.copyto(view, w, where=hit)
            surface[y0:y1, x0:x1][hit] = index
        return Hits(surface, nearest)

    def shade(self, pose: Pose, offset, samples: int) -> np.ndarray:
        """Grey values (H, W) f32 of one sample a pixel; textures are filtered for an average of ``samples``."""
        surface = self.hits(pose, offset).surface.ravel()
        image = np.zeros(surface.size, np.float32)
        for index in np.flatnonzero(np.bincount(surface, minlength=_NOTHING)[:_NOTHING]):
            s = self._world.surfaces[index]
            pixels = np.flatnonzero(surface == index)
            y, x = np.divmod(pixels.astype(np.int32), self._size[0])
            x, y = x + np.float32(offset[0]), y + np.float32(offset[1])
            image[pixels] = self._texture(s, self._lines(s, pose), x, y, samples)
        return image.reshape(self._size[::-1])

    def image(self, poses: list[Pose], rng: np.random.Generator | None = None) -> np.ndarray:
        """Mean of the views from ``poses`` (the camera's way during exposure), f32 (H, W), 0-255.

        Samples within the pixel come with the poses; a single pose is sampled four times.
        """
        if len(poses) < len(SUBPIXELS):
            poses = [p for p in poses for _ in SUBPIXELS]
        total = np.zeros(self._size[::-1], np.float32)
        for i, pose in enumerate(poses):
            total += self.shade(pose, SUBPIXELS[i % len(SUBPIXELS)], len(poses))
        return total / np.float32(len(poses))

    def _lines(self, s: Surface, pose: Pose) -> np.ndarray:
        """(3, 3) f64: coefficients over (x, y, 1) of w = 1/z, a * w and b * w for texture metres a, b."""
        to_ray = pose.R @ self._K_inv
        offset = pose.t - s.origin
        w = -(s.normal @ to_ray) / (s.normal @ offset)
        return np.stack([w, s.u @ to_ray + (offset @ s.u) * w, s.v @ to_ray + (offset @ s.v) * w])

    def _area(self, s: Surface, pose: Pose) -> tuple[int, int, int, int] | None:
        """Pixel box x0, y0, x1, y1 (ends excluded) that holds the surface; None where it is not in view."""
        if s.normal @ (pose.t - s.origin) <= 0:
            return None
        corners = s.origin + np.array([[0, 0], [1, 0], [1, 1], [0, 1]]) * s.size @ np.stack([s.u, s.v])
        corners = (corners - pose.t) @ pose.R
        following = np.roll(corners, -1, axis=0)
        crossing = (corners[:, 2] < _MIN_DEPTH_M) != (following[:, 2] < _MIN_DEPTH_M)
        p, q = corners[crossing], following[crossing]
        cuts = p + (q - p) * ((_MIN_DEPTH_M - p[:, 2:]) / (q[:, 2:] - p[:, 2:]))
        visible = np.concatenate([corners[corners[:, 2] >= _MIN_DEPTH_M], cuts])
        if not len(visible):
            return None
        pixels = visible @ self._K.T
        pixels = pixels[:, :2] / pixels[:, 2:]
        low = np.clip(np.floor(pixels.min(0)) - 1, 0, self._size).astype(int)
        high = np.clip(np.ceil(pixels.max(0)) + 2, 0, self._size).astype(int)
        return None if (high <= low).any() else (*low, *high)

    def _texture(self, s: Surface, lines, x, y, samples: int) -> np.ndarray:
        """Filtered texture at pixels x, y (N,) f32: the two nearest mip levels, mixed."""
        pyramid = self._world.pyramids[s.texture]
        (w0, w1, w2), (a0, a1, a2), (b0, b1, b2) = lines.astype(np.float32)
        z = 1 / (w0 * x + w1 * y + w2)
        a, b = (a0 * x + a1 * y + a2) * z, (b0 * x + b1 * y + b2) * z

        level = self._level((a0 - a * w0, b0 - b * w0), (a1 - a * w1, b1 - b * w1), z, samples)
        np.clip(level, 0, len(pyramid) - 1, out=level)
        values = np.zeros(len(x), np.float32)
        for n in range(int(level.min()), int(np.ceil(level.max())) + 1):
            weight = 1 - np.abs(level - n)
            pick = np.flatnonzero(weight > 0)
            height, width = pyramid[n].shape
            u = a[pick] * np.float32(width / s.size[0]) - np.float32(0.5)
            v = b[pick] * np.float32(height / s.size[1]) - np.float32(0.5)
            values[pick] += weight[pick] * _lookup(pyramid[n], u, v)
        return values

    @staticmethod
    def _level(along_x, along_y, z, samples: int) -> np.ndarray:
        """Mip level (N,) f32 for a pixel's footprint on the texture, the samples sharing it."""
        length_x = along_x[0] * along_x[0] + along_x[1] * along_x[1]
        length_y = along_y[0] * along_y[0] + along_y[1] * along_y[1]
        long, short = np.maximum(length_x, length_y), np.minimum(length_x, length_y)
        # n samples stand n to a pixel along one axis, and sqrt(n) where both axes need them.
        share = np.maximum(long / np.float32(min(samples, 4) ** 2), short / np.float32(min(samples, 4)))
        return np.float32(0.5) * np.log2(share * (z * z * np.float32(PX_PER_M**2)) + np.float32(1e-12))


def _grid(start: int, stop: int, offset: float) -> np.ndarray:
    return np.arange(start, stop, dtype=np.float32) + np.float32(offset)


def _plane(line, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    line = line.astype(np.float32)
    return (line[0] * x)[None, :] + (line[1] * y + line[2])[:, None]


def _lookup(image: np.ndarray, u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Bilinear values at pixels (u, v) (N,). The list is folded, as cv2.remap limits rows to 32767."""
    n = len(u)
    rows = -(-n // _REMAP_WIDTH)
    maps = np.zeros((2, rows * _REMAP_WIDTH), np.float32)
    maps[0, :n], maps[1, :n] = u, v
    maps = maps.reshape(2, rows, _REMAP_WIDTH)
    return cv2.remap(image, maps[0], maps[1], cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE).ravel()[:n]
