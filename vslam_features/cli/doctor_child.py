"""What ``doctor`` asks of libraries that may hang or crash: child processes with a time limit that answer in JSON."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from ..errors import VslamFeaturesError


class ChildError(VslamFeaturesError):
    """A child gave no answer: it crashed, failed or took too long."""


class Child:
    """``package.module:function`` in a process of its own, from now on; its last line on stdout is the answer.

    Args:
        function: finds ``question`` by :func:`question`, and gives its answer to :func:`answer`.
        question: plain JSON values.
    """

    def __init__(self, function: str, question: object = None):
        self._name, self._start, self._answer = function.partition(":")[0].rpartition(".")[2], time.monotonic(), None
        command = [sys.executable, str(Path(__file__).with_name("child.py")), str(os.getpid()), function]
        self._process = subprocess.Popen(
            [*command, json.dumps(question)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    def result(self, limit_s: float = 20.0) -> dict:
        """The answer, ``limit_s`` after the start at the latest. Raises ChildError."""
        if self._answer is None:
            try:
                remaining = max(0.1, self._start + limit_s - time.monotonic())
                self._answer = self._process.communicate(timeout=remaining)
            except subprocess.TimeoutExpired:
                self.end()
                raise ChildError(f"{self._name}: no answer within {limit_s:g} s") from None
        out, err = (part.decode(errors="replace").strip() for part in self._answer)
        code = self._process.returncode
        if code < 0:
            raise ChildError(f"{self._name}: crashed with {signal.Signals(-code).name}{_last(err)}")
        if code > 0:
            raise ChildError(f"{self._name}: ended with exit code {code}{_last(err)}")
        try:
            return json.loads(out.splitlines()[-1])  # libraries may have printed something before
        except (IndexError, ValueError) as error:
            raise ChildError(f"{self._name}: gave no answer{_last(err)}") from error

    def end(self) -> None:
        """Kill it, with what it started, where it still runs."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)  # it leads a session of its own
            self._process.wait()
        for stream in (self._process.stdout, self._process.stderr):
            stream.close()


def _last(text: str) -> str:
    lines = text.splitlines()
    return f": {lines[-1]}" if lines else ""


def question():
    """In a child: what its parent asks."""
    return json.loads(sys.argv[1])


def answer(values: dict) -> int:
    """In a child: print the answer; the exit code."""
    print(json.dumps(values), flush=True)
    return 0
