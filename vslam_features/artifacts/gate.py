"""The parity gate: does a model compute here what its reference computes?

A model may run, quickly and without an error, and still return NaN on some
pairs or no match on one of eight: so it is compared pair by pair before it is
used (``docs/models.md`` has the limits and where they come from).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from ..errors import BackendError, NonFiniteError, VslamFeaturesError
from .card import ModelCard
from .cases import Case, Tensors
from .compare import compare
from .comparison import LIMITS, Comparison, Limits, non_finite, relative_rms
from .stop_check import check_stops

GATE_VERSION = 2  # of cases, measures and limits; records of another are not used
LIMIT_S = 120.0
REFERENCE_NAN = "the reference returned NaN"
Run = Callable[[Tensors], Tensors]


@dataclass(frozen=True)
class Row:
    """A pair. ``comparison``: None where the model or its reference failed; ``problems``: all, in words."""

    name: str
    comparison: Comparison | None
    nan: int
    evidence: bool
    problems: tuple[str, ...]
    note: str = ""


@dataclass(frozen=True)
class TensorRow:
    """A tensor over all pairs: relative RMS, that of the worst pair, largest error, least cosine."""

    name: str
    rms: float
    worst_rms: float
    worst_pair: str
    max_error: float
    cosine: float


@dataclass(frozen=True)
class ParityReport:
    """Outcome of the gate.

    ``reasons``: why it failed, for people; ``reference``: ``golden`` or ``session``; ``unfinished``: the time ran out
    before anything was found, so that the model may well be right; ``emulated``: the precision was imitated in float32,
    so that the outcome is a prediction. ``saved``: so many of the last rows are of a user's saved inputs. ``ran``,
    ``compared_with``: on what the model and its reference ran, in words; ``record``: what became of the parity record;
    ``objection``: why an older one, of saved inputs too, still refuses the model. These five: where the caller tells.
    """

    role: str
    name: str
    precision: str
    reference: str
    rows: tuple[Row, ...]
    tensors: tuple[TensorRow, ...]
    reasons: tuple[str, ...]
    seconds: float
    unfinished: bool = False
    emulated: bool = False
    saved: int = 0
    ran: str = ""
    compared_with: str = ""
    record: str = ""
    objection: str = ""

    @property
    def passed(self) -> bool:
        """True where nothing is beyond its limit and something was proved."""
        return not self.reasons

    @property
    def limits(self) -> Limits:
        """Those of the precision."""
        return LIMITS[self.precision]

    def to_dict(self) -> dict:
        """Plain JSON values (non-finite figures become None)."""
        return _plain(
            {
                "role": self.role,
                "name": self.name,
                "precision": self.precision,
                "emulated": self.emulated,
                "reference": self.reference,
                "passed": self.passed,
                "reasons": list(self.reasons),
                "saved": self.saved,
                "ran": self.ran,
                "compared_with": self.compared_with,
                "record": self.record,
                "objection": self.objection,
                "seconds": round(self.seconds, 3),
                "limits": asdict(self.limits),
                "pairs": [_row_dict(row) for row in self.rows],
                "tensors": [asdict(t) for t in self.tensors],
            }
        )


def run_gate(
    run: Run,
    cases: Sequence[Case],
    card: ModelCard,
    reference_run: Run | None = None,
    progress: Callable[[str], None] | None = None,
    limit_s: float = LIMIT_S,
    precision: str = "",
) -> ParityReport:
    """Run a model on all cases and compare it with their expected outputs, or else with what its reference returns.

    Args:
        run: the model, inputs to outputs by our tensor names. NonFiniteError and BackendError count as its fault.
            A matcher that stops early is also run so that it stops, see ``stop_check.check_stops``.
        reference_run: the same of the reference; needed for cases without expected outputs.
        progress: called with a line of text before each case.
        limit_s: the gate stops, failed, after this time; a single run is not interrupted.
        precision: of ``comparison.LIMITS``, where the runtime computes in less than the card says (a hint).
    """
    precision = precision or card.precision
    start, rows, stopped = time.monotonic(), [], ""
    for i, case in enumerate(cases):
        if time.monotonic() - start > limit_s:
            stopped = (
                f"stopped after {limit_s:g} s with {i} of {len(cases)} pairs done; raise the limit, or use less pairs"
            )
            break
        if progress:
            progress(f"{card.name}: parity pair {i + 1} of {len(cases)} ({case.name})")
        rows.append(_row(run, case, card, reference_run, LIMITS[precision]))
    golden = any(case.expected is not None for case in cases)
    tensors, limits = _tensors(rows), LIMITS[precision]
    reasons = _grouped(rows) + _whole(rows, cases, card)
    reasons += [
        f"all pairs: {t.name} is {t.rms:.2%} RMS off the reference, at most {limits.rms:.1%}"
        for t in tensors
        if not t.rms <= limits.rms
    ]
    if stopped:
        reasons.append(stopped)
    return ParityReport(
        card.role, card.name, precision, "golden" if golden else "session", tuple(rows), tensors, tuple(reasons),
        time.monotonic() - start,
        bool(stopped) and not any(row.problems for row in rows),
        card.emulated,
    )  # fmt: skip


def _row(run: Run, case: Case, card: ModelCard, reference_run: Run | None, limits: Limits) -> Row:
    got, faults = [], []
    for inputs in case.runs:
        try:
            got.append(_copied(run(inputs)))
        except NonFiniteError as error:
            got.append(_copied(error.outputs))
        except BackendError as error:
            faults.append(f"the model failed: {_line(error)}")
        except VslamFeaturesError as error:
            faults.append(f"the model took no such input: {_line(error)}")
    nan = sum(map(non_finite, got))
    if faults:
        return Row(case.name, None, nan, False, tuple(dict.fromkeys(faults)))
    expected, note = _expected(case, reference_run)
    if expected is None:
        return Row(case.name, None, nan, False, (f"{nan} values are NaN or infinite",) if nan else (), note)
    result = compare(card, case.runs, expected, got, limits)
    if card.role == "matcher" and not result.problems:
        result.problems += check_stops(run, card, case.runs[0], got[0], limits)
    return Row(case.name, result, result.nan, result.evidence, tuple(result.problems))


def _expected(case: Case, reference_run: Run | None) -> tuple[Sequence[Tensors] | None, str]:
    """What the reference says of a case; None and why, where it says nothing."""
    if case.expected is not None:
        return case.expected, ""
    if reference_run is None:
        return None, "there is nothing to compare with"
    try:
        expected = [_copied(reference_run(inputs)) for inputs in case.runs]
    except VslamFeaturesError as error:
        return None, f"the reference failed: {_line(error)}"
    return (None, REFERENCE_NAN) if any(map(non_finite, expected)) else (expected, "")


def _grouped(rows: list[Row]) -> list[str]:
    """Problems of pairs in words; the same one of several pairs makes one line."""
    names: dict[str, list[str]] = {}
    for row in rows:
        for problem in dict.fromkeys(row.problems):
            names.setdefault(problem, []).append(row.name)
    return [f"{', '.join(n) if len(n) < 4 else f'{len(n)} of {len(rows)} pairs'}: {text}" for text, n in names.items()]


def _whole(rows: list[Row], cases: Sequence[Case], card: ModelCard) -> list[str]:
    """What is wrong with the gate as a whole."""
    if any(row.evidence or row.problems for row in rows):
        return []
    made_up = "" if card.features_model else " (its card names no 'features_model' whose features they could be)"
    notes = "; ".join(sorted({row.note for row in rows if row.note})) or {
        "matcher": f"the reference itself matches nothing on any pair{made_up}",
        "features": "the reference itself finds no keypoints on any pair",
        "global": "the reference itself gives both pictures of every pair the same descriptor",
    }.get(card.role, "no pair was compared")
    return [f"proves nothing: {notes if cases else 'there are no pairs'}; give other pairs or another reference"]


def _tensors(rows: list[Row]) -> tuple[TensorRow, ...]:
    figures: dict[str, list] = {}
    for row in rows:
        for name, value in (row.comparison.tensors if row.comparison else {}).items():
            figures.setdefault(name, []).append((row.name, value))
    out = []
    for name, values in figures.items():
        pair, worst = max(values, key=lambda item: item[1].rms)
        every = [v for _, v in values]
        cosine, error = min(v.cosine for v in every), max(v.max_error for v in every)
        out.append(TensorRow(name, relative_rms(every), worst.rms, pair, error, cosine))
    return tuple(out)


def _copied(outputs: Tensors) -> Tensors:
    """Runtimes may reuse the memory of outputs at their next run."""
    return {name: np.array(value) for name, value in outputs.items()}


def _row_dict(row: Row) -> dict:
    values = {} if row.comparison is None else asdict(row.comparison)
    return {**values, "name": row.name, "nan": row.nan, "problems": list(row.problems), "note": row.note}


def _line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__


def _plain(value):
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, (bool, str, int)) or value is None:
        return value
    return float(value) if np.isfinite(value) else None
