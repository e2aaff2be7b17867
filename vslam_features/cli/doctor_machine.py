"""What ``doctor`` says of the computer: processors, memory, clock, and the power mode of a Jetson."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from ..runtimes.hardware import cpu_name, usable_cpus
from .check import OK, WARN, Check

ROOT = Path("/")
_MINIMUM_GB, _FREE_GB = 2.0, 0.5
_RELEASED = 1_767_225_600  # 2026-01-01 UTC: no clock that was ever set is before this version


def check_machine(root: Path = ROOT) -> Iterator[Check]:
    """Cores, memory, swap, and how the cores are clocked."""
    cores, memory = usable_cpus(), _memory(root)
    total, free, swap = (memory.get(name, 0) / 2**20 for name in ("MemTotal", "MemAvailable", "SwapTotal"))
    limit = _container_limit_gb(root)
    text = f"{cores} cores ({cpu_name()}), {total:.1f} GB of memory, {free:.1f} free, {swap:.1f} of swap"
    if limit and limit < total:
        text, total = f"{text}, of which this container may use {limit:.1f} GB", limit
    if cores < 2 or total < _MINIMUM_GB:
        yield Check(WARN, "machine", text, "2 cores and 2 GB are the least for live images")
    elif free < _FREE_GB:
        yield Check(WARN, "machine", text, "end other programs, or add swap: the kernel kills who asks for more")
    else:
        yield Check(OK, "machine", text)
    slow = _slow_governors(root)
    if slow:
        fix = "echo performance | sudo tee /sys/devices/system/cpu/cpu*/cpufreq/scaling_governor"
        yield Check(WARN, "cpu clock", f"governor powersave on {slow} cores: they stay at their lowest clock", fix)


def check_clock(now: float | None = None) -> Iterator[Check]:
    """A robot without a battery for its clock starts in the past; stamps and sessions of maps then lie."""
    now = time.time() if now is None else now
    text = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    if now < _RELEASED:
        fix = "set the clock (timedatectl, chrony), and start the node after time-sync.target"
        yield Check(WARN, "clock", f"{text}, which is before this version was made", fix)
    else:
        yield Check(OK, "clock", text)


def check_jetson(root: Path = ROOT) -> Iterator[Check]:
    """JetPack and power mode; nothing where this is no Jetson."""
    try:
        release = (root / "etc/nv_tegra_release").read_text(errors="replace")
    except OSError:
        return
    found = re.search(r"R(\d+) \(release\), REVISION: ([\d.]+)", release)
    major = int(found[1]) if found else 0
    text = f"L4T {found[1]}.{found[2]}" if found else f"L4T {release.strip()[:60]!r}"
    if major == 36:
        yield Check(OK, "jetson", f"{text} (JetPack 6)")
    else:
        yield Check(WARN, "jetson", text, "meant for JetPack 6, which is L4T 36; see docs/deployment.md")
    try:
        said = subprocess.run(["nvpmodel", "-q"], capture_output=True, text=True, timeout=5).stdout
    except (OSError, subprocess.SubprocessError) as error:
        yield Check(WARN, "power mode", f"nvpmodel -q gave no answer: {error}", "look at it by hand: sudo nvpmodel -q")
        return
    mode = re.search(r"NV Power Mode:\s*(\S+)", said)
    if mode is None:
        yield Check(WARN, "power mode", "nvpmodel -q names no mode", "look at it by hand: sudo nvpmodel -q")
    elif mode[1].upper().startswith("MAXN"):
        yield Check(OK, "power mode", f"{mode[1]}; 'sudo jetson_clocks' keeps the clocks at their highest")
    else:
        fix = "'sudo nvpmodel -p --verbose' lists the modes, 'sudo nvpmodel -m N' sets one; fine where power is scarce"
        yield Check(WARN, "power mode", f"{mode[1]}: processors and GPU are slowed down to save power", fix)


def _memory(root: Path) -> dict[str, int]:
    """Kilobytes, by the names of ``/proc/meminfo``."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:  # not Linux
        return {"MemTotal": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 10}
    pairs = (re.match(r"(\w+):\s+(\d+)", line) for line in lines)
    return {m[1]: int(m[2]) for m in pairs if m}


def _container_limit_gb(root: Path) -> float:
    """0: none."""
    try:
        text = (root / "sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return 0.0
    return int(text) / 2**30 if text.isdecimal() else 0.0


def _slow_governors(root: Path) -> int:
    """Cores that stay slow. With the P-state drivers ``powersave`` only means that the hardware chooses."""
    count = 0
    for folder in (root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq"):
        try:
            governor, driver = ((folder / name).read_text().strip() for name in ("scaling_governor", "scaling_driver"))
        except OSError:
            continue
        count += governor == "powersave" and "pstate" not in driver
    return count
