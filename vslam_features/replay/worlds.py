"""Worlds of textured rectangles: their geometry, and exact ray casting in it.

The ``map`` frame: x east, y north, z up, metres. Rectangles are one-sided;
their normals point to where the camera may be.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from .textures import make_texture, mip_pyramid

PX_PER_M = 200.0
_ON_SURFACE_M = 1e-9  # f64 rounding, at edges and of points on a surface
_UP = np.array([0.0, 0.0, 1.0])


@dataclass(frozen=True)
class Surface:
    """A rectangle ``origin + a * u + b * v``, 0 <= a <= size[0], 0 <= b <= size[1] (metres, u and v unit vectors).

    ``u`` is the texture's right and ``v`` its down, as seen from the front;
    the normal ``v x u`` points to the viewer. ``texture``: rectangles of the
    same name look the same.
    """

    texture: str
    style: str
    origin: np.ndarray
    u: np.ndarray
    v: np.ndarray
    size: tuple[float, float]

    @cached_property
    def normal(self) -> np.ndarray:
        """Unit normal (3,) towards the side that can be seen."""
        return np.cross(self.v, self.u)


@dataclass(frozen=True)
class World:
    """Surfaces with their mip pyramids; answers what a ray hits."""

    surfaces: tuple[Surface, ...]
    pyramids: dict[str, list[np.ndarray]] = field(repr=False)

    @classmethod
    def build(cls, surfaces: list[Surface], seed: int) -> World:
        """Generate the textures. The same seed gives the same bytes."""
        pyramids = {}
        for s in surfaces:
            if s.texture not in pyramids:
                rng = np.random.default_rng([seed, *s.texture.encode()])
                pyramids[s.texture] = mip_pyramid(make_texture(rng, s.size, PX_PER_M, s.style))
        return cls(tuple(surfaces), pyramids)

    def cast(self, origin: np.ndarray, directions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """First hits of rays ``origin + k * direction``, k > 0.

        Args:
            origin: (3,) f64. directions: (N, 3) f64, any length.
        Returns:
            k (N,) f64, inf where nothing is hit, and the surface's index (N,) int, -1 where none.
        """
        best = np.full(len(directions), np.inf)
        index = np.full(len(directions), -1)
        for i, s in enumerate(self.surfaces):
            height = s.normal @ (origin - s.origin)
            if height <= 0:
                continue
            with np.errstate(divide="ignore", invalid="ignore"):
                k = -height / (directions @ s.normal)
                a = (origin - s.origin) @ s.u + k * (directions @ s.u)
                b = (origin - s.origin) @ s.v + k * (directions @ s.v)
                inside = (np.minimum(a, b) >= -_ON_SURFACE_M) & (
                    np.maximum(a - s.size[0], b - s.size[1]) <= _ON_SURFACE_M
                )
                hit = (k > 0) & (k < best) & inside
            best[hit], index[hit] = k[hit], i
        return best, index

    def sees(self, origin: np.ndarray, points: np.ndarray) -> np.ndarray:
        """Bool (N,): no surface lies between ``origin`` (3,) and the points (N, 3), which may be on one."""
        clear = np.arange(len(points))
        for s in self.surfaces:
            height = s.normal @ (origin - s.origin)
            if height <= 0:
                continue
            beyond = points[clear] @ s.normal - s.normal @ s.origin
            crossing = np.flatnonzero(beyond < -_ON_SURFACE_M)
            k = height / (height - beyond[crossing])
            on_plane = origin - s.origin + k[:, None] * (points[clear[crossing]] - origin)
            a, b = on_plane @ s.u, on_plane @ s.v
            hit = (a >= 0) & (a <= s.size[0]) & (b >= 0) & (b <= s.size[1])
            clear = np.delete(clear, crossing[hit])
        seen = np.zeros(len(points), bool)
        seen[clear] = True
        return seen


# -- building blocks -----------------------------------------------------------------------


def _wall(name: str, a, b, z0: float, z1: float, style: str = "wall") -> Surface:
    """An upright rectangle from ``a`` to ``b`` (x, y), which run left to right for the viewer."""
    a, b = np.array([*a, z1], float), np.array([*b, z1], float)
    length = float(np.linalg.norm(b - a))
    return Surface(name, style, a, (b - a) / length, -_UP, (length, z1 - z0))


def _floor(name: str, x0, y0, x1, y1, z: float = 0.0, style: str = "floor") -> Surface:
    size = (float(x1 - x0), float(y1 - y0))
    return Surface(name, style, np.array([x0, y1, z], float), np.eye(3)[0], -np.eye(3)[1], size)


def _ceiling(name: str, x0, y0, x1, y1, z: float) -> Surface:
    size = (float(x1 - x0), float(y1 - y0))
    return Surface(name, "ceiling", np.array([x0, y0, z], float), np.eye(3)[0], np.eye(3)[1], size)


def _inside(name: str, x0, y0, x1, y1, height: float) -> list[Surface]:
    """Floor, ceiling and the four walls of a hall, seen from inside."""
    corners = [(x0, y0), (x0, y1), (x1, y1), (x1, y0)]
    walls = [_wall(f"{name}-{i}", corners[i], corners[(i + 1) % 4], 0, height) for i in range(4)]
    return [*walls, _floor(f"{name}-floor", x0, y0, x1, y1), _ceiling(f"{name}-ceiling", x0, y0, x1, y1, height)]


def _box(name: str, x0, y0, x1, y1, z0: float, z1: float, style: str = "box") -> list[Surface]:
    """The four sides and, below eye level, the top of a box, seen from outside."""
    corners = [(x0, y0), (x1, y0), (x1, y1), (x0, y1)]
    sides = [_wall(f"{name}-{i}", corners[i], corners[(i + 1) % 4], z0, z1, style) for i in range(4)]
    return [*sides, _floor(f"{name}-top", x0, y0, x1, y1, z1, style)]


# -- the worlds ----------------------------------------------------------------------------

CORRIDOR = {"outer": (9.0, 7.0), "width": 1.8, "height": 2.6}
ROOM = (8.0, 6.0, 2.8)
TWIN = {"room": (5.0, 4.4, 2.6), "door": (1.0, 2.1), "vestibule": 1.2, "passage": 1.6, "pitch": 7.0}


def room() -> list[Surface]:
    """A hall with an island, two cupboards and a pillar."""
    width, depth, height = ROOM
    return [
        *_inside("room", 0, 0, width, depth, height),
        *_box("island", 3.5, 2.6, 4.6, 3.3, 0, 0.9),
        *_box("cupboard", 0.0, 2.2, 0.45, 3.4, 0, 1.8),
        *_box("shelf", 5.2, 5.6, 6.6, 6.0, 0, 1.2),
        *_box("pillar", 7.3, 0.5, 7.6, 0.8, 0, height),
    ]


def corridor() -> list[Surface]:
    """A rectangular ring corridor around a solid block, with cabinets along the walls."""
    (width, depth), w, height = CORRIDOR["outer"], CORRIDOR["width"], CORRIDOR["height"]
    return [
        *_inside("outer", 0, 0, width, depth, height),
        *_box("core", w, w, width - w, depth - w, 0, height, "wall")[:4],
        *_box("cabinet-south", 5.6, 0.0, 6.5, 0.25, 0, 1.1),
        *_box("cabinet-east", 8.75, 3.0, 9.0, 3.8, 0, 1.9),
        *_box("cabinet-north", 2.6, 5.2, 3.4, 5.4, 0, 0.9),
        *_box("cabinet-west", 0.0, 4.0, 0.2, 4.6, 0, 1.4),
    ]


def twin_rooms() -> list[Surface]:
    """Two rooms that look exactly the same, joined by a passage south of both.

    A vestibule between room and passage narrows the view, and the passage
    looks the same near both doors, so that no view from inside a room tells
    which one it is. Only the middle and the ends of the passage are unique.
    """
    (width, depth, height), (door_w, door_h) = TWIN["room"], TWIN["door"]
    near, far = -TWIN["vestibule"], -TWIN["vestibule"] - TWIN["passage"]
    left, right = (width - door_w) / 2, (width + door_w) / 2

    def unit(x: float) -> list[Surface]:
        inside = _inside("twin", x, 0, x + width, depth, height)
        return [
            *(s for s in inside if s.texture != "twin-3"),  # the south wall has the door in it
            _wall("twin-south-right", (x + width, 0), (x + right, 0), 0, height),
            _wall("twin-south-left", (x + left, 0), (x, 0), 0, height),
            _wall("twin-south-lintel", (x + right, 0), (x + left, 0), door_h, height),
            *_box("twin-bench", x + 2.0, 2.0, x + 3.0, 2.5, 0, 0.7),
            *_box("twin-locker", x + 4.6, 1.0, x + 5.0, 2.0, 0, 1.7),
            _wall("vestibule-west", (x + left, near), (x + left, 0), 0, door_h),
            _wall("vestibule-east", (x + right, 0), (x + right, near), 0, door_h),
            _floor("vestibule-floor", x + left, near, x + right, 0),
            _ceiling("vestibule-ceiling", x + left, near, x + right, 0, door_h),
            *hall("passage-by-door", x, x + width)[1:],
            _wall("passage-north-left", (x, near), (x + left, near), 0, height),
            _wall("passage-north-right", (x + right, near), (x + width, near), 0, height),
            _wall("passage-north-lintel", (x + left, near), (x + right, near), door_h, height),
        ]

    def hall(name: str, x0: float, x1: float) -> list[Surface]:
        return [
            _wall(f"{name}-north", (x0, near), (x1, near), 0, height),
            _wall(f"{name}-south", (x1, far), (x0, far), 0, height),
            _floor(f"{name}-floor", x0, far, x1, near),
            _ceiling(f"{name}-ceiling", x0, far, x1, near, height),
        ]

    end = TWIN["pitch"] + width
    return [
        *unit(0.0),
        *unit(TWIN["pitch"]),
        *hall("passage-middle", width, TWIN["pitch"]),
        _wall("passage-end-west", (0, far), (0, near), 0, height),
        _wall("passage-end-east", (end, near), (end, far), 0, height),
    ]


WORLDS = {"room": room, "corridor": corridor, "twin_rooms": twin_rooms}
