"""Plain data that flows between the stages (numpy arrays in frozen dataclasses).

Pixels follow the OpenCV convention: (0, 0) is the centre of the top-left
pixel, x right, y down, always in the coordinates of the *input* image.
``*_size`` means (width, height); array shapes are (H, W). Stamps are integer
nanoseconds. See ``docs/conventions.md``.
"""

from .frames import Features, Frame, ModelIdentity, Pose
from .keyframes import Candidate, Keyframe, KeyframeHeader, Loops, PairKind, PairResult, Tracked
from .map_entries import MapEntry, MapModels
from .matches import Matches, Status

__all__ = [
    "Candidate",
    "Features",
    "Frame",
    "Keyframe",
    "KeyframeHeader",
    "Loops",
    "MapEntry",
    "MapModels",
    "Matches",
    "ModelIdentity",
    "PairKind",
    "PairResult",
    "Pose",
    "Status",
    "Tracked",
]
