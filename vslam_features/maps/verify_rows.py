"""Checks the rows of a map file, each by itself and with those that it refers to."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from ..errors import DataError, MapFileError, VslamFeaturesError
from ..types import ModelIdentity, PairKind, Status
from . import database
from .pages import Progress
from .records import camera_of, features_of, identity_of, matches_of, member_of, pose_of
from .rows import Row, read
from .tables import CAMERAS, FEATURES, GLOBAL_DESCRIPTORS, KEYFRAMES, LOOPS, MATCHES, META, MODELS, SESSIONS, Table
from .verify_report import VerifyReport

_UNIT = 1e-2
_OUTSIDE_PX = 1.0
"""Detectors that interpolate go a little beyond the border."""

_ANY_MODEL = ModelIdentity("features", "", "", "")


def failed(report: VerifyReport, table: str, row: int | None, error: Exception) -> None:
    """Report one of ``FAILURES``. Raises MapError where it tells nothing of the file."""
    told = database.translated(report.path, table, error)
    if not isinstance(told, MapFileError):
        raise told from error
    report.damage(table, row, error)


class RowChecks:
    """Checks all rows of a map and how they belong together. ``report.rows`` says how many there must be."""

    def __init__(self, connection: sqlite3.Connection, report: VerifyReport):
        self._connection, self._report = connection, report
        self._models: dict[int, str] = {}
        self._cameras: dict[int, tuple[int, int]] = {}
        self._sessions: dict[int, int | None] = {}  # -> newest stamp
        self._payload = 0

    def meta(self) -> Row | None:
        """The one row of ``meta``, where it is intact."""
        self._meta = self._check(META, 0, lambda row: None)
        return self._meta

    def run(self, progress: Progress | None) -> None:
        """Check them. ``progress``: (rows done, rows in all)."""
        report = self._report
        for table, check in ((MODELS, self._model), (CAMERAS, self._camera)):
            for row_id in range(report.rows[table.name]):
                self._check(table, row_id, check)
        for row_id in self._ids(SESSIONS):
            self._check(SESSIONS, row_id, self._session)
        self._keyframes()
        self._done, self._progress = 0, progress
        self._total = sum(report.rows[t.name] for t in (FEATURES, GLOBAL_DESCRIPTORS, MATCHES, LOOPS))
        n = range(report.rows[KEYFRAMES.name])
        self._table(FEATURES, self._features, n, n)
        places = [i for i in n if self._has_global[i] or (not self._known[i] and self._there(GLOBAL_DESCRIPTORS, i))]
        self._table(GLOBAL_DESCRIPTORS, self._global, places, places)
        self._table(MATCHES, self._match, range(len(self._owners[MATCHES.name])), self._owners[MATCHES.name])
        self._table(LOOPS, self._loop, range(len(self._owners[LOOPS.name])), self._owners[LOOPS.name])
        if report.damaged:
            return  # what follows would only say so again
        counted = {GLOBAL_DESCRIPTORS: len(places), MATCHES: self._end[0], LOOPS: self._end[1]}
        for table, count in counted.items():
            if count != report.rows[table.name]:
                report.damage(table.name, None, f"{report.rows[table.name]} rows, keyframes have {count}")
        if self._meta["payload_bytes"] != self._payload:
            report.damage(
                META.name, 0, f"payload_bytes is {self._meta['payload_bytes']}, the arrays have {self._payload}"
            )

    def _check(self, table: Table, row_id: int, check: Callable[[Row], None]) -> Row | None:
        """A row that is intact and that ``check`` raises nothing for; else None, and the report says why."""
        try:
            row = read(self._connection, table, row_id)
            if row is None:
                raise DataError("the row is missing")
            check(row)
        except database.FAILURES as error:
            failed(self._report, table.name, row_id, error)
        except VslamFeaturesError as error:
            self._report.damage(table.name, row_id, error)
        else:
            self._report.intact[table.name] += 1
            return row
        return None

    def _array(self, row: Row, name: str) -> np.ndarray | None:
        array = row.array(name)
        if array is not None and row.table is not CAMERAS:
            self._payload += array.nbytes
        return array

    def _model(self, row: Row) -> None:
        model = identity_of(row)
        if model.role not in ("features", "global") or model.role in self._models.values():
            raise DataError(f"role {model.role!r}: one of 'features' and one of 'global' is expected")
        self._models[row["id"]] = model.role

    def _camera(self, row: Row) -> None:
        self._cameras[row["id"]] = camera_of(row).size

    def _session(self, row: Row) -> None:
        self._sessions[row["id"]] = None

    def _keyframes(self) -> None:
        """The rows of all keyframes, which tell what belongs to them."""
        rows = self._report.rows
        n = rows[KEYFRAMES.name]
        self._known, self._has_global, self._num_keypoints = np.zeros(n, bool), np.zeros(n, bool), np.zeros(n, np.int64)
        self._sizes = np.zeros((n, 2), np.int64)
        self._owners = {t.name: np.full(rows[t.name], -1, np.int64) for t in (MATCHES, LOOPS)}
        self._end: tuple[int, int] | None = (0, 0)  # of the rows of the last keyframe; None where that is damaged
        for kf_id in range(n):
            row = self._check(KEYFRAMES, kf_id, self._header)
            self._known[kf_id] = row is not None
            if row is None:
                self._end = None
                continue
            self._has_global[kf_id], self._num_keypoints[kf_id] = row["has_global_descriptor"], row["num_keypoints"]
            self._sizes[kf_id] = row["width"], row["height"]
            ends = []
            for table, kind in ((MATCHES, "match"), (LOOPS, "loop")):
                first = row[f"first_{kind}"]
                end = first + row["num_matches" if kind == "match" else "num_loops"]
                self._owners[table.name][first:end] = kf_id
                ends.append(end)
            self._end = (ends[0], ends[1])
        self._report.intact_keyframes = self._known.copy()

    def _header(self, row: Row) -> None:
        for i, (table, first, count) in enumerate(
            ((MATCHES, "first_match", "num_matches"), (LOOPS, "first_loop", "num_loops"))
        ):
            begin, end = row[first], row[first] + row[count]
            if not 0 <= begin <= end <= self._report.rows[table.name] or (self._end and begin != self._end[i]):
                raise DataError(f"{first} {begin}, {count} {row[count]}: not the rows after those of the one before")
        if not (0 < row["width"] < 1 << 31 and 0 < row["height"] < 1 << 31 and 0 <= row["num_keypoints"] < 1 << 31):
            raise DataError(f"an image of {row['width']}x{row['height']} with {row['num_keypoints']} keypoints")
        if row["session"] not in self._sessions:
            raise DataError(f"session {row['session']} is missing")
        if row["camera"] is not None and row["camera"] not in self._cameras:
            raise DataError(f"camera {row['camera']} is missing")
        pose_of(self._array(row, "pose"), row["pose_frame_id"] or "", bool(row["pose_scale_known"]))
        newest, stamp = self._sessions[row["session"]], row["stamp_ns"]
        if newest is not None and stamp <= newest:
            self._report.odd(KEYFRAMES.name, row["id"], f"stamp {stamp} ns is not after {newest} ns in its session")
        self._sessions[row["session"]] = stamp
        if row["camera"] is not None and self._cameras[row["camera"]] != (row["width"], row["height"]):
            self._report.odd(KEYFRAMES.name, row["id"], "its camera is for another size of image")

    def _table(self, table: Table, check: Callable[[Row], None], ids: Iterable[int], owners: Sequence[int]) -> None:
        """Check rows. A damaged one damages the keyframe that owns it; an owner of -1 is not known."""
        for row_id, owner in zip(ids, owners):
            if self._check(table, row_id, check) is None and owner >= 0:
                self._report.intact_keyframes[owner] = False
            self._done += 1
            if self._progress:
                self._progress(min(self._done, self._total), self._total)

    def _ids(self, table: Table) -> list[int]:
        with contextlib.suppress(*database.FAILURES):  # as below
            return [i for (i,) in self._connection.execute(f"SELECT id FROM {table.name}")]
        return []

    def _there(self, table: Table, row_id: int) -> bool:
        with contextlib.suppress(*database.FAILURES):  # told where the table as a whole was looked at
            sql = f"SELECT 1 FROM {table.name} WHERE id = ?"
            return self._connection.execute(sql, (row_id,)).fetchone() is not None
        return False

    def _features(self, row: Row) -> None:
        kf_id = row["id"]
        if self._models.get(row["model"]) != "features":
            raise DataError(f"model {row['model']} is missing, or one of another role")
        size = tuple(map(int, self._sizes[kf_id]))
        features = features_of(row, size, _ANY_MODEL, self._array)
        thumbnail = self._array(row, "thumbnail")
        if not self._known[kf_id]:
            return
        if len(features) != self._num_keypoints[kf_id]:
            raise DataError(f"{self._num_keypoints[kf_id]} keypoints expected, got {len(features)}")
        low, high = -_OUTSIDE_PX, np.array(size) - 1 + _OUTSIDE_PX
        outside = int(((features.keypoints < low) | (features.keypoints > high)).any(axis=1).sum())
        if outside:
            self._report.odd(FEATURES.name, kf_id, f"{outside} keypoints outside of the image of {size[0]}x{size[1]}")
        if thumbnail is not None and thumbnail.size == 0:
            self._report.odd(FEATURES.name, kf_id, "an empty thumbnail")

    def _global(self, row: Row) -> None:
        if self._models.get(row["model"]) != "global":
            raise DataError(f"model {row['model']} is missing, or one of another role")
        norm = float(np.linalg.norm(self._array(row, "descriptor").astype(np.float64)))
        if norm > 0 and abs(norm - 1) > _UNIT:
            self._report.odd(GLOBAL_DESCRIPTORS.name, row["id"], f"length {norm:.4g}, not 1")

    def _ends(self, row: Row) -> tuple[int, int]:
        """Both keyframes of a pair. Raises DataError where they are not what they must be."""
        owner, keyframe, reference = self._owners[row.table.name][row["id"]], row["keyframe"], row["reference"]
        n = len(self._known)
        if not (0 <= keyframe < n and 0 <= reference < n) or keyframe == reference:
            raise DataError(f"of keyframes {keyframe} and {reference}, there are {n}")
        if owner not in (-1, keyframe):
            raise DataError(f"of keyframe {keyframe}, but keyframe {owner} says that it is its own")
        return keyframe, reference

    def _match(self, row: Row) -> None:
        ends = self._ends(row)
        member_of(PairKind, row["kind"])
        matches = matches_of(row, self._array)
        for side, kf_id in enumerate(ends):
            index, count = matches.pairs[:, side], self._num_keypoints[kf_id]
            if len(index) and self._known[kf_id] and not (index.min() >= 0 and index.max() < count):
                raise DataError(
                    f"pairs: keypoint {index.min()} to {index.max()} of keyframe {kf_id}, which has {count}"
                )

    def _loop(self, row: Row) -> None:
        self._ends(row)
        if row["status"] is not None:
            member_of(Status, row["status"])
