"""How far TensorRT is: a bar for each phase on a terminal, else a line now and then."""

from __future__ import annotations

import sys
import threading
import time

_INTERVAL_S = 5.0  # between lines


class BuildProgress:
    """Callable with (phase, steps done, steps in all), from any thread. Use as a context manager."""

    def __init__(self):
        self._live = sys.stderr.isatty()
        self._bars: dict[str, object] = {}
        self._last, self._lock = time.monotonic(), threading.Lock()

    def __enter__(self) -> BuildProgress:
        return self

    def __exit__(self, *_) -> None:
        with self._lock:
            for bar in self._bars.values():
                bar.close()
            self._bars.clear()

    def __call__(self, phase: str, done: int, total: int) -> None:
        with self._lock:
            if self._live:
                self._bar(phase, done, total)
            elif time.monotonic() - self._last >= _INTERVAL_S:
                self._last = time.monotonic()
                print(f"  {phase}: {done} of {total}", file=sys.stderr, flush=True)

    def _bar(self, phase: str, done: int, total: int) -> None:
        from tqdm import tqdm

        if phase not in self._bars:
            self._bars[phase] = tqdm(total=total, desc=phase, file=sys.stderr, leave=False)
        bar = self._bars[phase]
        bar.update(done - bar.n)
        if done >= total:
            self._bars.pop(phase).close()
