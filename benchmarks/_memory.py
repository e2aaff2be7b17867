"""Memory of a model in a process of its own, and of a matcher over many pairs of random sizes.

    python benchmarks/_memory.py MODEL ENGINE KEYPOINTS THREADS RUNS DATA

prints one JSON object, MiB of resident memory (Linux's ``VmRSS`` and ``VmHWM``):

- ``loaded``: after all imports, with the model loaded and the images decoded, before the first run;
- ``growth``: peak during the runs minus ``loaded``: what running the model takes;
- ``total``: peak of the process from its start on: what a user sees, libraries and weights included.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

_WARM_UP_SHARE = 1 / 3  # OpenVINO keeps what it compiled for the last 128 shapes


def resident_mib(key: str = "VmRSS") -> float:
    """``VmRSS`` or ``VmHWM`` (peak) of this process, MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {key}: memory is measured on Linux only")


def measure(model: str, engine: str, keypoints: int, threads: int, runs: int, data: Path) -> dict[str, float]:
    """See above; ``engine`` is ``torch`` or a runtime plug-in."""
    import _ours

    images = _ours.images(data, 6)
    if engine == "torch":
        import _upstream

        run = _upstream.load(model, keypoints, threads)
    else:
        run = _ours.load(model, engine, threads, keypoints)
    start, loaded = resident_mib("VmHWM"), resident_mib()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    for i in range(runs):
        run(images[i % len(images)])
    peak = resident_mib("VmHWM")
    values = {"loaded": loaded, "growth": peak - loaded, "total": max(start, peak)}
    return {name: round(value, 1) for name, value in values.items()}


def in_child(model: str, engine: str, keypoints: int, threads: int, runs: int, data: Path) -> dict[str, float]:
    """``measure`` in a new process."""
    command = [sys.executable, __file__, model, engine, *map(str, (keypoints, threads, runs, data))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(f"memory of {model} on {engine} was not measured:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def random_sizes(run, pair, calls: int, seed: int = 0) -> dict[str, float]:
    """Match ``pair`` again and again, each side cut to a random number of keypoints: time and memory.

    Args:
        run: function of a pair of features.
        pair: features; 0, 1, 127 and all of their keypoints are among the sizes.
    Returns:
        ``median_ms``, ``worst_ms`` and ``worst_ratio`` of the two, of the calls after the warm-up (the first third);
        ``cpu_worst_ratio``, the same of CPU time, which other work on the machine changes little; ``warm_mib`` resident
        after the warm-up (which meets the largest pair), ``end_mib`` after the last call and ``growth_mib``, the peak
        of the time between above ``warm_mib``.
    """
    import _ours

    rng = np.random.default_rng(seed)
    sizes = np.stack([rng.integers(0, len(side) + 1, calls) for side in pair], axis=1)
    edges = [[len(side) for side in pair], [0, 127], [1, len(pair[1])], [127, 1], [1, 1], [len(pair[0]), 127]]
    warm_up = max(1, int(_WARM_UP_SHARE * calls))
    sizes[0] = edges[0]
    some = min(len(edges), calls - warm_up)
    sizes[warm_up : warm_up + some] = edges[:some]
    times, cpu, resident = [], [], []
    for n0, n1 in sizes:
        cut = _ours.first(pair[0], n0), _ours.first(pair[1], n1)
        start, start_cpu = time.perf_counter(), time.process_time()
        run(cut)
        times.append((time.perf_counter() - start) * 1e3)
        cpu.append(time.process_time() - start_cpu)
        resident.append(resident_mib())
    warm, later = resident[warm_up - 1], np.array(resident[warm_up:])
    median, worst = float(np.median(times[warm_up:])), float(max(times[warm_up:]))
    values = {
        "calls": calls,
        "median_ms": median,
        "worst_ms": worst,
        "worst_ratio": worst / median,
        "cpu_worst_ratio": max(cpu[warm_up:]) / float(np.median(cpu[warm_up:])),
        "warm_mib": warm,
        "end_mib": float(later[-1]),
        "growth_mib": float(later.max() - warm),
    }
    return {name: round(value, 2) for name, value in values.items()}


if __name__ == "__main__":
    model, engine, keypoints, threads, runs, data = sys.argv[1:]
    print(json.dumps(measure(model, engine, int(keypoints), int(threads), int(runs), Path(data))))
