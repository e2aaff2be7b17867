"""What a run produced, as plain records: filled by a replay or by a recorder of topics, read by metrics and report."""

from __future__ import annotations

import heapq
from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import cv2
import numpy as np

from ..images import resize_long_side
from ..types import Candidate, PairKind, Pose, Status
from .pictures import encode

PICTURE_LONG_SIDE = 480
PLACES = (PairKind.LOOP, PairKind.RELOCALISATION)
"""Kinds of pairs that say where one has been before, in this run or in the map."""


@dataclass
class KeyframeRecord:
    """A keyframe.

    ``position``: index of its image in the input, -1 for one of the map that came from elsewhere. ``picture``: JPEG,
    long side 480 px (of the map: its thumbnail), or None.
    """

    id: int
    stamp_ns: int
    frame_id: str
    position: int
    image_size: tuple[int, int]
    num_keypoints: int
    pose: Pose | None = None
    picture: bytes | None = None


@dataclass
class PairRecord:
    """An attempted pair. ``model`` and ``detail`` are empty where the source does not tell (topics)."""

    kind: PairKind
    status: Status
    kf_id: int
    ref_kf_id: int
    num_matches: int
    num_inliers: int
    covisibility: float | None = None
    model: str | None = None
    detail: str = ""

    @property
    def inlier_ratio(self) -> float | None:
        """Share of inliers among the matches; None without matches."""
        return self.num_inliers / self.num_matches if self.num_matches else None

    @property
    def verified(self) -> bool:
        """``status.confirms``."""
        return self.status.confirms


@dataclass
class ModelRecord:
    """A learned model: what it ran on, who verified it, and its runs.

    Args:
        role: features, matcher or global. name: of its card.
        precision: of its file: fp32, fp16, bf16 or int8.
        runtime: with version and provider. device: the hardware.
        verified: what its parity record says. linked: that record passed.
        note: where it does not run on what was asked for: what was, and why not; else empty.
        runs: of the model, without those of the fallback.
        non_finite, errors: runs that returned NaN or infinity, or raised.
        empty: runs that found nothing where the fallback did. empty_agreed: where it found nothing either, no faults.
        recovered: faults that the fallback made good. lost: those that it did not.
        incidents: files written. It depends on time and disk, all else is the same in each run on a machine.
        last_fault: in words.
    """

    role: str
    name: str
    precision: str
    runtime: str
    device: str
    verified: str
    linked: bool = True
    note: str = ""
    runs: int = 0
    non_finite: int = 0
    errors: int = 0
    empty: int = 0
    empty_agreed: int = 0
    recovered: int = 0
    lost: int = 0
    incidents: int = 0
    last_fault: str = ""

    @property
    def faults(self) -> int:
        """Runs that failed."""
        return self.non_finite + self.errors + self.empty


@dataclass
class MapRecord:
    """The map file of a run.

    Args:
        name: of the file, without its folder. mode: new, continue or localize.
        session: the number of this one. before, after: keyframes in the file when the run began and ended.
        problems: what is not in the file as it should be, in words.
        file_bytes: of the file at the end. It may differ between runs by some pages, all else is the same in each.
    """

    name: str
    mode: str
    session: int = 0
    before: int = 0
    after: int = 0
    problems: list[str] = field(default_factory=list)
    file_bytes: int = 0


@dataclass(frozen=True)
class MatchPoints:
    """Matched points (M, 2) f32 in pixels of the current and the reference image; ``inliers`` (M,) bool."""

    points: np.ndarray
    ref_points: np.ndarray
    inliers: np.ndarray

    @classmethod
    def none(cls) -> MatchPoints:
        """No matches."""
        return cls(np.empty((0, 2), np.float32), np.empty((0, 2), np.float32), np.empty(0, bool))


