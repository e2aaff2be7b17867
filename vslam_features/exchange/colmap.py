"""Writes a map as a COLMAP database, with matches and verified pairs, ready for ``colmap mapper``.

The tables are those that COLMAP's documentation ("Database Format") describes for 3.9: newer versions extend such a
database when they open it, older ones read it. What becomes what: ``docs/map_exchange.md``.
"""

from __future__ import annotations

import contextlib
import functools
import sqlite3
from pathlib import Path

import numpy as np

from ..errors import MapError
from ..features.sift import Sift
from ..maps.placing import placed_file
from ..maps.reader import MapReader
from ..types import Features, KeyframeHeader, PairResult
from .colmap_cameras import HALF_PX, ColmapCamera, colmap_camera
from .colmap_geometry import TwoViewGeometry, ordered, two_view_geometry
from .names import Progress, image_name
from .pairs import best_pairs, checked_pair

MAX_IMAGES = 2147483647
"""COLMAP's pair_id is image_id1 * 2147483647 + image_id2, with image_id1 < image_id2."""
_SCHEMA_VERSION = 3900
_TABLES = (
    "cameras (camera_id INTEGER PRIMARY KEY AUTOINCREMENT NOT NULL, model INTEGER NOT NULL, width INTEGER NOT NULL, "
    "height INTEGER NOT NULL, params BLOB, prior_focal_length INTEGER NOT NULL)",
    "images (image_id INTEGER PRIMARY KEY AUTOINCREMENT NOT NULL, name TEXT NOT NULL UNIQUE, "
    "camera_id INTEGER NOT NULL, prior_qw REAL, prior_qx REAL, prior_qy REAL, prior_qz REAL, prior_tx REAL, "
    f"prior_ty REAL, prior_tz REAL, CONSTRAINT image_id_check CHECK(image_id >= 0 and image_id < {MAX_IMAGES}), "
    "FOREIGN KEY(camera_id) REFERENCES cameras(camera_id))",
    *(
        f"{name} (image_id INTEGER PRIMARY KEY NOT NULL, rows INTEGER NOT NULL, cols INTEGER NOT NULL, data BLOB, "
        "FOREIGN KEY(image_id) REFERENCES images(image_id) ON DELETE CASCADE)"
        for name in ("keypoints", "descriptors")
    ),
    "matches (pair_id INTEGER PRIMARY KEY NOT NULL, rows INTEGER NOT NULL, cols INTEGER NOT NULL, data BLOB)",
    "two_view_geometries (pair_id INTEGER PRIMARY KEY NOT NULL, rows INTEGER NOT NULL, cols INTEGER NOT NULL, "
    "data BLOB, config INTEGER NOT NULL, F BLOB, E BLOB, H BLOB, qvec BLOB, tvec BLOB)",
)
_COMMIT_EVERY = 64
_KEYPOINTS_OF = 512  # keyframes whose keypoints are held, 16 kB each
_SIFT = Sift(1, 0, Sift.Options()).identity


def export_colmap(reader: MapReader, target: Path, progress: Progress | None = None, *, overwrite: bool = False) -> int:
    """Write a map as a COLMAP database and return the number of images. The same map gives the same bytes.

    Raises:
        MapError: the target is there (and not ``overwrite``) or cannot be written, or COLMAP has no such camera.
        MapDamagedError: the map is damaged. No target is left in either case.
    """
    target = Path(target)
    headers = reader.headers()
    with placed_file(target, replace=overwrite) as part, _sqlite_errors(target):
        connection = sqlite3.connect(part, isolation_level=None)
        with contextlib.closing(connection):
            connection.execute("PRAGMA journal_mode = OFF")  # the file has no name yet that anybody trusts
            connection.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")
            connection.execute("BEGIN")
            for table in _TABLES:
                connection.execute(f"CREATE TABLE {table}")
            connection.execute("CREATE UNIQUE INDEX index_name ON images(name)")
            _Export(reader, headers, connection).run(progress)
            connection.execute("COMMIT")
    return len(headers)


