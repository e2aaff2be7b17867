"""Pictures of matches for people: two images side by side, inliers green, outliers faint red."""

from __future__ import annotations

from collections.abc import Sequence

import cv2
import numpy as np

from ..errors import ImageError

_INLIER, _OUTLIER = (0, 200, 120), (255, 70, 70)
_BAR, _TEXT = (24, 26, 30), (240, 240, 240)
_TRACK, _FAINT = (60, 64, 72), (150, 154, 162)
_GAP = 6
_MAX_LINES = 120  # more hide the images; points are drawn for all
_MAX_HEIGHT = 2160  # larger pictures show people nothing more
_MAX_ASPECT, _LEAST_WIDTH = 4, 1280  # an image of 8000 x 1 pixels, brought to a height, would fill the memory
_HEADER_WIDTH = 320
_FONT = cv2.FONT_HERSHEY_SIMPLEX

Pairs = Sequence[tuple[int, float]]


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
        height: both are scaled to it, elongated ones less; 0: the larger of the two, at most 2160.
    Returns:
        uint8 (height, W, 3) RGB.
    """
    height = height or min(max(image0.shape[0], image1.shape[0]), _MAX_HEIGHT)
    (left, scale0), (right, scale1) = _scaled(image0, height), _scaled(image1, height)
    gap = np.full((height, _GAP, 3), 255, np.uint8)
    canvas = np.ascontiguousarray(np.hstack([left, gap, right]))
    p0 = _to_canvas(points0, scale0, 0)
    p1 = _to_canvas(points1, scale1, left.shape[1] + _GAP)
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
    image, scale = _wide(image)
    scale *= min(1.0, (image.shape[1] - 16) / max(max(_length(line, scale) for line in lines), 1))
    step = max(12, round(40 * scale))
    bar = np.full((step * len(lines) + step // 2, image.shape[1], 3), _BAR, np.uint8)
    for i, line in enumerate(lines):
        place = (8, step * (i + 1) - step // 8)
        cv2.putText(bar, line, place, _FONT, scale, _TEXT, 1, cv2.LINE_AA)
    return np.vstack([bar, image])


def with_layer_scores(image: np.ndarray, limits: Pairs, scores: Pairs) -> np.ndarray:
    """The RGB image below a bar for each checked layer of a matcher that stops early.

    A bar reaches as far as the layer's covisibility score, 0 to 1 from left to right; a white line is its limit. It is
    red where the score is below that, so that the matcher stopped; what did not run has none.

    Args:
        limits: layer and limit of all checked layers. scores: layer and score of those that ran.
    """
    image, scale = _wide(image)
    ran = dict(scores)
    step = max(14, round(34 * scale))
    texts = [
        (f"layer {k}", f"{ran[k]:.3f}  limit {limit:.3f}" if k in ran else f"not run  limit {limit:.3f}")
        for k, limit in limits
    ]
    left, right = (16 + max(_length(row[i], scale * 0.8) for row in texts) for i in (0, 1))
    length = image.shape[1] - left - right
    rows = np.full((step * len(texts) + step // 2, image.shape[1], 3), _BAR, np.uint8)
    for i, ((layer, limit), (name, text)) in enumerate(zip(limits, texts)):
        top, bottom = step * i + step // 4, step * (i + 1) - step // 8
        colour = _TEXT if layer in ran else _FAINT
        for words, x in ((name, 8), (text, left + length + 8)):
            cv2.putText(rows, words, (x, bottom - step // 8), _FONT, scale * 0.8, colour, 1, cv2.LINE_AA)
        cv2.rectangle(rows, (left, top), (left + length, bottom), _TRACK, cv2.FILLED)
        if layer in ran:
            end = left + round(length * min(max(ran[layer], 0.0), 1.0))
            cv2.rectangle(rows, (left, top), (end, bottom), _INLIER if ran[layer] >= limit else _OUTLIER, cv2.FILLED)
        at = left + round(length * limit)
        cv2.line(rows, (at, top - step // 8), (at, bottom + step // 8), (255, 255, 255), max(1, round(2 * scale)))
    return np.vstack([rows, image])


def decode_jpeg(data: bytes | None, size: tuple[int, int]) -> np.ndarray:
    """RGB image of JPEG bytes; where there are none a grey one of ``size`` (width, height)."""
    if data is None:
        return np.full((size[1], size[0], 3), 128, np.uint8)
    return cv2.cvtColor(cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR), cv2.COLOR_BGR2RGB)


def encode(image: np.ndarray, suffix: str, parameters: tuple[int, ...] = ()) -> bytes:
    """The bytes of a file ``suffix`` (such as ``.png``) of a grey or RGB uint8 image. Raises ImageError."""
    bgr = image if image.ndim == 2 else cv2.cvtColor(image, cv2.COLOR_RGB2BGR)
    try:
        done, data = cv2.imencode(suffix, bgr, parameters)
    except cv2.error as error:
        raise ImageError(f"picture: {_size(image)} cannot be written as {suffix}: {error.err}") from error
    if not done:
        raise ImageError(f"picture: {_size(image)} cannot be written as {suffix}; try another format")
    return data.tobytes()


def _size(image: np.ndarray) -> str:
    return f"{image.shape[1]}x{image.shape[0]} pixels"


def _scaled(image: np.ndarray, height: int) -> tuple[np.ndarray, np.ndarray]:
    """RGB image of ``height``, padded below where its width sets the scale; and the scale of x and y."""
    if image.ndim == 2:
        image = cv2.cvtColor(image, cv2.COLOR_GRAY2RGB)
    old = np.array(image.shape[1::-1])
    scale = min(height / old[1], max(_MAX_ASPECT * height, _LEAST_WIDTH) / old[0])
    new = np.maximum(np.round(old * scale), 1).astype(int)
    if (new != old).any():
        image = cv2.resize(image, new.tolist(), interpolation=cv2.INTER_AREA if scale < 1 else cv2.INTER_LINEAR)
    below = height - int(new[1])
    return cv2.copyMakeBorder(image, 0, below, 0, 0, cv2.BORDER_CONSTANT, value=_BAR), new / old


def _wide(image: np.ndarray) -> tuple[np.ndarray, float]:
    """The image, wide enough for text, and the scale of a font that suits it."""
    missing = max(_HEADER_WIDTH - image.shape[1], 0)
    image = cv2.copyMakeBorder(image, 0, 0, 0, missing, cv2.BORDER_CONSTANT, value=_BAR)
    return image, min(1.0, max(0.35, image.shape[1] / 1400))


def _length(text: str, scale: float) -> int:
    return cv2.getTextSize(text, _FONT, scale, 1)[0][0]


def _to_canvas(points: np.ndarray, scale: np.ndarray, offset: int) -> np.ndarray:
    """Pixels to canvas coordinates with four fractional bits, as OpenCV's drawing takes them."""
    moved = (np.asarray(points, np.float64).reshape(-1, 2) + 0.5) * scale - 0.5 + [offset, 0]
    return np.round(moved * 16).astype(int)
