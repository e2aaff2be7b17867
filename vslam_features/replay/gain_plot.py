"""One picture of what stopping early gains and loses: time and losses over the decay, scores over the layers."""

from __future__ import annotations

from collections.abc import Sequence

import cv2
import numpy as np

from ..artifacts.stop_rule import stop_limits
from .gain import Overlap, PairScores, Row
from .plots import ticks

_PAPER, _INK, _SOFT, _GRID = (255, 255, 255), (27, 31, 36), (91, 100, 112), (222, 226, 231)
_LINES = ((31, 95, 168), (217, 142, 0), (176, 58, 46), (106, 61, 154), (0, 121, 90), (90, 90, 90))
_GROUPS = {
    "verified, or marked as overlapping": (0, 168, 120),
    "not verified": (143, 184, 224),
    "of different scenes": (232, 116, 59),
}
_FONT, _SHIFT = cv2.FONT_HERSHEY_SIMPLEX, 4
_MOST_DOTS = 200


def gain_plot(
    rows: Sequence[Row], pairs: Sequence[PairScores], checked: Sequence[int], layers: int, decay: float, title: str
) -> np.ndarray:
    """uint8 (H, W, 3) RGB.

    Args:
        rows: of all settings. pairs: those that did not run are not drawn.
        checked, layers: of the rule. decay: whose limits are drawn.
    """
    canvas = np.full((1240, 1600, 3), _PAPER, np.uint8)
    _text(canvas, (40, 42), title, 0.75, _INK)
    decays = sorted({row.setting.decay for row in rows})
    thresholds = sorted({row.setting.min_covisibility for row in rows})
    colours = {t: _LINES[i % len(_LINES)] for i, t in enumerate(thresholds)}
    span = (decays[0], decays[-1]) if len(decays) > 1 else (decays[0] - 0.1, decays[0] + 0.1)
    known = [row.time for row in rows if row.time is not None]
    time = _Axes(canvas, (110, 120, 640, 360), span, (0, max([1.1, *known]) * 1.02))
    time.frame("matcher time, share of the plain model" if known else "matcher time (not measured)", "decay")
    time.line([(span[0], 1), (span[1], 1)], _SOFT, width=1)
    lost = [len(row.lost) / row.verified if row.verified else 0 for row in rows]
    loss = _Axes(canvas, (920, 120, 640, 360), span, (0, max(0.01, *lost) * 100 * 1.08))
    loss.frame("verified pairs that are lost, %", "decay")
    for threshold, colour in colours.items():
        chosen = [row for row in rows if row.setting.min_covisibility == threshold]
        if known:
            time.line([(row.setting.decay, row.time) for row in chosen], colour, dots=True)
        loss.line([(r.setting.decay, 100 * len(r.lost) / max(r.verified, 1)) for r in chosen], colour, dots=True)
    _key(canvas, (110, 572), {f"min_covisibility {t:g}": c for t, c in colours.items()})
    _scores(canvas, pairs, checked, layers, decay, colours)
    return canvas


def _scores(canvas, pairs, checked, layers, decay, colours) -> None:
    """Distribution of the scores after each checked layer and at the end, and the limits of a decay."""
    columns = len(checked) + 1
    groups = {name: np.empty((0, columns)) for name in _GROUPS}
    for name in groups:
        table = [(*p.layer_scores, p.covisibility) for p in pairs if p.ran and _group(p) == name]
        groups[name] = np.array(table, np.float64).reshape(len(table), columns)
    high = max([*colours, *(table.max() for table in groups.values() if len(table))])
    axes = _Axes(canvas, (110, 660, 1450, 460), (-0.5, columns - 0.5), (0, min(1, 1.05 * high) or 1))
    names = [f"after layer {layer}" for layer in checked] + ["final"]
    axes.frame(f"covisibility score; lines: limits at decay {decay:g}, below which a pair is rejected", "", names)
    shown = {name: table for name, table in groups.items() if len(table)}
    for i, (name, table) in enumerate(shown.items()):
        for column in range(columns):
            axes.spread(column + 0.26 * (i - (len(shown) - 1) / 2), 0.09, table[:, column], _GROUPS[name])
    for threshold, colour in colours.items():
        limits = [*stop_limits(checked, layers, threshold, decay), threshold]
        for column, limit in enumerate(limits):
            axes.line([(column - 0.45, limit), (column + 0.45, limit)], colour)
    _key(canvas, (110, 1195), {f"{name}: {len(table)} pairs": _GROUPS[name] for name, table in shown.items()})
    _text(canvas, (1010, 1200), "box: middle half; line: 1 to 99 %; dots: the rest", 0.5, _SOFT)


