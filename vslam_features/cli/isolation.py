"""What keeps a run of several processes apart from others: signals, a lock on its folder, a DDS domain of its own."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import ConfigError
from ..share import share_path
from .processes import ProcessError


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the command as Ctrl-C does, so that its processes end with it."""

    def end(number: int, _) -> None:
        for other in before:  # a second one must not disturb the end
            signal.signal(other, signal.SIG_IGN)
        raise SystemExit(128 + number)

    # What is ignored (nohup) stays ignored.
    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
    before = {n: signal.getsignal(n) for n in numbers}
    try:
        for number in numbers:
            signal.signal(number, end)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Keep others from the folder. Raises ConfigError where another demo has it, OSError."""
    out.mkdir(parents=True, exist_ok=True)
    with open(out / ".lock", "w") as lock:  # stays there: the lock is on the open file, and ends with the process
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another demo is using {out}: wait for its end, or give another --out") from None
        yield


def environment(out: Path) -> dict[str, str]:
    """The whole environment, with a DDS domain of its own on this machine only."""
    env = dict(os.environ)
    env.update(
        ROS_AUTOMATIC_DISCOVERY_RANGE="LOCALHOST",
        ROS_LOCALHOST_ONLY="1",  # what Humble knows
        ROS_DOMAIN_ID=str(free_domain()),
        ROS_LOG_DIR=str((out / "logs").resolve()),
        PYTHONUNBUFFERED="1",
    )
    env.setdefault("FASTDDS_DEFAULT_PROFILES_FILE", str(share_path("config/fastdds.xml")))
    if env.get("ROS_DISTRO") in ("humble", "jazzy"):  # Fast DDS 2 knows the old name only, 3 warns of it
        env.setdefault("FASTRTPS_DEFAULT_PROFILES_FILE", env["FASTDDS_DEFAULT_PROFILES_FILE"])
    return env


def free_domain() -> int:
    """A DDS domain in which no process of this machine is, from 40 to 99."""
    for i in range(60):
        domain = 40 + (os.getpid() + i) % 60
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.bind(("", 7410 + 250 * domain))  # what the first participant of a domain listens to (RTPS 9.6.1)
            except OSError:
                continue
            return domain
    raise ProcessError("all DDS domains from 40 to 99 are in use on this machine; end some ROS processes")
