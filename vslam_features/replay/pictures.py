"""Pictures of matches for people: two images side by side, inliers green, outliers faint red."""

from __future__ import annotations

import cv2
import numpy as np

_INLIER, _OUTLIER = (0, 200, 120), (255, 70, 70)
_BAR, _TEXT = (24, 26, 30), (240, 240, 240)
_GAP = 6
_MAX_LINES = 120  # more hide the images; points are drawn for all


def side_by_side(
    image0: np.ndarray,
    image1: np.ndarray,
    points0: np.ndarray,
    points1: np.ndarray,
    inliers: np.ndarray,
    height: int = 0,
) -> np.ndarray:
    """Current image (left) and reference with lines between matched points.

    Args:
        image0, image1: uint8 grey or RGB.
        points0, points1: (M, 2) pixels of these images. inliers: (M,) bool.
        height: both are scaled to it; 0: the larger of the two.
    Returns:
        uint8 (height, W, 3) RGB.
    """
    height = height or max(image0.shape[0], image1.shape[0])
    left, right = _scaled(image0, height), _scaled(image1, height)
    gap = np.full((height, _GAP, 3), 255, np.uint8)
    canvas = np.ascontiguousarray(np.hstack([left, gap, right]))
    p0 = _to_canvas(points0, height / image0.shape[0], 0)
    p1 = _to_canvas(points1, height / image1.shape[0], left.shape[1] + _GAP)
    for keep, colour, alpha in ((~inliers, _OUTLIER, 0.35), (inliers, _INLIER, 0.75)):
        if not keep.any():
            continue
        layer, step = canvas.copy(), -(-int(keep.sum()) // _MAX_LINES)
        for a, b in zip(p0[keep][::step], p1[keep][::step]):
            cv2.line(layer, a, b, colour, 1, cv2.LINE_AA, shift=4)
        cv2.addWeighted(layer, alpha, canvas, 1 - alpha, 0, dst=canvas)
        for point in np.vstack([p0[keep], p1[keep]]):
            cv2.circle(canvas, point, 2 << 4, colour, 1, cv2.LINE_AA, shift=4)
    return canvas


def with_header(image: np.ndarray, lines: list[str]) -> np.ndarray:
    """The RGB image below a dark bar with lines of text, in a size that fits its width."""
    scale = min(1.0, max(0.35, image.shape[1] / 1400))
    longest = max(cv2.getTextSize(line, cv2.FONT_HERSHEY_SIMPLEX, scale, 1)[0][0] for line in lines)
    scale *= min(1.0, (image.shape[1] - 16) / max(longest, 1))
    step = max(12, round(40 * scale))
    bar = np.full((step * len(lines) + step // 2, image.shape[1], 3), _BAR, np.uint8)
    for i, line in enumerate(lines):
        place = (8, step * (i + 1) - step // 8)
        cv2.putText(bar, line, place, cv2.FONT_HERSHEY_SIMPLEX, scale, _TEXT, 1, cv2.LINE_AA)
    return np.vstack([bar, image])


def decode_jpeg(data: bytes | None, size: tuple[int, int]) -> np.ndarray:
    """RGB image of JPEG bytes; where there are none a grey one of ``size`` (width, height)."""
    if data is None:
        return np.full((size[1], size[0], 3), 128, np.uint8)
    return cv2.cvtColor(cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR), cv2.COLOR_BGR2RGB)


def _scaled(image: np.ndarray, height: int) -> np.ndarray:
    if image.ndim == 2:
        image = cv2.cvtColor(image, cv2.COLOR_GRAY2RGB)
    width = max(1, round(image.shape[1] * height / image.shape[0]))
    shrink = cv2.INTER_AREA if height < image.shape[0] else cv2.INTER_LINEAR
    return image if image.shape[0] == height else cv2.resize(image, (width, height), interpolation=shrink)


def _to_canvas(points: np.ndarray, scale: float, offset: int) -> np.ndarray:
    """Pixels to canvas coordinates with four fractional bits, as OpenCV's drawing takes them."""
    moved = (np.asarray(points, np.float64).reshape(-1, 2) + 0.5) * scale - 0.5 + [offset, 0]
    return np.round(moved * 16).astype(int)
