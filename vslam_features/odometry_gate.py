"""Which loops odometry makes impossible."""

from __future__ import annotations

import numpy as np

from .config import LoopsConfig
from .maps.keyframe_map import KeyframeMap
from .two_view import rotation_angle_deg
from .types import KeyframeHeader, Matches, Pose

_SLACK_M, _SLACK_SHARE = 0.5, 0.2  # of the visual translation: its direction is known to some degrees only


class OdometryGate:
    """Holds loops against the poses of their keyframes, where both have one in the same frame and session.

    Poses come from odometry, which drifts: what it allows grows with the
    distance travelled between the two keyframes.
    """

    def __init__(self, config: LoopsConfig, keyframes: KeyframeMap, camera_poses: bool):
        """``camera_poses``: poses are those of the camera (``pose_of: camera``), not of a body."""
        self.config = config
        self.keyframes = keyframes
        self.camera_poses = camera_poses

    def applies(self, a: KeyframeHeader, b: KeyframeHeader) -> bool:
        """True where the poses of two keyframes can be compared and the gate is on.

        Odometry begins anew with each session, also where its frame has the same name.
        """
        return self.config.pose_gate_m > 0 and a.session == b.session and Pose.comparable(a.pose, b.pose)

    def possible(self, a: KeyframeHeader, b: KeyframeHeader) -> bool:
        """True where both may see the same place; also where the gate does not apply."""
        if not self.applies(a, b):
            return True
        return float(np.linalg.norm(a.pose.t - b.pose.t)) <= self.config.pose_gate_m + self._drift(a, b)

    def disagreement(self, current: KeyframeHeader, reference: KeyframeHeader, matches: Matches) -> str:
        """Why the matches' relative pose contradicts odometry, or an empty string.

        The visual translation has no length, so odometry's is compared with
        the ray that it points along. Any hypothesis that agrees will do.
        """
        if not self.applies(current, reference) or not matches.hypotheses:
            return ""
        R, t = reference.pose.R.T @ current.pose.R, reference.pose.R.T @ (current.pose.t - reference.pose.t)
        allowed = self._drift(current, reference) + _SLACK_M + _SLACK_SHARE * np.linalg.norm(t)
        reasons = [self._contradiction(R, t, pose, allowed) for pose in matches.hypotheses]
        return "" if "" in reasons else reasons[0]

    def _contradiction(self, R: np.ndarray, t: np.ndarray, visual: Pose, allowed: float) -> str:
        if not self.camera_poses:
            # An unknown offset turns axes and directions, but not the angle of a rotation.
            turned = abs(rotation_angle_deg(visual.R) - rotation_angle_deg(R))
        else:
            turned = rotation_angle_deg(visual.R.T @ R)
            miss = float(np.linalg.norm(t - max(float(visual.t @ t), 0.0) * visual.t))
            if miss > allowed:
                return f"odometry's translation is {miss:.1f} m off the visual direction, {allowed:.1f} m allowed"
        if turned > self.config.pose_gate_deg:
            return f"odometry's rotation differs by {turned:.0f} degrees, {self.config.pose_gate_deg:.0f} allowed"
        return ""

    def _drift(self, a: KeyframeHeader, b: KeyframeHeader) -> float:
        return self.config.pose_gate_drift * self.keyframes.travelled(a.id, b.id)
