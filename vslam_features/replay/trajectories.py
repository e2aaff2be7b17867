"""Smooth walks of a hand-held camera through the worlds: poses at any time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..types import Pose
from .worlds import CORRIDOR, ROOM, TWIN

_STEP_M = 0.01
_LOOK_AHEAD_M = 0.5


@dataclass(frozen=True)
class Trajectory:
    """A table of camera states: ``time`` (M,) s from 0, ``state`` (M, 6) x, y, z (m), yaw, pitch, roll (rad).

    Yaw counts from east to north, pitch is positive looking down, roll positive to the right.
    """

    time: np.ndarray
    state: np.ndarray

    @property
    def duration(self) -> float:
        """Seconds from the first to the last state."""
        return float(self.time[-1])

    def pose(self, t: float) -> Pose:
        """Camera (optical frame: z forward, x right, y down) in ``map`` at ``t`` seconds, held beyond both ends."""
        x, y, z, yaw, pitch, roll = (np.interp(t, self.time, column) for column in self.state.T)
        (cy, sy), (cp, sp), (cr, sr) = ((np.cos(a), np.sin(a)) for a in (yaw, pitch, roll))
        forward = np.array([cy * cp, sy * cp, -sp])
        right = np.array([sy, -cy, 0.0])
        down = np.cross(forward, right)
        R = np.column_stack([cr * right + sr * down, cr * down - sr * right, forward])
        return Pose(R, np.array([x, y, z]), frame_id="map")


def walk(name: str, *, speed: float, turn_rate: float, height: float, fps: float, rounds: float) -> Trajectory:
    """The walk of a scene.

    Args:
        speed: m/s on straights. turn_rate: most rad/s in turns, where the walk slows down for it.
        height: of the camera, metres. fps: of the camera; twin rooms are walked in step with it.
        rounds: laps of ``room`` and ``corridor``.
    """
    legs = {"room": _room, "corridor": _corridor, "twin_rooms": _twin_rooms}[name](rounds)
    return _join([_timed(leg, speed, turn_rate, height, fps) for leg in legs])


def _room(rounds: float) -> list[np.ndarray]:
    width, depth, _ = ROOM
    angle = np.arange(0, 2 * np.pi * rounds, 0.01)
    return [_resample(np.column_stack([width / 2 + 2.5 * np.cos(angle), depth / 2 + 1.6 * np.sin(angle)]))]


def _corridor(rounds: float) -> list[np.ndarray]:
    (width, depth), w = CORRIDOR["outer"], CORRIDOR["width"] / 2
    corners = [(width - w, w), (width - w, depth - w), (w, depth - w), (w, w)]
    start = (width / 2, w)
    lap = _rounded([start, *corners, start], 0.8)
    laps = np.concatenate([lap] * int(np.ceil(rounds)))
    return [_resample(laps)[: int(rounds * _length(lap) / _STEP_M)]]


def _twin_rooms(rounds: float) -> list[np.ndarray]:
    (width, depth, _), pitch = TWIN["room"], TWIN["pitch"]
    middle, inside = width / 2, -0.8
    passage = -TWIN["vestibule"] - TWIN["passage"] / 2
    door, crossing = (middle, inside), (middle, 1.1)
    tour = [(3.9, 1.1), (3.9, depth - 1.1), (1.1, depth - 1.1), (1.1, 1.1)]
    visit = _resample(_rounded([door, crossing, *tour, crossing, door], 0.55))
    over = [door, (middle, passage), (middle + pitch, passage), (middle + pitch, inside)]
    return [visit, _resample(_rounded(over, 0.55)), visit + [pitch, 0]]


def _rounded(points, radius: float) -> np.ndarray:
    """The polyline with its corners replaced by arcs (tangent at ``radius`` from the corner of a right angle)."""
    points = np.asarray(points, float)
    path = [points[:1]]
    for before, corner, after in zip(points, points[1:], points[2:]):
        into, out = (v / np.linalg.norm(v) for v in (corner - before, after - corner))
        centre = corner + radius * (out - into)
        angle = np.linspace(0, np.pi / 2, 60)[:, None]
        path.append(centre + radius * (into * np.sin(angle) - out * np.cos(angle)))
    return np.concatenate([*path, points[-1:]])


def _length(path: np.ndarray) -> float:
    return float(np.linalg.norm(np.diff(path, axis=0), axis=1).sum())


def _resample(path: np.ndarray) -> np.ndarray:
    """The path (N, 2) at even steps."""
    steps = np.linalg.norm(np.diff(path, axis=0), axis=1)
    keep = np.concatenate([[True], steps > 1e-9])
    path, s = path[keep], np.concatenate([[0], np.cumsum(steps[steps > 1e-9])])
    at = np.linspace(0, s[-1], int(s[-1] / _STEP_M) + 1)
    return np.column_stack([np.interp(at, s, c) for c in path.T])


def _smooth(values: np.ndarray, length_m: float) -> np.ndarray:
    n = max(1, int(length_m / _STEP_M) // 2)
    kernel = np.hanning(2 * n + 3)[1:-1]
    return np.convolve(np.pad(values, n, mode="edge"), kernel / kernel.sum(), mode="valid")


def _timed(path: np.ndarray, speed: float, turn_rate: float, height: float, fps: float) -> Trajectory:
    """Give a path (N, 2) headings, sway and times; it lasts a whole number of frames.

    The sway is zero at both ends, so that legs join.
    """
    yaw = np.unwrap(np.arctan2(np.gradient(path[:, 1]), np.gradient(path[:, 0])))
    yaw = _smooth(yaw, 2 * _LOOK_AHEAD_M)
    curvature = np.abs(np.gradient(yaw)) / _STEP_M
    pace = _smooth(np.minimum(speed, turn_rate / np.maximum(curvature, 1e-9)), 2 * _LOOK_AHEAD_M)
    time = np.concatenate([[0], np.cumsum(_STEP_M / (0.5 * (pace[1:] + pace[:-1])))])
    duration = max(1, round(time[-1] * fps)) / fps
    time *= duration / time[-1]

    def sway(amplitude: float, period_s: float) -> np.ndarray:
        cycles = max(1, round(duration / period_s))
        return amplitude * np.sin(2 * np.pi * cycles * time / duration)

    side = sway(0.08, 7.3)
    x, y = path[:, 0] - side * np.sin(yaw), path[:, 1] + side * np.cos(yaw)
    state = [x, y, height + sway(0.03, 1.7), yaw + sway(0.04, 4.1), sway(0.03, 2.9), sway(0.02, 3.7)]
    return Trajectory(time, np.column_stack(state))


def _join(legs: list[Trajectory]) -> Trajectory:
    time, state, start = [], [], 0.0
    for leg in legs:
        turns = 0.0 if not state else 2 * np.pi * np.round((state[-1][-1, 3] - leg.state[0, 3]) / (2 * np.pi))
        time.append(leg.time + start)
        state.append(leg.state + [0, 0, 0, turns, 0, 0])
        start += leg.duration
    return Trajectory(np.concatenate(time), np.concatenate(state))
