"""The parity report as plain text."""

from __future__ import annotations

import textwrap
from collections.abc import Callable

from .comparison import Comparison
from .gate import REFERENCE_NAN, ParityReport, Row

WIDTH = 120
_WIDEST_ENGINE = 56

_COLUMNS: dict[str, list[tuple[str, Callable[[Comparison], str]]]] = {
    "features": [
        ("keypoints", lambda c: _counts(c.keypoints)),
        ("matches", lambda c: _counts(c.matches)),
        ("agree", lambda c: _share(c.agreement)),
        ("shift px", lambda c: "-" if c.shift_px is None else f"{c.shift_px:.3f}"),
    ],
    "matcher": [
        ("matches", lambda c: _counts(c.matches)),
        ("ratio", lambda c: _ratio(c.matches)),
        ("agree", lambda c: _share(c.agreement)),
    ],
    "global": [
        ("cosine", lambda c: "-" if c.cosine is None else f"{c.cosine:.7f}"),
        (
            "similarity of the pair",
            lambda c: "-" if c.similarity is None else " / ".join(f"{s:.4f}" for s in c.similarity),
        ),
    ],
}


def table(report: ParityReport) -> str:
    """Pairs, tensors and the verdict; counts are reference / model."""
    columns = _COLUMNS[report.role]
    head = ["pair", "NaN", *(title for title, _ in columns), "result"]
    rows = [
        [row.name, str(row.nan), *("-" if row.comparison is None else text(row.comparison) for _, text in columns)]
        + [_result(row)]
        for row in report.rows
    ]
    limits = report.limits
    precision = f"{report.precision} emulated" if report.emulated else report.precision
    against, _, _ = _reference(report).partition(" on ")
    title = f"{report.name} ({report.role}, {precision}) against {against}"
    lines = [_cut(title, WIDTH - 32) + "; counts are reference / model", ""]
    lines += _aligned([head, *rows])
    if report.tensors:
        head = ["tensor", "rel. RMS", "max error", "cosine", "worst pair", ""]
        figures = [
            [t.name, f"{t.rms:.2e}", f"{t.max_error:.2e}", f"{t.cosine:.7f}", f"{t.worst_rms:.2e}", t.worst_pair]
            for t in report.tensors
        ]
        lines += ["", *_aligned([head, *figures])]
    if report.role == "matcher" and report.rows:
        lines += ["", *_engine_lines(engine_rows(report))]
    others = f"agreement {limits.agreement:.0%}, match counts {limits.counts:.0%}"
    lines += ["", f"limits: RMS {limits.rms:.1%}, {f'cosine {limits.cosine}' if report.role == 'global' else others}"]
    zero = sum(row.comparison is not None and row.comparison.zero for row in report.rows)
    nan = sum(row.nan > 0 for row in report.rows)
    done = len(report.rows)
    verdict = f"{'PASSED' if report.passed else 'FAILED'} in {report.seconds:.1f} s: NaN on {nan} of {done} pairs"
    lines.append(verdict if report.role == "global" else f"{verdict}, no match on {zero} of {done}")
    lines += [_cut(f"  - {reason}", WIDTH) for reason in report.reasons]
    if report.objection:
        lines.append(_cut(f"  - and yet it is refused: it {report.objection}", WIDTH))
    return "\n".join(lines)


def engine_rows(report: ParityReport) -> list[dict]:
    """A matcher's reference and the matcher itself, each in one row as TinyNav's pull request 261 compares engines.

    Two rows of the pairs that ship, and two of saved inputs: ``pairs`` says ``shipped`` or ``saved``. ``engine``: what
    computed them; ``nan`` and ``zero_matches``: [pairs, of how many]; ``matches``: of each pair, None: it told none.
    """
    first = len(report.rows) - report.saved
    sets = ("shipped", report.rows[:first]), ("saved", report.rows[first:])
    return [row for pairs, rows in sets if rows for row in _two_rows(report, pairs, rows)]


def _two_rows(report: ParityReport, pairs: str, rows: tuple[Row, ...]) -> list[dict]:
    compared = [row.comparison for row in rows]
    counts = [(None, None) if c is None or c.matches is None else c.matches for c in compared]
    nan = sum(row.note == REFERENCE_NAN for row in rows), sum(row.nan > 0 for row in rows)
    zero = sum(e == 0 for e, _ in counts), sum(c is not None and c.zero for c in compared)
    of_session = f"reference {report.compared_with}".rstrip()
    reference = of_session if pairs == "saved" else _reference(report).removeprefix("its ")
    return [
        {
            "engine": (reference, report.ran or report.name)[i],
            "pairs": pairs,
            "nan": [nan[i], len(rows)],
            "zero_matches": [zero[i], len(rows)],
            "matches": [pair[i] for pair in counts],
        }
        for i in (0, 1)
    ]


def _engine_lines(rows: list[dict]) -> list[str]:
    cells = [["engine", "pairs", "NaN", "zero-match pairs", ""]]
    for row in rows:
        cells.append(
            [row["engine"], row["pairs"], "{}/{}".format(*row["nan"]), "{}/{}".format(*row["zero_matches"]), ""]
        )
    columns = _aligned(cells, _WIDEST_ENGINE)
    width = max(map(len, columns))
    head = f"{columns[0].ljust(width)}  matches a pair"
    lines = [head, "-" * len(head)]
    for text, row in zip(columns[2:], rows):
        told = ", ".join("-" if n is None else str(n) for n in row["matches"])
        parts = textwrap.wrap(told, WIDTH - width - 2)
        lines += [f"{text.ljust(width)}  {parts[0]}", *(f"{'':{width}}  {part}" for part in parts[1:])]
    return lines


def _reference(report: ParityReport) -> str:
    first, joined = ("its golden outputs", " and ") if report.reference == "golden" else ("its reference", " ")
    return joined.join(filter(None, (first, report.compared_with)))


def _result(row: Row) -> str:
    if row.problems:
        return "FAILED"
    return "ok" if row.evidence else "proves nothing"


def _counts(pair) -> str:
    return "-" if pair is None else f"{pair[0]} / {pair[1]}"


def _ratio(pair) -> str:
    return "-" if not pair or not pair[0] else f"{pair[1] / pair[0]:.3f}"


def _share(value) -> str:
    return "-" if value is None else f"{value:.1%}"


def _aligned(rows: list[list[str]], widest: int = 32) -> list[str]:
    """Columns two spaces apart: the first and the last to the left, the others to the right."""
    rows = [[_cut(cell, widest) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    last = len(widths) - 1
    lines = [
        "  ".join(c.ljust(w) if i in (0, last) else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths))).rstrip()
        for row in rows
    ]
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."
