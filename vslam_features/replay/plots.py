"""Charts of a run as inline SVG: crisp, small, and coloured by the page's style (so they follow light and dark)."""

from __future__ import annotations

import base64
from html import escape

import numpy as np

from ..types import Status
from .pictures import encode
from .run_log import PLACES, PairRecord, RunLog

_WIDTH = 1000
_MAX_BARS = 1000
_MAX_ROWS = 800


def timeline(pairs: list[PairRecord]) -> str:
    """Matches and inliers of each pair with the keyframe before, and a strip of their statuses.

    Long runs are cut into bins that show their worst pair.
    """
    if not pairs:
        return ""
    size = -(-len(pairs) // _MAX_BARS)
    bins = [min(pairs[i : i + size], key=lambda p: (p.verified, p.num_inliers)) for i in range(0, len(pairs), size)]
    left, top, width, height, strip = 48, 10, _WIDTH - 58, 200, 14
    # One lucky pair (a standing robot) must not flatten all others.
    values = np.array([p.num_matches for p in bins])
    high = max(10, float(values.max()) if values.max() < 3 * np.percentile(values, 95) else np.percentile(values, 95))
    step = width / len(bins)
    parts = [_grid(left, top, width, height, high)]
    for name in ("num_matches", "num_inliers"):
        points = [f"M{left},{top + height}"]
        for i, pair in enumerate(bins):
            y = top + height * (1 - min(getattr(pair, name) / high, 1))
            points.append(f"V{y:.1f}H{left + (i + 1) * step:.1f}")
        parts.append(f'<path class="{name}" d="{"".join(points)}V{top + height}Z"/>')
    y = top + height + 6
    for i, p in enumerate(bins):
        text = f"keyframe {p.kf_id} with {p.ref_kf_id}: {p.status.label}, {p.num_inliers} of {p.num_matches} matches"
        x = left + i * step
        parts.append(
            f'<rect class="s-{p.status.label}" x="{x:.1f}" y="{y}" width="{step + 0.3:.1f}" height="{strip}"/>'
        )
        parts.append(
            f'<rect class="hover" x="{x:.1f}" y="{top}" width="{step:.1f}" height="{height + 6 + strip}">'
            f"<title>{escape(text)}</title></rect>"
        )
    for k in ticks(0, len(bins) - 1, 10, whole=True):
        i = int(k)
        parts.append(_text(left + (i + 0.5) * step, y + strip + 16, bins[i].kf_id, "middle"))
    parts.append(_text(left + width / 2, y + strip + 34, "keyframe", "middle"))
    return _svg(_WIDTH, y + strip + 40, parts, "Matches and inliers of consecutive keyframes")


def loop_matrix(log: RunLog) -> str:
    """Similarity of the keyframes with older ones (darker is more alike), candidates, verified and ambiguous loops.

    Down are the keyframes of this run, across those and the ones of the map before it; of a localisation, whose
    keyframes join no map, the map's only.
    """
    if len(log.keyframes) < 2:
        return ""
    first, end = log.first_id, max(k.id for k in log.keyframes) + 1  # more than there are where a recorder joined late
    rows, columns = range(first, end), range(first if log.localises and first else end)
    left, top, side = 44, 8, 480
    scale_x, scale_y = side / len(columns), side / len(rows)
    parts = []
    image = _similarity(log, rows, columns)
    if image is not None:
        png = base64.b64encode(encode(image, ".png")).decode()
        parts.append(
            f'<image x="{left}" y="{top}" width="{side}" height="{side}" style="image-rendering:pixelated" '
            f'preserveAspectRatio="none" href="data:image/png;base64,{png}"/>'
        )
    parts.append(f'<rect class="frame" x="{left}" y="{top}" width="{side}" height="{side}"/>')
    radius = float(np.clip(min(scale_x, scale_y) * 0.8, 2.0, 4.5))

    def place(kf_id: int, ref: int) -> tuple[float, float]:
        return left + (ref + 0.5) * scale_x, top + (kf_id - first + 0.5) * scale_y

    best = [c for c in log.candidates if c.rank == 0]
    for c in best[:: len(best) // 3000 + 1]:
        x, y = place(c.kf_id, c.ref_kf_id)
        parts.append(f'<circle class="candidate" cx="{x:.1f}" cy="{y:.1f}" r="{radius * 0.6:.1f}"/>')
    for pair in log.pairs:
        if pair.kind not in PLACES or not (pair.verified or pair.status == Status.AMBIGUOUS):
            continue
        x, y = place(pair.kf_id, pair.ref_kf_id)
        text = f"keyframe {pair.kf_id} with {pair.ref_kf_id}: {pair.status.label}, {pair.num_inliers} inliers"
        if pair.verified:
            shape = f'<circle class="loop" cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}">'
            parts.append(f"{shape}<title>{text}</title></circle>")
        else:
            r = radius * 1.2
            d = f"M{x - r:.1f},{y:.1f}l{r:.1f},{-r:.1f} {r:.1f},{r:.1f} {-r:.1f},{r:.1f}z"
            parts.append(f'<path class="doubt" d="{d}"><title>{text}</title></path>')
    for tick in ticks(0, len(columns) - 1, 6, whole=True):
        parts.append(_text(left + (tick + 0.5) * scale_x, top + side + 16, int(tick), "middle"))
    for tick in ticks(first, end - 1, 6, whole=True):
        parts.append(_text(left - 6, top + (tick - first + 0.5) * scale_y + 4, int(tick), "end"))
    if 0 < first < len(columns):
        x = left + first * scale_x
        parts.append(f'<line class="border" x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{top + side}"/>')
    across = "keyframe of the map" if len(columns) == first else "older keyframe"
    parts.append(_text(left + side / 2, top + side + 34, across, "middle"))
    return _svg(left + side + 10, top + side + 40, parts, "Similarity of keyframes and loops")


def trajectory(log: RunLog) -> str:
    """Keyframe positions seen along the axis of least extent, loops as lines; empty without poses.

    Keyframes of a map are left out: poses of different sessions have nothing to do with one another.
    """
    posed = [k for k in log.keyframes if k.pose is not None]
    if len(posed) < 2:
        return ""
    xyz = np.array([k.pose.t for k in posed])
    axes = sorted(np.argsort(-np.ptp(xyz, axis=0), kind="stable")[:2])
    xy = xyz[:, axes]
    low, extent = xy.min(axis=0), float(max(np.ptp(xy, axis=0).max(), 1e-6))
    left, top, side = 44, 8, 480
    centre = (low + xy.max(axis=0)) / 2
    start = centre - extent / 2 * 1.08
    scale = side / (extent * 1.08)
    points = np.column_stack([left + (xy[:, 0] - start[0]) * scale, top + side - (xy[:, 1] - start[1]) * scale])
    where = {k.id: p for k, p in zip(posed, points)}
    parts = [f'<rect class="frame" x="{left}" y="{top}" width="{side}" height="{side}"/>']
    for pair in log.pairs:
        shown = pair.verified or pair.status == Status.AMBIGUOUS
        if pair.kind in PLACES and shown and pair.kf_id in where and pair.ref_kf_id in where:
            (x0, y0), (x1, y1) = where[pair.kf_id], where[pair.ref_kf_id]
            css = "loop-line" if pair.verified else "doubt-line"
            parts.append(f'<line class="{css}" x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}"/>')
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    parts.append(f'<polyline class="track" points="{path}"/>')
    closing = {p.kf_id for p in log.pairs if p.kind in PLACES and p.verified}
    for k, (x, y) in zip(posed, points):
        css, r = ("loop", 4) if k.id in closing else ("kf", 2)
        parts.append(f'<circle class="{css}" cx="{x:.1f}" cy="{y:.1f}" r="{r}"><title>keyframe {k.id}</title></circle>')
    parts.append(f'<circle class="start" cx="{points[0, 0]:.1f}" cy="{points[0, 1]:.1f}" r="6"/>')
    parts.append(_text(points[0, 0] + 10, points[0, 1] - 8, "start", "start"))
    for tick in ticks(start[0], start[0] + extent * 1.08, 5):
        parts.append(_text(left + (tick - start[0]) * scale, top + side + 16, f"{tick:g}", "middle"))
    for tick in ticks(start[1], start[1] + extent * 1.08, 5):
        parts.append(_text(left - 6, top + side - (tick - start[1]) * scale + 4, f"{tick:g}", "end"))
    across, up = ("xyz"[a] for a in axes)
    parts.append(_text(left + side / 2, top + side + 34, f"{across} across, {up} up, metres", "middle"))
    return _svg(left + side + 10, top + side + 40, parts, "Trajectory and loops")


def sparkline(values, frames, last_frame: int) -> str:
    """Latency of a stage over the run (largest of each bin), its height scaled to the 99th percentile."""
    values, frames = np.asarray(values, np.float64), np.asarray(frames, np.int64)
    width, height, bins = 420, 34, min(max(last_frame, 1), 210)
    slot = np.minimum(frames * bins // max(last_frame, 1), bins - 1)
    high = float(np.percentile(values, 99)) or 1.0
    peaks, step = np.full(bins, np.nan), width / bins
    np.fmax.at(peaks, slot, values)
    parts = []
    for i in np.flatnonzero(np.isfinite(peaks)):
        h = max(1.0, min(peaks[i] / high, 1) * (height - 2))
        box = f'x="{i * step:.1f}" y="{height - h:.1f}" width="{max(step - 0.5, 1):.1f}" height="{h:.1f}"'
        parts.append(f'<rect class="spark" {box}/>')
    return _svg(width, height, parts, "latency over the run")


def _similarity(log: RunLog, rows: range, columns: range) -> np.ndarray | None:
    """uint8, dark where alike, at most 800 px a side; ``rows``, ``columns``: ids. None without descriptors."""
    if not log.descriptors:
        return None
    (down, left), (across, right) = (_described(log, ids) for ids in (rows, columns))
    similarity = left @ right.T
    others = similarity[down[:, None] != across]
    low, high = np.percentile(others, [2, 99.7]) if len(others) else (0.0, 1.0)
    image = 255 - np.clip((similarity - low) / max(high - low, 1e-6) * 225, 0, 225)
    return image.astype(np.uint8)


def _described(log: RunLog, ids: range) -> tuple[np.ndarray, np.ndarray]:
    """Some of the ids, and the (n, D) f32 descriptors of those; zeros where one has none.

    Some before the product, which is quadratic in them: no more of it can be seen.
    """
    shown = np.linspace(ids.start, ids.stop - 1, min(len(ids), _MAX_ROWS)).round().astype(int)
    table = np.zeros((len(shown), len(next(iter(log.descriptors.values())))), np.float32)
    for row, kf_id in zip(table, shown):
        descriptor = log.descriptor(int(kf_id))
        if descriptor is not None:
            row[:] = descriptor
    return shown, table


def _grid(left, top, width, height, high) -> str:
    parts = []
    for tick in ticks(0, high, 5, whole=True):
        y = top + height * (1 - tick / high)
        parts.append(f'<line class="grid" x1="{left}" y1="{y:.1f}" x2="{left + width}" y2="{y:.1f}"/>')
        parts.append(_text(left - 6, y + 4, f"{tick:g}", "end"))
    return "".join(parts)


def ticks(low: float, high: float, count: int, whole: bool = False) -> list[float]:
    """Round numbers from ``low`` to ``high``, about ``count`` of them; ``whole``: integers only."""
    if high <= low:
        return [low]
    raw = (high - low) / count
    magnitude = 10 ** np.floor(np.log10(raw))
    step = next(m * magnitude for m in (1, 2, 5, 10) if m * magnitude >= raw * 0.999)
    step = max(step, 1.0) if whole else step
    first, last = np.ceil(low / step - 1e-6), np.floor(high / step + 1e-6)
    return [round(float(k * step), 9) + 0.0 for k in np.arange(first, last + 1)]


def _text(x: float, y: float, text, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(str(text))}</text>'


def _svg(width: float, height: float, parts: list[str], label: str) -> str:
    return f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'
