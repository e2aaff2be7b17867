"""A progress bar on stderr."""

from __future__ import annotations

import sys


class ProgressBar:
    """Callable with (done, total). Work of a moment shows nothing; a new total begins anew. Use as a context manager.

    Args:
        quiet: show nothing.
        unit: of what is counted.
    """

    def __init__(self, quiet: bool = False, unit: str = ""):
        self._quiet, self._unit = quiet, unit
        self._bar = None

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_) -> None:
        if self._bar is not None:
            self._bar.close()

    def __call__(self, done: int, total: int) -> None:
        if self._quiet:
            return
        if self._bar is None or total != self._bar.total or done < self._bar.n:
            self._start(total)
        self._bar.update(min(done, total) - self._bar.n)

    def _start(self, total: int) -> None:
        from tqdm import tqdm

        if self._bar is not None:
            self._bar.close()
        # In a log file a line every ten seconds is enough.
        interval = 0.1 if sys.stderr.isatty() else 10
        self._bar = tqdm(total=total, unit=self._unit, file=sys.stderr, mininterval=interval, delay=1, leave=False)