def _group(pair: PairScores) -> str:
    together, alone, apart = _GROUPS
    if pair.overlap is Overlap.APART:
        return apart
    return together if pair.verified or pair.overlap is Overlap.MARKED else alone


class _Axes:
    """A part of the canvas with a scale in x and y. ``box``: left, top, width, height in pixels."""

    def __init__(self, canvas: np.ndarray, box: tuple[int, int, int, int], x: tuple, y: tuple):
        self.canvas, self.box, self.x, self.y = canvas, box, x, y

    def at(self, x: float, y: float) -> tuple[int, int]:
        """Pixel with four fractional bits, as OpenCV's drawing takes it."""
        left, top, width, height = self.box
        place = (
            left + width * (x - self.x[0]) / (self.x[1] - self.x[0]),
            top + height * (1 - (y - self.y[0]) / (self.y[1] - self.y[0])),
        )
        return tuple(round(float(v) * (1 << _SHIFT)) for v in place)

    def frame(self, title: str, below: str, columns: Sequence[str] = ()) -> None:
        left, top, width, height = self.box
        _text(self.canvas, (left - 70, top - 18), title, 0.58, _INK)
        _text(self.canvas, (left + width // 2, top + height + 54), below, 0.55, _SOFT, anchor=0.5)
        for y in ticks(*self.y, 5):
            self.line([(self.x[0], y), (self.x[1], y)], _GRID, width=1)
            _text(self.canvas, (left - 10, self.at(0, y)[1] / 16 + 6), f"{y:g}", 0.5, _SOFT, anchor=1)
        named = enumerate(columns) if columns else ((x, f"{x:g}") for x in ticks(*self.x, 6))
        for x, name in named:
            _text(self.canvas, (self.at(x, 0)[0] / 16, top + height + 26), name, 0.5, _SOFT, anchor=0.5)
        cv2.rectangle(self.canvas, (left, top), (left + width, top + height), _GRID, 1)

    def line(self, points: Sequence[tuple[float, float]], colour: tuple, dots: bool = False, width: int = 2) -> None:
        places = [self.at(*point) for point in points]
        cv2.polylines(self.canvas, [np.array(places, np.int32)], False, colour, width, cv2.LINE_AA, _SHIFT)
        for place in places if dots else ():
            cv2.circle(self.canvas, place, 5 << _SHIFT, colour, -1, cv2.LINE_AA, _SHIFT)

    def spread(self, x: float, half: float, values: np.ndarray, colour: tuple) -> None:
        low, first, middle, third, high = np.percentile(values, (1, 25, 50, 75, 99))
        self.line([(x, low), (x, high)], colour)
        corners = [self.at(x + side * half, y) for side, y in ((-1, first), (1, first), (1, third), (-1, third))]
        cv2.fillPoly(self.canvas, [np.array(corners, np.int32)], colour, cv2.LINE_AA, _SHIFT)
        self.line([(x - half, middle), (x + half, middle)], _INK)
        outside = np.sort(values[(values < low) | (values > high)])
        for y in outside[:: len(outside) // _MOST_DOTS + 1]:
            cv2.circle(self.canvas, self.at(x, y), 3 << _SHIFT, colour, -1, cv2.LINE_AA, _SHIFT)


def _key(canvas: np.ndarray, place: tuple[int, int], entries: dict[str, tuple]) -> None:
    x, y = place
    for name, colour in entries.items():
        cv2.rectangle(canvas, (x, y - 9), (x + 16, y + 7), colour, -1)
        x += 26 + _text(canvas, (x + 24, y + 5), name, 0.5, _SOFT) + 24


def _text(canvas: np.ndarray, place: tuple[float, float], text: str, size: float, colour: tuple, anchor=0.0) -> int:
    """Its width in pixels. ``anchor``: share of it that lies to the left of the place."""
    width = cv2.getTextSize(text, _FONT, size, 1)[0][0]
    where = round(place[0] - anchor * width), round(place[1])
    cv2.putText(canvas, text, where, _FONT, size, colour, 1, cv2.LINE_AA)
    return width
