"""Which GPUs there are, from ``VSLAM_FAKE_GPU``, and which one a thread uses."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass

_DEFAULT = "NVIDIA Orin;8.7;540.4.0"
_CUDA_OF_DRIVER = {535: 12020, 540: 12060, 545: 12030, 550: 12040, 560: 12060, 570: 12080, 575: 12090, 580: 13000}


@dataclass(frozen=True)
class Gpu:
    """One GPU: ``capability`` is (major, minor), ``driver`` the CUDA version of its driver, e.g. 12060."""

    name: str
    capability: tuple[int, int]
    driver: int
    memory_mb: int


def gpus() -> list[Gpu]:
    """``name;capability;driver[;memory in MB]``, several with ``|`` between; read at every call.

    An empty text is a machine with a driver and no GPU, ``no driver`` one without a driver.
    """
    text = os.environ.get("VSLAM_FAKE_GPU", _DEFAULT)
    if text in ("", "no driver"):
        return []
    return [_gpu(part) for part in text.split("|")]


def has_driver() -> bool:
    """False on a machine where the driver of NVIDIA is not installed."""
    return os.environ.get("VSLAM_FAKE_GPU") != "no driver"


def driver_version() -> int:
    """As ``cudaDriverGetVersion`` gives it: 0 without a driver."""
    found = gpus()
    return found[0].driver if found else 12060 if has_driver() else 0


def runtime_version() -> int:
    """As ``cudaRuntimeGetVersion`` gives it: ``VSLAM_FAKE_CUDA`` ("12.6"), else that of the TensorRT asked for."""
    default = "13.0" if os.environ.get("VSLAM_FAKE_TENSORRT", "10").startswith("11") else "12.6"
    return _version(os.environ.get("VSLAM_FAKE_CUDA", default))


def cuda_python() -> tuple[int, int]:
    """Release of cuda-python: ``VSLAM_FAKE_CUDA_PYTHON``, else 12.9, which has the old module and the new one."""
    major, minor = os.environ.get("VSLAM_FAKE_CUDA_PYTHON", "12.9").split(".")[:2]
    return int(major), int(minor)


class _Current(threading.local):
    index = 0


CURRENT = _Current()  # every thread starts on GPU 0, whatever the others chose


def current() -> int:
    """Index of the GPU that this thread uses."""
    return CURRENT.index


def _gpu(text: str) -> Gpu:
    name, capability, driver, *memory = text.split(";")
    major, minor = capability.split(".")
    return Gpu(name, (int(major), int(minor)), _version(driver), int(memory[0]) if memory else 7620)


def _version(text: str) -> int:
    parts = [int(part) for part in text.split(".")]
    if len(parts) == 1:
        return parts[0]
    if parts[0] >= 100:  # a number of the driver itself
        return _CUDA_OF_DRIVER[parts[0]]
    return parts[0] * 1000 + parts[1] * 10
