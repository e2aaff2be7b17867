"""What is true of a recorded scene: poses, and which frames see the same surfaces. One plain ``.npz``."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from ..errors import DataError

FILE_NAME = "ground_truth.npz"


@dataclass(frozen=True, eq=False)
class GroundTruth:
    """Truth about the n frames of a scene.

    Args:
        scene: name of the scene.
        stamps_ns: (n,) int64, ascending.
        positions: (n, 3) f64, camera in ``map``, metres.
        rotations: (n, 3, 3) f64, camera (optical frame) in ``map``.
        K: (3, 3) f64 intrinsics, pixels.
        image_size: (width, height).
        covisibility: (n, n) f32 symmetric, see :meth:`Scene.covisibility`.
    Raises:
        DataError: shapes that do not fit together.
    """

    scene: str
    stamps_ns: np.ndarray
    positions: np.ndarray
    rotations: np.ndarray
    K: np.ndarray
    image_size: tuple[int, int]
    covisibility: np.ndarray

    def __post_init__(self):
        n = len(self.stamps_ns)
        expected = {
            "stamps_ns": (n,), "positions": (n, 3), "rotations": (n, 3, 3), "K": (3, 3), "covisibility": (n, n)
        }  # fmt: skip
        for name, shape in expected.items():
            if getattr(self, name).shape != shape:
                raise DataError(f"ground truth: {name} must be {shape}, got {getattr(self, name).shape}")
        if (np.diff(self.stamps_ns) <= 0).any():
            raise DataError("ground truth: stamps do not ascend")

    def __len__(self) -> int:
        return len(self.stamps_ns)

    def index(self, stamp_ns: int) -> int:
        """Number of the frame with exactly this stamp. Raises DataError where there is none."""
        i = int(np.searchsorted(self.stamps_ns, stamp_ns))
        if i == len(self) or self.stamps_ns[i] != stamp_ns:
            raise DataError(
                f"ground truth of scene '{self.scene}': no frame has stamp {stamp_ns} ns; "
                f"its {len(self)} frames go from {self.stamps_ns[0]} to {self.stamps_ns[-1]}"
            )
        return i

    def is_true(self, stamp_ns: int, ref_stamp_ns: int, min_covisibility: float = 0.01) -> bool:
        """Whether a reported pair of frames, by their stamps, sees the same place; a loop that does not is false."""
        return bool(self.covisibility[self.index(stamp_ns), self.index(ref_stamp_ns)] >= min_covisibility)

    def true_loops(self, min_gap_frames: int, min_covisibility: float = 0.4, max_angle_deg: float = 30.0) -> np.ndarray:
        """Pairs that a good front end should find: covisible, alike in direction, and apart in time.

        Args:
            min_gap_frames: least difference of the frame numbers.
            min_covisibility: least covisibility (of the two views the smaller share).
            max_angle_deg: largest angle between the optical axes; frames that see
                a surface from opposite sides cannot be matched by appearance.
        Returns:
            bool (n, n), symmetric.
        """
        axes = self.rotations[:, :, 2]
        alike = axes @ axes.T >= np.cos(np.radians(max_angle_deg))
        number = np.arange(len(self))
        apart = np.abs(number[:, None] - number) >= min_gap_frames
        return (self.covisibility >= min_covisibility) & alike & apart

    def save(self, path) -> None:
        """Write to ``path`` (``.npz``)."""
        np.savez_compressed(path, **{f.name: np.asarray(getattr(self, f.name)) for f in fields(self)})

    @classmethod
    def load(cls, path) -> GroundTruth:
        """Read what ``save`` wrote: the file, or the bag folder that holds it. Raises DataError naming the file."""
        path = Path(path)
        path = path / FILE_NAME if path.is_dir() else path
        try:
            with np.load(path, allow_pickle=False) as data:
                values = {f.name: data[f.name] for f in fields(cls)}
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise DataError(f"ground truth {path}: cannot be read: {error}") from error
        values["scene"] = str(values["scene"])
        values["image_size"] = tuple(int(v) for v in values["image_size"])
        try:
            return cls(**values)
        except DataError as error:
            raise DataError(f"{path}: {error}") from error
