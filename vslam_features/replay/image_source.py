"""Frames from a folder of images, in natural order, with synthetic stamps."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np

from ..camera import Camera
from ..config import Config
from ..errors import CameraError, ConfigError, DataError, ImageError
from ..images import read_image
from ..types import Frame
from .source import IMAGE_SUFFIXES, Source

# Images of a folder are a choice of views rather than a video: each counts, and seconds mean nothing.
FOLDER_DEFAULTS = {"keyframes.every": 1, "retrieval.exclude_frames": 10, "retrieval.exclude_s": 0.0}


class ImageSource(Source):
    """The images of one folder (not of its subfolders), ordered as people number them: 2 before 10.

    Stamps are index / ``fps``; an unreadable image keeps its index, is counted
    and makes the read partial. ``frame_id`` is ``camera``.

    Args:
        camera: a Camera (scaled to each image), or (fx, fy, cx, cy) in pixels of the images.
        explicit: dotted names that ``FOLDER_DEFAULTS`` must not override; those
            in which ``config`` differs from the defaults are left alone anyway.
    """

    def __init__(
        self,
        path: Path,
        config: Config,
        camera: Camera | tuple | None = None,
        fps: float = 10.0,
        explicit: frozenset[str] = frozenset(),
    ):
        if not (np.isfinite(fps) and fps > 0):
            raise ConfigError(f"fps: expected a positive number, got {fps}")
        super().__init__(path, folder_config(config, explicit))
        self.camera, self.fps = camera, fps
        self.files = sorted((p for p in path.iterdir() if p.suffix.lower() in IMAGE_SUFFIXES), key=natural_key)

    def __len__(self) -> int:
        return len(self.files)

    def __iter__(self) -> Iterator[Frame]:
        for position, file in enumerate(self.files):
            self.position = position
            try:
                image = read_any_image(file, self.config.image_max_value or None)
                camera = camera_for(self.camera, (image.shape[1], image.shape[0]))
                frame = Frame(round(position * 1e9 / self.fps), "camera", image, camera)
            except ImageError as error:
                self.skipped.add("unreadable image", str(error))
            except (CameraError, DataError) as error:
                self.skipped.add("camera does not fit the image", f"{file.name}: {error}")
            else:
                yield frame

    def describe(self) -> dict:
        """See :meth:`Source.describe`."""
        return {"kind": "images", "name": self.name, "images": len(self), "fps": self.fps}


def folder_config(config: Config, explicit: frozenset[str] = frozenset()) -> Config:
    """``config`` with ``FOLDER_DEFAULTS`` wherever the user set nothing."""
    given, default = config.flat(), Config().flat()
    changes = {k: v for k, v in FOLDER_DEFAULTS.items() if k not in explicit and given[k] == default[k]}
    return Config.from_flat(changes, base=config)


def natural_key(path: Path) -> list:
    """Sort key: digit groups as numbers, the rest without case."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", path.name.lower())]


def read_any_image(path: Path, max_value: float | None = None) -> np.ndarray:
    """uint8 (H, W) or (H, W, 3) RGB of an image file, TIFF and WebP included. Raises ImageError naming the file."""
    if path.suffix.lower() not in (".tif", ".tiff", ".webp"):
        return read_image(path, max_value=max_value)
    image = cv2.imread(str(path), cv2.IMREAD_UNCHANGED)
    if image is None:
        raise ImageError(f"{path}: cannot be decoded; is the file whole?")
    if image.dtype != np.uint8:
        raise ImageError(f"{path}: expected 8-bit samples, got {image.dtype}; convert it to 8 bit")
    if image.ndim == 3 and image.shape[2] in (3, 4):
        return np.ascontiguousarray(image[:, :, 2::-1])
    return image.reshape(image.shape[:2]) if image.ndim == 2 or image.shape[2] == 1 else image


def camera_for(camera: Camera | tuple | None, size: tuple[int, int]) -> Camera | None:
    """The camera of an image of ``size`` (width, height); a Camera of another size is scaled to it.

    Raises CameraError where the aspect ratio differs: a crop cannot be told from a wrong file.
    """
    if camera is None:
        return None
    if not isinstance(camera, Camera):
        fx, fy, cx, cy = camera
        return Camera(*size, np.array([[fx, 0, cx], [0, fy, cy], [0, 0, 1]], np.float64))
    if camera.size == size:
        return camera
    if abs(camera.width * size[1] - camera.height * size[0]) > max(size[0], size[1]):
        raise CameraError(
            f"camera is for {camera.width}x{camera.height} pixels, the image has {size[0]}x{size[1]}, "
            "another aspect ratio; give the calibration of these images"
        )
    return camera.scaled_to(size)
