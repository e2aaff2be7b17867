"""Faults to order, the record of calls, and the loud end of a program that broke a rule of CUDA or TensorRT."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import Counter


class Misuse(BaseException):
    """The program broke a rule that a real GPU answers with a crash or with wrong numbers.

    No ``Exception``, so that no handler in the code under test takes it for an error of the library.
    """


class Faults:
    """What fails, from ``VSLAM_FAKE_FAULTS`` (JSON) or ``set``: name of a call -> which call of it.

    A value is ``true`` (every call), a number (that call, from 1), a list of numbers, or
    ``{"at": number or list, "error": "cudaErrorIllegalAddress", "sticky": true}``. The name ``cuda_call`` counts over
    all functions of CUDA together. ``nan_inputs``, ``zero_inputs`` and ``drop_matches`` change results, see ``spoil``.
    """

    def __init__(self):
        self._lock = threading.RLock()
        self.clear()
        text = os.environ.get("VSLAM_FAKE_FAULTS")
        if text:
            self.set(**json.loads(text))

    def clear(self) -> None:
        """No faults, and no call counted."""
        with self._lock:
            self.wanted, self.counts, self.sticky = {}, Counter(), None
            self.misuses: list[str] = []

    def set(self, **wanted) -> None:
        """Order faults; counting starts anew."""
        with self._lock:
            self.wanted, self.sticky = dict(wanted), None
            self.counts.clear()

    def hit(self, name: str, cuda: bool = False) -> dict | None:
        """Count a call; how it shall fail, or None."""
        with self._lock:
            names = (name, "cuda_call") if cuda else (name,)
            found = None
            for each in names:
                self.counts[each] += 1
                wanted = self.wanted.get(each, 0)
                spec = wanted if isinstance(wanted, dict) else {"at": wanted}
                at = spec.get("at", True)
                if at is True or (at and self.counts[each] in (at if isinstance(at, list) else [at])):
                    found = spec
            return found

    def value(self, name: str, default=None):
        """A fault that changes results."""
        return self.wanted.get(name, default)


FAULTS = Faults()


def misuse(text: str) -> Misuse:
    """Record and print it, for it may be lost in a thread or a child process, and give what to raise."""
    FAULTS.misuses.append(text)
    print(f"fake GPU: {text}", file=sys.stderr, flush=True)
    return Misuse(text)
