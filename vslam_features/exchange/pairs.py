"""Which pairs of keyframes an export takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from ..errors import MapDamagedError
from ..types import KeyframeHeader, PairResult


def best_pairs(pairs: Iterable[PairResult]) -> list[PairResult]:
    """One a pair of images (the verified one, then the one with more inliers), those without matches left out."""
    best: dict[tuple[int, int], PairResult] = {}
    for pair in pairs:
        if len(pair.matches) == 0 or pair.kf_id == pair.ref_kf_id:
            continue
        key = min(pair.kf_id, pair.ref_kf_id), max(pair.kf_id, pair.ref_kf_id)
        if key not in best or _rank(pair) > _rank(best[key]):
            best[key] = pair
    return [best[key] for key in sorted(best)]


def _rank(pair: PairResult) -> tuple:
    return pair.matches.verified, pair.matches.num_inliers, len(pair.matches)


def checked_pair(pair: PairResult, headers: Sequence[KeyframeHeader], path: Path) -> None:
    """Raises MapDamagedError where a pair refers to a keyframe or a keypoint that the map at ``path`` has not."""
    for column, kf_id in enumerate((pair.kf_id, pair.ref_kf_id)):
        indices = pair.matches.pairs[:, column]
        if not 0 <= kf_id < len(headers) or indices.min() < 0 or indices.max() >= headers[kf_id].num_keypoints:
            raise MapDamagedError(
                f"{path}: table matches, pair {pair.kf_id}-{pair.ref_kf_id}: it refers to a keyframe or a keypoint "
                "that is not there; 'map verify' lists all damage"
            )
