"""The status of the map in ``/diagnostics``: what it holds, where it is kept, and what keeps it from the disk."""

from __future__ import annotations

import shutil
from pathlib import Path

from ..running_map import MapStatus
from ..types import PairKind, Status
from .diagnostic_report import ERROR, WARN, Report
from .slot import Counts
from .statistics import Statistics

LOW_DISK = 500_000_000
"""Less free space than this beside the map, in bytes, is reported."""


class MapDiagnostics:
    """Remembers the last counts to tell what is new."""

    def __init__(self):
        self._dropped = 0

    def report(self, status: MapStatus, statistics: Statistics, queue: Counts) -> Report:
        """``queue``: counts of the keyframes that wait for loop closure. Hold the lock of ``statistics``."""
        fine = "growing" if status.keyframes else "empty"
        report = Report("map", fine if status.mode == "mapping" else "localising")
        free = _free_bytes(status.path)
        report.add(
            path=status.path,
            mode=status.mode,
            keyframes=status.keyframes,
            first_id=status.first_id,
            stored=status.stored,
            waiting=status.waiting,
            file_megabytes=status.file_bytes / 1e6,
            megabytes=status.memory_bytes / 1e6,
            disk_free_megabytes=free / 1e6,
            last_save=status.last_save,
            last_save_age_s=status.last_save_age_s,
            problem=status.problem,
        )
        self._add_counts(report, statistics, queue)
        if status.problem:
            report.found(ERROR, f"keyframes cannot be stored: {status.problem}")
        if status.warning:
            report.found(WARN, status.warning)
        if free < LOW_DISK and status.mode == "mapping":
            report.found(WARN, f"{free / 1e6:.0f} MB free on the disk of {status.path}")
        if new := max(0, queue.dropped - self._dropped):
            report.found(WARN, f"{new} keyframes skipped by loop closure: it is too slow for the keyframe rate")
        self._dropped = queue.dropped
        return report

    def _add_counts(self, report: Report, s: Statistics, queue: Counts) -> None:
        loops, places = s.statuses[PairKind.LOOP], s.statuses[PairKind.RELOCALISATION]
        report.add(
            keyframes_total=s.keyframes,
            keyframe_rate_hz=s.keyframe_rate.value(),
            loop_candidates=s.candidates,
            loops_gated=s.gated,
            loops_verified=loops[Status.OK] + loops[Status.FAULT_RECOVERED],
            loops_ambiguous=loops[Status.AMBIGUOUS],
            relocalisations_verified=places[Status.OK] + places[Status.FAULT_RECOVERED],
            relocalisations_ambiguous=places[Status.AMBIGUOUS],
            loop_queue=queue.waiting,
            loop_queue_dropped=queue.dropped,
        )


def _free_bytes(path: str) -> float:
    """Free space beside a file; NaN where that is not known, or there is no file."""
    try:
        return float(shutil.disk_usage(Path(path).parent).free) if path else float("nan")
    except OSError:
        return float("nan")
