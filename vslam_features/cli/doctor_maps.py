"""What ``doctor`` says of where maps and models are kept: folders, free disk, and the map that is configured."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ..artifacts.cache import cache_root
from ..config import Config
from ..errors import MapError, ModelError, VslamFeaturesError
from ..session_files import state_folder
from .check import FAIL, OK, WARN, Check

# Of a keyframe: few keypoints of a small model, and many of SIFT (docs/maps.md).
_KEYFRAME_MB, _KEYFRAMES_A_SECOND = (0.1, 2.0), 1.0
_LEAST_MB = 100.0


def check_folders(config: Config) -> Iterator[Check]:
    """State and cache: whether they can be written, and how long there is room for a map."""
    for name, variable, folder in (
        ("state", "VSLAM_FEATURES_STATE", state_folder),
        ("cache", "VSLAM_FEATURES_CACHE", cache_root),
    ):
        try:
            where = folder()
        except VslamFeaturesError as error:  # no home folder
            yield Check(FAIL, name, str(error), f"set {variable} to a folder")
            continue
        if problem := _unwritable(where):
            yield Check(FAIL, name, f"{where} cannot be written: {problem}", f"set {variable} to a folder that can")
            continue
        free = free_mb(where)
        if name == "state" and not config.map_path:
            yield _room(name, where, free)
        elif free < _LEAST_MB:
            yield Check(FAIL, name, f"{where} ({_size(free)} free)", "make room: nothing more can be written")
        else:
            few = free < 1024
            yield Check(WARN if few else OK, name, f"{where} ({_size(free)} free)", "make room" if few else "")


def check_map(config: Config) -> Iterator[Check]:
    """The configured map: its folder, whether it can be read, and whether it is of the configured models."""
    from ..map_keeper import absolute
    from ..map_keeper import check_map as require_map

    try:
        require_map(config)
    except VslamFeaturesError as error:
        yield Check(FAIL, "map", str(error), "correct map_path and mode in the configuration")
        return
    if not config.map_path:
        return
    path = absolute(config.map_path)
    if config.mode == "mapping":
        if problem := _unwritable(path.parent):
            fix = "give the user that runs the front-end the right to write there"
            yield Check(FAIL, "map", f"{path.parent} cannot be written: {problem}", fix)
            return
        yield _room("map disk", path.parent, free_mb(path.parent))
    if path.exists():
        yield from _existing(path, config)
    elif config.mode == "localization":
        fix = "correct map_path, or copy the map there"
        yield Check(FAIL, "map", f"{path} is not there: there is nothing to localise in", fix)
    else:
        yield Check(OK, "map", f"{path} is made at the start")


def free_mb(folder: Path) -> float:
    """Of the disk that a folder is on, or will be."""
    return shutil.disk_usage(_existing_part(folder)).free / 2**20


def _existing(path: Path, config: Config) -> Iterator[Check]:
    from ..maps.reader import MapReader

    fix = f"vslam-features map verify {path}"
    try:
        with MapReader(path) as reader:
            identities, keyframes = reader.identities, reader.meta["keyframes"]
    except (MapError, OSError) as error:
        yield Check(FAIL, "map", str(error), fix)
        return
    text = f"{path}: {keyframes} keyframes, {path.stat().st_size / 1e6:.1f} MB"
    if problems := [p for found in identities if (p := _foreign(found, config))]:
        fix = "set features.name and retrieval.name (and their models) to the map's, or choose another map"
        yield Check(FAIL, "map", f"{text}; {'; '.join(problems)}", fix)
    else:
        models = " + ".join(f"{m.name}" for m in identities)
        yield Check(OK, "map", f"{text}{f', of {models}' if models else ''}")


def _foreign(found, config: Config) -> str:
    """Why descriptors of a map cannot be compared with those of the configuration; empty: they can, or nobody knows."""
    group = {"features": config.features, "global": config.retrieval}.get(found.role)
    if group is None or (found.role == "global" and not config.loops.enabled):
        return ""
    model = group.options.get("model")
    if model is None:
        # Classical ones carry the name of their plug-in; that of VLAD goes on with the features that it is of.
        return "" if found.name.startswith(group.name) else f"the map is of {found.name}, configured is {group.name}"
    from ..artifacts.card import identity, read_card
    from ..artifacts.records import records_of
    from ..artifacts.store import content_sha256, locate
    from ..models import proven_sha256

    try:
        path = locate(model, config.runtime.precision)
        card = read_card(path)
        proven = {proven_sha256(r) for r in records_of(content_sha256(path)) if r.passed}
    except (ModelError, VslamFeaturesError):
        return ""  # the line of the model says so
    ours = [identity(card, sha256) for sha256 in sorted(proven)]
    if (card.name, card.preprocessing.id) != (found.name, found.preprocessing) or (ours and found not in ours):
        return f"the map is of {found}, configured is {ours[0] if ours else card.name}"
    return ""


def _room(name: str, folder: Path, mb: float) -> Check:
    """How long a map can grow."""
    few, many = (mb / size / _KEYFRAMES_A_SECOND / 3600 for size in reversed(_KEYFRAME_MB))
    text = f"{folder} ({_size(mb)} free, {_hours(few)} to {_hours(many)} of mapping at 1 keyframe a second)"
    if mb < _LEAST_MB:
        return Check(
            FAIL, name, text, "the disk is full: keyframes cannot be stored; remove old maps (map.keep_sessions)"
        )
    return Check(WARN, name, text, "make room: maps grow") if few < 0.5 else Check(OK, name, text)


def _unwritable(folder: Path) -> str:
    """Why nothing can be written to a folder, which need not be there yet; empty: it can."""
    there = _existing_part(folder)
    if not there.is_dir():
        return f"{there} is a file"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"no right to write to {there}"
    if there != folder:
        return ""
    try:
        with tempfile.TemporaryFile(dir=folder):  # quotas and read-only disks show only now
            return ""
    except OSError as error:
        return error.strerror or str(error)


def _existing_part(folder: Path) -> Path:
    return next(p for p in (folder, *folder.parents) if p.exists())


def _size(mb: float) -> str:
    return f"{mb / 1024:.0f} GB" if mb >= 10 * 1024 else f"{mb / 1024:.1f} GB" if mb >= 1024 else f"{mb:.0f} MB"


def _hours(hours: float) -> str:
    return f"{hours:.0f} h" if hours >= 2 else f"{hours * 60:.0f} min"