class _Export:
    def __init__(self, reader: MapReader, headers: list[KeyframeHeader], connection: sqlite3.Connection):
        self._reader, self._headers, self._connection = reader, headers, connection
        self._cameras: dict[ColmapCamera, int] = {}
        self._keypoints = functools.lru_cache(_KEYPOINTS_OF)(lambda kf_id: reader.keyframe(kf_id).features.keypoints)

    def run(self, progress: Progress | None) -> None:
        for done, header in enumerate(self._headers):
            features = self._reader.keyframe(header.id).features
            self._add_image(header, features)
            for pair in best_pairs(self._reader.pairs(header.id)):
                self._add_pair(pair)
            if done % _COMMIT_EVERY == _COMMIT_EVERY - 1:  # bounds the memory of what is not written yet
                self._connection.execute("COMMIT")
                self._connection.execute("BEGIN")
            if progress is not None:
                progress(done + 1, len(self._headers))

    def _add_image(self, header: KeyframeHeader, features: Features) -> None:
        image_id = header.id + 1  # COLMAP's ids are positive
        camera = self._camera(header)
        self._insert("images", image_id, image_name(header.id), camera, *[None] * 7)
        self._insert("keypoints", image_id, *_array(features.keypoints + np.float32(HALF_PX), "<f4"))
        descriptors = colmap_descriptors(features)
        if descriptors is not None:
            self._insert("descriptors", image_id, *_array(descriptors, "|u1"))

    def _camera(self, header: KeyframeHeader) -> int:
        camera = colmap_camera(header.camera, header.image_size)
        if camera not in self._cameras:
            self._cameras[camera] = len(self._cameras) + 1
            params = np.array(camera.params, "<f8").tobytes()
            size = camera.width, camera.height
            prior = int(camera.prior_focal_length)
            self._insert("cameras", self._cameras[camera], camera.model, *size, params, prior)
        return self._cameras[camera]

    def _add_pair(self, pair: PairResult) -> None:
        first, second, indices = ordered(pair)
        checked_pair(pair, self._headers, self._reader.path)
        pair_id = (first + 1) * MAX_IMAGES + second + 1
        self._insert("matches", pair_id, *_array(indices, "<u4"))
        if not pair.matches.verified:
            return
        points = (self._keypoints(kf_id) for kf_id in (first, second))
        cameras = (self._headers[kf_id].camera for kf_id in (first, second))
        geometry = two_view_geometry(pair, *points, *cameras)
        self._insert("two_view_geometries", pair_id, *_array(geometry.inliers, "<u4"), *_matrices(geometry))

    def _insert(self, table: str, *values) -> None:
        marks = ", ".join("?" * len(values))
        self._connection.execute(f"INSERT INTO {table} VALUES ({marks})", values)


def colmap_descriptors(features: Features) -> np.ndarray | None:
    """(N, 128) u8 where COLMAP can compare them, which is RootSIFT times 512; None for others."""
    d = features.descriptors
    if features.model != _SIFT or d.ndim != 2 or d.shape[1] != 128:
        return None
    return np.clip(np.rint(d.astype(np.float32) * 512), 0, 255).astype(np.uint8)


def _array(array: np.ndarray, dtype: str) -> tuple[int, int, bytes]:
    return (*array.shape, np.ascontiguousarray(array, dtype).tobytes())


def _matrices(geometry: TwoViewGeometry) -> tuple:
    parts = (geometry.F, geometry.E, geometry.H, geometry.qvec, geometry.tvec)
    blobs = [None if part is None else np.ascontiguousarray(part, "<f8").tobytes() for part in parts]
    return (geometry.config, *blobs)


@contextlib.contextmanager
def _sqlite_errors(target: Path):
    try:
        yield
    except sqlite3.Error as error:
        raise MapError(f"{target} cannot be written: {error}: make room, or choose another folder") from error
