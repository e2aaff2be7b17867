"""Parity records: what the gate found for a model file on a runtime and device, kept in the cache.

One small JSON file each, in ``records/``. A file that cannot be read counts as
missing: the gate runs again and writes it anew.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import time
from dataclasses import dataclass
from pathlib import Path

from .. import __version__
from ..errors import CacheError, ModelError
from ..runtimes.base import Active
from . import golden
from .cache import cache_folder, place
from .card import ModelCard
from .gate import GATE_VERSION, ParityReport

logger = logging.getLogger(__name__)

SCHEMA = 3  # 1: without the cards; 2: without saved


@dataclass(frozen=True)
class Record:
    """What the gate found.

    Args:
        sha256: of the model file. source_sha256: of its weights, by its card.
        runtime, version, provider, device: of the session. precision: that was judged.
        gate: version of the gate and of the golden outputs.
        card: ``card_id`` of the card that was judged.
        reference: ``golden``, ``self`` or the sha256 of the reference's file; ``reference_card``: ``card_id`` of its
            card where it is a file.
        reasons: why it failed. figures: tensor -> relative RMS, max error, cosine.
        pairs: that were compared; saved: so many were given of a user's own saved inputs, beside those that ship.
        time: UTC, ISO 8601. made_with: version of vslam_features.
    """

    sha256: str
    source_sha256: str
    role: str
    name: str
    runtime: str
    version: str
    provider: str
    device: str
    precision: str
    gate: str
    card: str
    reference: str
    reference_card: str
    passed: bool
    reasons: tuple[str, ...]
    figures: dict[str, dict[str, float]]
    pairs: int
    saved: int
    seconds: float
    time: str
    made_with: str = __version__
    schema: int = SCHEMA

    def to_dict(self) -> dict:
        """Plain JSON values."""
        return dataclasses.asdict(self) | {"reasons": list(self.reasons)}

    @property
    def summary(self) -> str:
        """One line for diagnostics and reports."""
        if self.passed:
            own = f" ({self.saved} saved ones among them)" if self.saved else ""
            return f"passed on {self.pairs} pairs{own} against {_reference_text(self.reference)}, {self.time[:10]}"
        return f"failed: {self.reasons[0] if self.reasons else 'no reason kept'}"

    @property
    def objects(self) -> bool:
        """Whether it failed with saved inputs: that the pairs that ship pass is no answer to that."""
        return bool(self.saved) and not self.passed


def find(
    sha256: str, card: ModelCard, active: Active, precision: str = "", folder: Path | None = None
) -> Record | None:
    """The record of a model file on a runtime and device; None where there is none, or only a damaged one.

    Where there is none of this gate, one of another that ``objects``.

    Args:
        precision: that the runtime was told to compute in, where it is not the card's.
        folder: of the records, else the cache's.
    """
    key = _key(sha256, card, active, precision or card.precision)
    path = _folder(folder) / _file_name(key)
    record = _read(path)
    if record is not None and _key_of(record) != key:
        logger.warning("%s: is the record of something else and counts as missing", path)
        record = None
    return record or _objection(key, folder)


def save(
    report: ParityReport,
    sha256: str,
    card: ModelCard,
    active: Active,
    reference: str = "",
    reference_card: ModelCard | None = None,
    folder: Path | None = None,
    saved: int = 0,
) -> Record:
    """Keep what the gate found; one that cannot be written is logged, for the gate has run all the same.

    What was found with saved inputs says more than what is found without: it stays, unless it passed and this failed.

    Args:
        reference: sha256 of the reference's file, or ``self``; empty for golden outputs. ``reference_card``: of it.
        saved: how many pairs are of saved inputs.
    Returns:
        The record that holds from now on, this or the one that stays.
    """
    golden_outputs = report.reference == "golden"
    key = _key(sha256, card, active, report.precision)
    before = find(sha256, card, active, report.precision, folder)
    if not saved and before is not None and before.saved and (report.passed or not before.passed):
        logger.info("%s: the record of %s, which is of saved inputs too, stays", card.name, before.time)
        return before
    record = Record(
        **key, source_sha256=card.source_sha256, role=card.role, name=card.name,
        reference="golden" if golden_outputs else reference or "session",
        reference_card="" if golden_outputs or reference_card is None else card_id(reference_card),
        passed=report.passed, reasons=report.reasons,
        figures={t["name"]: {k: t[k] for k in ("rms", "max_error", "cosine")} for t in report.to_dict()["tensors"]},
        pairs=len(report.rows), saved=saved, seconds=round(report.seconds, 3),
        time=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    )  # fmt: skip
    try:
        path = _folder(folder) / _file_name(key)
        place(path, json.dumps(record.to_dict(), indent=1, sort_keys=True).encode())
    except CacheError as error:
        logger.warning("%s: the parity record cannot be kept, the gate will run again: %s", card.name, error)
    return record


def _objection(key: dict[str, str], folder: Path | None) -> Record | None:
    """The newest record of the same file, runtime and device that objects, by whatever gate."""
    same = {n: v for n, v in key.items() if n != "gate"}
    found = [r for r in records_of(key["sha256"], folder) if r.objects and same.items() <= _key_of(r).items()]
    return max(found, key=lambda r: r.time, default=None)


def predecessor(record: Record, folder: Path | None = None) -> Record | None:
    """The newest record that objects to another file of the same weights on the same runtime and device.

    It is of an engine that was replaced. None where there is none, or where the record is of saved inputs itself.
    """
    if record.saved:
        return None
    names = ("role", "name", "source_sha256", "runtime", "version", "provider", "device", "precision")
    try:
        others = [r for r in map(_read, _folder(folder).glob("*.json")) if r is not None and r.sha256 != record.sha256]
    except (OSError, CacheError):
        return None
    same = (r for r in others if r.objects and all(getattr(r, n) == getattr(record, n) for n in names))
    return max(same, key=lambda r: r.time, default=None)


def records_of(sha256: str, folder: Path | None = None) -> list[Record]:
    """All records of a model file, on whatever runtime and device, of any version of the gate."""
    try:
        paths = sorted(_folder(folder).glob(f"{sha256[:16]}-*.json"))
    except (OSError, CacheError):
        return []
    return [r for r in map(_read, paths) if r is not None and r.sha256 == sha256]


def links(sha256: str, source_sha256: str, folder: Path | None = None) -> bool:
    """True where a passing record, on any runtime, ties a model file to its source weights."""
    return any(r.passed and r.source_sha256 == source_sha256 for r in records_of(sha256, folder))


def find_on_cpu(sha256: str, card: ModelCard, folder: Path | None = None) -> Record | None:
    """A passing record of a model file on any runtime's CPU, by this gate and card; None where there is none."""
    key = {"card": card_id(card), "gate": gate_id(card)}
    for r in records_of(sha256, folder):
        if r.passed and r.device.partition(" ")[0] == "cpu" and {name: getattr(r, name) for name in key} == key:
            return r
    return None


