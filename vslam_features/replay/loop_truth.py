"""Which images of a sequence are true revisits of one another."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np

from ..errors import DataError
from .ground_truth import FILE_NAME, GroundTruth


class LoopTruth:
    """True revisits among n images, by their position in the input.

    Args:
        revisit: bool (n, n); either triangle may be filled.
        possible: bool (n, n), pairs that see a common place at all. Where it is
            not known (None), a loop up to ``tolerance`` images from a true one is.
    """

    def __init__(self, revisit: np.ndarray, possible: np.ndarray | None = None, tolerance: int = 6):
        if revisit.ndim != 2 or revisit.shape[0] != revisit.shape[1]:
            raise DataError(f"loop matrix: expected a square, got {revisit.shape}")
        self.revisit = revisit | revisit.T
        self.tolerance = tolerance
        if possible is None:
            size = 2 * tolerance + 1
            possible = cv2.dilate(self.revisit.astype(np.uint8), np.ones((size, size), np.uint8)) > 0
        self.possible = possible

    def __len__(self) -> int:
        return len(self.revisit)

    @classmethod
    def load(cls, path, exclude: int = 10, exclude_s: float = 0.0) -> LoopTruth:
        """From a grey picture (255 where image j revisits image i), or from the truth of a rendered scene.

        Args:
            path: a PNG, a ``ground_truth.npz``, or the folder of a bag with one.
            exclude, exclude_s: images fewer, or less time, apart are no revisit (scenes only).
        Raises:
            DataError: unreadable or not square.
        """
        path = Path(path)
        if path.is_dir() or path.suffix == ".npz":
            truth = GroundTruth.load(path)
            revisit = truth.true_loops(max(exclude, 1))
            apart_s = np.abs(truth.stamps_ns[:, None] - truth.stamps_ns) / 1e9
            return cls(revisit & (apart_s >= exclude_s), truth.covisibility >= 0.01)
        image = cv2.imread(str(path), cv2.IMREAD_GRAYSCALE) if path.is_file() else None
        if image is None:
            raise DataError(f"{path}: cannot be read as a loop matrix; expected a square grey PNG or {FILE_NAME}")
        try:
            return cls(image > 127)
        except DataError as error:
            raise DataError(f"{path}: {error}") from None

    def is_true(self, i: int, j: int) -> bool:
        """True where images i and j are a true revisit."""
        return bool(self.revisit[i, j])

    def is_false(self, i: int, j: int) -> bool:
        """True where a loop between i and j is wrong beyond doubt."""
        return not self.possible[i, j]

    def has_revisit(self, i: int, exclude: int) -> bool:
        """True where image i revisits one at least ``exclude`` images older: a query that can be answered."""
        return bool(self.revisit[i, : max(i - max(exclude, 1) + 1, 0)].any())
