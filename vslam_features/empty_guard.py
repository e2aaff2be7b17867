"""Tells an empty result that nothing explains from images that show nothing, or nothing in common.

A broken engine looks like "nothing there": no error, no keypoint, no match. In
an image with texture no keypoint is improbable, and so is no match between a
keyframe and the one before it while both images look alike.
"""

from __future__ import annotations

import cv2
import numpy as np

from .config import ModelsConfig
from .images import resize_long_side, to_grey
from .types import Features, Frame, Keyframe, Matches, Status

_EMPTY = (Status.NO_MATCHES, Status.NOT_COVISIBLE, Status.STOPPED_EARLY)
_SHORT_SIDE = 60  # pixels, at which images are compared
_BLOCKS = 3
_REACH = 0.2  # of the shorter side, that a block may have moved
_MIN_BLOCK = 6  # pixels; smaller ones are found anywhere
_MIN_FOUND = 3  # blocks with contrast
_MIN_CONTRAST = 4.0  # grey levels; below it a correlation is noise
_MAX_WAIT = 64


class _Guard:
    """Decides when the fallback is asked about empty results: once they come in a row, ``models.zero_matches`` of them.

    Where it agrees (a blank wall, a blurred turn), it is asked half as often each time: a scene without texture must
    not cost two runs an image.
    """

    def __init__(self, config: ModelsConfig):
        self.config = config
        self._streak = 0
        self._wait, self._skip = 1, 0

    def answered(self, agreed: bool) -> None:
        """What the fallback said."""
        self._wait = min(_MAX_WAIT, 2 * self._wait) if agreed else 1
        self._skip = self._wait - 1 if agreed else 0

    def _explained(self, found: bool) -> None:
        """A result that is not in doubt ends the streak; one that ``found`` something also the waiting."""
        self._streak = 0
        if found:
            self._wait, self._skip = 1, 0

    def _due(self) -> bool:
        """Counts a result in doubt; true where the fallback is to be asked about it."""
        self._streak += 1
        if self._streak < self.config.zero_matches:
            return False
        if self._skip > 0:
            self._skip -= 1
            return False
        return True


class KeypointGuard(_Guard):
    """Watches the images of a stream for those without keypoints, keyframes or not."""

    def doubt(self, frame: Frame, features: Features) -> str:
        """Why it is in doubt that the image has no keypoint; empty where it is not."""
        if self.config.zero_matches == 0 or len(features):
            self._explained(found=len(features) > 0)
            return ""
        seen = contrast(frame)
        if seen < _MIN_CONTRAST:
            self._explained(found=False)
            return ""
        return f"no keypoint in an image with texture (contrast {seen:.0f} grey levels)" if self._due() else ""


class EmptyGuard(_Guard):
    """Watches pairs of one distance, such as each keyframe with the one before, for those without a match."""

    def doubt(self, keyframe: Keyframe, ref: Keyframe, matches: Matches) -> str:
        """Why the result of two keyframes that follow one another is in doubt; empty where it is not."""
        if self.config.zero_matches == 0 or len(matches) or matches.status not in _EMPTY:
            self._explained(found=len(matches) > 0)
            return ""
        correlation = alike(keyframe.thumbnail, ref.thumbnail)
        if correlation < self.config.alike:
            self._explained(found=False)
            return ""
        if not self._due():
            return ""
        return (
            f"no match ({matches.status.label}) between keyframes {ref.id} and {keyframe.id}, whose images look alike "
            f"(correlation {correlation:.2f})"
        )


def contrast(frame: Frame) -> float:
    """Standard deviation of the blurred image in grey levels, where its mask allows keypoints."""
    grey = _coarse(frame.image)
    if frame.mask is None:
        return float(grey.std())
    allowed = cv2.resize(frame.mask.astype(np.uint8), grey.shape[::-1], interpolation=cv2.INTER_NEAREST) > 0
    return float(grey[allowed].std()) if allowed.any() else 0.0


def alike(image0: np.ndarray | None, image1: np.ndarray | None) -> float:
    """How well the parts of one small image are found again in the other, -1 to 1: 1 for equal images.

    Of 3x3 blocks each is moved to where it correlates best; the median of these correlations tells. So parallax, which
    moves parts differently, does not count, and neither does fine texture, which is blurred. Measured between
    neighbours of videos 0.1 s apart (also on a real road): 0.85 and more; between rendered rooms: 0.70 and less.
    Corridors of one real building come to 0.8, where asking the fallback costs time and nothing else.

    0 where an image is missing, tiny or without contrast, or the shapes of the images differ.
    """
    if image0 is None or image1 is None or image0.shape[:2] != image1.shape[:2]:
        return 0.0
    grey0, grey1 = (_coarse(image) for image in (image0, image1))
    h, w = grey0.shape
    reach = round(_REACH * min(h, w))  # also the margin of the blocks, so that each can move that far
    height, width = (h - 2 * reach) // _BLOCKS, (w - 2 * reach) // _BLOCKS
    if min(height, width) < _MIN_BLOCK or min(grey0.std(), grey1.std()) < _MIN_CONTRAST:
        return 0.0
    found = []
    for row, column in np.ndindex(_BLOCKS, _BLOCKS):
        y, x = reach + row * height, reach + column * width
        block = grey0[y : y + height, x : x + width]
        if block.std() >= _MIN_CONTRAST:
            around = grey1[y - reach : y + height + reach, x - reach : x + width + reach]
            found.append(cv2.matchTemplate(around, block, cv2.TM_CCOEFF_NORMED).max())
    return float(np.median(found)) if len(found) >= _MIN_FOUND else 0.0


def _coarse(image: np.ndarray) -> np.ndarray:
    long_side = max(1, round(_SHORT_SIDE * max(image.shape[:2]) / min(image.shape[:2])))
    return cv2.GaussianBlur(resize_long_side(to_grey(image), long_side)[0], (0, 0), 1.0)
