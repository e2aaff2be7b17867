"""Descriptors of pictures by a torch module and by a model file, as arrays (n, D), for comparing the two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from .. import registry
from ..artifacts import golden
from ..artifacts.cases import picture_files
from ..artifacts.preprocessing import Preprocessing
from ..errors import NonFiniteError
from ..images import read_image
from ..runtimes.base import LoadRequest, Session

INPUT, OUTPUT = "image", "descriptor"
MAX_PICTURES = 8  # the widest table that is read
_SHIPPED = ("cup", "two-places")  # of the parity gate: two views of one thing, two different places


@dataclass(frozen=True)
class Picture:
    """uint8 (H, W) or (H, W, 3) RGB."""

    name: str
    image: np.ndarray


def pictures(paths: Sequence[Path] = ()) -> list[Picture]:
    """Those that are named, files or folders, at most eight spread over the list; else four that ship.

    Raises DataError for fewer than two, ImageError for what is no picture.
    """
    if not paths:
        chosen = [pair for pair in golden.pairs() if pair.name in _SHIPPED]
        return [Picture(f"{pair.name}_{i}", image) for pair in chosen for i, image in enumerate(pair.images)]
    files = picture_files(paths)
    spread = sorted({round(i) for i in np.linspace(0, len(files) - 1, min(MAX_PICTURES, len(files)))})
    return [Picture(files[i].stem, read_image(files[i])) for i in spread]


def by_torch(module: torch.nn.Module, tensors: Sequence[np.ndarray]) -> np.ndarray:
    """``tensors``: one (1, C, H, W) f32 for each picture."""
    with torch.inference_mode():
        return np.concatenate([module(torch.from_numpy(t)).reshape(1, -1).numpy() for t in tensors])


def by_file(path: Path, tensors: Sequence[np.ndarray], runtime: str = "onnxruntime", **options):
    """Descriptors (n, D) by an ONNX file, NaN and infinities included, and what it ran on: provider and precision.

    Args:
        runtime: plug-in. options: of the plug-in.
    Raises:
        ModelFileError: the runtime cannot load the file. BackendError: it failed.
    """
    session = opened(path, runtime, **options)
    found = [run(session, {INPUT: tensor})[OUTPUT].reshape(1, -1) for tensor in tensors]
    return np.concatenate(found), session.active.provider


def opened(path: Path, runtime: str = "onnxruntime", **options) -> Session:
    """A session of a model file. Raises ModelFileError."""
    plugin = registry.get("runtime", runtime)
    return plugin(plugin.Options(**options)).load(path, LoadRequest())


def run(session: Session, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Outputs by name, NaN and infinities included. Raises BackendError."""
    try:
        return session.run(inputs)
    except NonFiniteError as error:
        return error.outputs


def peaks_by_file(path: Path, feeds: Sequence[dict[str, np.ndarray]]) -> tuple[float, ...]:
    """For each of the inputs, the largest of all outputs of a file of ``graph.peaks``."""
    session = opened(path)
    return tuple(float(np.max([*run(session, inputs).values()])) for inputs in feeds)


def imagenet(width: int, height: int) -> Preprocessing:
    """An RGB image of a size, resized as torch does it, with the mean and deviation of ImageNet."""
    return Preprocessing("rgb", width, height, "antialias", (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def float_reference(picture: np.ndarray, steps: Preprocessing) -> np.ndarray:
    """The published preprocessing: torch's antialiased bilinear resize of floats, then mean and deviation."""
    image = picture if picture.ndim == 3 else np.dstack([picture] * 3)
    planes = torch.from_numpy(image.astype(np.float32) / 255).permute(2, 0, 1)[None]
    size = (steps.height, steps.width)
    resized = functional.interpolate(planes, size, mode="bilinear", align_corners=False, antialias=True).numpy()
    mean, std = (np.array(v, np.float32).reshape(1, -1, 1, 1) for v in (steps.mean, steps.std))
    return np.ascontiguousarray((resized - mean) / std)
