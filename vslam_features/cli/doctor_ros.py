"""What ``doctor`` says of the ROS environment: whether rclpy runs, as which middleware, and who finds whom."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec

from .check import FAIL, OK, WARN, Check
from .doctor_child import Child, ChildError

_RANGES = ("SUBNET", "LOCALHOST", "OFF", "SYSTEM_DEFAULT")
_DISTROS = ("humble", "jazzy", "kilted")
# Ports of the others are also those that Linux gives to outgoing connections (ROS 2: "The ROS_DOMAIN_ID").
_MOST, _SAFE = 232, (range(102), range(215, 233))


def check_ros(probe: Child | None) -> Iterator[Check]:
    """rclpy, distribution and middleware. ``probe``: a child that tried them; None where rclpy is not there."""
    if probe is None:
        fix = "source /opt/ros/<distro>/setup.bash on a robot, or pip install 'vslam_features[ros]' on a desk"
        yield Check(WARN, "ros", "rclpy is not there: match and replay work, the node does not", fix)
        return
    distro = os.environ.get("ROS_DISTRO", "")
    try:
        facts = probe.result()
    except ChildError as error:
        fix = "run 'ros2 topic list': what it says is about this ROS, not this package"
        if "RMW" in str(error):
            wanted = os.environ.get("RMW_IMPLEMENTATION", "rmw_fastrtps_cpp").replace("_", "-")
            fix = f"sudo apt install ros-{distro or '$ROS_DISTRO'}-{wanted}, or unset RMW_IMPLEMENTATION"
        yield Check(FAIL, "ros", str(error), fix)
        return
    if problem := facts.get("import_error"):
        fix = "run this in the Python that ROS was built for (/usr/bin/python3), with its setup.bash sourced"
        yield Check(FAIL, "ros", f"rclpy cannot be imported: {problem}", fix)
    elif missing := facts["missing"]:
        names = " ".join(f"ros-{distro or '$ROS_DISTRO'}-{name.replace('_', '-')}" for name in missing)
        text = f"message packages cannot be imported: {', '.join(missing)}"
        yield Check(FAIL, "ros", text, f"sudo apt install {names}, and source the setup.bash")
    elif problem := facts.get("init_error"):
        fix = "correct RMW_IMPLEMENTATION and ROS_DOMAIN_ID, or unset them"
        yield Check(FAIL, "ros", f"rclpy cannot start: {problem}", fix)
    else:
        text = f"rclpy runs ({distro or 'distribution unknown'}, {facts['rmw']})"
        fix = "" if distro in ("", *_DISTROS) else f"supported are {', '.join(_DISTROS)}"
        yield Check(WARN if fix else OK, "ros", text, fix)


def check_discovery() -> Iterator[Check]:
    """Domain and range, by the variables that say so."""
    distro, env = os.environ.get("ROS_DISTRO", ""), os.environ
    domain, reach = env.get("ROS_DOMAIN_ID", "0") or "0", env.get("ROS_AUTOMATIC_DISCOVERY_RANGE", "")
    only_here = env.get("ROS_LOCALHOST_ONLY", "") == "1"
    name = "discovery"
    if not domain.isdecimal() or int(domain) > _MOST:
        yield Check(FAIL, name, f"ROS_DOMAIN_ID={domain}: no domain", f"set a number from 0 to {_SAFE[0][-1]}")
        return
    text = f"domain {int(domain)}, {'this machine only' if localhost_only() else reach or 'the local network'}"
    if peers := env.get("ROS_STATIC_PEERS"):
        text += f", and {peers}"
    if not any(int(domain) in numbers for numbers in _SAFE):
        fix = f"set a number from 0 to {_SAFE[0][-1]}: the ports of this one are also given to outgoing connections"
        yield Check(WARN, name, text, fix)
    elif reach and reach.upper() not in _RANGES:
        fix = f"ROS_AUTOMATIC_DISCOVERY_RANGE is one of {', '.join(_RANGES)}"
        yield Check(WARN, name, f"{text}: unknown range, SUBNET is taken", fix)
    elif reach and distro == "humble":
        fix = "Humble does not know ROS_AUTOMATIC_DISCOVERY_RANGE: ROS_LOCALHOST_ONLY=1 keeps it on this machine"
        yield Check(
            WARN, name, f"domain {int(domain)}, {'this machine only' if only_here else 'the local network'}", fix
        )
    elif reach.upper() == "OFF" and not only_here:
        yield Check(WARN, name, f"{text}: no process finds another", "unset ROS_AUTOMATIC_DISCOVERY_RANGE")
    elif only_here and reach:
        fix = "unset one of them"
        yield Check(WARN, name, f"{text}: ROS_LOCALHOST_ONLY=1 overrides ROS_AUTOMATIC_DISCOVERY_RANGE={reach}", fix)
    else:
        yield Check(OK, name, text)


def localhost_only() -> bool:
    """Whether the environment keeps ROS on this machine."""
    if os.environ.get("ROS_LOCALHOST_ONLY") == "1":
        return True
    reach = os.environ.get("ROS_AUTOMATIC_DISCOVERY_RANGE", "").upper()
    return reach in ("LOCALHOST", "OFF") and os.environ.get("ROS_DISTRO") != "humble"


def has_rclpy() -> bool:
    """Whether rclpy is there; it may still fail to be imported."""
    return find_spec("rclpy") is not None
