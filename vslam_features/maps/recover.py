"""Saves the keyframes of a damaged map that are intact into a new one."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..errors import DataError, IdentityError, MapError, MapFileError
from ..types import Candidate, Features, Keyframe, MapEntry, MapModels, PairKind, PairResult, Pose
from .connection import roll_back
from .copy import placed_map
from .database import has_journal
from .lock import is_written
from .pages import FoundRow, PageFile, Progress
from .records import camera_of, features_of, identity_of, matches_of, member_of, pose_of
from .salvage import Salvage
from .tables import CAMERAS, FEATURES, GLOBAL_DESCRIPTORS, KEYFRAMES, LOOPS, MATCHES, MODELS, SESSIONS
from .writer import MapWriter


@dataclass
class RecoverReport:
    """What was saved.

    Args:
        found: keyframes of which there is any trace: a row of ``keyframes`` or ``features``.
        ids: old id -> new id of the saved ones.
        lost: old id -> why it could not be saved.
        without: what saved keyframes had to be saved without -> how many of it.
        notes: lines for people.
    """

    source: Path
    target: Path
    found: int = 0
    ids: dict[int, int] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)
    without: Counter[str] = field(default_factory=Counter)
    matches: int = 0
    loops: int = 0
    notes: list[str] = field(default_factory=list)


def recover(
    source: Path,
    target: Path,
    progress: Progress | None = None,
    *,
    models: MapModels | None = None,
    overwrite: bool = False,
) -> RecoverReport:
    """Write the intact keyframes of a file, however damaged, to a new map; the source is never changed.

    Ids become 0, 1, 2 ... without gaps. Matches and loops are kept where both keyframes are. A keyframe is intact where
    its row and its features are; what else is damaged of it is left out.

    Args:
        progress: called with (done, total), in bytes while rows are looked for, then in keyframes.
        models: the identities of the map, for a file that has lost them.
    Raises:
        MapError: the target is there (and not ``overwrite``) or cannot be written; nothing can be saved; somebody
            writes to the source. No target is left.
    """
    source, target = Path(source), Path(target)
    if not source.is_file():
        raise MapFileError(
            f"{source}: {'no file, but a folder or device' if source.exists() else 'there is no such map'}"
        )
    if target.exists() and os.path.samefile(source, target):
        raise MapError(f"{target}: source and target are the same file")
    if is_written(source):
        raise MapError(f"{source}: a process writes to this map; end it first")
    report = RecoverReport(source, target)
    with contextlib.ExitStack() as stack:
        part = stack.enter_context(placed_map(target, overwrite=overwrite))
        try:
            salvage = stack.enter_context(_opened(source, part.parent, report, progress))
        except OSError as error:
            raise MapFileError(f"{source}: {error.strerror or error}") from error
        models = _models(source, salvage, models)
        with MapWriter(part, models, create=True, durable=False) as writer:
            _Recovery(salvage, models, report).write(writer, progress)
        if not report.ids:
            reasons = Counter(report.lost.values()).most_common(1)
            raise MapError(
                f"{source}: no keyframe is intact{f' ({reasons[0][0]})' if reasons else ''}: nothing to save"
            )
    return report


@contextlib.contextmanager
def _opened(source: Path, folder: Path, report: RecoverReport, progress: Progress | None) -> Iterator[Salvage]:
    """The rows of the source, or of a copy of it in ``folder`` in which a half-done transaction was rolled back."""
    with contextlib.ExitStack() as stack:
        salvage = stack.enter_context(Salvage(source, progress))
        journal = Path(f"{source}-journal")
        if has_journal(source):
            temporary = stack.enter_context(tempfile.TemporaryDirectory(prefix=".recover-", dir=folder))
            copy = _rolled_back(source, journal, Path(temporary))
            other = stack.enter_context(Salvage(copy, progress)) if copy else None
            # The last keyframe of the file itself may be one that the transaction was about.
            if other is not None and len(other) >= len(salvage) - 1 and _same_map(salvage, other):
                salvage = other
                report.notes.append(f"{journal.name}: a transaction that was not finished is rolled back (on a copy)")
            else:
                report.notes.append(f"{journal.name}: not used, since it does not fit the file")
        yield salvage


def _same_map(salvage: Salvage, other: Salvage) -> bool:
    """False where a journal brought pages of another map: rows are written once, those of one id never differ.

    Except of the last keyframe, which may have been tried twice.
    """
    differ = set()
    for table in (KEYFRAMES, FEATURES):
        for row_id in salvage.ids(table) & other.ids(table):
            one, two = ([s.row(table, row_id)[name] for name in table.plain] for s in (salvage, other))
            differ |= {row_id} if one != two else set()
    return len(differ) < 2


def _rolled_back(source: Path, journal: Path, folder: Path) -> Path | None:
    copy = folder / "map"
    with PageFile(source) as pages, open(copy, "wb") as file:
        pages.copy_to(file)
    shutil.copyfile(journal, folder / "map-journal")
    with contextlib.suppress(sqlite3.Error):
        roll_back(copy)
    return copy if not (folder / "map-journal").exists() or (folder / "map-journal").stat().st_size == 0 else None


def _models(source: Path, salvage: Salvage, given: MapModels | None) -> MapModels:
    """The identities of the map: those given, else what the file says. Raises MapError, IdentityError."""
    if not salvage.any:
        raise MapError(f"{source}: there is no intact row of a map in it")
    rows = (salvage.first(MODELS, i, identity_of) for i in sorted(salvage.ids(MODELS)))
    found = {m.role: m for m in rows if m is not None}
    if given is None and "features" not in found:
        raise MapError(
            f"{source}: the identity of the features is damaged: name an intact map of the same front-end that has it "
            "(map recover --like OTHER.vmap)"
        )
    wanted = {"features": given.features, "global": given.global_descriptor} if given else {}
    for role, model in found.items():
        if wanted.get(role) not in (None, model):
            raise IdentityError(f"{source} is a map of {model}, not of {wanted[role]}")
    merged = found | {role: model for role, model in wanted.items() if model is not None}
    return MapModels(merged["features"], merged.get("global"))


class _Recovery:
    """Writes what a salvage has."""

    def __init__(self, salvage: Salvage, models: MapModels, report: RecoverReport):
        self._rows, self._models, self._report = salvage, models, report
        self._cameras = {i: salvage.first(CAMERAS, i, camera_of) for i in salvage.ids(CAMERAS)}
        self._stamps: dict[int, int] = {}  # of the saved, by old id

    def write(self, writer: MapWriter, progress: Progress | None) -> None:
        """Append all intact keyframes."""
        report, ids, begun = self._report, self._rows.ids(KEYFRAMES), set()
        lost = self._rows.ids(FEATURES) - ids
        report.found = len(ids) + len(lost)
        report.lost = dict.fromkeys(sorted(lost), "its row of table keyframes is damaged")
        for done, old in enumerate(sorted(ids), 1):
            try:
                entry, without = self._entry(old)
                session = entry.keyframe.session
                if session not in begun:
                    writer.begin_session(session, *self._session(session))
                    begun.add(session)
                writer.append(entry)
            except DataError as error:
                report.lost[old] = str(error)
            else:
                report.without += without
                report.ids[old] = entry.keyframe.id
                report.matches += len(entry.pairs)
                report.loops += len(entry.candidates) + len(entry.gated)
                self._stamps[old] = entry.keyframe.stamp_ns
            if progress:
                progress(done, len(ids))

    def _entry(self, old: int) -> tuple[MapEntry, Counter[str]]:
        """A keyframe with its new id and what is intact of the rest, and what is not. Raises DataError where it is."""
        row, without = self._rows.row(KEYFRAMES, old), Counter()
        features, thumbnail = self._features(row, without)
        camera = None if row["camera"] is None else self._cameras.get(row["camera"])
        without["cameras"] += camera is None and row["camera"] is not None
        place = None
        if row["has_global_descriptor"]:
            if self._models.global_descriptor is not None:
                place = self._rows.first(GLOBAL_DESCRIPTORS, old, lambda r: r.array("descriptor"))
            without["global descriptors"] += place is None
        stamp, frame_id, session, pose = row["stamp_ns"], row["frame_id"], row["session"], self._pose(row, without)
        keyframe = Keyframe(len(self._stamps), stamp, frame_id, features, camera, pose, place, thumbnail, session)
        pairs = [self._rows.first(MATCHES, i, lambda r: self._pair(r, keyframe.id, old)) for i in self._matches(row)]
        loops = [self._rows.first(LOOPS, i, lambda r: self._loop(r, keyframe.id, old)) for i in self._loops(row)]
        pairs, loops = [p for p in pairs if p], [x for x in loops if x]
        without["matches"] += max(0, row["num_matches"] - len(pairs))
        without["loop candidates"] += max(0, row["num_loops"] - len(loops))
        candidates, gated = ([c for c, is_gated in loops if is_gated == want] for want in (False, True))
        return MapEntry(keyframe, tuple(pairs), tuple(candidates), tuple(gated)), without

    def _features(self, row: FoundRow, without: Counter[str]) -> tuple[Features, np.ndarray | None]:
        size, thumbnail = (row["width"], row["height"]), None
        try:
            features = self._rows.any_of(FEATURES, row["id"], lambda r: features_of(r, size, self._models.features))
        except DataError as error:
            raise DataError(f"features: {error}") from error
        if len(features) != row["num_keypoints"]:
            raise DataError(f"features: {row['num_keypoints']} keypoints expected, got {len(features)}")
        try:
            thumbnail = self._rows.any_of(FEATURES, row["id"], lambda r: r.array("thumbnail"))
        except DataError:
            without["thumbnails"] += 1
        return features, thumbnail

    def _pose(self, row: FoundRow, without: Counter[str]) -> Pose | None:
        frame_id, known = row["pose_frame_id"] or "", bool(row["pose_scale_known"])
        try:
            return self._rows.any_of(KEYFRAMES, row["id"], lambda r: pose_of(r.array("pose"), frame_id, known))
        except DataError:
            without["poses"] += 1
            return None

    def _matches(self, row: FoundRow) -> list[int]:
        return self._rows.range(MATCHES, row["first_match"], row["num_matches"])

    def _loops(self, row: FoundRow) -> list[int]:
        return self._rows.range(LOOPS, row["first_loop"], row["num_loops"])

    def _pair(self, r: FoundRow, new: int, old: int) -> PairResult:
        reference, kind = self._reference(r, old), member_of(PairKind, r["kind"])
        return PairResult(kind, new, reference, self._stamps[r["reference"]], matches_of(r))

    def _loop(self, r: FoundRow, new: int, old: int) -> tuple[Candidate, bool]:
        reference, margin = self._reference(r, old), float("nan") if r["margin"] is None else r["margin"]
        stamp = self._stamps[r["reference"]]
        return Candidate(new, reference, stamp, r["similarity"], margin, r["rank"]), bool(r["gated"])

    def _reference(self, r: FoundRow, old: int) -> int:
        if r["keyframe"] != old or r["reference"] not in self._stamps:
            raise DataError("belongs to another keyframe, or to one that is lost")
        return self._report.ids[r["reference"]]

    def _session(self, session: int) -> tuple[int, str]:
        """When a session began, and what made it."""
        found = self._rows.first(SESSIONS, session, lambda r: (r["started_ns"], r["software"]))
        return found or (0, "unknown")
