"""What a matcher gets of two keyframes, kept as files that ``models verify --inputs`` replays.

``models collect`` writes them. A file is an ``.npz`` without pickles: the arrays by our tensor names and ``meta``, a
JSON text that says what the pair is and whose features it holds.
"""

from __future__ import annotations

import json
import re
import zlib
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import numpy as np

from .. import __version__
from ..errors import DataError, IdentityError
from ..types import ModelIdentity
from .cache import place, writing
from .card import ModelCard
from .npz import npz_bytes, read_arrays

KINDS = ("wide", "revisit", "control")
"""Kinds of pairs, hardest first: neighbours far apart in view, a place that was come back to, adjacent keyframes."""

FORMAT, SCHEMA = "matcher inputs", 1
_NAME = re.compile(rf"({'|'.join(KINDS)})-\d{{5,}}-\d{{5,}}-[0-9a-f]{{8}}\.npz")
_IDENTITY = [field.name for field in fields(ModelIdentity)]
TENSORS = tuple(f"{name}{side}" for side in (0, 1) for name in ("keypoints", "descriptors", "image_size"))


@dataclass(frozen=True)
class SavedPair:
    """A pair of keyframes, the newer one first.

    Args:
        kind: one of ``KINDS``.
        stamps_ns: integer nanoseconds, of both. keyframes: their ids.
        features: identity of what computed the descriptors.
        matcher: name of the model that gave ``matches`` and, of these, ``inliers``, when the pair was collected.
        source: name of the recording, map or node.
        inputs: our tensor name -> array: keypoints (N, 2) f32, descriptors (N, D) or map (C, h, w) f32, image_size
            (2,) f32: width, height.
    """

    kind: str
    stamps_ns: tuple[int, int]
    keyframes: tuple[int, int]
    features: ModelIdentity
    matcher: str
    matches: int
    inliers: int
    source: str
    inputs: dict[str, np.ndarray]

    @property
    def file_name(self) -> str:
        """The same for the same pair, so that collecting it again replaces it."""
        key = f"{self.source} {self.stamps_ns}".encode()
        return f"{self.kind}-{self.keyframes[0]:05d}-{self.keyframes[1]:05d}-{zlib.crc32(key):08x}.npz"

    @property
    def seconds_apart(self) -> float:
        """Time between both, negative where the older one comes from a later clock."""
        return (self.stamps_ns[0] - self.stamps_ns[1]) / 1e9

    @property
    def text(self) -> str:
        """What it is, in a line."""
        return (
            f"{self.kind}, keyframes {self.keyframes[0]} and {self.keyframes[1]} of {self.source}, stamps "
            f"{self.stamps_ns[0]} and {self.stamps_ns[1]}: {self.matches} matches of {self.matcher}"
        )

    def require_taken(self, card: ModelCard, where: str) -> None:
        """Raises DataError where a matcher of this card did not learn to match these features, naming both."""
        takes = card.features_model
        if card.role != "matcher" or (takes and takes != self.features.name):
            other = f"{card.name} matches features of {takes}" if takes else f"{card.name} is a {card.role} model"
            raise DataError(
                f"{where}: holds features of {self.features.name}, {other}: verify a matcher of {self.features.name} "
                "with it, or collect pairs with 'vslam-features models collect'"
            )


def save(folder: Path, pair: SavedPair) -> Path:
    """Write a pair, whole or not at all; the file.

    Raises CacheError where it cannot be written, DataError where the arrays are not what they should be.
    """
    _check(pair, pair.file_name)
    meta = {**asdict(replace(pair, inputs={})), "format": FORMAT, "schema": SCHEMA, "version": __version__}
    del meta["inputs"]
    return place(Path(folder) / pair.file_name, npz_bytes(meta, pair.inputs))


def load(path: Path) -> SavedPair:
    """Read a pair. Raises DataError naming the file where it is damaged or none."""
    found = parse(path, read_arrays(path))
    if found is None:
        raise DataError(f"{path}: is no pair that 'vslam-features models collect' saved")
    return found