@dataclass
class RunLog:
    """Records of one run.

    A keyframe takes a few hundred bytes. What is larger is bounded: pictures by
    ``max_picture_bytes`` (later keyframes have none), global descriptors by
    ``max_descriptors``, points to those of ``max_pictures`` pairs a group. In a continued map ids count on from its
    own: those below ``first_id`` are keyframes that were there before, of which only those in pairs are kept.

    Attributes:
        source, config, models: plain descriptions of what ran, the same in each run.
        engines: the learned models.
        instead: what ran instead of what was configured, and why; empty where all ran as asked.
        run: what differs between runs: times, machine, path.
        map: the map file; None where the map was in memory only.
        first_id: the first id that a keyframe of this run can have.
        older: id -> keyframe of the map that a keyframe of this run was matched with.
        descriptors: id -> global descriptor, of this run and, for some of them, of the map before it.
        frames: images processed, of ``expected``; max_frames: stop asked for after so many, 0: none.
        latency_ms: stage -> milliseconds; latency_frame: stage -> the frame of each.
        faults: (where, stage, error) of the first hundred; fault_counts: stage -> all.
        skipped, notes: reason -> count (see ``Source``); examples: reason -> texts.
        incomplete: why the input was not read whole; empty where it was.
        damaged, interrupted: the input ends in damage; somebody stopped the run (``incomplete`` says it too).
    """

    source: dict = field(default_factory=dict)
    config: dict = field(default_factory=dict)
    models: dict[str, str] = field(default_factory=dict)
    engines: list[ModelRecord] = field(default_factory=list)
    instead: str = ""
    run: dict = field(default_factory=dict)
    map: MapRecord | None = None
    first_id: int = 0
    frames: int = 0
    expected: int = 0
    max_frames: int = 0
    keyframes: list[KeyframeRecord] = field(default_factory=list)
    older: dict[int, KeyframeRecord] = field(default_factory=dict)
    descriptors: dict[int, np.ndarray] = field(default_factory=dict)
    candidates: list[Candidate] = field(default_factory=list)
    gated: int = 0
    pairs: list[PairRecord] = field(default_factory=list)
    latency_ms: dict[str, array] = field(default_factory=dict)
    latency_frame: dict[str, array] = field(default_factory=dict)
    faults: list[tuple[str, str, str]] = field(default_factory=list)
    fault_counts: Counter = field(default_factory=Counter)
    skipped: dict[str, int] = field(default_factory=dict)
    notes: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)
    incomplete: str = ""
    damaged: bool = False
    interrupted: bool = False
    max_picture_bytes: int = 64 << 20
    max_descriptors: int = 2000
    max_pictures: int = 12

    def __post_init__(self):
        self._picture_bytes = self._num_own = 0
        self._kept: dict[str, list[tuple]] = {"worst": [], "loops": [], "ambiguous": []}

    @property
    def localises(self) -> bool:
        """Keyframes are recognised in a map that takes none of them."""
        if self.map is not None:
            return self.map.mode == "localize"
        return any(p.kind == PairKind.RELOCALISATION for p in self.pairs)

    @property
    def _older_step(self) -> int:
        return max(-(-self.first_id // self.max_descriptors), 1)

    @property
    def expected_known(self) -> bool:
        """False where ``expected`` is only what damage has left, so that nobody knows how many there were."""
        read = self.frames + sum(self.skipped.values())
        return not self.damaged or read < self.expected or 0 < self.max_frames <= self.frames

    def add_keyframe(self, record: KeyframeRecord, image: np.ndarray | None = None) -> None:
        """Add a keyframe, with its image where that is at hand, see ``add_picture``."""
        if image is not None:
            self.add_picture(record, image)
        self.keyframes.append(record)

    def add_older(self, record: KeyframeRecord, thumbnail: np.ndarray | None = None) -> None:
        """Add a keyframe of the map, with the small image that a map keeps."""
        if thumbnail is not None:
            self.add_picture(record, thumbnail)
        self.older[record.id] = record

    def add_picture(self, record: KeyframeRecord, image: np.ndarray) -> None:
        """Keep a keyframe's image (uint8, any size) as a small JPEG while there is room."""
        if self._picture_bytes < self.max_picture_bytes:
            record.picture = encode_jpeg(resize_long_side(image, PICTURE_LONG_SIDE)[0])
            self._picture_bytes += len(record.picture)

    def add_descriptor(self, kf_id: int, descriptor: np.ndarray | None) -> None:
        """Keep a keyframe's global descriptor, in fp16, for the picture of similarities."""
        if descriptor is not None and self._num_own < self.max_descriptors:
            self._num_own += 1
            self.descriptors[kf_id] = descriptor.astype(np.float16)

    def add_older_descriptors(self, descriptors: Iterable[tuple[int, np.ndarray]]) -> None:
        """(id, global descriptor) of the keyframes of the map; of a large one evenly chosen ones are kept."""
        step = self._older_step
        self.descriptors.update((kf_id, d.astype(np.float16)) for kf_id, d in descriptors if kf_id % step == 0)

    def descriptor(self, kf_id: int) -> np.ndarray | None:
        """The global descriptor of a keyframe, or of one near it in a large map; None where there is none."""
        return self.descriptors.get(kf_id if kf_id >= self.first_id else kf_id - kf_id % self._older_step)

    def add_pair(self, record: PairRecord, points: MatchPoints | None = None) -> None:
        """Add an attempted pair. Its points stay while it is among the first of its group, see ``pictured``."""
        self.pairs.append(record)
        if record.kind not in PLACES:
            group, rank = "worst", badness(record)
        elif record.verified:
            group, rank = "loops", record.num_inliers
        elif record.status == Status.AMBIGUOUS:
            group, rank = "ambiguous", record.num_inliers
        else:
            return
        number = len(self.pairs) - 1  # no two are equal, so that records are never compared
        heapq.heappush(self._kept[group], (rank, -number, record, points or MatchPoints.none()))
        if len(self._kept[group]) > self.max_pictures:
            heapq.heappop(self._kept[group])

    def add_latency(self, latency_ms: dict[str, float]) -> None:
        """Wall times of the stages of the newest frame, milliseconds."""
        for stage, value in latency_ms.items():
            self.latency_ms.setdefault(stage, array("d")).append(value)
            self.latency_frame.setdefault(stage, array("q")).append(self.frames)

    def add_fault(self, where: str, stage: str, text: str) -> None:
        """Count a stage that failed; the first hundred are kept in words."""
        self.fault_counts[stage] += 1
        if len(self.faults) < 100:
            self.faults.append((where, stage, text))

    def pictured(self, group: str) -> list[tuple[PairRecord, MatchPoints]]:
        """Pairs with points: ``worst`` between consecutive keyframes, verified ``loops`` or ``ambiguous`` ones.

        Places recognised in a map are ``loops`` as well.
        """
        return [(record, points) for *_, record, points in sorted(self._kept[group], reverse=True)]

    def leave_out_unseen(self) -> list[int]:
        """Leave out pairs and candidates with keyframes that are neither in the log nor of the map before it.

        Returns the ids of those, ascending.
        """
        seen = {k.id for k in self.keyframes} | set(range(self.first_id))
        named = {i for item in (*self.pairs, *self.candidates) for i in (item.kf_id, item.ref_kf_id)}
        if named <= seen:
            return []
        self.pairs = [p for p in self.pairs if {p.kf_id, p.ref_kf_id} <= seen]
        self.candidates = [c for c in self.candidates if {c.kf_id, c.ref_kf_id} <= seen]
        for group, kept in self._kept.items():
            self._kept[group] = [item for item in kept if {item[2].kf_id, item[2].ref_kf_id} <= seen]
            heapq.heapify(self._kept[group])
        return sorted(named - seen)


def badness(pair: PairRecord) -> float:
    """How much a pair deserves a look: failed ones first, then by the share and number of inliers."""
    return (0.0 if pair.verified else 10.0) - (pair.inlier_ratio or 0.0) - min(pair.num_inliers, 1000) / 1000


def encode_jpeg(image: np.ndarray, quality: int = 80) -> bytes:
    """JPEG of a grey or RGB uint8 image. Raises ImageError."""
    return encode(image, ".jpg", (cv2.IMWRITE_JPEG_QUALITY, quality))
