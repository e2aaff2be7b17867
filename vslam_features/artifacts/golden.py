"""What ships for the parity gate: pairs of pictures, and outputs that the published code gave for them.

``golden/pairs.json`` lists the pictures. ``golden/<model>.npz`` holds arrays
named ``<pair>/<view>/<tensor>`` (of matchers ``<pair>/0/<tensor>``) and
``meta``, a JSON text: ``role``, ``source_sha256``, ``preprocessing`` (its id),
``max_keypoints``, ``features`` (of matchers: the golden file whose keypoints
and descriptors are the inputs) and ``made_with``. Descriptors are stored in
fp16, hence off by 0.03 % at most; as a matcher's inputs they are exact.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources

import cv2
import numpy as np

from ..errors import DataError, ModelFileError
from .card import ModelCard


@dataclass(frozen=True)
class Pair:
    """Two pictures, uint8 (H, W) or (H, W, 3) RGB. ``kind``: ``homography``, ``3-D scene`` or ``different places``."""

    name: str
    kind: str
    images: tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Golden:
    """A golden file. ``outputs``: pair -> outputs of each run, name -> array; ``sha256``: of the file."""

    meta: dict
    outputs: dict[str, tuple[dict[str, np.ndarray], ...]]
    sha256: str


def folder():
    """Where the files are."""
    return resources.files("vslam_features") / "golden"


def pairs() -> list[Pair]:
    """All pairs, in the order of ``pairs.json``. Raises DataError where the installation is damaged."""
    try:
        entries = json.loads((folder() / "pairs.json").read_text(encoding="utf-8"))["pairs"]
        return [Pair(e["name"], e["kind"], tuple(_picture(file) for file in e["files"])) for e in entries]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"pictures of the parity gate cannot be read: {error}; install vslam_features again") from error


def load(name: str) -> Golden | None:
    """The golden file of a model by its name, None where none ships. Raises ModelFileError where it is damaged."""
    path = folder() / f"{name}.npz"
    if not path.is_file():
        return None
    with _opened(path) as data:
        meta, outputs = json.loads(str(data["meta"])), {}
        for key in data.files:
            if key != "meta":
                pair, view, tensor = key.split("/")
                outputs.setdefault(pair, {}).setdefault(int(view), {})[tensor] = _as_output(data[key])
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    return Golden(meta, {p: tuple(views[i] for i in sorted(views)) for p, views in outputs.items()}, sha256)


def golden_for(card: ModelCard) -> Golden | None:
    """The golden outputs that belong to a model, whatever its name: of the same source weights and preprocessing.

    None where none ship. Raises ModelFileError where a file is damaged.
    """
    if not card.source_sha256:
        return None
    wanted = card.role, card.source_sha256, card.preprocessing.id
    for name, meta in _metas(folder()).items():
        if (meta["role"], meta["source_sha256"], meta["preprocessing"]) == wanted:
            return load(name)
    return None


@lru_cache(maxsize=4)
def _metas(where) -> dict[str, dict]:
    """What all golden files of a folder are of, by their names."""
    found = {}
    for path in sorted(where.iterdir(), key=str):
        if path.name.endswith(".npz"):
            with _opened(path) as data:
                found[path.name.removesuffix(".npz")] = json.loads(str(data["meta"]))
    return found


@contextmanager
def _opened(path) -> Iterator[np.lib.npyio.NpzFile]:
    """The arrays of a golden file; what they raise while they are read is a ModelFileError."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as data:
            yield data
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise ModelFileError(f"golden outputs {path}: cannot be read: {error}; install vslam_features again") from error


def _as_output(value: np.ndarray) -> np.ndarray:
    kind = {"f": np.float32, "i": np.int64}.get(value.dtype.kind)
    return value if kind is None else value.astype(kind)


def _picture(file: str) -> np.ndarray:
    image = cv2.imdecode(np.frombuffer((folder() / file).read_bytes(), np.uint8), cv2.IMREAD_UNCHANGED)
    if image is None:
        raise ValueError(f"{file} is no picture")
    return image if image.ndim == 2 else cv2.cvtColor(image, cv2.COLOR_BGR2RGB)
