"""Inputs on which a model failed, kept as files that ``models verify --inputs`` replays.

A file is an ``.npz`` without pickles: arrays ``input/<tensor>`` and
``output/<tensor>`` and ``meta``, a JSON text. Faults of the same kind differ in
numbers and addresses only. Where the folder is full the oldest go first, but
the first of each kind last: it shows how a fault began.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .. import __version__
from ..errors import CacheError, DataError
from . import saved_pairs
from .cache import place
from .npz import npz_bytes, read_arrays

logger = logging.getLogger(__name__)

INTERVAL_S = 10.0
KINDS = 10
"""Most kinds of which one is written in an interval: messages may differ in more than numbers and addresses."""

_NUMBER = re.compile(r"0x[0-9a-f]+|\b(?=[a-f]*[0-9])[0-9a-f]{6,}\b|[0-9]+(\.[0-9]+)?(e[+-]?[0-9]+)?", re.IGNORECASE)
_NAME = re.compile(r"(?P<time>\d{8}T\d{6}\.\d{6}Z)-.*-(?P<kind>[0-9a-f]{8})(?P<first>-first)?\.npz")


@dataclass(frozen=True)
class Incident:
    """A model's failed run. ``inputs``, ``outputs`` (empty where it returned none): our tensor name -> array."""

    path: Path
    role: str
    name: str
    sha256: str
    runtime: str
    fault: str
    time: str
    inputs: dict[str, np.ndarray]
    outputs: dict[str, np.ndarray]


class Incidents:
    """A folder of incidents, bounded in number and size. Safe to call from several threads.

    Args:
        folder: made at the first fault.
        max_count: files kept; 0: none is written.
        max_mb: their size together.
        interval_s: in this time not more than one of the same kind of fault is written, and ``KINDS`` in all.

    Attributes:
        skipped: faults that were not written, for being too frequent, too large, or disabled.
        failed: faults that could not be written (disk full, no permission).
    """

    def __init__(self, folder: Path, max_count: int = 20, max_mb: float = 50, interval_s: float = INTERVAL_S):
        self.folder, self.max_count, self.max_bytes = Path(folder), max_count, int(max_mb * 2**20)
        self.interval_s = interval_s
        self.skipped = self.failed = 0
        self._last: dict[str, float] = {}
        self._lock = threading.Lock()

    def save(self, role: str, name: str, sha256: str, runtime: str, fault: str, inputs: dict, outputs: dict | None):
        """Keep a failed run.

        Args:
            inputs, outputs: our tensor name -> array.
        Returns:
            The file, or None where it was not written; never raises for want of disk.
        """
        with self._lock:
            kind = _kind(role, sha256, fault)
            now = time.monotonic()
            self._last = {k: t for k, t in self._last.items() if now - t < self.interval_s}
            if self.max_count <= 0 or kind in self._last or len(self._last) >= KINDS:
                self.skipped += 1
                return None
            self._last[kind] = now
            stamp = time.time()
            meta = {
                "role": role, "name": name, "sha256": sha256, "runtime": runtime, "fault": fault,
                "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(stamp)), "version": __version__,
            }  # fmt: skip
            arrays = {f"input/{k}": np.asarray(v) for k, v in inputs.items()}
            arrays |= {f"output/{k}": np.asarray(v) for k, v in (outputs or {}).items()}
            size = sum(a.nbytes for a in arrays.values())
            if size > self.max_bytes:
                self.skipped += 1
                logger.warning("%s: the failing input of %.1f MB exceeds the limit and is not kept", name, size / 2**20)
                return None
            try:
                return self._write(_file_stem(stamp, role, name), kind, meta, arrays)
            except (OSError, CacheError, ValueError) as error:  # ValueError: an array of objects
                self.failed += 1
                logger.error("%s: the failing input cannot be kept in %s: %s", name, self.folder, error)
                return None

    def files(self) -> list[Path]:
        """The incidents there are, oldest first."""
        if not self.folder.is_dir():
            return []
        return sorted(p for p in self.folder.iterdir() if _NAME.fullmatch(p.name))

    def _write(self, stem: str, kind: str, meta: dict, arrays: dict) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        data = npz_bytes(meta, arrays)
        seen = {_NAME.fullmatch(p.name)["kind"] for p in self.files()}
        path = self.folder / f"{stem}-{kind}{'' if kind in seen else '-first'}.npz"
        self._make_room(len(data))
        return place(path, data)

    def _make_room(self, size: int) -> None:
        kept = [(p, p.stat().st_size) for p in self.files()]
        kept.sort(key=lambda item: (_NAME.fullmatch(item[0].name)["first"] is not None, item[0].name))
        total = sum(s for _, s in kept)
        while kept and (len(kept) >= self.max_count or total + size > self.max_bytes):
            path, freed = kept.pop(0)
            path.unlink(missing_ok=True)
            total -= freed


def load(path: Path) -> Incident:
    """Read an incident. Raises DataError naming the file where it is damaged or none."""
    arrays = read_arrays(path)
    try:
        meta = json.loads(str(arrays.pop("meta")))
        texts = {f: str(meta[f]) for f in ("role", "name", "sha256", "runtime", "fault", "time")}
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path}: is no incident, its description lacks or breaks: {error}") from error
    sides = {"input": {}, "output": {}}
    for key, value in arrays.items():
        side, _, tensor = key.partition("/")
        if side not in sides or not tensor:
            raise DataError(f"{path}: is no incident: unknown array '{key}'")
        sides[side][tensor] = value
    return Incident(Path(path), **texts, inputs=sides["input"], outputs=sides["output"])


def load_inputs(path: Path) -> dict[str, np.ndarray]:
    """A model's inputs, of an incident, a saved pair, or any ``.npz`` whose arrays are the inputs by name.

    Raises DataError.
    """
    arrays = read_arrays(path)
    if pair := saved_pairs.parse(path, arrays):
        return pair.inputs
    if "meta" in arrays:
        return load(path).inputs
    if not arrays:
        raise DataError(f"{path}: holds no arrays; expected a model's inputs by name")
    return arrays


def _kind(role: str, sha256: str, fault: str) -> str:
    """Eight digits, the same for faults of a model that differ in numbers and addresses only."""
    text = _NUMBER.sub("#", fault)
    return f"{zlib.crc32(f'{role} {sha256} {text}'.encode()):08x}"


def _file_stem(stamp: float, role: str, name: str) -> str:
    seconds = time.strftime("%Y%m%dT%H%M%S", time.gmtime(stamp))
    return f"{seconds}.{int(stamp % 1 * 1e6):06d}Z-{role}-{re.sub(r'[^A-Za-z0-9_.]+', '_', name)[:40]}"