def parse(path: Path, arrays: dict[str, np.ndarray]) -> SavedPair | None:
    """The pair that is in the arrays of a file; None where they are something else. Raises DataError: damaged."""
    try:
        meta = json.loads(str(arrays["meta"]))
    except (KeyError, ValueError):
        return None
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        return None
    if meta.get("schema") != SCHEMA:
        raise DataError(
            f"{path}: is of schema {meta.get('schema')}, this version reads {SCHEMA}: update vslam_features"
        )
    try:
        pair = SavedPair(
            kind=_one_of(KINDS, meta["kind"]),
            stamps_ns=_two(meta["stamps_ns"]),
            keyframes=_two(meta["keyframes"]),
            features=ModelIdentity(*(_typed(str, meta["features"][name]) for name in _IDENTITY)),
            matcher=_typed(str, meta["matcher"]),
            matches=_typed(int, meta["matches"]),
            inliers=_typed(int, meta["inliers"]),
            source=_typed(str, meta["source"]),
            inputs={name: value for name, value in arrays.items() if name != "meta"},
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path}: its description lacks or breaks: {error}; collect the pair again") from error
    _check(pair, str(path))
    return pair


def pairs_in(folder: Path) -> dict[Path, SavedPair]:
    """The saved pairs of a folder by their files; other files are left out.

    Raises DataError for a damaged one, which could be of any model.
    """
    found = {path: parse(path, read_arrays(path)) for path in sorted(Path(folder).glob("*.npz"))}
    return {path: pair for path, pair in found.items() if pair is not None}


def remove_others(folder: Path, kept: set[Path]) -> None:
    """Remove the saved pairs of a folder, known by their names as they may be damaged, but those that are to stay."""
    for path in sorted(Path(folder).glob("*.npz")):
        if _NAME.fullmatch(path.name) and path not in kept:
            with writing(path.parent):
                path.unlink(missing_ok=True)


def require_same_features(folder: Path, name: str, features: ModelIdentity | None = None) -> None:
    """Raises IdentityError, naming both, where a folder has pairs of other features: no matcher takes all of them.

    Args:
        name: of the features; empty: not known yet. features: all of their identity, where it is known.
    """
    for path, pair in pairs_in(folder).items():
        if (name and pair.features.name != name) or (features and pair.features != features):
            raise IdentityError(
                f"{path}: is of {pair.features}, the new pairs are of {features or name}: name another folder, or "
                "replace what is there with --force"
            )


def _check(pair: SavedPair, where: str) -> None:
    inputs = pair.inputs
    if set(inputs) != set(TENSORS):
        raise DataError(f"{where}: expected the arrays {', '.join(TENSORS)}, got {', '.join(sorted(inputs)) or 'none'}")
    for side in (0, 1):
        points, described, size = (inputs[f"{n}{side}"] for n in ("keypoints", "descriptors", "image_size"))
        fits = described.ndim == 3 or (described.ndim == 2 and len(described) == len(points))
        if points.ndim != 2 or points.shape[1:] != (2,) or not fits or size.shape != (2,):
            raise DataError(
                f"{where}: side {side}: expected keypoints (N, 2), descriptors (N, D) or (C, h, w) and image_size "
                f"(2,), got {points.shape}, {described.shape} and {size.shape}"
            )
    for name, value in inputs.items():
        if value.dtype != np.float32 or not np.isfinite(value).all():
            raise DataError(f"{where}: {name}: expected finite float32, got {value.dtype}{_finite(value)}")


def _finite(value: np.ndarray) -> str:
    return "" if value.dtype.kind != "f" or np.isfinite(value).all() else " with values that are not finite"


def _typed(kind: type, value):
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}, got {value!r}")
    return value


def _two(values) -> tuple[int, int]:
    a, b = _typed(list, values)
    return _typed(int, a), _typed(int, b)


def _one_of(names: tuple[str, ...], value) -> str:
    if value not in names:
        raise ValueError(f"kind is one of {', '.join(names)}, got {value!r}")
    return value
