"""Seeded grey textures full of corners, each place of which looks like no other, and their mip pyramids."""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import numpy as np

_SUBPIXEL_BITS = 4


@dataclass(frozen=True)
class Style:
    """Look of a surface. ``grain``: noise sigma in grey levels; the others count shapes a square metre."""

    base: float
    grain: float
    marks: float
    specks: float
    signs: float


STYLES = {
    "wall": Style(base=165, grain=20, marks=6, specks=70, signs=0.9),
    "floor": Style(base=95, grain=20, marks=10, specks=90, signs=0.0),
    "ceiling": Style(base=200, grain=13, marks=4, specks=50, signs=0.0),
    "box": Style(base=120, grain=22, marks=12, specks=80, signs=2.0),
}


def make_texture(rng: np.random.Generator, size_m: tuple[float, float], px_per_m: float, style: str) -> np.ndarray:
    """A texture for a rectangle of ``size_m`` (width, height) metres.

    Returns:
        uint8 (H, W); the same generator state gives the same bytes.
    """
    width, height = (max(8, round(s * px_per_m)) for s in size_m)
    look, area = STYLES[style], size_m[0] * size_m[1]
    image = np.clip(look.base + look.grain * _noise(rng, width, height), 0, 255).astype(np.uint8)
    for _ in range(rng.poisson(look.marks * area)):
        _draw_mark(rng, image, rng.uniform(0.04, 0.22) * px_per_m)
    for _ in range(rng.poisson(look.signs * area)):
        _draw_sign(rng, image, px_per_m)
    for _ in range(rng.poisson(look.specks * area)):
        _draw_mark(rng, image, rng.uniform(0.008, 0.035) * px_per_m)
    return image


def mip_pyramid(texture: np.ndarray) -> list[np.ndarray]:
    """The texture and its halvings (area averages), down to 4 pixels on the short side."""
    levels = [texture]
    while min(levels[-1].shape) >= 8:
        height, width = levels[-1].shape
        levels.append(cv2.resize(levels[-1], (width // 2, height // 2), interpolation=cv2.INTER_AREA))
    return levels


def _noise(rng, width: int, height: int) -> np.ndarray:
    """Noise of zero mean and about unit sigma with detail at all scales, f32 (H, W)."""
    total = np.zeros((height, width), np.float32)
    cells = (4, 9, 21, 48, 110, 250)
    for cell in cells:
        grid = rng.standard_normal((height // cell + 3, width // cell + 3), dtype=np.float32)
        total += cv2.resize(grid, (width, height), interpolation=cv2.INTER_CUBIC)
    return total * np.float32(1.25 / len(cells) ** 0.5)


def _draw_mark(rng, image: np.ndarray, radius: float) -> None:
    """A polygon, ellipse, ring or bar of random grey around a random place."""
    centre = rng.uniform(0, (image.shape[1], image.shape[0]))
    grey = int(rng.integers(15, 246))
    kind = rng.integers(4)
    if kind <= 1:
        corners = int(rng.integers(3, 8))
        angles = np.sort(rng.uniform(0, 2 * np.pi, corners))
        reach = radius * rng.uniform(0.5, 1.3, (corners, 1))
        _fill(image, centre + reach * np.column_stack([np.cos(angles), np.sin(angles)]), grey)
    elif kind == 2:
        axes = np.maximum(radius * rng.uniform(0.4, 1.1, 2), 1)
        thickness = -1 if rng.random() < 0.6 else max(1, int(radius / 4))
        scale = 2**_SUBPIXEL_BITS
        cv2.ellipse(
            image, _fixed(centre), tuple(int(a * scale) for a in axes), rng.uniform(0, 180), 0, 360, grey,
            thickness, cv2.LINE_AA, _SUBPIXEL_BITS,
        )  # fmt: skip
    else:
        angle = rng.uniform(0, np.pi)
        along = np.array([np.cos(angle), np.sin(angle)]) * radius * 1.3
        across = np.array([-along[1], along[0]]) * rng.uniform(0.12, 0.4)
        _fill(image, centre + np.array([along + across, along - across, -along - across, -along + across]), grey)


def _draw_sign(rng, image: np.ndarray, px_per_m: float) -> None:
    """A framed notice with lines of random 5x7 glyphs: text that is in no language and on no other wall."""
    height, width = image.shape
    w, h = (int(s * px_per_m) for s in rng.uniform((0.3, 0.25), (0.8, 0.6)))
    if w + 2 >= width or h + 2 >= height:
        return
    x, y = int(rng.integers(0, width - w)), int(rng.integers(0, height - h))
    paper, ink = (rng.integers(190, 246), rng.integers(15, 80))
    if rng.random() < 0.3:
        paper, ink = ink, paper
    cv2.rectangle(image, (x, y), (x + w, y + h), int(paper), -1)
    cv2.rectangle(image, (x, y), (x + w, y + h), int(ink), max(2, int(0.012 * px_per_m)))
    dot = max(1, int(rng.uniform(0.006, 0.014) * px_per_m))
    for top in range(y + 4 * dot, y + h - 9 * dot, 10 * dot):
        for left in range(x + 4 * dot, x + w - 7 * dot, 7 * dot):
            if rng.random() < 0.15:
                continue
            glyph = np.kron(rng.random((7, 5)) < 0.45, np.ones((dot, dot), bool))
            image[top : top + 7 * dot, left : left + 5 * dot][glyph] = ink


def _fill(image, points, grey: int) -> None:
    fixed = np.round(np.asarray(points) * 2**_SUBPIXEL_BITS).astype(np.int32)
    cv2.fillPoly(image, [fixed], grey, cv2.LINE_AA, _SUBPIXEL_BITS)


def _fixed(point) -> tuple[int, int]:
    return tuple(int(round(c * 2**_SUBPIXEL_BITS)) for c in point)
