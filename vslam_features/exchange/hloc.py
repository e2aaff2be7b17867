"""Writes a map as files of hloc (Hierarchical-Localization): features, global descriptors, matches, pairs.

hloc's layout: a group an image; ``descriptors`` is (D, N); keypoints are in pixels with (0, 0) at the centre of the
top-left one, as ours, and hloc itself adds the half pixel of COLMAP when it writes a database. Details:
``docs/map_exchange.md``.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ..errors import MapError
from ..maps.placing import sync
from ..maps.reader import MapReader
from ..types import Keyframe, PairResult
from .hdf5 import h5py, new_hdf5, write_errors
from .names import Progress, image_name
from .pairs import best_pairs, checked_pair

FEATURES, GLOBAL, MATCHES, PAIRS = "features.h5", "global-feats.h5", "matches.h5", "pairs.txt"


def export_hloc(reader: MapReader, folder: Path, progress: Progress | None = None, *, overwrite: bool = False) -> int:
    """Write a map as four files in a folder and return the number of images. The same map gives the same bytes.

    Without global descriptors in the map there is no file of them; dense descriptors are left out, since hloc has none.

    Raises:
        MapError: the folder is there and not empty (and not ``overwrite``, which replaces the files of these names), or
            cannot be written.
        MapDamagedError: the map is damaged. Nothing is left in either case.
        PluginError: h5py is not installed.
    """
    h5py()  # before anything is made
    headers = reader.headers()
    with _placed_folder(Path(folder), overwrite) as part, write_errors(Path(folder)):
        with (
            new_hdf5(part / FEATURES) as (features, file_0),
            new_hdf5(part / GLOBAL) as (places, file_1),
            new_hdf5(part / MATCHES) as (matches, file_2),
            open(part / PAIRS, "w", encoding="ascii", newline="\n") as pairs,
        ):
            for done, header in enumerate(headers):
                keyframe = reader.keyframe(header.id)
                _write_features(features, keyframe)
                if keyframe.global_descriptor is not None:
                    _write_global(places, keyframe)
                for pair in best_pairs(reader.pairs(header.id)):
                    checked_pair(pair, headers, reader.path)
                    _write_pair(matches, pair, headers[pair.kf_id].num_keypoints)
                    pairs.write(f"{image_name(pair.kf_id)} {image_name(pair.ref_kf_id)}\n")
                for file in (file_0, file_1, file_2):
                    file.check()
                if progress is not None:
                    progress(done + 1, len(headers))
            any_global = len(places) > 0
        if not any_global:
            os.unlink(part / GLOBAL)
    return len(headers)


def pair_group(name0: str, name1: str) -> str:
    """The group of a pair in hloc's file of matches."""
    return "/".join(name.replace("/", "-") for name in (name0, name1))


def _write_features(file, keyframe: Keyframe) -> None:
    f = keyframe.features
    group = file.create_group(image_name(keyframe.id))
    keypoints = group.create_dataset("keypoints", data=f.keypoints)
    keypoints.attrs["uncertainty"] = float(f.pixel_scale)
    group.create_dataset("scores", data=f.scores)
    if f.descriptors.ndim == 2:
        group.create_dataset("descriptors", data=np.ascontiguousarray(f.descriptors.T))
    group.create_dataset("image_size", data=np.array(f.image_size, np.int64))


def _write_global(file, keyframe: Keyframe) -> None:
    group = file.create_group(image_name(keyframe.id))
    group.create_dataset("global_descriptor", data=np.asarray(keyframe.global_descriptor, np.float32))
    group.create_dataset("image_size", data=np.array(keyframe.features.image_size, np.int64))


def _write_pair(file, pair: PairResult, num_keypoints: int) -> None:
    matches0, scores0 = np.full(num_keypoints, -1, np.int32), np.zeros(num_keypoints, np.float32)
    order = np.argsort(pair.matches.scores, kind="stable")  # of two partners the better one stays
    matches0[pair.matches.pairs[order, 0]] = pair.matches.pairs[order, 1]
    scores0[pair.matches.pairs[order, 0]] = pair.matches.scores[order]
    group = file.create_group(pair_group(image_name(pair.kf_id), image_name(pair.ref_kf_id)))
    group.create_dataset("matches0", data=matches0)
    group.create_dataset("matching_scores0", data=scores0)


@contextlib.contextmanager
def _placed_folder(folder: Path, overwrite: bool) -> Iterator[Path]:
    """A folder beside ``folder`` that becomes it when the block ends well."""
    folder = Path(os.path.abspath(folder.expanduser()))
    if not folder.parent.is_dir():
        raise MapError(f"{folder}: the folder {folder.parent} does not exist; create it, or choose another one")
    if os.path.lexists(folder) and not folder.is_dir():
        raise MapError(f"{folder} is a file: give the name of a folder")
    if folder.is_dir() and any(folder.iterdir()) and not overwrite:
        raise MapError(
            f"{folder} is there already and not empty: choose another folder, or let --force (overwrite) write into "
            "this one"
        )
    part = folder.with_name(f".{folder.name}.{os.getpid()}-{secrets.token_hex(4)}.part")
    try:
        with write_errors(folder):
            part.mkdir()
        yield part
        with write_errors(folder):
            written = sorted(os.listdir(part))
            for name in written:
                sync(part / name)
            if folder.is_dir() and any(folder.iterdir()):
                for name in (FEATURES, GLOBAL, MATCHES, PAIRS):
                    if name in written:
                        os.replace(part / name, folder / name)
                    else:  # of an older export, and not of this map
                        with contextlib.suppress(FileNotFoundError):
                            os.unlink(folder / name)
            else:
                os.rename(part, folder)
            sync(folder)
            sync(folder.parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)
