"""Fills a :class:`~vslam_features.replay.run_log.RunLog` from the tables that a front-end publishes. No ROS in here."""

from __future__ import annotations

import time
from collections import OrderedDict
from datetime import datetime, timezone

import numpy as np

from ..pose_track import PoseTrack
from ..replay.ground_truth import GroundTruth
from ..replay.run_log import KeyframeRecord, MatchPoints, PairRecord, RunLog
from ..replay.source import Ledger
from ..types import Candidate, PairKind, Pose, Status

IMAGES_KEPT = 64
"""Latest images that wait to be recognised as keyframes."""


class TopicLog:
    """Joins messages that belong together, in whichever order they come.

    Args:
        name: title of the run.
        truth: gives keyframes the number of their image; without it, images are counted as they come.
    """

    def __init__(self, name: str, truth: GroundTruth | None):
        self._truth = truth
        self._log = RunLog({"name": name, "kind": "topics"}, expected=len(truth) if truth else 0)
        self._started, self._began = datetime.now(timezone.utc), time.monotonic()
        self._images: OrderedDict[int, tuple[int, float, np.ndarray]] = OrderedDict()
        self._image_count = 0
        self._unpictured: dict[int, KeyframeRecord] = {}
        self._poses = PoseTrack()
        self._pairs: dict[tuple[int, int], PairRecord] = {}
        self._matches: dict[tuple[int, int], MatchPoints] = {}
        self._diagnostics: dict[str, dict[str, str]] = {}
        self._rejected = Ledger()

    def add_image(self, stamp_ns: int, image: np.ndarray) -> None:
        """An input image, uint8."""
        self._images[stamp_ns] = (self._image_count, time.monotonic(), image)
        self._image_count += 1
        if len(self._images) > IMAGES_KEPT:
            self._images.popitem(last=False)
        if stamp_ns in self._unpictured:
            self._picture(self._unpictured.pop(stamp_ns))

    def add_pose(self, stamp_ns: int, pose: Pose) -> None:
        """A pose of the camera."""
        self._poses.add(stamp_ns, pose)

    def add_keyframe(self, stamp_ns: int, frame_id: str, table: np.ndarray) -> None:
        """A message on ``~/keyframes``. One without keypoints does not tell its id: it is the next."""
        log = self._log
        kf_id = int(table["kf_id"][0]) if len(table) else len(log.keyframes)
        position = self._truth.index(stamp_ns) if self._truth else self._images.get(stamp_ns, (self._image_count,))[0]
        size = self._truth.image_size if self._truth else (640, 480)  # of the placeholder, till the image comes
        record = KeyframeRecord(kf_id, stamp_ns, frame_id, position, size, len(table), self._poses.at(stamp_ns))
        log.add_keyframe(record)
        if stamp_ns in self._images:
            log.add_latency({"image to keyframe": (time.monotonic() - self._images[stamp_ns][1]) * 1e3})
            self._picture(record)
        else:
            self._unpictured[stamp_ns] = record

    def add_candidates(self, stamp_ns: int, frame_id: str, table: np.ndarray) -> None:
        """A message on ``~/loop_candidates``."""
        if stamp_ns in self._images:
            self._log.add_latency({"image to loops": (time.monotonic() - self._images[stamp_ns][1]) * 1e3})
        for row in table:
            ref_ns = int(row["ref_sec"]) * 10**9 + int(row["ref_nanosec"])
            numbers = float(row["similarity"]), float(row["margin"]), int(row["rank"])
            self._log.candidates.append(Candidate(int(row["kf_id"]), int(row["ref_kf_id"]), ref_ns, *numbers))

    def add_pairs(self, stamp_ns: int, frame_id: str, table: np.ndarray) -> None:
        """A message on ``~/pairs``."""
        for row in table:
            covisibility = None if np.isnan(row["covisibility"]) else float(row["covisibility"])
            ids = int(row["kf_id"]), int(row["ref_kf_id"])
            counts = int(row["num_matches"]), int(row["num_inliers"])
            record = PairRecord(PairKind(row["kind"]), Status(row["status"]), *ids, *counts, covisibility)
            if record.num_matches and ids not in self._matches:
                self._pairs[ids] = record
            else:
                self._log.add_pair(record, self._matches.pop(ids, None))

    def add_matches(self, stamp_ns: int, frame_id: str, table: np.ndarray) -> None:
        """A message on ``~/matches``."""
        for ref in np.unique(table["ref_kf_id"]):
            rows = table[table["ref_kf_id"] == ref]
            points = MatchPoints(
                np.stack([rows["x"], rows["y"]], axis=1),
                np.stack([rows["ref_x"], rows["ref_y"]], axis=1),
                rows["inlier"].astype(bool),
            )
            ids = int(rows["kf_id"][0]), int(ref)
            if ids in self._pairs:
                self._log.add_pair(self._pairs.pop(ids), points)
            else:
                self._matches[ids] = points

    def set_diagnostics(self, part: str, values: dict[str, str]) -> None:
        """The latest values of a part of the front-end's diagnostics."""
        self._diagnostics[part] = values

    def rejected(self, topic: str, reason: str) -> None:
        """A message that breaks its contract."""
        self._rejected.add(f"message on {topic} rejected", reason)

    def progress(self) -> dict[str, int]:
        """Counts so far: the front-end's own, and what came in here."""
        frames, queue = self._diagnostics.get("frames", {}), self._diagnostics.get("map", {})
        names = ("received", "processed", "dropped", "missing", "waiting", "resets")
        out = {name: int(frames.get(name, 0)) for name in names}
        out["loop_queue"] = int(queue.get("loop_queue", 0))
        out["front_end_keyframes"] = int(queue.get("keyframes", 0))
        out["keyframes"] = len(self._log.keyframes)
        out["searched"] = len(self._log.latency_ms.get("image to loops", ()))
        out["pairs"] = len(self._log.pairs) + len(self._pairs)
        out["loops"] = sum(p.kind == PairKind.LOOP and p.verified for p in self._log.pairs)
        out["active"] = int(bool(frames))
        return out

    def finish(self) -> RunLog:
        """The log, with the counts of the last diagnostics. Call once."""
        log, counts = self._log, self.progress()
        log.notes, log.examples = dict(self._rejected.counts), dict(self._rejected.examples)
        for record in self._pairs.values():
            log.add_pair(record)
        if self._pairs:
            log.notes["pair whose matches did not come"] = len(self._pairs)
        log.frames = counts["processed"]
        log.gated = int(self._diagnostics.get("map", {}).get("loops_gated", 0))
        log.expected = log.expected or counts["received"]
        for name in ("dropped", "missing"):
            if counts[name]:
                log.skipped[f"image {name}"] = counts[name]
        for part, values in self._diagnostics.items():
            if int(values.get("faults") or 0):
                log.fault_counts[part] = int(values["faults"])
                log.faults.append(("", part, values.get("last_fault", "")))
        if counts["processed"] < log.expected:
            log.incomplete = f"{counts['processed']} of {log.expected} images were processed"
        log.run = {
            "started": self._started.isoformat(timespec="seconds"),
            "seconds": round(time.monotonic() - self._began, 1),
            "diagnostics": self._diagnostics,
        }
        return log

    def _picture(self, record: KeyframeRecord) -> None:
        image = self._images[record.stamp_ns][2]
        record.image_size = image.shape[1], image.shape[0]
        self._log.add_picture(record, image)
        record.pose = record.pose or self._poses.at(record.stamp_ns)
