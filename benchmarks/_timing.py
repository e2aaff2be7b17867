"""Interleaved timing: on a shared machine only ratios of runs that follow one another say something."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

WARM_UP = 2
_PAUSE_S = 0.02  # threads of the run before still spin for some milliseconds after it


@dataclass(frozen=True)
class Spread:
    """Median and quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: np.ndarray) -> Spread:
        """Of (n,) values."""
        low, median, high = np.percentile(values, (25, 50, 75))
        return cls(round(float(median), 3), round(float(low), 3), round(float(high), 3))

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


def interleaved(
    runs: dict[str, Callable], items: Sequence, rounds: int, seed: int | None = None
) -> dict[str, np.ndarray]:
    """Wall times A B C, A B C, ...: each round runs all of ``runs`` on the same item.

    Args:
        runs: name -> function of an item.
        items: one after the other, again from the start where there are more rounds.
        seed: each round in another order. For runs of a millisecond, which pay for the memory that the one before gave
            back.
    Returns:
        name -> (rounds,) milliseconds; the first ``WARM_UP`` rounds are left out.
    """
    times, names = {name: [] for name in runs}, list(runs)
    rng = np.random.default_rng(seed)
    for i in range(WARM_UP + rounds):
        if seed is not None:
            rng.shuffle(names)
        for name in names:
            time.sleep(_PAUSE_S)
            start = time.perf_counter()
            runs[name](items[i % len(items)])
            times[name].append((time.perf_counter() - start) * 1e3)
    return {name: np.array(values[WARM_UP:]) for name, values in times.items()}


def fastest_ratio(times: np.ndarray, baseline: np.ndarray, items: int) -> float:
    """Ratio of the sums over the items of the fastest run of each: on a busy machine nearest to what an idle one gives.

    ``times``, ``baseline``: (rounds,) of ``interleaved`` over so many items.
    """
    items = min(items, len(times))
    sums = [sum(values[i::items].min() for i in range(items)) for values in (times, baseline)]
    return round(float(sums[0] / sums[1]), 3)
