"""A matcher with geometric verification behind it: two sets of features to :class:`Matches`."""

from __future__ import annotations

import time

import numpy as np

from ..camera import Camera
from ..errors import DataError, NonFiniteError
from ..geometry import Verifier
from ..types import Features, Matches, Status
from .base import Correspondences, Matcher, require_same_model


class VerifiedMatcher:
    """Matches and verifies; every result says why it is what it is."""

    def __init__(self, matcher: Matcher, verifier: Verifier):
        self.matcher = matcher
        self.verifier = verifier

    def match(
        self,
        features0: Features,
        features1: Features,
        camera0: Camera | None = None,
        camera1: Camera | None = None,
        overlapping: bool = False,
    ) -> Matches:
        """Current features (0) against reference features (1).

        ``overlapping``: they are known to see one place, so that no matcher rejects them beforehand.

        ``FAULT_RECOVERED`` where it is verified and the fallback computed the match or the current features. Reference
        features that it computed were told in their own time, and do not count again in each pair after that.

        Raises IdentityError where the two come from different models.
        """
        start = time.perf_counter()
        require_same_model(features0, features1)
        if not len(features0) or not len(features1):
            return Matches.empty(
                Status.NO_KEYPOINTS,
                detail=_recovered(features0.recovered),
                elapsed_ms=_since(start),
                runtime=self.matcher.runtime,
            )
        try:
            match = self.matcher.match_overlapping if overlapping else self.matcher.match
            found = match(features0, features1)
            if not len(found.pairs) and self.matcher.suspect:
                doubt = "no match, from a model that has lately found none where there were"
                found = self.matcher.match_again(features0, features1, doubt, overlapping) or found
        except NonFiniteError as error:  # no fallback made it good
            return Matches.empty(
                Status.NON_FINITE, detail=str(error), elapsed_ms=_since(start), runtime=self.matcher.runtime
            )
        return self._verified(found, features0, features1, camera0, camera1, start)

    def match_again(
        self,
        features0: Features,
        features1: Features,
        camera0: Camera | None = None,
        camera1: Camera | None = None,
        *,
        doubt: str,
        overlapping: bool = False,
    ) -> Matches | None:
        """A second opinion on an empty result: that of the fallback, where it is another; else None."""
        start = time.perf_counter()
        found = self.matcher.match_again(features0, features1, doubt, overlapping)
        return None if found is None else self._verified(found, features0, features1, camera0, camera1, start)

    def _verified(self, found: Correspondences, features0, features1, camera0, camera1, start: float) -> Matches:
        if len(found.pairs) and not ((found.pairs >= 0) & (found.pairs < (len(features0), len(features1)))).all():
            raise DataError(
                f"matcher {type(self.matcher).__name__} returned pairs outside of {len(features0)} and "
                f"{len(features1)} keypoints"
            )
        extra = {
            "covisibility": found.covisibility,
            "stopped_after_layer": found.stopped_after_layer,
            "layer_scores": found.layer_scores,
            "runtime": found.runtime or self.matcher.runtime,
            "detail": _recovered(features0.recovered, found.recovered),
        }
        nothing = np.zeros(len(found.pairs), bool)
        if found.status is not None:
            return Matches(found.pairs, found.scores, nothing, found.status, elapsed_ms=_since(start), **extra)
        scale = float(np.sqrt(features0.pixel_scale * features1.pixel_scale))
        v = self.verifier.verify(
            features0.keypoints[found.pairs[:, 0]], features1.keypoints[found.pairs[:, 1]], camera0, camera1, scale
        )
        status = Status.FAULT_RECOVERED if extra["detail"] and v.status is Status.OK else v.status
        return Matches(
            found.pairs,
            found.scores,
            v.inliers,
            status,
            pose=v.pose,
            hypotheses=v.hypotheses,
            model=v.model,
            elapsed_ms=_since(start),
            **extra,
        )


def _recovered(features: str, match: str = "") -> str:
    """What the fallback made good, in words; empty where nothing."""
    told = [f"features computed by the fallback after: {features}"] if features else []
    told += [f"computed by the fallback after: {match}"] if match else []
    return "; ".join(told)


def _since(start: float) -> float:
    return (time.perf_counter() - start) * 1e3
