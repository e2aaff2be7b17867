"""ITimingCache and IProgressMonitor."""

from __future__ import annotations

import json
import sys

from fake_gpu.device import current, gpus

from .host_memory import host_memory
from .logger import Checked, error
from .versions import VERSION


class ITimingCache:
    """What was measured, for one version and one GPU."""

    def __init__(self, version: str, gpu: str, keys: list[str]):
        self._version, self._gpu, self._keys = version, gpu, keys

    def serialize(self):
        return host_memory(json.dumps({"version": self._version, "gpu": self._gpu, "keys": self._keys}).encode())

    def combine(self, input_cache, ignore_mismatch):
        if input_cache._version != self._version or (input_cache._gpu != self._gpu and not ignore_mismatch):
            error("ITimingCache::combine: the cache was made by another TensorRT or for another device")
            return False
        self._keys += [key for key in input_cache._keys if key not in self._keys]
        return True

    def reset(self):
        self._keys.clear()
        return True


def timing_cache(content: bytes) -> ITimingCache | None:
    """From its bytes, a new one from none; None where they are damaged or of another version."""
    gpu = gpus()[current()].name
    if not content:
        return ITimingCache(VERSION, gpu, [])
    try:
        found = json.loads(content)
        made = ITimingCache(found["version"], found["gpu"], list(found["keys"]))
    except (ValueError, KeyError, TypeError):
        error("createTimingCache: Error Code 1: Serialization (the timing cache is damaged)")
        return None
    if made._version != VERSION:
        error(f"createTimingCache: the timing cache is of TensorRT {made._version}, this is {VERSION}")
        return None
    return made


class IProgressMonitor(metaclass=Checked):
    """To be derived from; ``step_complete`` returns False to stop the build."""

    def __init__(self):
        self._constructed = True

    def phase_start(self, phase_name, parent_phase, num_steps):
        raise RuntimeError('Tried to call pure virtual function "IProgressMonitor::phase_start"')

    def step_complete(self, phase_name, step):
        raise RuntimeError('Tried to call pure virtual function "IProgressMonitor::step_complete"')

    def phase_finish(self, phase_name):
        raise RuntimeError('Tried to call pure virtual function "IProgressMonitor::phase_finish"')


class Stopped(Exception):
    """The monitor asked for it."""


def report(monitor, phases: dict[str, int], parent: str = "Building engine") -> None:
    """Go through all phases of a build. Raises Stopped, also after an exception in the monitor, which is printed."""
    if monitor is None:
        return
    try:
        monitor.phase_start(parent, None, len(phases))
        for done, (name, steps) in enumerate(phases.items()):
            monitor.phase_start(name, parent, steps)
            go_on = all(monitor.step_complete(name, step) for step in range(steps))
            monitor.phase_finish(name)
            if not go_on or not monitor.step_complete(parent, done):
                raise Stopped
    except Stopped:
        raise
    except Exception as failure:
        print(f"[ERROR] Exception caught in step_complete(): {failure}", file=sys.stderr)
        raise Stopped from failure
    finally:
        monitor.phase_finish(parent)
