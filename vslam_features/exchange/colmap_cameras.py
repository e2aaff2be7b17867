"""Our camera models as those of COLMAP.

Names, numbers and parameters: COLMAP's documentation, "Camera Models". COLMAP puts (0.5, 0.5) at the centre of the
top-left pixel, so that principal points move by half a pixel; its OpenCV models are OpenCV's formulas.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..camera import Camera
from ..errors import MapError

HALF_PX = 0.5
"""Ours to COLMAP's pixels."""

PINHOLE, SIMPLE_RADIAL, OPENCV, OPENCV_FISHEYE, FULL_OPENCV = 1, 2, 4, 5, 6
_GUESSED_FOCAL = 1.2  # of the longer side: COLMAP's own guess for an image without EXIF data


class ColmapCamera(NamedTuple):
    """A row of the table ``cameras``; ``params`` f64 in COLMAP's order."""

    model: int
    width: int
    height: int
    params: tuple[float, ...]
    prior_focal_length: bool


def colmap_camera(camera: Camera | None, image_size: tuple[int, int]) -> ColmapCamera:
    """The camera that COLMAP needs for an image.

    An uncalibrated one is a guess that COLMAP refines (``SIMPLE_RADIAL``, no prior focal length). Raises MapError for
    a distortion that no model of COLMAP has.
    """
    width, height = image_size
    if camera is None:
        focal = _GUESSED_FOCAL * max(width, height)
        return ColmapCamera(SIMPLE_RADIAL, width, height, (focal, width / 2, height / 2, 0.0), False)
    K = camera.K
    pinhole = (K[0, 0], K[1, 1], K[0, 2] + HALF_PX, K[1, 2] + HALF_PX)
    model, distortion = _distortion(camera)
    return ColmapCamera(model, width, height, tuple(float(v) for v in (*pinhole, *distortion)), True)


def _distortion(camera: Camera) -> tuple[int, np.ndarray]:
    if camera.model == "equidistant":
        return OPENCV_FISHEYE, camera.D
    D = np.zeros(14)
    D[: camera.D.size] = camera.D
    if D[8:].any():
        raise MapError(
            f"COLMAP has no model for the thin prism or tilt coefficients {D[8:].tolist()} of a camera with "
            f"{camera.width}x{camera.height} pixels: rectify the images, or calibrate without them"
        )
    if D[4:8].any():
        return FULL_OPENCV, D[:8]
    return (OPENCV, D[:4]) if D.any() else (PINHOLE, D[:0])
