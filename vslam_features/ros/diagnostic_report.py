"""One status of ``/diagnostics`` while it is put together."""

from __future__ import annotations

import math

from diagnostic_msgs.msg import DiagnosticStatus, KeyValue

from .logs import encodable

OK, WARN, ERROR = DiagnosticStatus.OK, DiagnosticStatus.WARN, DiagnosticStatus.ERROR


class Report:
    """A status that grows worse as findings come in.

    The message joins the findings, the worst level wins.
    """

    def __init__(self, name: str, fine: str):
        self.level, self._name, self._fine = OK, name, fine
        self._findings: list[str] = []
        self._values: list[KeyValue] = []

    def found(self, level: bytes, text: str) -> None:
        """Something that a person should know."""
        self.level = max(self.level, level)
        self._findings.append(text)

    def add(self, **values) -> None:
        """Key-value pairs; floats are shortened."""
        self._values += [KeyValue(key=k, value=_text(v)) for k, v in values.items()]

    def message(self, prefix: str) -> DiagnosticStatus:
        """The status under the node's name."""
        return DiagnosticStatus(
            level=self.level,
            name=f"{prefix}: {self._name}",
            message=encodable("; ".join(self._findings) or self._fine),
            hardware_id=prefix,
            values=self._values,
        )


def _text(value) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.3f}"
    return encodable(str(value))
