"""The latest diagnostics of a front-end, read as counts and records. No ROS in here."""

from __future__ import annotations

from ..errors import DataError
from ..replay.run_log import ModelRecord, RunLog

FRAME_COUNTS = ("received", "processed", "dropped", "missing", "waiting", "resets")
MAP_COUNTS = ("loop_queue", "loop_queue_dropped", "keyframes", "first_id", "loops_gated")
MODEL_COUNTS = ("runs", "non_finite", "errors", "empty", "empty_agreed", "recovered", "lost", "incidents")
"""Values that are read as numbers; beside ``faults`` of each part."""

_NOT_CONFIGURED = ("configuring", "failed")
_MODEL = "model "  # and its name: the part of a model
_MODEL_TEXTS = ("role", "precision", "runtime", "device", "verified", "note", "last_fault")


class TopicDiagnostics:
    """What each part of a front-end said last.

    Attributes:
        parts: part -> key -> value, as published.
    """

    def __init__(self):
        self.parts: dict[str, dict[str, str]] = {}

    @property
    def configuring(self) -> bool:
        """The front-end is on its way into the configured state, or did not reach it."""
        return self.parts.get("models", {}).get("state") in _NOT_CONFIGURED

    @property
    def heard(self) -> bool:
        """Anything but that it is being configured."""
        return bool(self.parts.keys() - ({"models"} if self.configuring else set()))

    def set(self, part: str, values: dict[str, str]) -> bool:
        """Take the latest values of a part; True where they tell of a reset. Raises DataError, and changes nothing."""
        counted = {"frames": FRAME_COUNTS, "map": MAP_COUNTS}.get(part, ())
        counted = MODEL_COUNTS if part.startswith(_MODEL) else counted
        for name in (*counted, "faults"):
            text = values.get(name) or "0"
            if not (text.isascii() and text.isdigit() and len(text) < 20):
                raise DataError(f"{part}: {name} must be a count, got '{text[:40]}'")
        known = part == "frames" and part in self.parts
        was_reset = known and int(values.get("resets") or 0) > self.count(part, "resets")
        if part == "models" and values.get("state") not in _NOT_CONFIGURED:
            # Those in use follow; a front-end that was configured anew may use others than before.
            self.parts = {p: v for p, v in self.parts.items() if not p.startswith(_MODEL)}
        self.parts[part] = values
        return was_reset

    def count(self, part: str, name: str) -> int:
        """A value that is a number; 0 where it did not come."""
        return int(self.parts.get(part, {}).get(name) or 0)

    def account(self, log: RunLog) -> None:
        """Enter faults and models into a log."""
        for part, values in self.parts.items():
            if faults := self.count(part, "faults"):
                log.fault_counts[part] = faults
                log.faults.append(("", part, values.get("last_fault", "")))
        log.engines = [self._model(part) for part in self.parts if part.startswith(_MODEL)]
        log.instead = self.parts.get("models", {}).get("instead", "")

    def _model(self, part: str) -> ModelRecord:
        values = self.parts[part]
        counts = {name: self.count(part, name) for name in MODEL_COUNTS}
        texts = {name: values.get(name, "") for name in _MODEL_TEXTS}
        linked = values.get("linked", "true") == "true"
        return ModelRecord(name=part.removeprefix(_MODEL), linked=linked, **texts, **counts)
