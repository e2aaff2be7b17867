"""What ``doctor`` says of how images get from process to process: shared memory and socket buffers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from .check import FAIL, OK, WARN, Check

SHARED_MEMORY, RECEIVE_BUFFER = Path("/dev/shm"), Path("/proc/sys/net/core/rmem_max")
# A participant that finds no room logs "Unable to Register SHM Transport" and goes on by UDP (seen with 64 and 100 MB).
_LEAST = 2  # camera driver and front-end
_PARTICIPANTS = 4  # and something that looks at them, and a command line
_RECEIVE_BYTES = 4 << 20  # a 1280x720 colour image is 2.8 MB, and arrives at once


def check_shared_memory(rmw: str, segment: int, folder: Path = SHARED_MEMORY) -> Iterator[Check]:
    """Size and free space, against what each participant takes (``segment`` bytes)."""
    if rmw and "fastrtps" not in rmw:
        yield Check(OK, "shm", f"not in use ({rmw})")
        return
    try:
        state = os.statvfs(folder)
    except OSError as error:
        fix = "mount a tmpfs there: sudo mount -t tmpfs tmpfs /dev/shm"
        yield Check(FAIL, "shm", f"{folder}: {error.strerror}: Fast DDS has no shared memory", fix)
        return
    total, free = state.f_blocks * state.f_frsize, state.f_bavail * state.f_frsize
    text = f"{_mb(free)} of {_mb(total)} free in {folder}, each participant takes {_mb(segment)}"
    larger = "in a container: docker run --shm-size=1g, or --ipc=host; else sudo mount -o remount,size=1g /dev/shm"
    if total <= _LEAST * segment:
        without = "none" if total <= segment else "not both of camera and front-end"
        yield Check(FAIL, "shm", f"{text}: {without} can have it (Docker gives 64 MB), images go by UDP", larger)
    elif free <= segment:
        text = f"{text}: the next one gets none, its images go by UDP{_held(folder)}"
        yield Check(WARN, "shm", text, f"'fastdds shm clean' removes what dead processes left; {larger}")
    elif total < _PARTICIPANTS * segment:
        yield Check(WARN, "shm", f"{text}: too little for {_PARTICIPANTS}", larger)
    else:
        yield Check(OK, "shm", text)


def check_socket_buffers(rmw: str, only_here: bool, path: Path = RECEIVE_BUFFER) -> Iterator[Check]:
    """How large the receive buffer of a socket may be: images that come by UDP are lost where it is full."""
    try:
        most = int(path.read_text())
    except (OSError, ValueError):  # not Linux, or a container that hides it
        return
    by_udp = bool(rmw) and "fastrtps" not in rmw
    text = f"net.core.rmem_max is {most / 2**20:.1f} MB"
    if most >= _RECEIVE_BYTES:
        yield Check(OK, "sockets", text)
    elif only_here and not by_udp:
        yield Check(OK, "sockets", f"{text}, of no matter: images of this machine come by shared memory")
    else:
        whom = f"{rmw} sends all images" if by_udp else "images of other machines come"
        fix = "sudo sysctl -w net.core.rmem_max=2147483647 net.ipv4.ipfrag_time=3 net.ipv4.ipfrag_high_thresh=134217728"
        yield Check(WARN, "sockets", f"{text}: {whom} by UDP, and large ones are lost", fix)


def _held(folder: Path) -> str:
    """How much of it files of Fast DDS hold, in words."""
    size = 0
    for path in folder.glob("fast*"):
        try:
            size += path.stat().st_blocks * 512
        except OSError:
            continue
    return f" ({_mb(size)} of it in files of Fast DDS)" if size else ""


def _mb(size: float) -> str:
    return f"{size / 2**20:.1f} MB" if size < 10 << 20 else f"{size / 2**20:.0f} MB"
