"""How an image becomes a model's input; part of the model's identity."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

import cv2
import numpy as np

from ..errors import DataError

CHANNELS = ("any", "rgb", "grey")
KERNELS = ("none", "area", "linear")


@dataclass(frozen=True)
class Preprocessing:
    """Steps from a uint8 image to an f32 tensor (1, C, H, W) in [0, 1].

    Args:
        channels: ``any`` (1 or 3 as the image has), ``rgb`` (grey is repeated) or ``grey`` (BT.601 luma).
        width, height: the image is resized to this; 0: its own size.
        kernel: of that resize: ``area`` or ``linear`` as OpenCV's, ``none`` where there is none.
    """

    channels: str = "any"
    width: int = 0
    height: int = 0
    kernel: str = "none"

    @property
    def id(self) -> str:
        """Short text, equal where the steps are."""
        size = f"-{self.width}x{self.height}-{self.kernel}" if self.width else ""
        return f"{self.channels}{size}"

    def apply(self, image: np.ndarray) -> np.ndarray:
        """uint8 (H, W) or (H, W, 3) RGB to f32 (1, C, H, W). Raises DataError for another type or shape."""
        if image.dtype != np.uint8 or not (image.ndim == 2 or (image.ndim == 3 and image.shape[2] == 3)):
            raise DataError(f"model image: expected uint8 (H, W) or (H, W, 3), got {image.dtype} {image.shape}")
        if self.channels == "grey" and image.ndim == 3:
            image = cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)
        if self.width:
            kernel = cv2.INTER_AREA if self.kernel == "area" else cv2.INTER_LINEAR
            image = cv2.resize(image, (self.width, self.height), interpolation=kernel)
        planes = cv2.split(image) if image.ndim == 3 else (image,) * (3 if self.channels == "rgb" else 1)
        tensor = np.empty((1, len(planes), *image.shape[:2]), np.float32)
        for plane, out in zip(planes, tensor[0]):  # faster than all at once through a transposed view
            np.multiply(plane, np.float32(1 / 255), out=out, dtype=np.float32)
        return tensor

    @classmethod
    def from_dict(cls, values: dict, problems: list[str]) -> Preprocessing:
        """Read from a card; what is wrong is appended to ``problems``, and the default returned."""
        found = []
        known = {f.name for f in fields(cls)}
        found += [f"preprocessing: unknown field '{n}'" for n in sorted(set(values) - known, key=str)]
        given = asdict(cls()) | {n: v for n, v in values.items() if n in known}
        for name, choices in (("channels", CHANNELS), ("kernel", KERNELS)):
            if given[name] not in choices:
                found.append(f"preprocessing.{name}: {given[name]!r} is not one of {', '.join(choices)}")
        sizes = (given["width"], given["height"])
        if any(not isinstance(v, int) or isinstance(v, bool) or not 0 <= v <= 16384 for v in sizes):
            found.append(f"preprocessing: width and height are pixels, got {sizes}")
        elif (sizes[0] == 0) != (sizes[1] == 0) or (sizes[0] > 0) != (given["kernel"] != "none"):
            found.append("preprocessing: width, height and kernel go together")
        problems += found
        return cls() if found else cls(**given)