def card_id(card: ModelCard) -> str:
    """Digest of what a card says of how a file is run, and judged: other bindings make another function of the file."""
    values = [card.role, card.inputs, card.outputs, card.preprocessing.id]
    values += [[card.keypoints, card.layouts]] if card.keypoints or card.layouts else []
    values += [{"layers": card.layers, "stops": card.early_stop_layers}] if card.early_stop_layers else []
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def gate_id(card: ModelCard) -> str:
    """Version of the gate and of what it compares a model with."""
    try:
        found = golden.golden_for(card)
    except ModelError:
        found = None
    pairs = f"session {card.features_model}".rstrip()  # of which features a matcher's pairs are
    return f"{GATE_VERSION}-{found.sha256[:16] if found else pairs}"


def _key(sha256: str, card: ModelCard, active: Active, precision: str) -> dict[str, str]:
    return {
        "sha256": sha256, "runtime": active.runtime, "version": active.version, "provider": active.provider,
        "device": active.device, "precision": precision, "gate": gate_id(card),
        "card": card_id(card),
    }  # fmt: skip


def _key_of(record: Record) -> dict[str, str]:
    names = ("sha256", "runtime", "version", "provider", "device", "precision", "gate", "card")
    return {name: getattr(record, name) for name in names}


def _file_name(key: dict[str, str]) -> str:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return f"{key['sha256'][:16]}-{digest[:16]}.json"


def _folder(folder: Path | None) -> Path:
    return Path(folder) if folder is not None else cache_folder("records")


def _read(path: Path) -> Record | None:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(values, dict) and type(schema := values.get("schema")) is int and schema < SCHEMA:
            return None  # of an older version, which said less
        return _record(values)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        logger.warning("%s: is damaged and counts as missing: %s", path, error)
        return None


def _record(values: object) -> Record:
    """Raises ValueError for anything but a whole record."""
    if not isinstance(values, dict) or values.get("schema") != SCHEMA:
        raise ValueError("no record of this schema")
    fields = {f.name: f.type for f in dataclasses.fields(Record)}
    if set(values) != set(fields):
        raise ValueError(f"fields {sorted(set(values) ^ set(fields))} are missing or unknown")
    kinds = {"str": str, "bool": bool, "int": int, "float": (int, float)}
    for name, kind in fields.items():
        if kind in kinds and (
            not isinstance(values[name], kinds[kind]) or isinstance(values[name], bool) != (kind == "bool")
        ):
            raise ValueError(f"{name} is {values[name]!r}")
    reasons, figures = values["reasons"], values["figures"]
    if not isinstance(reasons, list) or not all(isinstance(r, str) for r in reasons):
        raise ValueError(f"reasons are {reasons!r}")
    if not isinstance(figures, dict) or not all(isinstance(f, dict) for f in figures.values()):
        raise ValueError(f"figures are {figures!r}")
    if values["passed"] == bool(reasons):
        raise ValueError("a record passes if and only if it has no reasons")
    return Record(**{**values, "reasons": tuple(reasons)})


def _reference_text(reference: str) -> str:
    words = {"golden": "golden outputs", "self": "itself", "session": "its reference"}
    return words.get(reference, f"model {reference[:12]}")
