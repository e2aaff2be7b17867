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
from ..images import decode, read_image
from ..options import Scalar
from ..types import Frame
from .source import IMAGE_SUFFIXES, Source

# Images of a folder are a choice of views rather than a video: each counts, and seconds mean nothing.
FOLDER_DEFAULTS = {"keyframes.every": 1, "retrieval.exclude_frames": 10, "retrieval.exclude_s": 0.0}

# How OpenCV hands over the pixels of a file: (channels, dtype) -> raw encoding.
_OPENCV_ENCODINGS = {
    (1, "uint8"): "mono8",
    (3, "uint8"): "bgr8",
    (4, "uint8"): "bgra8",
    (1, "uint16"): "mono16",
    (3, "uint16"): "bgr16",
    (4, "uint16"): "bgra16",
}


class ImageSource(Source):
    """The images of one folder (not of its subfolders), ordered as people number them: 2 before 10.

    Stamps are index / ``fps``; an unreadable image keeps its index, is counted
    and makes the read partial. ``frame_id`` is ``camera``.

    Args:
        camera: a Camera (scaled to each image), or (fx, fy, cx, cy) in pixels of the images.
        explicit: dotted names that ``FOLDER_DEFAULTS`` must not override; those
            in which ``config`` differs from the defaults are left alone anyway.

    What was overridden, and sub-folders with more images, are in ``notes``.
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
        changes = folder_changes(config, explicit)
        super().__init__(path, Config.from_flat(changes, base=config))
        if changes:
            values = ", ".join(f"{name}={value:g}" for name, value in changes.items())
            self.notes.add(f"defaults of image folders: {values} (--set chooses others)")
        self.camera, self.fps = camera, fps
        self.files = sorted((p for p in path.iterdir() if p.suffix.lower() in IMAGE_SUFFIXES), key=natural_key)
        if inside := sorted(p.name for p in path.iterdir() if p.is_dir() and has_images(p)):
            self.notes.add(
                f"sub-folders with images are not read ({', '.join(inside[:5])}): if one is meant, give its path"
            )

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


def folder_changes(config: Config, explicit: frozenset[str] = frozenset()) -> dict[str, Scalar]:
    """Those of ``FOLDER_DEFAULTS`` for which the user chose nothing else."""
    given, default = config.flat(), Config().flat()
    return {k: v for k, v in FOLDER_DEFAULTS.items() if k not in explicit and given[k] == default[k]}


def has_images(folder: Path) -> bool:
    """True where there is an image file in the folder itself."""
    try:
        return any(p.suffix.lower() in IMAGE_SUFFIXES for p in folder.iterdir())
    except OSError:  # one that may not be looked into is no folder to suggest
        return False


def natural_key(path: Path) -> list:
    """Sort key: digit groups as numbers, the rest without case."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", path.name.lower())]


def read_any_image(path: Path, max_value: float | None = None) -> np.ndarray:
    """uint8 (H, W) or (H, W, 3) RGB of an image file, TIFF and WebP included; ``max_value`` as in ``read_image``.

    Raises ImageError naming the file.
    """
    if path.suffix.lower() not in (".tif", ".tiff", ".webp"):
        return read_image(path, max_value=max_value)
    image = cv2.imread(str(path), cv2.IMREAD_UNCHANGED)
    if image is None:
        raise ImageError(f"{path}: cannot be decoded; is the file whole?")
    height, width, channels = image.shape if image.ndim == 3 else (*image.shape, 1)
    encoding = _OPENCV_ENCODINGS.get((channels, str(image.dtype)))
    if encoding is None:
        raise ImageError(
            f"{path}: expected 1, 3 or 4 channels of 8 or 16 bits, got {channels} of {image.dtype}; convert it to PNG"
        )
    return decode(image.tobytes(), width, height, encoding, image.strides[0], max_value=max_value)


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
