"""Resize kernels by name: a uint8 image becomes planes of another size.

``antialias`` computes what ``Resize`` of torchvision does with float images
(bilinear, antialias), ``pillow`` what it does with Pillow images: the same
filter, but rounded to whole grey levels after each of the two passes. ``area``
and ``linear`` are OpenCV's. ``benchmarks/preprocessing.py`` times all four.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import cv2
import numpy as np

from ..errors import PluginError

# Rows and columns that one matrix product makes. Weights are banded: larger blocks multiply more zeros, smaller ones
# make more calls. Of 4 to 64 these took the least time for 640x480 to 322x322.
_ROWS, _COLUMNS = 12, 16
# Multiplications of one product. OpenBLAS wakes its other threads above this, and where those find all cores busy, as
# beside other work they do, an image was seen to take 150 ms instead of 2.
_PRODUCT = 1 << 18


def area(image: np.ndarray, width: int, height: int) -> Sequence[np.ndarray]:
    """OpenCV's INTER_AREA: mean of the pixels covered."""
    return cv2.split(cv2.resize(image, (width, height), interpolation=cv2.INTER_AREA))


def linear(image: np.ndarray, width: int, height: int) -> Sequence[np.ndarray]:
    """OpenCV's INTER_LINEAR: of the two nearest pixels on each axis, also where the image shrinks."""
    return cv2.split(cv2.resize(image, (width, height), interpolation=cv2.INTER_LINEAR))


def pillow(image: np.ndarray, width: int, height: int) -> Sequence[np.ndarray]:
    """Pillow's BILINEAR. Raises PluginError where Pillow is not installed."""
    try:
        from PIL import Image
    except ImportError as error:
        raise PluginError(
            "resize kernel 'pillow' needs Pillow, which is not installed: pip install pillow (apt: python3-pil)"
        ) from error
    return cv2.split(np.asarray(Image.fromarray(image).resize((width, height), Image.BILINEAR)))


def antialias(image: np.ndarray, width: int, height: int) -> Sequence[np.ndarray]:
    """Bilinear with antialiasing, unrounded: f32 planes in [0, 255], within fp32 rounding of the filter's definition.

    Each axis by itself: an output is the weighted mean of the pixels nearer than max(1, scale) pixels to its centre,
    with weights that fall linearly to 0 there; scale = size in / size out. So an axis that grows is plain bilinear.
    """
    rows, columns, *channels = image.shape
    down, across = _bands(rows, height, _ROWS), _bands(columns, width, _COLUMNS)
    strips, layers = _parts(columns, down), _parts(height, across)
    tall = np.empty((height, columns), np.float32)
    resized = np.empty((*(channels or [1]), height, width), np.float32)
    for channel, out in enumerate(resized):
        plane = cv2.extractChannel(image, channel)  # not all at once: fresh memory costs more than the reading
        for strip in strips:
            for outputs, inputs, weights in down:
                np.matmul(weights, plane[inputs, strip].astype(np.float32), out=tall[outputs, strip])
        for layer in layers:
            for outputs, inputs, weights in across:
                np.matmul(tall[layer, inputs], weights.T, out=out[layer, outputs])
    return resized


# Name -> function of a uint8 image (H, W) or (H, W, 3), a width and a height; it returns 1 or 3 planes (height, width)
# in [0, 255]: uint8 ones, or one f32 array (planes, height, width).
KERNELS = {"area": area, "linear": linear, "pillow": pillow, "antialias": antialias}


@lru_cache(maxsize=32)
def _bands(n_in: int, n_out: int, block: int) -> tuple[tuple[slice, slice, np.ndarray], ...]:
    """Weights of one axis, a block of outputs at a time: (outputs, inputs that they see, f32 weights between them)."""
    scale = n_in / n_out
    support = max(1.0, scale)
    bands = []
    for first in range(0, n_out, block):
        outputs = np.arange(first, min(first + block, n_out))
        centres = (outputs + 0.5) * scale
        low = max(0, int(centres[0] - support))
        high = min(n_in, int(centres[-1] + support) + 1)
        distances = np.abs(np.arange(low, high) + 0.5 - centres[:, None])
        weights = np.maximum(0.0, 1 - distances / support)
        weights /= weights.sum(axis=1, keepdims=True)
        bands.append((slice(first, first + len(outputs)), slice(low, high), weights.astype(np.float32)))
    return tuple(bands)


def _parts(length: int, bands: tuple) -> list[slice]:
    """Of the axis that bands are not of: so much at a time that products stay small."""
    step = max(1, _PRODUCT // max(weights.size for _, _, weights in bands))
    return [slice(first, min(first + step, length)) for first in range(0, length, step)]
