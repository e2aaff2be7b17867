"""Indexes of global descriptors, ours and those of faiss, and what one of them takes in a process of its own.

    python benchmarks/_global_index.py INDEX NUMBER

adds NUMBER descriptors one by one, as a front-end does, and prints one JSON object:

- ``peak``: most bytes of resident memory (Linux's ``VmHWM``) above those before the first add, for each byte of the
  descriptors in half precision;
- ``first_us``, ``last_us``: CPU time of an add, mean of the first and of the second half: equal where it is constant,
  1 to 3 where each add copies all. Without the time of the system, which hands out fresh memory in pages of sizes, and
  at a cost, that depend on what else the machine did.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import faiss
import numpy as np
from _memory import resident_mib

from vslam_features import registry

DIMENSION = 8448
STEP = 100
"""Descriptors that are made at once: few, so that they do not count as memory of an index."""
_VIEWS = 10  # of a place


def descriptors(count: int) -> Iterator[np.ndarray]:
    """(STEP, D) f32 unit vectors: ten views of each place, whose cosines are about 0.8; always the same."""
    return map(_step, range(count // STEP))


def queries(count: int, number: int) -> np.ndarray:
    """(number, D) more views of places among the first ``count`` descriptors."""
    rng = np.random.default_rng(count)
    d = np.array([_step(int(step))[rng.integers(STEP)] for step in rng.integers(0, count // STEP, number)])
    return _unit(d + _noise(rng, number))


class Ours:
    """An index plug-in."""

    def __init__(self, name: str):
        self.index = registry.get("index", name)()

    def add(self, kf_id: int, descriptor: np.ndarray) -> None:
        self.index.add(kf_id, descriptor)

    def add_batch(self, first: int, d: np.ndarray) -> None:
        self.index.add_batch(range(first, first + len(d)), d)

    def search(self, d: np.ndarray, k: int) -> None:
        self.index.search_batch(d, k, [len(self.index)] * len(d))


class Theirs:
    """An index of faiss, by its own interface."""

    def __init__(self, index):
        self.index = index

    def add(self, kf_id: int, descriptor: np.ndarray) -> None:
        self.index.add(descriptor[None])

    def add_batch(self, first: int, d: np.ndarray) -> None:
        self.index.add(d)

    def search(self, d: np.ndarray, k: int) -> None:
        self.index.search(d, k)


MAKE = {
    "flat": lambda: Ours("flat"),
    "faiss": lambda: Ours("faiss"),
    "IndexFlatIP": lambda: Theirs(faiss.IndexFlatIP(DIMENSION)),
    "IndexScalarQuantizer": lambda: Theirs(
        faiss.IndexScalarQuantizer(DIMENSION, faiss.ScalarQuantizer.QT_fp16, faiss.METRIC_INNER_PRODUCT)
    ),
}


def measure(name: str, count: int) -> dict[str, float]:
    """See above."""
    for _ in descriptors(5 * STEP):  # memory of making them
        pass
    index, times = MAKE[name](), []
    start = resident_mib()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    for step, d in enumerate(descriptors(count)):
        began = _user_s()
        for i, row in enumerate(d):
            index.add(step * STEP + i, row)
        times.append((_user_s() - began) / STEP * 1e6)
    peak = (resident_mib("VmHWM") - start) * 2**20 / (2 * DIMENSION * count)
    half = len(times) // 2
    return {"peak": peak, "first_us": float(np.mean(times[:half])), "last_us": float(np.mean(times[half:]))}


def _user_s() -> float:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_utime


def in_child(name: str, count: int) -> dict[str, float]:
    """``measure`` in a new process."""
    command = [sys.executable, __file__, name, str(count)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(f"{name} of {count} was not measured:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _step(number: int) -> np.ndarray:
    rng = np.random.default_rng((8448, number))
    places = _unit(rng.standard_normal((STEP // _VIEWS, DIMENSION), np.float32))
    return _unit(np.repeat(places, _VIEWS, axis=0) + _noise(rng, STEP))


def _noise(rng: np.random.Generator, count: int) -> np.ndarray:
    return np.float32(0.5) * _unit(rng.standard_normal((count, DIMENSION), np.float32))


def _unit(d: np.ndarray) -> np.ndarray:
    return d / np.linalg.norm(d, axis=1, keepdims=True)


if __name__ == "__main__":
    name, count = sys.argv[1:]
    print(json.dumps(measure(name, int(count))))
