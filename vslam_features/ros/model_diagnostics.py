"""Statuses of the learned models: what each runs on, who verified it, and what went wrong."""

from __future__ import annotations

import dataclasses

from ..health import Health
from .diagnostic_report import ERROR, WARN, Report


class ModelDiagnostics:
    """Builds one report a model; remembers the last counts to tell what is new."""

    def __init__(self):
        self._last: dict[tuple[str, str], dict[str, int]] = {}

    def reports(self, health: list[Health], warning: str) -> list[Report]:
        """``warning``: what runs instead of what was configured, and why; empty where all is as asked."""
        verified = "verified" if all(h.linked for h in health) else "not all are verified"
        summary = Report("models", verified if health else "none in use")
        summary.add(instead=warning)
        if warning:
            summary.found(WARN, warning)
        return [summary, *(self._model(h) for h in health)]

    def _model(self, h: Health) -> Report:
        report = Report(f"model {h.name}", f"running on {h.runtime}")
        counts = dataclasses.asdict(h.counts)
        report.add(
            role=h.role,
            file=h.file,
            engine_id=h.sha256[:16],
            precision=h.precision,
            runtime=h.runtime,
            device=h.device,
            verified=h.verified,
            linked=h.linked,
            note=h.note,
            fallback=h.fallback,
            **counts,
            last_fault=h.last_fault,
        )
        if h.note:
            report.found(WARN, h.note)
        if not h.linked:
            report.found(WARN, f"runs unverified: {h.verified}")
        last = self._last.get((h.role, h.name), {})
        new = {name: value - last.get(name, 0) for name, value in counts.items()}
        self._last[h.role, h.name] = counts
        if new["lost"]:
            report.found(ERROR, f"{new['lost']} runs failed, and no fallback made them good: {h.last_fault}")
        elif faults := new["non_finite"] + new["errors"] + new["empty"]:
            report.found(WARN, f"{faults} runs failed and were repeated on the fallback: {h.last_fault}")
        return report
