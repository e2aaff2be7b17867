"""Names of the processor and the GPU: a parity record holds for one device."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from functools import cache
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_BOARD = Path("/proc/device-tree/model")
_DRIVER = Path("/proc/driver/nvidia/version")


def usable_cpus() -> int:
    """Logical CPUs that this process may run on, at least 1."""
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return os.cpu_count() or 1


@cache
def cpu_name() -> str:
    """Of the first CPU, e.g. ``Intel(R) Xeon(R) Processor``; on Arm implementer and part, as Linux gives no name."""
    try:
        name = cpuinfo_name(_CPUINFO.read_text(encoding="utf-8", errors="replace"))
    except OSError:  # not Linux
        name = ""
    return name or platform.processor() or platform.machine() or "unknown"


def cpuinfo_name(text: str) -> str:
    """The CPU that the text of ``/proc/cpuinfo`` describes; empty where it tells nothing."""
    first: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        first.setdefault(key.strip(), value.strip())
    if first.get("model name"):
        return first["model name"]
    if "CPU implementer" in first and "CPU part" in first:
        return f"Arm implementer {first['CPU implementer']} part {first['CPU part']}"
    return ""


@cache
def gpu_name() -> str:
    """Model of this machine's NVIDIA GPUs; empty where none is found or they differ.

    Where they differ no name is given, because CUDA and the driver's tool may count devices in different orders.
    """
    try:
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        out = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
        names = {line.strip() for line in out.splitlines() if line.strip()}
    except (OSError, subprocess.SubprocessError):
        names = set()
    if not names:  # a Jetson before JetPack 6 has no nvidia-smi
        try:
            board = _BOARD.read_text(encoding="utf-8", errors="replace").strip("\0\n ")
        except OSError:
            board = ""
        names = {board} if "nvidia" in board.lower() else set()
    return names.pop() if len(names) == 1 else ""


def nvidia_driver() -> str:
    """Version of NVIDIA's kernel module, e.g. ``540.4.0``; empty where it tells none.

    The first line of its file is, for instance, ``NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  540.4.0``.
    """
    try:
        text = _DRIVER.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    line = next((line for line in text.splitlines() if line.startswith("NVRM version")), "")
    found = re.search(r"(?<![\w.])\d+(?:\.\d+)+", line.partition(":")[2])
    return found[0] if found else ""
