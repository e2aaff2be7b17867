"""Fills a :class:`~vslam_features.replay.run_log.RunLog` from the tables that a front-end publishes. No ROS in here."""

from __future__ import annotations

import time
from collections import OrderedDict
from datetime import datetime, timezone

import numpy as np

from ..errors import DataError
from ..pose_track import PoseTrack
from ..replay.ground_truth import GroundTruth
from ..replay.run_log import KeyframeRecord, MatchPoints, PairRecord, RunLog
from ..replay.source import Ledger
from ..types import Candidate, PairKind, Pose, Status
from .topic_diagnostics import FRAME_COUNTS, TopicDiagnostics

IMAGES_KEPT = 64
"""Latest images that wait to be recognised as keyframes."""

PLACES = PairKind.LOOP, PairKind.RELOCALISATION

FARTHEST_PX = 1e6
"""Pixels of matches beyond this are no pixels, and drawing them fails."""


class TopicLog:
    """Joins messages that belong together, in whichever order they come.

    A front-end that is reset counts its keyframes from 0 again, or where it
    localises from behind those of its map. The log then starts anew, as its
    records would be those of other keyframes, and only counts the earlier
    sessions. All methods raise DataError on values outside
    the contract and then change nothing.

    Args:
        name: title of the run.
        truth: gives keyframes the number of their image; without it, images are counted as they come.
        frontend: name of the node that is listened to, for messages.
    """

    def __init__(self, name: str, truth: GroundTruth | None, frontend: str = "/frontend"):
        self._name, self._truth, self._frontend = name, truth, frontend
        self._started, self._began = datetime.now(timezone.utc), time.monotonic()
        self._images: OrderedDict[int, tuple[int, float, np.ndarray]] = OrderedDict()
        self._image_count = 0
        self._poses = PoseTrack()
        self._diagnostics = TopicDiagnostics()
        self._rejected = Ledger()
        self._earlier_sessions = 0
        self._start_session()

    @property
    def nothing_came(self) -> str:
        """Why there is nothing to report, one line; empty where anything of the front-end has come."""
        log = self._log
        heard = self._diagnostics.heard or self._rejected.total
        if heard or log.keyframes or log.candidates or log.pairs or self._pairs:
            return ""
        if self._diagnostics.configuring:
            return f"{self._frontend} did not get beyond its configuration: see its log"
        return (
            f"nothing came from {self._frontend}: start the front-end, and check the parameter frontend and "
            "ROS_DOMAIN_ID"
        )

    def add_image(self, stamp_ns: int, image: np.ndarray) -> None:
        """An input image, uint8."""
        self._images[stamp_ns] = (self._image_count, time.monotonic(), image)
        self._images.move_to_end(stamp_ns)  # a recording in a loop: the stamp is known
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
        position = self._truth.index(stamp_ns) if self._truth else self._images.get(stamp_ns, (self._image_count,))[0]
        first = self._diagnostics.count("map", "first_id")
        last = self._log.keyframes[-1].id if self._log.keyframes else first - 1
        kf_id = _only(table["kf_id"]) if len(table) else first if self._was_reset else last + 1
        if kf_id <= last:
            self._earlier_sessions += 1
            self._start_session()
        self._was_reset = False
        log = self._log
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
        if not np.isfinite(table["similarity"]).all():
            raise DataError("a similarity is not finite")
        self._searched += 1
        if stamp_ns in self._images:
            self._log.add_latency({"image to loops": (time.monotonic() - self._images[stamp_ns][1]) * 1e3})
        for row in table:
            ref_ns = int(row["ref_sec"]) * 10**9 + int(row["ref_nanosec"])
            numbers = float(row["similarity"]), float(row["margin"]), int(row["rank"])
            self._log.candidates.append(Candidate(int(row["kf_id"]), int(row["ref_kf_id"]), ref_ns, *numbers))

    def add_pairs(self, stamp_ns: int, frame_id: str, table: np.ndarray) -> None:
        """A message on ``~/pairs``."""
        for record in [_pair_record(row) for row in table]:
            ids = record.kf_id, record.ref_kf_id
            if record.num_matches and ids not in self._matches:
                self._pairs[ids] = record
            else:
                self._log.add_pair(record, self._matches.pop(ids, None))

    def add_matches(self, stamp_ns: int, frame_id: str, table: np.ndarray) -> None:
        """A message on ``~/matches``."""
        if not len(table):
            return
        kf_id = _only(table["kf_id"])
        if not all((np.abs(table[name]) <= FARTHEST_PX).all() for name in ("x", "y", "ref_x", "ref_y")):
            raise DataError("a match has pixels that are not finite, or far outside any image")
        for ref in np.unique(table["ref_kf_id"]):
            rows = table[table["ref_kf_id"] == ref]
            points = MatchPoints(
                np.stack([rows["x"], rows["y"]], axis=1),
                np.stack([rows["ref_x"], rows["ref_y"]], axis=1),
                rows["inlier"].astype(bool),
            )
            ids = kf_id, int(ref)
            if ids in self._pairs:
                self._log.add_pair(self._pairs.pop(ids), points)
            else:
                self._matches[ids] = points

    def set_diagnostics(self, part: str, values: dict[str, str]) -> None:
        """The latest values of a part of the front-end's diagnostics."""
        self._was_reset |= self._diagnostics.set(part, values)

    def rejected(self, topic: str, reason: str) -> None:
        """A message that breaks its contract."""
        self._rejected.add(f"message on {topic} rejected", reason)

    def progress(self) -> dict[str, int]:
        """Counts so far: the front-end's own, and what came in here."""
        out = {name: self._diagnostics.count("frames", name) for name in FRAME_COUNTS}
        out["loop_queue"] = self._diagnostics.count("map", "loop_queue")
        out["front_end_keyframes"] = self._diagnostics.count("map", "keyframes")
        out["keyframes"] = len(self._log.keyframes)
        out["searched"] = self._searched
        out["not_searched"] = self._diagnostics.count("map", "loop_queue_dropped")
        out["pairs"] = len(self._log.pairs) + len(self._pairs)
        out["loops"] = sum(p.kind in PLACES and p.verified for p in self._log.pairs)
        out["active"] = int(bool(self._diagnostics.parts.get("frames")))
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
        log.gated = self._diagnostics.count("map", "loops_gated")
        log.first_id = self._diagnostics.count("map", "first_id")
        log.expected = max(log.expected, counts["received"]) if self._earlier_sessions else log.expected
        log.expected = log.expected or counts["received"]
        attempted = len(log.pairs)
        if unseen := log.leave_out_unseen():
            reason = "pair left out: one of its keyframes was not seen"
            log.notes[reason] = attempted - len(log.pairs)
            log.examples[reason] = [f"keyframe {i} was not seen" for i in unseen[:3]]
        for name in ("dropped", "missing"):
            if counts[name]:
                log.skipped[f"image {name}"] = counts[name]
        self._diagnostics.account(log)
        log.incomplete = "; ".join(self._gaps(log, counts["processed"]))
        log.run = {
            "started": self._started.isoformat(timespec="seconds"),
            "seconds": round(time.monotonic() - self._began, 1),
            "diagnostics": self._diagnostics.parts,
        }
        return log

    def _gaps(self, log: RunLog, processed: int) -> list[str]:
        """What keeps the log from being that of the whole run, each in a sentence."""
        out = [self.nothing_came] if self.nothing_came else []
        if n := self._earlier_sessions:
            sessions = "1 earlier session" if n == 1 else f"{n} earlier sessions"
            is_are = "is" if n == 1 else "are"
            out.append(
                f"{sessions} before a reset {is_are} not in this report; the counts of images run since configure"
            )
        first, number = (log.keyframes[0].id, len(log.keyframes)) if log.keyframes else (0, 0)
        if number and first > (start := log.first_id):
            which = f"keyframe {start} was" if first == start + 1 else f"keyframes {start} to {first - 1} were"
            out.append(f"joined late: {which} not seen")
        if number and (lost := log.keyframes[-1].id - first + 1 - number):
            out.append(f"{lost} keyframes between the first and the last one did not come")
        if processed < log.expected:
            out.append(f"{processed} of {log.expected} images were processed")
        elif number and not processed:
            out.append(f"no diagnostics came from {self._frontend}, so its images are not counted")
        return out

    def _start_session(self) -> None:
        self._log = RunLog({"name": self._name, "kind": "topics"}, expected=len(self._truth) if self._truth else 0)
        self._unpictured: dict[int, KeyframeRecord] = {}
        self._pairs: dict[tuple[int, int], PairRecord] = {}
        self._matches: dict[tuple[int, int], MatchPoints] = {}
        self._searched = 0  # keyframes; a message comes for each, also without candidates
        self._was_reset = False  # by the diagnostics, and no keyframe has come since

    def _picture(self, record: KeyframeRecord) -> None:
        image = self._images[record.stamp_ns][2]
        record.image_size = image.shape[1], image.shape[0]
        self._log.add_picture(record, image)
        record.pose = record.pose or self._poses.at(record.stamp_ns)


def _only(ids: np.ndarray) -> int:
    """The one id of a message. Raises DataError where there are more."""
    if (ids != ids[0]).any():
        raise DataError("rows of more than one keyframe in a message")
    return int(ids[0])


def _pair_record(row: np.void) -> PairRecord:
    """A row of ``~/pairs``. Raises DataError."""
    try:
        kind, status = PairKind(int(row["kind"])), Status(int(row["status"]))
    except ValueError as error:
        raise DataError(f"a pair of unknown kind or status: {error}") from None
    if row["num_inliers"] > row["num_matches"]:
        raise DataError(f"a pair with {row['num_inliers']} inliers of {row['num_matches']} matches")
    covisibility = None if np.isnan(row["covisibility"]) else float(row["covisibility"])
    ids, counts = (int(row["kf_id"]), int(row["ref_kf_id"])), (int(row["num_matches"]), int(row["num_inliers"]))
    return PairRecord(kind, status, *ids, *counts, covisibility)
