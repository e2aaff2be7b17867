"""What global descriptor and index plug-ins are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from ..errors import DataError
from ..models import Models
from ..types import Features, Frame, ModelIdentity


class GlobalDescriptor(ABC):
    """Describes a whole image by one unit vector; the dot product is the similarity."""

    runtime = "numpy"

    @dataclass(frozen=True)
    class Options:
        """Parameters of the plug-in."""

    def __init__(self, options, features_model: ModelIdentity, models: Models | None = None):
        """``features_model``: identity of the local features that ``describe`` will be given."""
        self.options = options
        self.features_model = features_model
        self.models = models

    @property
    @abstractmethod
    def identity(self) -> ModelIdentity:
        """What makes these descriptors comparable with others."""

    @abstractmethod
    def describe(self, frame: Frame, features: Features) -> np.ndarray:
        """(D,) f32 of unit length, or all zero where the image shows nothing to describe."""


class Index(ABC):
    """Nearest global descriptors by inner product, with incremental adds."""

    @abstractmethod
    def add(self, kf_id: int, descriptor: np.ndarray) -> None:
        """Add the descriptor of a keyframe; ids must increase. Raises DataError."""

    @abstractmethod
    def search(self, descriptor: np.ndarray, k: int, newest_id: int) -> tuple[np.ndarray, np.ndarray]:
        """The best k keyframes with id <= newest_id: ids (n,) i64 and similarities (n,) f32, best first."""


def check_descriptor(descriptor: np.ndarray, dimension: int | None) -> np.ndarray:
    """The descriptor as f32. Raises DataError unless (D,), finite, and of length 1 (or 0: nothing seen)."""
    d = np.asarray(descriptor, np.float32)
    if d.ndim != 1 or d.size == 0 or (dimension is not None and len(d) != dimension):
        raise DataError(f"global descriptor: expected shape ({dimension or 'D'},), got {d.shape}")
    if not np.isfinite(d).all():
        raise DataError("global descriptor: not finite; run the model's check before it is used")
    norm = float(np.linalg.norm(d))
    if norm > 0 and abs(norm - 1) > 1e-2:
        raise DataError(f"global descriptor: expected unit length, got {norm:.4f}; normalise it first")
    return d
