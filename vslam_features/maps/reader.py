"""Reads a map file: an index at once, keyframes when they are asked for."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ..errors import DataError, MapError
from ..types import (
    Candidate,
    Features,
    Keyframe,
    KeyframeHeader,
    MapEntry,
    MapModels,
    ModelIdentity,
    PairKind,
    PairResult,
    Status,
)
from .records import camera_of, features_of, identity_of, matches_of, member_of, pose_of
from .row_reader import RowReader
from .rows import Row, ids, read, scan
from .side_by_side import side_by_side
from .tables import (
    CAMERAS,
    FEATURES,
    GLOBAL_DESCRIPTORS,
    KEYFRAMES,
    LOOPS,
    MATCHES,
    META,
    MODELS,
    SESSIONS,
)


class MapReader(RowReader):
    """A map file, read-only; safe between threads, and beside a writer in any process.

    Opening reads the small tables only; ``headers`` reads one small row a keyframe. What follows the last keyframe that
    was there when ``headers`` was called is not seen. Checksums and finiteness are checked the first time that an array
    is read. All methods raise MapDamagedError, which names file and table, for rows that are not what was written.

    Attributes:
        path: of the file.
        models: the identities of its descriptors; None for a role that no keyframe has.
        meta: the counters and the origin of the map, as they were when it was opened.

    Raises:
        MapFileError: no such file, not a map, another schema version.
    """

    def __init__(self, path: Path):
        super().__init__(path)
        try:
            with self._reading("models"):
                self._models = {r["id"]: identity_of(r) for r in scan(self._connection, MODELS)}
                if self.meta["keyframes"] and self.models is None:
                    raise DataError("that of the features is missing")
            with self._reading("cameras"):
                self._cameras = {r["id"]: camera_of(r) for r in scan(self._connection, CAMERAS)}
        except BaseException:
            self.close()
            raise

    def twin(self) -> MapReader:
        """Another reader of the same file, to be used at the same time. Raises MapError where none can be had."""
        twin = MapReader(self.path)
        if twin._connection.file is not self._connection.file:
            twin.close()
            raise MapError(f"{self.path}: another file has taken the place of the map")
        twin._checked = self._checked
        return twin

    @property
    def identities(self) -> list[ModelIdentity]:
        """All that the file names."""
        return list(self._models.values())

    @property
    def models(self) -> MapModels | None:
        """Identities of the descriptors; None of a map without keyframes."""
        by_role = {m.role: m for m in self._models.values()}
        return MapModels(by_role["features"], by_role.get("global")) if "features" in by_role else None

    def sessions(self) -> dict[int, int]:
        """Session -> wall time of its first keyframe in nanoseconds since 1970."""
        with self._reading("sessions"):
            found = {r["id"]: r["started_ns"] for r in scan(self._connection, SESSIONS)}
            used = {i for (i,) in self._connection.execute("SELECT DISTINCT session FROM keyframes")}
            if used - set(found):
                raise DataError(f"session {min(used - set(found))} is missing")
            return found

    def headers(self) -> list[KeyframeHeader]:
        """Of all keyframes, in order of their ids, which are 0, 1, 2 ..."""
        with self._reading("keyframes"):
            meta = read(self._connection, META, 0)  # of now: a writer may have gone on
            if meta is None:
                raise DataError("table meta has no row")
            self._refresh_small()
            headers: list[KeyframeHeader] = []
            for row in scan(self._connection, KEYFRAMES, 0, meta["keyframes"]):
                if row["id"] != len(headers):
                    raise DataError(f"keyframe {len(headers)} is missing")
                headers.append(self._header(row))
            if len(headers) != meta["keyframes"]:
                raise DataError(f"{meta['keyframes']} keyframes expected, got {len(headers)}")
            return headers

    def keyframe(self, kf_id: int) -> Keyframe:
        """A keyframe with features, thumbnail and global descriptor. Raises IndexError for an id that is not there."""
        with self._snapshot():
            with self._reading("keyframes", kf_id):
                row = self._row(KEYFRAMES, kf_id)
                h = self._header(row)
            with self._reading("features", kf_id):
                features, thumbnail = self._features(h)
            descriptor = None
            if row["has_global_descriptor"]:
                with self._reading("global_descriptors", kf_id):
                    descriptor = self._array(self._row(GLOBAL_DESCRIPTORS, kf_id), "descriptor")
        return Keyframe(kf_id, h.stamp_ns, h.frame_id, features, h.camera, h.pose, descriptor, thumbnail, h.session)

    def thumbnail(self, kf_id: int) -> np.ndarray | None:
        """Of a keyframe, without its features."""
        with self._reading("features", kf_id):
            return self._array(self._row(FEATURES, kf_id), "thumbnail")

    def global_descriptors(self) -> Iterator[tuple[int, np.ndarray]]:
        """(id, (D,) f16 or f32) of the keyframes that have one, ids ascending."""
        with self._reading("global_descriptors"):
            count = read(self._connection, META, 0)["global_descriptors"]
            there = list(itertools.islice(ids(self._connection, GLOBAL_DESCRIPTORS), max(0, count)))
            if len(there) != count:
                raise DataError(f"{count} rows expected, got {len(there)}")
        batches = [there[i : i + _BATCH] for i in range(0, count, _BATCH)]
        for found in side_by_side(self, MapReader._global_descriptors, batches):
            yield from found

    def _global_descriptors(self, kf_ids: list[int]) -> list[tuple[int, np.ndarray]]:
        found = []
        with self._snapshot():
            for kf_id in kf_ids:
                with self._reading("global_descriptors", kf_id):
                    row = self._row(GLOBAL_DESCRIPTORS, kf_id)
                    if row["model"] not in self._models:
                        raise DataError(f"model {row['model']} is missing")
                    found.append((kf_id, self._array(row, "descriptor")))
        return found

    def confirmed_loops(self) -> list[tuple[int, int]]:
        """(id, reference id) of all verified loops."""
        with self._reading("loops"):
            count = read(self._connection, META, 0)["loops"]
            rows = list(scan(self._connection, LOOPS, 0, count))
            if len(rows) != count:
                raise DataError(f"{count} rows expected, got {len(rows)}")
            for row in rows:
                with self._reading("loops", row["id"]):
                    require_older(row)
            return [(r["keyframe"], r["reference"]) for r in rows if r["status"] in _CONFIRMS]

    def pairs(self, kf_id: int) -> tuple[PairResult, ...]:
        """The attempted pairs of a keyframe with older ones."""
        with self._reading("keyframes", kf_id):
            keyframe = self._row(KEYFRAMES, kf_id)
            first, count = keyframe["first_match"], keyframe["num_matches"]
        with self._reading("matches", f"{first} to {first + count - 1}"):
            rows = list(scan(self._connection, MATCHES, first, count))
            if len(rows) != count or any(r["keyframe"] != kf_id for r in rows):
                raise DataError(f"{count} rows of keyframe {kf_id} expected, got {len(rows)}")
            return tuple(self._pair(r) for r in rows)

    def entry(self, kf_id: int) -> MapEntry:
        """A keyframe with all that belongs to it."""
        keyframe = self.keyframe(kf_id)
        with self._reading("loops", kf_id):
            row = self._row(KEYFRAMES, kf_id)
            rows = list(scan(self._connection, LOOPS, row["first_loop"], row["num_loops"]))
            if len(rows) != row["num_loops"] or any(r["keyframe"] != kf_id for r in rows):
                raise DataError(f"{row['num_loops']} rows of keyframe {kf_id} expected, got {len(rows)}")
            candidates = tuple(self._candidate(r) for r in rows if not r["gated"])
            gated = tuple(self._candidate(r) for r in rows if r["gated"])
        return MapEntry(keyframe, self.pairs(kf_id), candidates, gated)

    # -- what rows stand for ---------------------------------------------------------------

    def _refresh_small(self) -> None:
        self._models = {r["id"]: identity_of(r) for r in scan(self._connection, MODELS)}
        self._cameras = {r["id"]: camera_of(r) for r in scan(self._connection, CAMERAS)}

    def _header(self, row: Row) -> KeyframeHeader:
        camera = None
        if row["camera"] is not None:
            if row["camera"] not in self._cameras:
                self._refresh_small()
            camera = self._cameras.get(row["camera"])
            if camera is None:
                raise DataError(f"camera {row['camera']} is missing")
        pose = pose_of(row.array("pose"), row["pose_frame_id"] or "", bool(row["pose_scale_known"]))
        size = row["width"], row["height"]
        return KeyframeHeader(
            row["id"], row["session"], row["stamp_ns"], row["frame_id"], camera, pose, size, row["num_keypoints"]
        )

    def _features(self, header: KeyframeHeader) -> tuple[Features, np.ndarray | None]:
        row = self._row(FEATURES, header.id)
        if row["model"] not in self._models:
            self._refresh_small()
        model = self._models.get(row["model"])
        if model is None:
            raise DataError(f"model {row['model']} is missing")
        features = features_of(row, header.image_size, model, self._array)
        if len(features) != header.num_keypoints:
            raise DataError(f"keypoints: {header.num_keypoints} expected, got {len(features)}")
        return features, self._array(row, "thumbnail")

    def _pair(self, row: Row) -> PairResult:
        stamp = self._row(KEYFRAMES, row["reference"])["stamp_ns"]
        kind, matches = member_of(PairKind, row["kind"]), matches_of(row, self._array)
        return PairResult(kind, row["keyframe"], row["reference"], stamp, matches)

    def _candidate(self, row: Row) -> Candidate:
        margin = float("nan") if row["margin"] is None else row["margin"]
        stamp = self._row(KEYFRAMES, row["reference"])["stamp_ns"]
        return Candidate(row["keyframe"], row["reference"], stamp, row["similarity"], margin, row["rank"])


_BATCH = 64
"""Global descriptors that are read at once: the lock of the file is not held for longer."""

_CONFIRMS = [int(s) for s in Status if s.confirms]


def require_older(row: Row) -> None:
    """Raises DataError where a row of ``matches`` or ``loops`` refers to no keyframe before its own."""
    if not 0 <= row["reference"] < row["keyframe"]:
        raise DataError(f"keyframe {row['keyframe']} refers to {row['reference']}, which is not an older one")
