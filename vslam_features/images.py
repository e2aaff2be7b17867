"""Image bytes to uint8 arrays: (H, W) grey or (H, W, 3) RGB, nothing else.

``decode`` reads the raw encodings of ``sensor_msgs/image_encodings.hpp`` that
say what brightness is (table ``ENCODINGS``, explained in ``docs/images.md``);
``decode_compressed`` and ``read_image`` read compressed ones. Lengths and
sizes are checked before anything is allocated, so a malformed message or file
is an :class:`~vslam_features.errors.ImageError`, never a crash.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import cv2
import numpy as np

from .errors import ImageError
from .image_headers import compressed_size

MAX_PIXELS = 100_000_000
"""Larger images are refused before they are decoded (decompression bombs, corrupted headers)."""


@dataclass(frozen=True)
class Encoding:
    """How a raw encoding lies in memory.

    Args:
        channels: samples a pixel in a row of the message.
        dtype: numpy type of a sample, without byte order.
        to_rgb: ``cv2.COLOR_*`` code, None where the samples are grey or RGB already.
        bayer: a colour mosaic. ``needs_max``: the encoding defines no brightness scale.
        rows: rows of the message for every 2 of the image (3 with a chroma plane below).
        multiple: width and height must be multiples of these.
    """

    channels: int
    dtype: str
    to_rgb: int | None = None
    bayer: bool = False
    needs_max: bool = False
    rows: int = 2
    multiple: tuple[int, int] = (1, 1)


# OpenCV names a mosaic after its second row and column, ROS after its first: rggb is BG.
_BAYER = {
    "rggb": cv2.COLOR_BayerBG2RGB,
    "bggr": cv2.COLOR_BayerRG2RGB,
    "gbrg": cv2.COLOR_BayerGR2RGB,
    "grbg": cv2.COLOR_BayerGB2RGB,
}
_UYVY = Encoding(2, "u1", cv2.COLOR_YUV2RGB_UYVY, multiple=(2, 1))
_YUYV = Encoding(2, "u1", cv2.COLOR_YUV2RGB_YUY2, multiple=(2, 1))

ENCODINGS: dict[str, Encoding] = {
    "mono8": Encoding(1, "u1"),
    "mono16": Encoding(1, "u2"),
    "rgb8": Encoding(3, "u1"),
    "bgr8": Encoding(3, "u1", cv2.COLOR_BGR2RGB),
    "rgba8": Encoding(4, "u1", cv2.COLOR_RGBA2RGB),
    "bgra8": Encoding(4, "u1", cv2.COLOR_BGRA2RGB),
    "rgb16": Encoding(3, "u2"),
    "bgr16": Encoding(3, "u2", cv2.COLOR_BGR2RGB),
    "rgba16": Encoding(4, "u2", cv2.COLOR_RGBA2RGB),
    "bgra16": Encoding(4, "u2", cv2.COLOR_BGRA2RGB),
    "8UC1": Encoding(1, "u1"),
    "8UC3": Encoding(3, "u1", cv2.COLOR_BGR2RGB),
    "8UC4": Encoding(4, "u1", cv2.COLOR_BGRA2RGB),
    "16UC1": Encoding(1, "u2", needs_max=True),
    "32FC1": Encoding(1, "f4", needs_max=True),
    **{f"bayer_{name}8": Encoding(1, "u1", code, bayer=True) for name, code in _BAYER.items()},
    **{f"bayer_{name}16": Encoding(1, "u2", code, bayer=True) for name, code in _BAYER.items()},
    "uyvy": _UYVY,
    "yuv422": _UYVY,
    "yuyv": _YUYV,
    "yuv422_yuy2": _YUYV,
    "nv12": Encoding(1, "u1", cv2.COLOR_YUV2RGB_NV12, rows=3, multiple=(2, 2)),
    "nv21": Encoding(1, "u1", cv2.COLOR_YUV2RGB_NV21, rows=3, multiple=(2, 2)),
}
"""Raw encodings that ``decode`` reads."""


def decode(
    data,
    width: int,
    height: int,
    encoding: str,
    step: int,
    is_bigendian: bool = False,
    *,
    max_value: float | None = None,
    fallback: Callable[..., np.ndarray] | None = None,
) -> np.ndarray:
    """The image of a ``sensor_msgs/Image``, given by its plain fields.

    Args:
        data: the bytes (anything with a contiguous buffer of bytes). The last
            row may come without its padding; what follows it is ignored.
        width, height: image size in pixels.
        encoding: a key of ``ENCODINGS``.
        step: bytes a row, padding included.
        is_bigendian: byte order of 16- and 32-bit samples.
        max_value: sample that becomes 255, for 16- and 32-bit encodings; larger
            ones saturate, negative ones and NaN become 0. None means 65535, and
            an error for ``16UC1`` and ``32FC1``, which are mostly depth.
        fallback: called as ``fallback(data, width, height, encoding, step,
            is_bigendian)`` for an encoding outside the table.
    Returns:
        uint8 (H, W) or (H, W, 3) RGB, C-contiguous. Of ``mono8``, ``8UC1`` and
        ``rgb8`` without padding it is a read-only view of ``data``.
    Raises:
        ImageError: the fields contradict each other or the encoding is unknown.
    """
    width, height, step = (_positive(*item) for item in (("width", width), ("height", height), ("step", step)))
    _check_size(width, height)
    spec = ENCODINGS.get(encoding)
    if spec is None:
        return _call_fallback(fallback, data, width, height, encoding, step, is_bigendian)
    if width % spec.multiple[0] or height % spec.multiple[1]:
        raise ImageError(f"image: {encoding} needs a size in multiples of {spec.multiple}, got {width}x{height}")
    item = np.dtype(spec.dtype).itemsize
    row, rows = width * spec.channels * item, height * spec.rows // 2
    data = _bytes(data)
    if step < row:
        raise ImageError(f"image: step {step} is too small, {width} pixels of {encoding} take {row} bytes")
    if len(data) < step * (rows - 1) + row:
        raise ImageError(
            f"image: data is too short, {width}x{height} {encoding} with step {step} takes {step * rows} bytes, "
            f"got {len(data)}"
        )
    shape, strides = (rows, width, spec.channels), (step, spec.channels * item, item)
    if spec.channels == 1:
        shape, strides = shape[:2], strides[:2]
    samples = np.ndarray(shape, (">" if is_bigendian else "<") + spec.dtype, buffer=data, strides=strides)
    image = np.ascontiguousarray(_to_8bit(samples, encoding, spec.needs_max, max_value))
    if spec.to_rgb is not None:
        image = _convert(image, spec)
    elif np.may_share_memory(image, data):
        image.flags.writeable = False  # a write would change the message for everybody else
    return image


def decode_compressed(data, format: str = "", *, max_value: float | None = None) -> np.ndarray:
    """The image of a JPEG or PNG stream, such as the data of a ``sensor_msgs/CompressedImage``.

    Grey stays grey, colour comes as RGB, alpha is dropped, an EXIF orientation
    is ignored (the calibration is of the sensor's rows and columns).

    Args:
        data: the bytes; PNM (P5, P6) and BMP are read too.
        format: the message's ``format``, e.g. ``bayer_rggb8; jpeg compressed``: a mosaic is
            interpolated, ``16UC1`` needs ``max_value``, ``compressedDepth`` is refused.
        max_value: as in ``decode``, for 16-bit samples.
    Raises:
        ImageError: not an image, truncated, over ``MAX_PIXELS`` or depth.
    """
    encoding = format.split(";")[0].strip()
    if "compressedDepth" in format:
        raise ImageError(f"image: format '{format}' is depth; subscribe to the compressed colour or infrared image")
    stream = _bytes(data).tobytes()
    width, height = compressed_size(stream)
    _check_size(width, height)
    flags = cv2.IMREAD_ANYCOLOR | cv2.IMREAD_ANYDEPTH | cv2.IMREAD_IGNORE_ORIENTATION
    try:
        image = cv2.imdecode(np.frombuffer(stream, np.uint8), flags)
    except cv2.error as error:
        raise ImageError(f"image: OpenCV cannot decode it: {error}") from None
    if image is None or image.shape[:2] != (height, width):
        raise ImageError(f"image: {len(stream)} bytes of a {width}x{height} image are corrupted, or not supported")
    spec = ENCODINGS.get(encoding, ENCODINGS["mono16"])
    image = _to_8bit(image, encoding, spec.needs_max, max_value)
    if image.ndim == 3:
        return cv2.cvtColor(image, cv2.COLOR_BGR2RGB)
    # image_transport compresses a mosaic as if it were grey
    return _convert(image, spec) if spec.bayer else image


def read_image(path: str | Path, *, max_value: float | None = None) -> np.ndarray:
    """The image of a JPEG, PNG, PNM or BMP file, by the rules of ``decode_compressed``.

    Raises:
        ImageError: naming the file.
    """
    try:
        return decode_compressed(Path(path).read_bytes(), max_value=max_value)
    except OSError as error:
        raise ImageError(f"{path}: cannot be read: {error.strerror or error}") from None
    except ImageError as error:
        raise ImageError(f"{path}: {error}") from None


def to_grey(image: np.ndarray) -> np.ndarray:
    """uint8 (H, W): luma of ITU-R BT.601 for RGB; a grey image is returned as it is."""
    _check_image(image)
    return image if image.ndim == 2 else cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)


def resize_long_side(image: np.ndarray, long_side: int) -> tuple[np.ndarray, float]:
    """Shrink an image, averaging areas, so that its longer side has ``long_side`` pixels; never enlarges.

    Returns:
        The image (the same object if it is small enough), stretched to whole
        pixels, and the nominal scale. Map points by the ratio of the sizes,
        x_small = (x + 0.5) W_small / W - 0.5 (as ``Camera.scaled_to`` does):
        rounding makes that of the shorter side differ a little from the scale.
    """
    _check_image(image)
    longest = max(image.shape[:2])
    if longest <= _positive("long_side", long_side):
        return image, 1.0
    scale = long_side / longest
    size = tuple(max(1, round(side * scale)) for side in image.shape[1::-1])
    return cv2.resize(image, size, interpolation=cv2.INTER_AREA), scale


def thumbnail(image: np.ndarray, long_side: int = 160) -> np.ndarray:
    """A small copy for people, at most ``long_side`` pixels; shares no memory with ``image``."""
    return resize_long_side(image, long_side)[0].copy()


def _to_8bit(samples: np.ndarray, encoding: str, needs_max: bool, max_value: float | None) -> np.ndarray:
    if samples.dtype == np.uint8:
        return samples
    if max_value is None and needs_max:
        raise ImageError(
            f"image: {encoding} has no brightness scale and is mostly depth; subscribe to a mono8 image, "
            "or set image_max_value (max_value here), the sample that is white"
        )
    top = 65535.0 if max_value is None else float(max_value)
    if not 0 < top < np.inf:
        raise ImageError(f"image: max_value must be positive, got {max_value}")
    return _table(top)[samples] if samples.dtype.kind == "u" else _scale(samples, top)


def _scale(samples: np.ndarray, top: float) -> np.ndarray:
    samples = np.where(samples > 0, samples, 0)  # also for NaN
    return np.rint(np.minimum(samples, top) * (255 / top)).astype(np.uint8)


@lru_cache(maxsize=8)
def _table(top: float) -> np.ndarray:
    """8-bit values of all 16-bit samples; a look-up is several times faster than the arithmetic."""
    return _scale(np.arange(65536, dtype=np.float64), top)


def _convert(image: np.ndarray, spec: Encoding) -> np.ndarray:
    height, width = image.shape[:2]
    if not spec.bayer or min(height, width) > 2:
        return cv2.cvtColor(image, spec.to_rgb)
    if min(height, width) < 2:
        raise ImageError(f"image: a Bayer mosaic has at least 2x2 pixels, got {width}x{height}")
    # OpenCV returns black below 3x3; a reflection by 2 keeps the mosaic's phase
    return cv2.cvtColor(np.pad(image, 2, "reflect"), spec.to_rgb)[2:-2, 2:-2].copy()


def _call_fallback(fallback, data, width, height, encoding, step, is_bigendian) -> np.ndarray:
    if fallback is None:
        raise ImageError(f"image: unknown encoding '{encoding}'; known: {', '.join(ENCODINGS)}")
    try:
        image = np.ascontiguousarray(fallback(data, width, height, encoding, step, is_bigendian))
        _check_image(image)
    except Exception as error:  # whatever a foreign decoder raises is a bad image here
        raise ImageError(f"image: the fallback decoder failed for encoding '{encoding}': {error}") from error
    if image.shape[:2] != (height, width):
        raise ImageError(f"image: the fallback decoder returned {image.shape} for {width}x{height} '{encoding}'")
    return image


def _bytes(data) -> np.ndarray:
    try:
        view = memoryview(data)
        if view.itemsize != 1 or not view.c_contiguous:
            raise TypeError(f"items of {view.itemsize} bytes, or not contiguous")
        return np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8)
    except (TypeError, ValueError, BufferError) as error:
        raise ImageError(f"image: data must be contiguous bytes, got {type(data).__name__}: {error}") from None


def _positive(name: str, value) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise ImageError(f"image: {name} must be an integer, got {value!r}") from None
    if number <= 0:
        raise ImageError(f"image: {name} must be positive, got {number}")
    return number


def _check_size(width: int, height: int) -> None:
    if width <= 0 or height <= 0 or width * height > MAX_PIXELS:
        raise ImageError(f"image: size {width}x{height} is outside 1 to {MAX_PIXELS} pixels")


def _check_image(image: np.ndarray) -> None:
    if image.dtype != np.uint8 or image.size == 0 or image.ndim not in (2, 3) or image.shape[2:] not in ((), (3,)):
        raise ImageError(f"image: expected uint8 (H, W) or (H, W, 3), got {image.dtype} {image.shape}")
