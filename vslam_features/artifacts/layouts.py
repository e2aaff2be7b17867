"""In which coordinates keypoints are given, and in which order the axes of a tensor are, by the names of a card."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Affine = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Convention:
    """Coordinates that differ from ours by a factor and an offset an axis.

    Args:
        affine: of the image's (width, height) and of that of the picture that the descriptor model saw, f64 (2,):
            factor and offset (2,) with theirs = ours * factor + offset. None: ours.
        of_model: the second of these sizes is used.
    """

    affine: Callable[[np.ndarray, np.ndarray], Affine] | None = None
    of_model: bool = False

    @property
    def needs_no_size(self) -> bool:
        """True where it is ours."""
        return self.affine is None

    def to_file(self, keypoints: np.ndarray, size, model_size) -> np.ndarray:
        """(N, 2) f32 pixels to the file's coordinates."""
        if self.affine is None:
            return keypoints
        factor, offset = self.affine(size, model_size)
        return (keypoints * factor + offset).astype(np.float32)

    def to_ours(self, keypoints: np.ndarray, size, model_size) -> np.ndarray:
        """The other way round."""
        if self.affine is None:
            return keypoints
        factor, offset = self.affine(size, model_size)
        return ((keypoints - offset) / factor).astype(np.float32)


def _steps(size: np.ndarray) -> np.ndarray:
    """From the first to the last pixel centre of an axis; an image one pixel wide has no extent."""
    return np.maximum(size - 1, 1)


# The table in docs/models.md has the formulas.
KEYPOINTS = {
    "pixels": Convention(),
    "corner_pixels": Convention(lambda size, model: (np.ones(2), np.full(2, 0.5))),
    "unit": Convention(lambda size, model: (1 / size, 0.5 / size)),
    "signed": Convention(lambda size, model: (2 / size, 1 / size - 1)),
    "unit_centres": Convention(lambda size, model: (1 / _steps(size), np.zeros(2))),
    "signed_centres": Convention(lambda size, model: (2 / _steps(size), np.full(2, -1.0))),
    "long_side": Convention(lambda size, model: (np.full(2, 2 / size.max()), -size / size.max())),
    "model_pixels": Convention(lambda size, model: (model / size, 0.5 * model / size - 0.5), of_model=True),
    "model_corner_pixels": Convention(lambda size, model: (model / size, 0.5 * model / size), of_model=True),
}


@dataclass(frozen=True)
class Layout:
    """An order of axes.

    Args:
        tensors: beginnings of our names that may have it.
        rank: least number of axes that ours has; ``file_rank``: that the file's has, without axes of length 1 in front.
        to_file: of our array. to_ours: of the file's, and the inputs of the run by our names; ValueError where it
            cannot be.
    """

    tensors: tuple[str, ...]
    rank: int
    file_rank: int
    to_file: Callable[[np.ndarray], np.ndarray]
    to_ours: Callable[[np.ndarray, dict[str, np.ndarray]], np.ndarray]


def _map_of_tokens(tokens: np.ndarray, inputs: dict[str, np.ndarray]) -> np.ndarray:
    """(h w, C) to (C, h, w): cells are square, so that the shape of the image tells h and w."""
    height, width = inputs["image"].shape[-2:]
    side = np.sqrt(height * width / max(len(tokens), 1))
    h, w = round(height / side), round(width / side)
    if h * w != len(tokens):
        raise ValueError(f"{len(tokens)} tokens are no map of square cells of {width}x{height} pixels")
    return tokens.reshape(h, w, -1).transpose(2, 0, 1)


_MAPS = ("descriptors",)
LAYOUTS = {
    "chw": Layout(_MAPS, 3, 3, lambda a: a, lambda a, _: a),
    "hwc": Layout((*_MAPS, "image"), 3, 3, lambda a: np.moveaxis(a, -3, -1), lambda a, _: np.moveaxis(a, -1, -3)),
    "tokens": Layout(_MAPS, 3, 2, lambda a: a.reshape(*a.shape[:-2], -1).swapaxes(-1, -2), _map_of_tokens),
    "yx": Layout(("keypoints",), 2, 2, lambda a: a[..., ::-1], lambda a, _: a[..., ::-1]),
}
