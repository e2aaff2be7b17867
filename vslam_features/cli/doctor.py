"""``doctor``: what of this machine fits, what does not, and what to do."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from ..artifacts.cache import cache_root
from ..session_files import state_folder
from .check import FAIL, OK, WARN, Check
from .model_checks import check_models, check_runtimes


def add_parser(subparsers) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "doctor",
        help="check this installation and machine",
        description="Check libraries, ROS, files and resources; each line says what to do.",
        epilog="example: vslam-features doctor\nThe exit code is 1 if a line is FAIL, else 0.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args) -> int:
    """Print all checks."""
    checks = list(examine())
    worst = max((c.state for c in checks), key=(OK, WARN, FAIL).index)
    if args.json:
        print(json.dumps({"state": worst, "checks": [asdict(c) for c in checks]}))
    else:
        for c in checks:
            print(f"{c.state:<5} {c.name:<12} {c.text}")
            if c.fix:
                print(f"{'':<18} -> {c.fix}")
        count = sum(c.state != OK for c in checks)
        print("all is well" if not count else f"{count} of {len(checks)} lines want attention")
    return 1 if worst == FAIL else 0


def examine() -> Iterator[Check]:
    """All checks; one that breaks is a FAIL of its own."""
    for name, function in _CHECKS.items():
        try:
            yield from function()
        except Exception as error:  # a doctor must not die of what it looks for
            yield Check(FAIL, name, f"the check failed: {type(error).__name__}: {error}", "reinstall vslam_features")


def _python() -> Iterator[Check]:
    text = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if not (3, 10) <= sys.version_info[:2] <= (3, 13):
        yield Check(WARN, "python", text, "supported are Python 3.10 to 3.13")
    elif platform.system() != "Linux" or platform.machine() not in ("x86_64", "aarch64"):
        yield Check(WARN, "python", text, "supported are Linux on x86-64 and aarch64")
    else:
        yield Check(OK, "python", text)


def _numpy() -> Iterator[Check]:
    import numpy

    new = _version(numpy.__version__) >= (1, 21)
    yield Check(OK if new else FAIL, "numpy", numpy.__version__, "" if new else "needs 1.21 or newer")


def _opencv() -> Iterator[Check]:
    try:
        import cv2
    except ImportError as error:
        yield Check(FAIL, "opencv", f"cannot be imported: {error}", "pip install opencv-python-headless")
        return
    installed = sorted(
        {n for d in metadata.distributions() if (n := (d.metadata["Name"] or "").lower()).startswith("opencv-")}
    )
    text = f"{cv2.__version__} from {', '.join(installed) or 'the system'}"
    if _version(cv2.__version__) < (4, 5, 4):
        yield Check(FAIL, "opencv", text, "needs 4.5.4 or newer")
    elif len(installed) > 1:
        yield Check(WARN, "opencv", text, "they overwrite each other: uninstall all, then install one")
    else:
        yield Check(OK, "opencv", text)


def _poselib() -> Iterator[Check]:
    if find_spec("poselib"):
        yield Check(OK, "poselib", f"{metadata.version('poselib')}: LO-RANSAC verifies matches")
    else:
        fix = "pip install 'vslam_features[poselib]' (x86-64; build it from source elsewhere)"
        yield Check(WARN, "poselib", "not installed: OpenCV verifies matches, a little less accurately", fix)


def _rosbags() -> Iterator[Check]:
    if find_spec("rosbags"):
        yield Check(OK, "rosbags", f"{metadata.version('rosbags')}: recordings can be read")
    else:
        fix = "pip install rosbags (for replay, demo and the player only)"
        yield Check(WARN, "rosbags", "not installed: recordings cannot be read", fix)


def _ros() -> Iterator[Check]:
    if find_spec("rclpy") is None:
        fix = "source /opt/ros/<distro>/setup.bash on a robot, or pip install 'vslam_features[ros]' on a desk"
        yield Check(WARN, "ros", "rclpy is not there: match and replay work, the node does not", fix)
        return
    distro = os.environ.get("ROS_DISTRO", "distribution unknown")
    rmw = os.environ.get("RMW_IMPLEMENTATION", "default RMW")
    yield Check(OK, "ros", f"rclpy is there ({distro}, {rmw}, domain {os.environ.get('ROS_DOMAIN_ID', '0')})")
    old, variable = "FASTRTPS_DEFAULT_PROFILES_FILE", "FASTDDS_DEFAULT_PROFILES_FILE"
    if distro in ("humble", "jazzy"):  # Fast DDS 2 knows the old name only
        variable = old
    profile = os.environ.get(variable) or os.environ.get(old)
    if "fastrtps" not in rmw and rmw != "default RMW":
        return
    if profile is None:
        fix = f"export {variable}=<share>/vslam_features/config/fastdds.xml (demo and launch do it)"
        yield Check(WARN, "fast dds", "no profile: images over 0.5 MB are slow and may be lost", fix)
    elif not Path(profile).is_file():
        yield Check(FAIL, "fast dds", f"the profile {profile} is not there", f"correct {variable}")
    else:
        yield Check(OK, "fast dds", f"profile {profile}")


def _shared_memory() -> Iterator[Check]:
    if not Path("/dev/shm").is_dir():
        return
    free = shutil.disk_usage("/dev/shm").free / 2**20
    if free < 128:
        yield Check(WARN, "shm", f"{free:.0f} MB free in /dev/shm, Fast DDS wants 64 a process",
                    "in a container: --shm-size=512m")  # fmt: skip
    else:
        yield Check(OK, "shm", f"{free:.0f} MB free in /dev/shm")


def _codebooks() -> Iterator[Check]:
    from ..retrieval.vlad import load_codebook

    sizes = [f"{name} {load_codebook(name)[0].shape[0]} words" for name in ("sift", "orb", "xfeat", "aliked-n16")]
    yield Check(OK, "codebooks", ", ".join(sizes))


def _pipeline() -> Iterator[Check]:
    import time

    import cv2
    import numpy as np

    from ..config import Config
    from ..frontend import FrontEnd
    from ..types import Frame

    noise = np.random.default_rng(0).integers(0, 256, (60, 80), np.uint8)
    image = cv2.resize(noise, (320, 240), interpolation=cv2.INTER_CUBIC)
    front_end, start = FrontEnd(Config().with_values(loops__enabled=False)), time.perf_counter()
    features = front_end.features.extract(Frame(0, "camera", image))
    matches = front_end.matcher.match(features, features, overlapping=True)
    text = f"an image matches itself: {matches.status.label}, {matches.num_inliers} inliers"
    text += f", {(time.perf_counter() - start) * 1e3:.0f} ms"
    yield Check(OK if matches.verified else FAIL, "self test", text, "" if matches.verified else "reinstall opencv")


def _folders() -> Iterator[Check]:
    for name, variable, folder in (
        ("state", "VSLAM_FEATURES_STATE", state_folder()),
        ("cache", "VSLAM_FEATURES_CACHE", cache_root()),
    ):
        existing = next(p for p in (folder, *folder.parents) if p.exists())
        if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
            free = shutil.disk_usage(existing).free / 2**30
            fix = "" if free >= 1 else "make room: maps grow"
            yield Check(WARN if fix else OK, name, f"{folder} ({free:.0f} GB free)", fix)
        else:
            yield Check(FAIL, name, f"{folder} cannot be written", f"set {variable} to a folder that can")


def _machine() -> Iterator[Check]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    text = f"{cores} cores, {memory:.1f} GB of memory"
    if cores < 2 or memory < 2:
        yield Check(WARN, "machine", text, "2 cores and 2 GB are the least for live images")
    else:
        yield Check(OK, "machine", text)


_CHECKS: dict[str, Callable[[], Iterator[Check]]] = {
    "python": _python,
    "numpy": _numpy,
    "opencv": _opencv,
    "poselib": _poselib,
    "runtimes": check_runtimes,
    "models": check_models,
    "rosbags": _rosbags,
    "ros": _ros,
    "shm": _shared_memory,
    "codebooks": _codebooks,
    "self test": _pipeline,
    "folders": _folders,
    "machine": _machine,
}


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("+")[0].split(".")[:3] if part.isdigit())
