"""Pairs of keyframes of a map file, chosen and saved as a matcher's inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from pathlib import Path

import numpy as np

from ..artifacts.cases import matching
from ..artifacts.saved_pairs import SavedPair, remove_others, require_same_features, save
from ..errors import BackendError, DataError
from ..maps.reader import MapReader
from ..matching.base import require_kind
from ..matching.verified import VerifiedMatcher
from ..types import Features, Keyframe, Matches, PairKind, PairResult, Status
from .collect import Choice, SeenPair, choose, look_wide, shares
from .gain_views import descriptor_length

Progress = Callable[[int, int], None]
_ANCHORS = 3  # keyframes from which wide pairs are looked for, for each that is wanted
_CACHED = 32  # keyframes in memory; a dense map has 4 MB


def silent(done: int, total: int) -> None:
    """Progress that nobody sees."""


@dataclass(frozen=True)
class Collected:
    """What was saved: file and pair, hardest kind first; ``notes``: what there was less of than wanted."""

    pairs: tuple[tuple[Path, SavedPair], ...]
    notes: tuple[str, ...]


def seen_pairs(reader: MapReader, progress: Progress = silent) -> list[SeenPair]:
    """All attempted pairs of a map. Raises MapDamagedError."""
    headers, found = reader.headers(), []
    for done, header in enumerate(headers, 1):
        found += [SeenPair.of(pair, header.stamp_ns) for pair in reader.pairs(header.id)]
        progress(done, len(headers))
    return found


def wide_pairs(reader: MapReader, matcher: VerifiedMatcher, wanted: int, progress: Progress = silent) -> list[SeenPair]:
    """Neighbours that still verify far apart, see :func:`look_wide`, in each session of a map.

    ``wanted``: pairs of all kinds.
    """

    @lru_cache(maxsize=_CACHED)
    def keyframe(kf_id: int) -> Keyframe:
        return reader.keyframe(kf_id)

    def match(kf_id: int, ref_kf_id: int) -> SeenPair:
        new, old = keyframe(kf_id), keyframe(ref_kf_id)
        try:  # as neighbours are matched: they are not rejected beforehand
            matches = matcher.match(new.features, old.features, new.camera, old.camera, overlapping=True)
        except BackendError as error:  # counted by the engine; the more reason to save the pair
            matches = Matches.empty(Status.BACKEND_ERROR, detail=str(error))
        pair = PairResult(PairKind.TRACK, kf_id, ref_kf_id, old.stamp_ns, matches)
        return SeenPair.of(pair, new.stamp_ns, _moved(new.features, old.features, matches))

    headers, found, anchors = reader.headers(), [], _ANCHORS * shares(wanted)["wide"]
    for _, group in groupby(headers, key=lambda h: h.session):
        ids = [header.id for header in group]
        own = max(1, round(anchors * len(ids) / len(headers)))
        found += look_wide(ids, match, own, progress)
    return found


def require_matcher(reader: MapReader, matcher: VerifiedMatcher, matcher_name: str, source: str) -> None:
    """Raises PluginError where a matcher does not take the features of a map, DataError where it has too few.

    ``source``: what the map is of, as messages name it.
    """
    if len(reader.headers()) < 2:
        raise DataError(f"{source}: fewer than two keyframes, and a pair has two: collect from a longer run")
    features, plugin = reader.keyframe(0).features, matcher.matcher
    require_kind(plugin, matcher_name, features.descriptors.ndim == 3, features.model.name)
    plugin.require(features.model, descriptor_length(features))


def collect(
    reader: MapReader,
    folder: Path,
    wanted: int,
    *,
    matcher: str,
    source: str,
    more: list[SeenPair] = (),
    replace: bool = False,
    progress: Progress = silent,
) -> Collected:
    """Choose pairs of a map and save them.

    Args:
        folder: made where it is not there.
        matcher, source: see :class:`SavedPair`.
        more: pairs beside those in the map.
        replace: saved pairs in the folder, of whichever model, go when the new ones are there.
    Raises:
        DataError: there is no pair that proves anything. IdentityError: the folder has pairs of other features.
        CacheError: a file cannot be written. MapDamagedError.
    """
    features = reader.keyframe(0).features.model
    if not replace:
        require_same_features(folder, features.name, features)
    choice = choose([*seen_pairs(reader, progress), *more], wanted)
    if not choice.pairs:
        raise DataError(
            f"{source}: none of its {len(reader.headers())} keyframes match each other, so that no pair proves "
            "anything: collect from a run whose keyframes are tracked"
        )
    saved = _saved(reader, choice, folder, features, matcher, source)
    if replace:
        remove_others(folder, {path for path, _ in saved})
    return Collected(tuple(saved), choice.notes)


def _saved(reader: MapReader, choice: Choice, folder: Path, features, matcher: str, source: str):
    saved = []
    for kind, seen in choice.pairs:
        sides = [reader.keyframe(kf_id).features for kf_id in (seen.kf_id, seen.ref_kf_id)]
        pair = SavedPair(
            kind=kind,
            stamps_ns=(seen.stamp_ns, seen.ref_stamp_ns),
            keyframes=(seen.kf_id, seen.ref_kf_id),
            features=features,
            matcher=matcher,
            matches=seen.matches,
            inliers=seen.inliers,
            source=source,
            inputs=matching([(f.keypoints, f.descriptors, f.image_size) for f in sides]),
        )
        saved.append((save(folder, pair), pair))
    return saved


def _moved(new: Features, old: Features, matches: Matches) -> float:
    """Median shift of the inliers as a share of the image diagonal."""
    pairs = matches.pairs[matches.inliers]
    if not len(pairs):
        return 0.0
    shift = np.linalg.norm(new.keypoints[pairs[:, 0]] - old.keypoints[pairs[:, 1]], axis=1)
    return float(np.median(shift) / np.hypot(*new.image_size))
