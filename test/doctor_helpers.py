"""Helpers of the tests of ``doctor``."""

from __future__ import annotations

import os
from pathlib import Path

from vslam_features.cli.doctor_child import ChildError


class Answer:
    """In place of a child: an answer, or none."""

    def __init__(self, facts: dict | str):
        self._facts = facts

    def result(self, limit_s: float = 0.0) -> dict:
        """The facts; a text is what went wrong."""
        if isinstance(self._facts, str):
            raise ChildError(self._facts)
        return self._facts


def module(folder: Path, name: str, source: str, monkeypatch) -> None:
    """A module that children of this test import in place of the installed one."""
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))


def only(checks) -> tuple[str, str, str]:
    """State, text and fix of a single line."""
    (check,) = checks
    assert check.state == "OK" or check.fix, f"{check.text}: says nothing of what to do"
    return check.state, check.text, check.fix
