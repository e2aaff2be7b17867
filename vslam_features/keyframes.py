"""Which frames become keyframes."""

from __future__ import annotations

import numpy as np

from .config import KeyframesConfig
from .two_view import rotation_angle_deg
from .types import Features, Frame, Keyframe, Matches, Pose

STILL = 0.2  # of the motion that makes a keyframe; less is one view


class KeyframePolicy:
    """Decides by count, by odometry where poses come in, else by what the images share.

    Without a pose a frame is a keyframe when its matches with the last keyframe
    are fewer than ``min_shared_ratio`` of those that the first frame after that
    keyframe had, or moved by ``parallax_ratio`` of the image diagonal in the median.
    After ``max_interval_s`` a fifth of the motion is enough, but standing still
    brings no keyframe: it would fill the map with one view.
    """

    def __init__(self, config: KeyframesConfig):
        self.config = config
        self.reset()

    def reset(self) -> None:
        """Forget the frames counted so far."""
        self._seen = 0
        self._baseline_of, self._baseline = -1, 0

    def by_appearance(self, frame: Frame, last: Keyframe | None) -> bool:
        """True where the decision needs the matches of the frame with the last keyframe."""
        return last is not None and not self.config.every and not Pose.comparable(frame.pose, last.pose)

    def decide(self, frame: Frame, features: Features, last: Keyframe | None, matches: Matches | None) -> bool:
        """True where the frame is a keyframe. Call once a frame, in order.

        ``matches``: frame (0) with last keyframe (1), where ``by_appearance``; None
        there means that matching failed, and the frame is kept.
        """
        c, self._seen = self.config, self._seen + 1
        if last is None:
            return True
        if c.every:
            return (self._seen - 1) % c.every == 0
        due = c.max_interval_s > 0 and frame.stamp_ns - last.stamp_ns >= c.max_interval_s * 1e9
        share = STILL if due else 1.0
        if not self.by_appearance(frame, last):
            return self._moved(frame, last, share)
        if matches is None or not len(matches):
            # A blank frame shares nothing and gives nothing; it becomes a keyframe only by the interval.
            return due or len(features) > 0
        if len(matches) < c.min_shared_ratio * self._shareable(features, last, matches):
            return True
        return parallax(features, last.features, matches) >= share * c.parallax_ratio

    def still(self, features: Features, reference: Features, matches: Matches) -> bool:
        """True where verified matches show one view twice: no new evidence of a place."""
        return matches.verified and parallax(features, reference, matches) < STILL * self.config.parallax_ratio

    def _shareable(self, features: Features, last: Keyframe, matches: Matches) -> float:
        """Matches a frame could have: what the first frame after the keyframe had, at most all keypoints.

        Ratio tests and noise make even the next image share only a part of its keypoints.
        """
        if last.id != self._baseline_of:
            self._baseline_of, self._baseline = last.id, len(matches)
        return min(self._baseline, len(features))

    def _moved(self, frame: Frame, last: Keyframe, share: float) -> bool:
        c = self.config
        if np.linalg.norm(frame.pose.t - last.pose.t) >= share * c.translation_m:
            return True
        return rotation_angle_deg(last.pose.R.T @ frame.pose.R) >= share * c.rotation_deg


def parallax(features: Features, reference: Features, matches: Matches) -> float:
    """Median motion of the matches (inliers where there are any) as a share of the image diagonal."""
    used = matches.inliers if matches.inliers.any() else np.ones(len(matches), bool)
    now = features.keypoints[matches.pairs[used, 0]]
    then = reference.keypoints[matches.pairs[used, 1]]
    return float(np.median(np.linalg.norm(now - then, axis=1)) / np.hypot(*features.image_size))
