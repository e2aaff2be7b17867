"""A map's life in a process of its own: mapped, opened, read at random, copied; time of opening and peak of memory.

    python benchmarks/_map_memory.py write|open|read|copy MAP NUMBER

prints one JSON object; ``peak_mib`` is Linux's ``VmHWM`` of the process from its start on, libraries included.

- ``write``: NUMBER keyframes, each with arrays of its own, through a ``KeyframeMap`` over a ``FileStore`` as the
  front-end does, as fast as it takes them: the queue is full most of the time.
- ``open``: what ``FrontEnd.use_map`` needs of the file: headers, global descriptors into the flat index, loops.
- ``read``: NUMBER random keyframes through the store's cache.
- ``copy``: ``copy_map`` to a file beside it, which is removed again.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from _map_data import MODELS, Keyframes
from _memory import resident_mib

from vslam_features import registry
from vslam_features.maps.copy import copy_map
from vslam_features.maps.file_store import FileStore
from vslam_features.maps.keyframe_map import KeyframeMap


def write(path: Path, count: int) -> dict[str, float]:
    keyframes = Keyframes(own_arrays=True)
    running = KeyframeMap(FileStore(path, MODELS, create=not path.exists()))
    start, done = time.perf_counter(), len(running)
    waited = 0
    for kf_id in range(done, done + count):
        entry = keyframes.entry(kf_id)
        kept = running.add(entry.keyframe)
        running.finish(kept.id, entry.pairs, entry.candidates)
        waited = max(waited, running.store.waiting)
    running.close()
    return {"seconds": time.perf_counter() - start, "most_waiting": waited}


def open_map(path: Path, _: int) -> dict[str, float]:
    flat = registry.get("index", "flat")  # imports the plug-in, which a front-end has done before it opens a map
    start = time.perf_counter()
    running = KeyframeMap(FileStore(path, MODELS, read_only=True))
    headers = time.perf_counter()
    index = flat()
    index.extend(running.global_descriptors())
    descriptors = time.perf_counter()
    loops = running.confirmed_loops()
    end = time.perf_counter()
    found = {"keyframes": len(running), "indexed": len(index), "loops": len(loops), "seconds": end - start}
    running.close()
    return found | {"headers_s": headers - start, "descriptors_s": descriptors - headers, "loops_s": end - descriptors}


def read(path: Path, count: int) -> dict[str, float]:
    running = KeyframeMap(FileStore(path, MODELS, read_only=True))
    start = time.perf_counter()
    for kf_id in np.random.default_rng(0).integers(0, len(running), count):
        running[int(kf_id)]
    seconds = time.perf_counter() - start
    running.close()
    return {"seconds": seconds}


def copy(path: Path, _: int) -> dict[str, float]:
    target = path.with_suffix(".copy")
    start = time.perf_counter()
    try:
        copy_map(path, target)
        return {"seconds": time.perf_counter() - start}
    finally:
        target.unlink(missing_ok=True)


def in_child(what: str, path: Path, number: int = 0) -> dict[str, float]:
    """One of the above in a new process."""
    command = [sys.executable, __file__, what, str(path), str(number)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    if done.returncode:
        raise RuntimeError(f"{what} of {path} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    what, path, number = sys.argv[1:]
    result = {"write": write, "open": open_map, "read": read, "copy": copy}[what](Path(path), int(number))
    print(json.dumps(result | {"peak_mib": resident_mib("VmHWM")}))
