"""Every ROS test has a DDS domain of its own, on this machine only."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from ros_domain import domain  # noqa: F401 (a fixture)


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.ros)
