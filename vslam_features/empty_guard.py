"""Tells an empty match that nothing explains from two images that do not overlap.

A broken engine looks like "no overlap": no error, no match. Between a keyframe
and the one before it that is improbable while both images look alike.
"""

from __future__ import annotations

import cv2
import numpy as np

from .config import ModelsConfig
from .types import Keyframe, Matches, Status

_EMPTY = (Status.NO_MATCHES, Status.NOT_COVISIBLE, Status.STOPPED_EARLY)
_CENTRE = 0.6  # share of the sides; the rest is room for the motion between two keyframes
_MIN_CONTRAST = 4.0  # grey levels; below it a correlation is noise
_MAX_WAIT = 64


class EmptyGuard:
    """Decides when the fallback is asked about an empty result.

    Where it agrees (a blank wall, a blurred turn), it is asked half as often each time: a scene without texture must
    not cost two matchers an image. One guard watches pairs of one distance, such as each keyframe with the one before.
    """

    def __init__(self, config: ModelsConfig):
        self.config = config
        self._streak = 0
        self._wait, self._skip = 1, 0

    def doubt(self, keyframe: Keyframe, ref: Keyframe, matches: Matches) -> str:
        """Why the result of two keyframes that follow one another is in doubt; empty where it is not."""
        if self.config.zero_matches == 0 or len(matches) or matches.status not in _EMPTY:
            self._streak = 0
            if len(matches):  # no blank wall any more
                self._wait, self._skip = 1, 0
            return ""
        correlation = alike(keyframe.thumbnail, ref.thumbnail)
        if correlation < self.config.alike:
            self._streak = 0
            return ""
        self._streak += 1
        if self._streak < self.config.zero_matches:
            return ""
        if self._skip > 0:
            self._skip -= 1
            return ""
        return (
            f"no match ({matches.status.label}) between keyframes {ref.id} and {keyframe.id}, whose images look alike "
            f"(correlation {correlation:.2f})"
        )

    def answered(self, agreed: bool) -> None:
        """What the fallback said."""
        self._wait = min(_MAX_WAIT, 2 * self._wait) if agreed else 1
        self._skip = self._wait - 1 if agreed else 0


def alike(image0: np.ndarray | None, image1: np.ndarray | None) -> float:
    """Normalised correlation, -1 to 1, of the centre of one small image with its best place in the other.

    0 where one is missing, has no contrast, or the sizes differ.
    """
    if image0 is None or image1 is None or image0.shape != image1.shape:
        return 0.0
    grey0, grey1 = (cv2.cvtColor(i, cv2.COLOR_RGB2GRAY) if i.ndim == 3 else i for i in (image0, image1))
    h, w = grey0.shape
    y, x = int(h * (1 - _CENTRE) / 2), int(w * (1 - _CENTRE) / 2)
    centre = grey0[y : h - y, x : w - x]
    if min(centre.shape) < 8 or min(centre.std(), grey1.std()) < _MIN_CONTRAST:
        return 0.0
    return float(cv2.matchTemplate(grey1, centre, cv2.TM_CCOEFF_NORMED).max())
