"""Every ROS test has a DDS domain of its own, on this machine only."""

import itertools
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

_count = itertools.count()


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.ros)


@pytest.fixture
def domain(tmp_path, monkeypatch):
    """A fresh ROS_DOMAIN_ID; the environment of this process and of its children is set for it."""
    pytest.importorskip("rclpy")
    from ros_helpers import environment

    number = 1 + (7 * os.getpid() + next(_count)) % 100  # above 101 ports collide with ephemeral ones
    for name, value in environment(number, tmp_path / "log").items():
        monkeypatch.setenv(name, value)
    return number
