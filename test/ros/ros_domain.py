"""A DDS domain for a test, on this machine only."""

import itertools
import os
import socket

import pytest

_count = itertools.count()


def _free(number: int) -> bool:
    """Whether no process of this machine is in a domain: others may run demos and tests meanwhile."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind(("", 7410 + 250 * number))  # what the first participant of a domain listens to (RTPS 9.6.1)
        except OSError:
            return False
    return True


@pytest.fixture
def domain(tmp_path, monkeypatch):
    """A fresh ROS_DOMAIN_ID; the environment of this process and of its children is set for it."""
    pytest.importorskip("rclpy")
    from ros_helpers import environment

    numbers = (
        1 + (7 * os.getpid() + next(_count)) % 100 for _ in range(100)
    )  # above, ports collide with ephemeral ones
    number = next(filter(_free, numbers))
    for name, value in environment(number, tmp_path / "log").items():
        monkeypatch.setenv(name, value)
    return number
