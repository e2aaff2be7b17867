"""What ``doctor`` says of Python, the libraries of the core, and whether they match an image."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec

from .check import FAIL, OK, WARN, Check


def check_python() -> Iterator[Check]:
    """Version and platform."""
    text = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if not (3, 10) <= sys.version_info[:2] <= (3, 13):
        yield Check(WARN, "python", text, "supported are Python 3.10 to 3.13")
    elif platform.system() != "Linux" or platform.machine() not in ("x86_64", "aarch64"):
        yield Check(WARN, "python", text, "supported are Linux on x86-64 and aarch64")
    else:
        yield Check(OK, "python", text)


def check_numpy() -> Iterator[Check]:
    """Version."""
    import numpy

    new = _version(numpy.__version__) >= (1, 21)
    yield Check(OK if new else FAIL, "numpy", numpy.__version__, "" if new else "needs 1.21 or newer")


def check_opencv() -> Iterator[Check]:
    """Version, and whether several distributions of it lie over one another."""
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


def check_poselib() -> Iterator[Check]:
    """Whether the better solver is there."""
    if find_spec("poselib"):
        yield Check(OK, "poselib", f"{metadata.version('poselib')}: LO-RANSAC verifies matches")
    elif platform.machine() == "aarch64":  # no wheels: nothing that a user forgot
        yield Check(OK, "poselib", "not installed (there are no wheels for aarch64): OpenCV verifies matches")
    else:
        fix = "pip install 'vslam_features[poselib]'"
        yield Check(WARN, "poselib", "not installed: OpenCV verifies matches, a little less accurately", fix)


def check_rosbags() -> Iterator[Check]:
    """Whether recordings can be read."""
    if find_spec("rosbags"):
        yield Check(OK, "rosbags", f"{metadata.version('rosbags')}: recordings can be read")
    else:
        fix = "pip install rosbags (for replay, demo and the player only)"
        yield Check(WARN, "rosbags", "not installed: recordings cannot be read", fix)


def check_codebooks() -> Iterator[Check]:
    """The shipped codebooks of VLAD, read whole."""
    from ..retrieval.vlad import load_codebook

    sizes = [f"{name} {load_codebook(name)[0].shape[0]} words" for name in ("sift", "orb", "xfeat", "aliked-n16")]
    yield Check(OK, "codebooks", ", ".join(sizes))


def check_pipeline() -> Iterator[Check]:
    """An image matches itself, with the classical plug-ins."""
    import cv2
    import numpy as np

    from ..config import Config
    from ..frontend import FrontEnd
    from ..types import Frame

    noise = np.random.default_rng(0).integers(0, 256, (60, 80), np.uint8)
    image = cv2.resize(noise, (320, 240), interpolation=cv2.INTER_CUBIC)
    classical = {"features__name": "sift", "matcher__name": "nearest", "loops__enabled": False}
    front_end = FrontEnd(Config().with_values(**classical))
    features = front_end.features.extract(Frame(0, "camera", image))
    matches = front_end.matcher.match(features, features, overlapping=True)
    text = f"an image matches itself: {matches.status.label}, {matches.num_inliers} inliers"
    yield Check(OK if matches.verified else FAIL, "self test", text, "" if matches.verified else "reinstall opencv")


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("+")[0].split(".")[:3] if part.isdigit())
