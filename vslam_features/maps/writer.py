"""Appends keyframes to a map file in durable transactions."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from ..camera import Camera
from ..errors import DataError, IdentityError, MapError
from ..types import Keyframe, MapEntry, MapModels, ModelIdentity, PairKind, PairResult
from . import database
from .arrays import Packed
from .connection import BUSY_S
from .copy import Progress, copy_connection
from .lock import WriterLock
from .packing import Packer
from .records import camera_of, identity_of, matrix_of
from .rows import Value, insert, read, scan, update
from .store import entry_bytes
from .tables import CAMERAS, FEATURES, GLOBAL_DESCRIPTORS, KEYFRAMES, LOOPS, MATCHES, META, MODELS, SESSIONS


class MapWriter:
    """The one writer of a map; other processes may read meanwhile. Use it from one thread at a time.

    Args:
        path: of the map.
        models: identities of what the keyframes will be described by.
        create: make a new map; else continue the one that is there.
        durable: each keyframe survives a power cut; else all do once whoever gives the file its name has synced it.
    Raises:
        MapError: it cannot be made, another process writes to it, it is no map, or it is damaged.
        IdentityError: the map is one of other models; the message names both.
    """

    def __init__(self, path: Path, models: MapModels, create: bool = False, durable: bool = True):
        self.path, self.models = Path(path), models
        self._lock = WriterLock(self.path)
        self._connection, self._held, self._cache_bytes = None, None, 0
        try:
            if create:
                database.create(self.path)
            self._connection = database.open_for_writing(self.path)
            if not durable:
                self._connection.execute("PRAGMA synchronous = OFF")
            with self._guarded("meta"):
                self._load()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> MapWriter:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def __len__(self) -> int:
        return self._counts["keyframes"]

    def append(self, *entries: MapEntry) -> None:
        """Store keyframes and all that belongs to them in one transaction; on return they survive a power cut.

        Their arrays must not change meanwhile: checksums are computed some keyframes ahead of the writing.

        Raises:
            DataError: an entry is not the next one, or has arrays that a map does not take. Nothing is stored.
            MapError: the disk is full, or fails. Nothing is stored, and the same may be tried again.
        After a KeyboardInterrupt all of them are stored or none, as ``len`` says.
        """
        if self._connection is None:
            raise MapError(f"{self.path}: the map is closed")
        before = dict(self._counts), dict(self._cameras), set(self._sessions), dict(self._model_ids)
        try:
            with self._guarded("keyframes"), Packer([entry.keyframe for entry in entries]) as packer:
                self._hold()
                self._cache(entries)
                self._connection.execute("BEGIN IMMEDIATE")
                with self._waiting_for_nobody():
                    for entry in entries:
                        self._insert(entry, packer)
                        packer.beside(self._connection.file.start_writing)
                    update(self._connection, META, 0, self._meta | self._counts)
                self._connection.execute("COMMIT")
                if len(entries) == 1:
                    self._connection.file.pass_over()
        except BaseException:
            stored = before[0]["keyframes"]
            with contextlib.suppress(Exception):
                self._let_go()
                if self._connection.in_transaction:  # after some errors SQLite has rolled back by itself
                    self._connection.execute("ROLLBACK")
                stored = read(self._connection, META, 0)["keyframes"]
            if stored == before[0]["keyframes"]:  # else it is an interrupt, which is raised once the commit is done
                self._counts, self._cameras, self._sessions, self._model_ids = before
            raise

    def begin_session(self, session: int, started_ns: int, software: str = database.SOFTWARE) -> None:
        """Store when a session began and what made it; without this that is now, by this version.

        Raises DataError where it has begun already, MapError as ``append`` does.
        """
        if self._connection is None:
            raise MapError(f"{self.path}: the map is closed")
        if session in self._sessions:
            raise DataError(f"map: session {session} is there already")
        with self._guarded("sessions"):
            insert(self._connection, SESSIONS, session, {"started_ns": started_ns, "software": software})
        self._sessions.add(session)

    def copy(self, target: Path, progress: Progress | None = None) -> int:
        """Copy the map, see :func:`~.copy.copy_map`. ``progress`` may append: the copy then has that as well."""
        if self._connection is None:
            raise MapError(f"{self.path}: the map is closed")
        return copy_connection(self._connection, self.path, target, progress)

    def close(self) -> None:
        """Let go of the file. All that was appended is on the disk. Safe to call twice."""
        if self._connection is not None:
            with contextlib.suppress(Exception):
                self._let_go()
                self._connection.execute("PRAGMA journal_mode = DELETE")  # no empty journal stays beside the map
            self._connection.close()
            self._connection = None
        if self._lock is not None:
            self._lock.release()

    # -- steps -----------------------------------------------------------------------------

    def _guarded(self, table: str):
        return database.reported(self.path, table)

    @contextlib.contextmanager
    def _waiting_for_nobody(self) -> Iterator[None]:
        """What cannot go to the file yet, since somebody reads, stays in memory; only the commit waits, once."""
        try:
            self._connection.execute("PRAGMA busy_timeout = 0")
            yield
        finally:
            self._connection.execute(f"PRAGMA busy_timeout = {int(BUSY_S * 1000)}")

    def _cache(self, entries: Sequence[MapEntry]) -> None:
        largest = max(map(entry_bytes, entries), default=0)
        nbytes = database.WRITE_CACHE if len(entries) == 1 else database.batch_cache(largest)
        if nbytes != self._cache_bytes:
            self._connection.execute(f"PRAGMA cache_size = -{nbytes >> 10}")
            self._cache_bytes = nbytes

    def _hold(self) -> None:
        """Begin a read that stays open over the commits: with it SQLite keeps the journal open.

        Else it would make the journal anew, and sync the folder, for each keyframe. Readers are not kept out by it.
        """
        if self._held is None:
            self._held = self._connection.execute("SELECT id FROM meta UNION ALL SELECT id FROM meta")
            self._held.fetchone()  # the second row keeps it open

    def _let_go(self) -> None:
        """End that read: after an error SQLite rolls back only once nobody reads."""
        if self._held is not None:
            self._held.close()
            self._held = None

    def _load(self) -> None:
        c = self._connection
        try:
            meta = read(c, META, 0)
            if meta is None:
                raise DataError("there is no row")
            self._meta = {column.name: meta[column.name] for column in META.columns}
            self._counts = {k: v for k, v in self._meta.items() if k not in ("software", "created_ns")}
            self._model_ids = {identity_of(row): row["id"] for row in scan(c, MODELS)}
            self._cameras = {camera_of(row): row["id"] for row in scan(c, CAMERAS)}
            self._sessions = {row["id"] for row in scan(c, SESSIONS)}
        except DataError as error:
            raise database.damaged(self.path, "meta, models, cameras or sessions", "?", error) from error
        last = c.execute("SELECT max(id) FROM keyframes").fetchone()[0]
        if (-1 if last is None else last) + 1 != self._counts["keyframes"]:
            what = f"{self._counts['keyframes']} keyframes expected, the last one there is {last}"
            raise database.damaged(self.path, "keyframes", last, what)
        require_models(self.path, self._model_ids, self.models)

    def _insert(self, entry: MapEntry, packer: Packer) -> None:
        c, kf, counts = self._connection, entry.keyframe, self._counts
        if kf.id != counts["keyframes"]:
            raise DataError(f"map: keyframe {counts['keyframes']} is the next one, got {kf.id}")
        if kf.features.model != self.models.features:
            raise IdentityError(
                f"{self.path} is a map of {self.models.features}, it cannot store features of {kf.features.model}"
            )
        self._insert_session(kf.session)
        first_match, first_loop = counts["matches"], counts["loops"]
        pose = kf.pose
        nbytes = insert(
            c,
            KEYFRAMES,
            kf.id,
            {
                "session": kf.session,
                "stamp_ns": kf.stamp_ns,
                "frame_id": kf.frame_id,
                "camera": self._camera(kf.camera),
                "width": kf.features.image_size[0],
                "height": kf.features.image_size[1],
                "num_keypoints": len(kf.features),
                "pose_frame_id": None if pose is None else pose.frame_id,
                "pose_scale_known": None if pose is None else pose.scale_known,
                "has_global_descriptor": kf.global_descriptor is not None,
                "first_match": first_match,
                "num_matches": len(entry.pairs),
                "first_loop": first_loop,
                "num_loops": len(entry.candidates) + len(entry.gated),
            },
            {"pose": matrix_of(pose)},
        )
        arrays = packer.take()
        nbytes += self._insert_features(kf, arrays.features)
        if arrays.global_descriptor is not None:
            nbytes += self._insert_global(kf, arrays.global_descriptor)
        for pair in entry.pairs:
            nbytes += self._insert_pair(pair)
        status = {p.ref_kf_id: int(p.matches.status) for p in entry.pairs if p.kind is PairKind.LOOP}
        for gated, candidates in ((False, entry.candidates), (True, entry.gated)):
            for candidate in candidates:
                self._insert_loop(candidate, gated, None if gated else status.get(candidate.ref_kf_id))
        counts["keyframes"] += 1
        counts["payload_bytes"] += nbytes

    def _insert_session(self, session: int) -> None:
        if session not in self._sessions:
            insert(self._connection, SESSIONS, session, {"started_ns": time.time_ns(), "software": database.SOFTWARE})
            self._sessions.add(session)

    def _insert_features(self, kf: Keyframe, arrays: dict[str, Packed | None]) -> int:
        f = kf.features
        return insert(
            self._connection,
            FEATURES,
            kf.id,
            {"model": self._model(f.model), "pixel_scale": float(f.pixel_scale), "recovered": f.recovered},
            arrays,
        )

    def _insert_global(self, kf: Keyframe, descriptor: Packed) -> int:
        if self.models.global_descriptor is None:
            raise DataError("map: a keyframe with a global descriptor, but the map names no model of one")
        self._counts["global_descriptors"] += 1
        model = self._model(self.models.global_descriptor)
        return insert(self._connection, GLOBAL_DESCRIPTORS, kf.id, {"model": model}, {"descriptor": descriptor})

    def _insert_pair(self, pair: PairResult) -> int:
        m, row = pair.matches, self._counts["matches"]
        known = [p.scale_known for p in (m.pose, *m.hypotheses) if p is not None]
        self._counts["matches"] += 1
        return insert(
            self._connection,
            MATCHES,
            row,
            {
                "keyframe": pair.kf_id,
                "reference": pair.ref_kf_id,
                "kind": int(pair.kind),
                "status": int(m.status),
                "covisibility": None if m.covisibility is None else float(m.covisibility),
                "stopped_after_layer": m.stopped_after_layer,
                "geometry": m.model,
                "scale_known": all(known) if known else None,
                "elapsed_ms": float(m.elapsed_ms),
                "runtime": m.runtime,
                "detail": m.detail,
            },
            {
                "pose": matrix_of(m.pose),
                "hypotheses": np.array([matrix_of(p) for p in m.hypotheses]) if m.hypotheses else None,
                "pairs": m.pairs,
                "scores": np.asarray(m.scores, np.float32),
                "inliers": m.inliers,
            },
        )

    def _insert_loop(self, candidate, gated: bool, status: int | None) -> None:
        row = self._counts["loops"]
        self._counts["loops"] += 1
        values: dict[str, Value] = {
            "keyframe": candidate.kf_id,
            "reference": candidate.ref_kf_id,
            "similarity": float(candidate.similarity),
            "margin": None if math.isnan(candidate.margin) else float(candidate.margin),
            "rank": candidate.rank,
            "gated": gated,
            "status": status,
        }
        insert(self._connection, LOOPS, row, values)

    def _model(self, identity: ModelIdentity) -> int:
        if identity not in self._model_ids:
            row = len(self._model_ids)
            insert(self._connection, MODELS, row, vars(identity))
            self._model_ids[identity] = row
        return self._model_ids[identity]

    def _camera(self, camera: Camera | None) -> int | None:
        if camera is None:
            return None
        if camera not in self._cameras:
            row = len(self._cameras)
            plain = {n: getattr(camera, n) for n in ("width", "height", "model", "rectified")}
            insert(self._connection, CAMERAS, row, plain, {"K": camera.K, "D": camera.D})
            self._cameras[camera] = row
        return self._cameras[camera]


def require_models(path: Path, found, models: MapModels) -> None:
    """Raises IdentityError, naming both, where identities of a map are others than those of the front-end."""
    for identity in found:
        wanted = {"features": models.features, "global": models.global_descriptor}.get(identity.role)
        if wanted is not None and wanted != identity:
            raise IdentityError(
                f"{path} is a map of {identity}, the front-end runs {wanted}: their descriptors cannot be compared; "
                "set features.name and retrieval.name (and their models) to the map's, or choose another map"
            )
