"""Child processes that are watched while they run and ended together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from ..errors import VslamFeaturesError


class ProcessError(VslamFeaturesError):
    """A process ended early or badly."""


class Processes:
    """Python functions as processes, each with a log file. Use as a context manager: none outlives it.

    Args:
        logs: folder of the log files.
        env: the whole environment of the children.
    """

    def __init__(self, logs: Path, env: dict[str, str]):
        self._logs, self._env = logs, env
        self._running: dict[str, subprocess.Popen] = {}

    def __enter__(self) -> Processes:
        self._logs.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_) -> None:
        try:
            for process in self._running.values():
                process.send_signal(signal.SIGINT)
            for process in self._running.values():
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    break
        finally:  # also after a second Ctrl-C
            for process in self._running.values():
                process.kill()
                process.wait()

    def start(self, name: str, function: str, *arguments: str) -> int:
        """Call ``package.module:function``, which finds the arguments in ``sys.argv``; the pid."""
        child = [sys.executable, str(Path(__file__).with_name("child.py")), str(os.getpid()), function]
        with open(self._logs / f"{name}.log", "wb") as log:
            self._running[name] = subprocess.Popen(
                [*child, *arguments], env=self._env, stdout=log, stderr=subprocess.STDOUT
            )
        return self._running[name].pid

    def ended(self, name: str) -> bool:
        """True where a process has ended well. Raises ProcessError where any process ended badly."""
        for other, process in self._running.items():
            code = process.poll()
            if code is not None and (code != 0 or other != name):
                raise ProcessError(self._reason(other, code))
        return self._running[name].poll() == 0

    def stop(self, name: str, timeout_s: float) -> None:
        """SIGINT and wait. Raises ProcessError where it does not end with 0 in time."""
        process = self._running.pop(name)
        process.send_signal(signal.SIGINT)
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise ProcessError(f"{name} did not stop within {timeout_s:g} s of SIGINT; see {self._log(name)}") from None
        if code != 0:
            raise ProcessError(self._reason(name, code))

    def forget(self, name: str) -> None:
        """A process that has ended is no longer watched."""
        self._running.pop(name)

    def _log(self, name: str) -> Path:
        return self._logs / f"{name}.log"

    def _reason(self, name: str, code: int) -> str:
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        tail = self._log(name).read_text(errors="replace").splitlines()[-5:]
        last = "".join(f"\n  | {line}" for line in tail) or "\n  | (no output)"
        return f"{name} {how}; the end of {self._log(name)}:{last}"
