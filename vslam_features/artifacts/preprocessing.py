"""How an image becomes a model's input; part of the model's identity."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

import cv2
import numpy as np

from ..errors import DataError
from . import resize

CHANNELS = ("any", "rgb", "grey")
KERNELS = ("none", *resize.KERNELS)
_PLANES = {"rgb": 3, "grey": 1}  # of the channels whose number is known
_LIMIT = 1e6  # of means, deviations and one over deviations: f32 stays finite


@dataclass(frozen=True)
class Preprocessing:
    """Steps from a uint8 image to an f32 tensor (1, C, H, W): (image / 255 - mean) / std.

    Args:
        channels: ``any`` (1 or 3 as the image has), ``rgb`` (grey is repeated) or ``grey`` (BT.601 luma).
        width, height: the image is resized to this; 0: its own size.
        kernel: of that resize, a name of ``resize.KERNELS``; ``none`` where there is none.
        mean, std: a value a channel, with channels ``rgb`` or ``grey``; empty: 0 and 1, so the tensor is in [0, 1].
    """

    channels: str = "any"
    width: int = 0
    height: int = 0
    kernel: str = "none"
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    @property
    def id(self) -> str:
        """Short text, equal where the steps are."""
        size = f"-{self.width}x{self.height}-{self.kernel}" if self.width else ""
        given = [(name, values) for name, values in (("mean", self.mean), ("std", self.std)) if values]
        numbers = [f"-{name}{','.join(str(float(v) + 0.0) for v in values)}" for name, values in given]  # -0.0 is 0.0
        return "".join([self.channels, size, *numbers])

    def to_dict(self) -> dict:
        """Plain JSON values, without an empty ``mean`` or ``std``: older versions read such cards too."""
        values = asdict(self)
        numbers = {name: list(values.pop(name)) for name in ("mean", "std")}
        return values | {name: given for name, given in numbers.items() if given}

    def apply(self, image: np.ndarray) -> np.ndarray:
        """uint8 (H, W) or (H, W, 3) RGB to f32 (1, C, H, W).

        Raises:
            DataError: another type or shape, or no pixels. PluginError: kernel ``pillow`` without Pillow.
        """
        if image.dtype != np.uint8 or not image.size or image.shape[2:] not in ((), (3,)) or image.ndim < 2:
            raise DataError(f"model image: expected uint8 (H, W) or (H, W, 3), got {image.dtype} {image.shape}")
        if self.channels == "grey" and image.ndim == 3:
            image = cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)
        planes = resize.KERNELS[self.kernel](image, self.width, self.height) if self.width else cv2.split(image)
        if self.channels == "rgb" and len(planes) == 1:
            planes = (planes[0],) * 3
        if isinstance(planes, np.ndarray):
            tensor = planes[None]  # f32 already: scaled in place
        else:
            tensor = np.empty((1, len(planes), *planes[0].shape), np.float32)
        for i, (plane, out) in enumerate(zip(planes, tensor[0])):  # faster than all at once through a transposed view
            std = self.std[i] if self.std else 1.0
            np.multiply(plane, np.float32(1 / (255 * std)), out=out, dtype=np.float32)
            if self.mean:
                out -= np.float32(self.mean[i] / std)
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
        for name, least in (("mean", -_LIMIT), ("std", 1 / _LIMIT)):
            values = given[name]
            if not isinstance(values, (list, tuple)) or not all(_is_number(v, least) for v in values):
                found.append(f"preprocessing.{name}: expected numbers from {least:g} to {_LIMIT:g}, got {values!r}")
            elif values and len(values) != _PLANES.get(str(given["channels"])):
                found.append(f"preprocessing.{name}: 3 values go with channels rgb, 1 with grey, got {list(values)}")
            else:
                given[name] = tuple(map(float, values))
        problems += found
        return cls() if found else cls(**given)


def _is_number(value: object, least: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= _LIMIT
