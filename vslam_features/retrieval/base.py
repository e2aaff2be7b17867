"""What global descriptor and index plug-ins are."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
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
    """Nearest global descriptors by inner product, with incremental adds. One thread at a time.

    Descriptors are (D,) f16, f32 or f64 of unit length, or all zero where nothing was seen. Ids are those of keyframes:
    0 or more, and they increase. All methods raise DataError, which names the keyframe or the query, for anything else,
    and then leave the index as it was.
    """

    runtime = "numpy"

    @abstractmethod
    def __len__(self) -> int:
        """Number of descriptors."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of memory that are taken for them, room for the next ones included."""

    @abstractmethod
    def add_batch(self, ids: Sequence[int], descriptors: np.ndarray | Sequence[np.ndarray]) -> None:
        """Add keyframes, all or none: (n,) ids and (n, D) descriptors."""

    @abstractmethod
    def search_batch(
        self, descriptors: np.ndarray | Sequence[np.ndarray], k: int, newest_ids: Sequence[int]
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """``search`` for each of (q, D) descriptors, with the newest id of each (q,)."""

    def add(self, kf_id: int, descriptor: np.ndarray) -> None:
        """Add the (D,) descriptor of a keyframe."""
        self.add_batch((kf_id,), (descriptor,))

    def extend(self, places: Iterable[tuple[int, np.ndarray]]) -> None:
        """Add (id, (D,) descriptor) of many keyframes, such as a map's.

        They are added in batches: where one is refused, or ``places`` raises, the batches before it stay.
        """
        places = iter(places)
        while batch := list(itertools.islice(places, _BATCH)):
            self.add_batch(*zip(*batch))

    def search(self, descriptor: np.ndarray, k: int, newest_id: int) -> tuple[np.ndarray, np.ndarray]:
        """The best k keyframes with id <= newest_id: ids (n,) i64 and similarities (n,) f32, best first."""
        return self.search_batch((descriptor,), k, (newest_id,))[0]


_BATCH = 64  # 8448-d ones still fit a processor's cache


def check_descriptor(descriptor: np.ndarray, dimension: int | None) -> np.ndarray:
    """The descriptor as f32. Raises DataError unless (D,) float, finite, and of length 1 (or 0: nothing seen)."""
    return check_descriptors((descriptor,), dimension, ("",))[0]


def check_descriptors(
    descriptors: np.ndarray | Sequence[np.ndarray], dimension: int | None, names: Sequence[str]
) -> np.ndarray:
    """Descriptors as (n, D) f32, see ``check_descriptor``. ``names``: (n,), what an error calls each."""
    try:
        rows = [np.asarray(d) for d in descriptors]
    except (TypeError, ValueError) as error:  # not iterable, or nested in some uneven way
        raise DataError(f"global descriptors: expected shape (n, {dimension or 'D'}): {error}") from error
    if len(rows) != len(names):
        raise DataError(f"global descriptors: {len(names)} expected, got {len(rows)}")
    if not rows:
        return np.empty((0, dimension or 0), np.float32)
    dimension = rows[0].size if dimension is None else dimension
    for row, name in zip(rows, names):
        if row.shape != (dimension,) or dimension == 0:
            raise DataError(f"global descriptor{name}: expected shape ({dimension or 'D'},), got {row.shape}")
        if row.dtype not in _DTYPES:
            raise DataError(f"global descriptor{name}: expected float16, float32 or float64, got {row.dtype}")
    d = np.empty((len(rows), dimension), np.float32)
    with np.errstate(over="ignore"):  # 1e300 becomes infinity, and the square of 1e30: both are refused below
        for i, row in enumerate(rows):
            d[i] = row
        length = np.sqrt(np.einsum("nd,nd->n", d, d))
    for i in np.flatnonzero(~(np.abs(length - 1) <= UNIT_TOLERANCE)):  # also where it is NaN
        if not np.isfinite(rows[i]).all():
            raise DataError(f"global descriptor{names[i]}: not finite; run the model's check before it is used")
        if rows[i].any():
            length = math.hypot(*rows[i].tolist())
            raise DataError(f"global descriptor{names[i]}: expected unit length, got {length:.4g}; normalise it first")
    return d


UNIT_TOLERANCE = 1e-2
_DTYPES = (np.float16, np.float32, np.float64)
