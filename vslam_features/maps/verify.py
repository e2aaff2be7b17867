"""Checks every byte of a map file that means something."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

from ..errors import MapFileError
from . import database
from .lock import is_written
from .pages import Progress
from .tables import GLOBAL_DESCRIPTORS, META, SESSIONS, TABLES
from .verify_report import VerifyReport
from .verify_rows import RowChecks, failed

_SMALLEST_ROW = 8
_MAX_STRUCTURE = 100


def verify(path: Path, progress: Progress | None = None) -> VerifyReport:
    """Check a map. A file that cannot be opened is a report as well.

    Keyframes that a writer adds meanwhile are not looked at, and it is not held up for longer than one row takes.

    Args:
        progress: called with (rows done, rows in all).
    Raises:
        MapError: the file cannot be read for a reason that is no damage, such as a lock that somebody holds.
    """
    path = Path(path)
    report = VerifyReport(path)
    try:
        report.nbytes = path.stat().st_size
        connection = database.open_for_reading(path)
    except (MapFileError, OSError) as error:
        report.damage("", None, error)
        return report
    with contextlib.closing(connection):
        checks = RowChecks(connection, report)
        _count(connection, report, checks)
        _check_structure(connection, report)
        checks.run(progress)
    return report


def _count(connection: sqlite3.Connection, report: VerifyReport, checks: RowChecks) -> None:
    """How many rows there must be: by ``meta``, or where that is damaged by the tables themselves."""
    report.rows = dict.fromkeys((t.name for t in TABLES), 0)
    report.rows[META.name] = 1
    with contextlib.suppress(*database.FAILURES):
        connection.execute("BEGIN")  # all of one moment
    meta = checks.meta()
    counters = {n: n for n in ("keyframes", "global_descriptors", "matches", "loops")} | {"features": "keyframes"}
    for table in TABLES:
        found = _ask(connection, report, table.name, f"SELECT count(*), min(id), max(id) FROM {table.name}")
        found = found[0] if found else None
        there, first, last = found if found else (0, None, None)
        end = there if table is SESSIONS or last is None else last + 1
        wanted = meta[counters[table.name]] if meta and table.name in counters else end
        if not 0 <= wanted <= report.nbytes // _SMALLEST_ROW:
            report.damage(table.name, None, f"{wanted} rows are more than the file can hold")
            wanted = there
        gaps = there > 0 and table not in (GLOBAL_DESCRIPTORS, SESSIONS) and (first, end) != (0, wanted)
        if found and (there != wanted or gaps):
            ids = f", ids {first} to {last}" if there else ""
            report.damage(table.name, None, f"{wanted} rows expected, got {there}{ids}")
        report.rows[table.name] = wanted
    with contextlib.suppress(*database.FAILURES):
        connection.execute("COMMIT")


def _check_structure(connection: sqlite3.Connection, report: VerifyReport) -> None:
    if is_written(report.path):
        report.notes.append("a process writes to the map: SQLite's own check of its pages was left out")
        return
    for line in _ask(connection, report, "", f"PRAGMA integrity_check({_MAX_STRUCTURE})"):
        if line != ("ok",):
            report.damage("", None, "; ".join(str(line[0]).split("\n")))
    for table, row, parent, _ in _ask(connection, report, "", "PRAGMA foreign_key_check"):
        report.damage(str(table), row, f"refers to a row of {parent} that is missing")


def _ask(connection: sqlite3.Connection, report: VerifyReport, table: str, sql: str) -> list[tuple]:
    try:
        return connection.execute(sql).fetchmany(_MAX_STRUCTURE)
    except database.FAILURES as error:
        failed(report, table, None, error)
        return []
