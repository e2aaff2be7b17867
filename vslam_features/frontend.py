"""The pipeline on one screen: track = describe -> keyframe? -> match; close_loops = retrieve -> verify -> store."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable

import cv2
import numpy as np

from . import registry
from .classical import available
from .config import Config
from .empty_guard import EmptyGuard, KeypointGuard
from .errors import DataError
from .features.base import store_descriptors
from .geometry import Verifier
from .images import thumbnail
from .keyframes import KeyframePolicy
from .loops import LoopJudge
from .maps.keyframe_map import KeyframeMap
from .matching.base import require_kind
from .matching.verified import VerifiedMatcher
from .models import Models
from .odometry_gate import OdometryGate
from .stages import Stages
from .types import (
    Candidate,
    Features,
    Frame,
    Keyframe,
    Loops,
    MapModels,
    Matches,
    PairKind,
    PairResult,
    Status,
    Tracked,
)

logger = logging.getLogger(__name__)
_GATED_FACTOR = 4


class FrontEnd:
    """Features, keyframes, matches and loop candidates of an image stream.

    ``track`` and ``close_loops`` may run in two threads, each called in frame
    order. With a fixed seed and thread count the same frames give the same
    results. A fault in a stage costs that stage's result for that frame, is
    reported in ``faults`` and logged, and never ends the process.

    Args:
        config: where files of learned models are missing, ``config`` and ``warning`` say what runs instead.
        progress: called with lines of text while models are verified on their first use.
    Attributes:
        keyframes: the running map; ``use_map`` replaces it.
        new_map: makes the map after a ``reset``; one in memory unless replaced.
    Raises:
        PluginError: a plug-in or its library is missing, or the matcher does not take the features.
        ModelError: a learned model cannot run here, or failed its verification.
    """

    def __init__(self, config: Config, progress: Callable[[str], None] | None = None):
        config, self.warning = available(config)
        self.config = config
        if self.warning:
            logger.warning("%s", self.warning)
        cv2.setNumThreads(config.threads or -1)  # -1: OpenCV's default, all cores; 0 would mean one
        f, m, r = config.features, config.matcher, config.retrieval
        self.models = Models(config, progress)
        self.features = self._plugin("features", f, max_keypoints=f.max_keypoints, long_side=f.long_side)
        self.matcher = VerifiedMatcher(self._plugin("matcher", m), Verifier(config.geometry))
        require_kind(self.matcher.matcher, m.name, getattr(self.features, "dense", False), f.name)
        self.matcher.matcher.require(self.features.identity, self.features.descriptor_length)
        self.global_descriptor = None
        if config.loops.enabled:
            self.global_descriptor = self._plugin("global", r, features_model=self.features.identity)
        self.new_map: Callable[[], KeyframeMap] = KeyframeMap
        self.reset()

    @property
    def map_models(self) -> MapModels:
        """Identities that a map must have been made with."""
        described_by = self.global_descriptor.identity if self.global_descriptor is not None else None
        return MapModels(self.features.identity, described_by)

    def reset(self) -> None:
        """Forget all keyframes, as after a jump back in time."""
        self.use_map(self.new_map())

    def use_map(self, keyframes: KeyframeMap) -> None:
        """Replace the running map by one that was just opened; the old one is not closed.

        Its keyframes are candidates from the first frame on. Where it is read-only, frames are located in it and it is
        never changed. Call only while no thread is in ``track`` or ``close_loops``.

        Raises:
            MapError, DataError: the map cannot be read; the running map goes on as if nothing had been.
        """
        index = registry.get("index", self.config.retrieval.index)()
        if self.global_descriptor is not None:
            index.extend(keyframes.global_descriptors())
        odometry = OdometryGate(self.config.loops, keyframes, camera_poses=self.config.pose_of == "camera")
        matcher = self.matcher.matcher
        config = self.config.loops.resolved(matcher.loop_inliers, matcher.loop_share)
        loops = LoopJudge(config, keyframes, odometry, keyframes.confirmed_loops())
        keyframes.keep = max(keyframes.keep, self.config.keyframes.match_last + 1)  # the new one among them
        self.keyframes, self.index, self.loops = keyframes, index, loops
        self._keypoint_guard = KeypointGuard(self.config.models)
        self._guards: dict[int, EmptyGuard] = {}
        self.policy = KeyframePolicy(self.config.keyframes)

    def process(self, frame: Frame) -> tuple[Tracked, Loops | None]:
        """Track a frame and, where it is a new keyframe, close loops."""
        tracked = self.track(frame)
        return tracked, self.close_loops(tracked) if tracked.keyframe is not None else None

    def track(self, frame: Frame) -> Tracked:
        """Describe a frame, decide whether it is a keyframe, match it with the keyframes before it."""
        stages = Stages()
        previous = self.keyframes.last(self.config.keyframes.match_last)
        last = previous[0] if previous else None
        if last is not None and frame.stamp_ns <= last.stamp_ns:
            raise DataError(
                f"stamps must increase: got {frame.stamp_ns} ns after keyframe {last.id} at {last.stamp_ns} ns; "
                "call reset() after a jump back in time"
            )
        features = stages.run("describe", self.extract, frame)
        if features is None:
            return Tracked(frame, None, None, (), stages.latency_ms, stages.faults)
        shared = None
        if self.policy.by_appearance(frame, last):
            shared = stages.run("match", self._match, features, frame, last)
        if not stages.run("keyframe", self.policy.decide, frame, features, last, shared):
            return Tracked(frame, features, None, (), stages.latency_ms, stages.faults)
        keyframe = stages.run("keyframe", self._keyframe, frame, features)
        if keyframe is None:
            return Tracked(frame, features, None, (), stages.latency_ms, stages.faults)
        keyframe = stages.run("store", self.keyframes.add, keyframe)
        if keyframe is None:  # no room for it: the next frame is as good
            return Tracked(frame, features, None, (), stages.latency_ms, stages.faults)
        pairs = [self._track_pair(stages, keyframe, ref, shared if ref is last else None) for ref in previous]
        if self.global_descriptor is None:
            stages.run("store", self.keyframes.finish, keyframe.id, pairs)
        else:
            self.keyframes.attach(keyframe.id, pairs)
        return Tracked(frame, features, keyframe, tuple(pairs), stages.latency_ms, stages.faults)

    def close_loops(self, tracked: Tracked) -> Loops:
        """Retrieve older keyframes that look like the new one and verify the best of them."""
        stages, keyframe = Stages(), tracked.keyframe
        if self.global_descriptor is None:
            return Loops(keyframe)
        descriptor = stages.run("global", self.global_descriptor.describe, tracked.frame, keyframe.features)
        candidates = []
        if descriptor is not None:
            keyframe = dataclasses.replace(keyframe, global_descriptor=descriptor)
            candidates = stages.run("retrieve", self._retrieve, keyframe) or []
        possible, gated = stages.run("judge", self.loops.gate, keyframe, candidates) or ([], [])
        tried, top_k = possible[: self.config.loops.verify], self.config.retrieval.top_k
        candidates = [c for c in candidates if c.rank < top_k or c in tried]
        gated = [c for c in gated if c.rank < top_k]
        pairs = [self._loop_pair(stages, keyframe, c) for c in tried]
        still = stages.run("judge", self._still, tracked) or False
        judged = stages.run("judge", self.loops.judge, keyframe, pairs, still)
        pairs = [_failed(pair, stages.faults["judge"]) for pair in pairs] if judged is None else judged
        stages.run("store", self.keyframes.finish, keyframe.id, pairs, candidates, gated)
        return Loops(keyframe, tuple(candidates), tuple(pairs), tuple(gated), stages.latency_ms, stages.faults)

    def _plugin(self, role: str, group, **arguments):
        """Construct the plug-in that a group of the configuration names."""
        cls = registry.get(role, group.name)
        return cls(options=cls.Options(**group.options), models=self.models, **arguments)

    def _still(self, tracked: Tracked) -> bool:
        """True where the keyframe shows the same view as the one before."""
        if not tracked.pairs:
            return False
        pair = tracked.pairs[0]
        return self.policy.still(tracked.keyframe.features, self.keyframes[pair.ref_kf_id].features, pair.matches)

    def extract(self, frame: Frame) -> Features:
        """The features, or where there are none without a reason those of the fallback."""
        features = self.features.extract(frame)
        doubt = self._keypoint_guard.doubt(frame, features)
        if not doubt:
            return features
        second = self.features.extract_again(frame, doubt)
        self._keypoint_guard.answered(agreed=second is None)
        return features if second is None else second

    def _keyframe(self, frame: Frame, features: Features) -> Keyframe:
        kept = store_descriptors(features, self.config.features.fp16)
        return Keyframe(0, frame.stamp_ns, frame.frame_id, kept, frame.camera, frame.pose, None, thumbnail(frame.image))

    def _match(self, features: Features, frame: Frame | Keyframe, ref: Keyframe) -> Matches:
        return self.matcher.match(features, ref.features, frame.camera, ref.camera, overlapping=True)

    def _match_again(self, keyframe: Keyframe, ref: Keyframe, doubt: str) -> Matches | None:
        cameras = keyframe.camera, ref.camera
        return self.matcher.match_again(keyframe.features, ref.features, *cameras, doubt=doubt, overlapping=True)

    def _track_pair(self, stages: Stages, keyframe: Keyframe, ref: Keyframe, matches: Matches | None) -> PairResult:
        if matches is None:
            matches = stages.run("match", self._match, keyframe.features, keyframe, ref)
        if matches is None:
            matches = Matches.empty(Status.BACKEND_ERROR, detail=stages.faults["match"])
        else:
            matches = self._guarded(stages, keyframe, ref, matches)
        return PairResult(PairKind.TRACK, keyframe.id, ref.id, ref.stamp_ns, matches)

    def _loop_pair(self, stages: Stages, keyframe: Keyframe, candidate: Candidate) -> PairResult:
        kind = PairKind.RELOCALISATION if self.keyframes.read_only else PairKind.LOOP
        matches = stages.run("verify", self._verify, keyframe, candidate.ref_kf_id)
        if matches is None:
            matches = Matches.empty(Status.BACKEND_ERROR, detail=stages.faults["verify"])
        return PairResult(kind, keyframe.id, candidate.ref_kf_id, candidate.ref_stamp_ns, matches)

    def _verify(self, keyframe: Keyframe, ref_kf_id: int) -> Matches:
        ref = self.keyframes[ref_kf_id]
        return self.matcher.match(keyframe.features, ref.features, keyframe.camera, ref.camera)

    def _guarded(self, stages: Stages, keyframe: Keyframe, ref: Keyframe, matches: Matches) -> Matches:
        """The matches, or where they are empty without a reason those of the fallback."""
        guard = self._guards.setdefault(keyframe.id - ref.id, EmptyGuard(self.config.models))
        doubt = guard.doubt(keyframe, ref, matches)
        if not doubt:
            return matches
        second = stages.run("match", self._match_again, keyframe, ref, doubt)
        guard.answered(agreed=second is None)
        return matches if second is None else second

    def _retrieve(self, keyframe: Keyframe) -> list[Candidate]:
        r = self.config.retrieval
        newest = self.keyframes.newest_older_than(keyframe, r.exclude_s, r.exclude_frames)
        seen = bool(np.any(keyframe.global_descriptor))  # a blank image looks like nothing
        if not self.keyframes.read_only:  # first, so that a failed search costs no more
            self.index.add(keyframe.id, keyframe.global_descriptor)
            self.keyframes.describe(keyframe.id, keyframe.global_descriptor)
        # With a pose some are gated: places further down the list then take their turn.
        k = r.top_k if keyframe.pose is None else _GATED_FACTOR * r.top_k
        ids, similarity = self.index.search(keyframe.global_descriptor, k, newest if seen else -1)
        keep = similarity >= r.min_similarity
        ids, similarity = [int(i) for i in ids[keep]], similarity[keep]
        out = []
        for rank, (ref, value) in enumerate(zip(ids, similarity)):
            others = [s for i, s in zip(ids, similarity) if not self.loops.same_place(i, ref)]
            margin = float(value - max(others)) if others else float("nan")
            stamp = self.keyframes.header(ref).stamp_ns
            out.append(Candidate(keyframe.id, ref, stamp, float(value), margin, rank))
        return out


def _failed(pair: PairResult, text: str) -> PairResult:
    """A pair whose result was lost to a fault."""
    return dataclasses.replace(pair, matches=Matches.empty(Status.BACKEND_ERROR, detail=text))
