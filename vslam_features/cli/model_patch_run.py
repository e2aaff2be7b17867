"""A patched file against the file that it was made from, both on ONNX Runtime, before it is placed."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .. import registry
from ..artifacts.binding import Binding
from ..artifacts.card import ModelCard, read_card
from ..artifacts.cases import Case, shipped_cases
from ..artifacts.dense_cases import Describe, dense_cases
from ..artifacts.gate import ParityReport, run_gate
from ..artifacts.store import locate, model_path
from ..errors import ConfigError, DataError, ExportError, ModelError
from ..runtimes.base import LoadRequest, Session

logger = logging.getLogger(__name__)
_LIMIT_S = 600.0  # after which no further pair is begun


@dataclass(frozen=True)
class PlainRun:
    """A model before it was patched, and pairs that ship, whatever is known of their outputs.

    ``inputs`` and ``outputs``: of a run of the first pair, by our tensor names.
    """

    run: Callable[[dict], dict]
    cases: tuple[Case, ...]
    outputs: dict[str, np.ndarray]

    @property
    def inputs(self) -> dict[str, np.ndarray]:
        return self.cases[0].runs[0]

    @classmethod
    def of(cls, path: Path, card: ModelCard) -> PlainRun:
        """Raises RuntimeMissingError: ONNX Runtime is not here; ModelError, DataError: the file does not run."""
        binding = Binding(load(path), card, str(path))
        binding.require()
        if card.role == "matcher" and binding.dense:
            cases = dense_cases(_describe(path, card), binding.map_shape("descriptors0"))
        else:
            dim = binding.channels("descriptors0") if card.role == "matcher" else None
            cases = shipped_cases(card, dim or 64)
        return cls(
            binding.run, tuple(Case(case.name, case.runs) for case in cases), binding.run(dict(cases[0].runs[0]))
        )

    def compare(self, patched: Path, card: ModelCard, precision: str) -> ParityReport:
        """Run all pairs; the patched file must compute what this one does, within the limits of the precision.

        Args:
            card: of the patched file.
        Raises:
            ExportError: it does not run.
        """
        try:
            binding = Binding(load(patched), card, str(patched))
        except ModelError as error:
            raise ExportError(f"the patched file does not run: {error}; nothing was written") from error
        progress = _told if sys.stderr.isatty() else None
        report = run_gate(binding.run, self.cases, card, self.run, progress, _LIMIT_S, precision)
        if progress:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
        return report


def _describe(path: Path, card: ModelCard) -> Describe | None:
    """Maps of pictures by a matcher's features model, beside its file or in the cache; None where it is not there."""
    beside = path.with_name(model_path(card.features_model, "fp32").name)
    for model in (str(beside), card.features_model) if card.features_model else ():
        try:
            found = locate(model, "fp32")
            features = Binding(load(found), read_card(found), str(found))
            features.require()
        except (ModelError, ConfigError) as error:  # ConfigError: its name is none of the registry
            logger.info("no maps by '%s': %s", model, error)
            continue
        return lambda image: features.run({"image": features.card.preprocessing.apply(image)})["descriptors"]
    return None


def load(path: Path) -> Session:
    """A session of a file on ONNX Runtime's CPU."""
    return registry.get("runtime", "onnxruntime")().load(path, LoadRequest())


def plain_run(path: Path, card: ModelCard) -> PlainRun | None:
    """None, with the reason on stderr, where the plain file cannot be run here: the other is proved to be valid."""
    try:
        return PlainRun.of(path, card)
    except (ModelError, DataError) as error:
        print(f"warning: not run, and not compared with the plain file: {error}", file=sys.stderr)
        return None


def differences(report: ParityReport) -> list[str]:
    """What is wrong with the patched file; that no pair proves anything, or that time ran out, is not."""
    if any(row.problems for row in report.rows):
        return list(report.reasons)
    return list(report.reasons) if proves(report) and not report.unfinished else []


def proves(report: ParityReport) -> bool:
    """Whether there is a pair whose agreement says something."""
    return any(row.evidence for row in report.rows)


def compared(report: ParityReport) -> str:
    """In one line, for people and for the card of the patched file."""
    pairs = f"{len(report.rows)} pairs"
    if not proves(report):
        return f"{pairs}, which prove nothing"
    text = [pairs]
    counts = [row.comparison.matches for row in report.rows if row.comparison and row.comparison.matches]
    if counts:
        plain, got = (sum(column) for column in zip(*counts))
        agreed = [r.comparison.agreement for r in report.rows if r.comparison and r.comparison.agreement is not None]
        text.append(f"{got} matches of {plain}, {min(agreed):.1%} equal on the worst")
    text += [f"{tensor.name} {tensor.rms:.1e} off" for tensor in report.tensors]
    return ", ".join(text)


def _told(text: str) -> None:
    print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
