"""A matcher with geometric verification behind it: two sets of features to :class:`Matches`."""

from __future__ import annotations

import time

import numpy as np

from ..camera import Camera
from ..errors import DataError
from ..geometry import Verifier
from ..types import Features, Matches, Status
from .base import Matcher, require_same_model


class VerifiedMatcher:
    """Matches and verifies; every result says why it is what it is."""

    def __init__(self, matcher: Matcher, verifier: Verifier):
        self.matcher = matcher
        self.verifier = verifier

    def match(
        self, features0: Features, features1: Features, camera0: Camera | None = None, camera1: Camera | None = None
    ) -> Matches:
        """Current features (0) against reference features (1).

        Raises IdentityError where the two come from different models.
        """
        start = time.perf_counter()
        require_same_model(features0, features1)
        runtime = self.matcher.runtime

        def elapsed() -> float:
            return (time.perf_counter() - start) * 1e3

        if not len(features0) or not len(features1):
            return Matches.empty(Status.NO_KEYPOINTS, elapsed_ms=elapsed(), runtime=runtime)
        found = self.matcher.match(features0, features1)
        if len(found.pairs) and not ((found.pairs >= 0) & (found.pairs < (len(features0), len(features1)))).all():
            raise DataError(
                f"matcher {type(self.matcher).__name__} returned pairs outside of {len(features0)} and "
                f"{len(features1)} keypoints"
            )
        extra = {
            "covisibility": found.covisibility,
            "stopped_after_layer": found.stopped_after_layer,
            "runtime": runtime,
        }
        nothing = np.zeros(len(found.pairs), bool)
        if found.status is not None:
            return Matches(found.pairs, found.scores, nothing, found.status, elapsed_ms=elapsed(), **extra)
        scale = float(np.sqrt(features0.pixel_scale * features1.pixel_scale))
        v = self.verifier.verify(
            features0.keypoints[found.pairs[:, 0]], features1.keypoints[found.pairs[:, 1]], camera0, camera1, scale
        )
        return Matches(
            found.pairs,
            found.scores,
            v.inliers,
            v.status,
            pose=v.pose,
            hypotheses=v.hypotheses,
            model=v.model,
            elapsed_ms=elapsed(),
            **extra,
        )
