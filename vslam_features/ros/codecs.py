"""The tables that the front-end publishes: their columns, how they are built, how they are read.

``docs/topics.md`` freezes them. ``read_*`` accept any writer's layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from sensor_msgs.msg import PointCloud2

from ..types import Candidate, Keyframe, PairResult
from .clouds import from_cloud
from .messages import quaternion, split_stamp

_NAN7 = (np.nan,) * 7


def _columns(text: str) -> np.dtype:
    return np.dtype([(name, "<" + kind) for name, kind in (item.split(":") for item in text.split())])


KEYFRAMES = _columns("x:f4 y:f4 z:f4 score:f4 idx:u4 kf_id:u4")
"""A row = a keypoint of a new keyframe."""

CANDIDATES = _columns(
    "kf_id:u4 ref_kf_id:u4 ref_sec:i4 ref_nanosec:u4 similarity:f4 margin:f4 rank:u1",
)
"""A row = a retrieval candidate, before verification."""

PAIRS = _columns(
    "kind:u1 status:u1 kf_id:u4 ref_kf_id:u4 ref_sec:i4 ref_nanosec:u4 num_matches:u4 num_inliers:u4 covisibility:f4 "
    "stopped_after_layer:u1 qx:f4 qy:f4 qz:f4 qw:f4 tx:f4 ty:f4 tz:f4 scale_known:u1"
)
"""A row = an attempted pair, also an empty one."""

MATCHES = _columns(
    "x:f4 y:f4 z:f4 ref_x:f4 ref_y:f4 score:f4 idx:u4 ref_idx:u4 kf_id:u4 ref_kf_id:u4 inlier:u1",
)
"""A row = a correspondence of a pair."""


def keyframe_table(keyframe: Keyframe) -> np.ndarray:
    """(N,) ``KEYFRAMES``: the keypoints of a keyframe."""
    features = keyframe.features
    table = np.zeros(len(features), KEYFRAMES)
    table["x"], table["y"] = features.keypoints.T
    table["score"] = features.scores
    table["idx"] = np.arange(len(features))
    table["kf_id"] = keyframe.id
    return table


def candidates_table(candidates: Sequence[Candidate]) -> np.ndarray:
    """(N,) ``CANDIDATES``, in the given order. Ranks above 255 are written as 255."""
    rows = [
        (c.kf_id, c.ref_kf_id, *split_stamp(c.ref_stamp_ns), c.similarity, c.margin, min(c.rank, 255))
        for c in candidates
    ]
    return np.array(rows, CANDIDATES)


def pairs_table(pairs: Sequence[PairResult]) -> np.ndarray:
    """(N,) ``PAIRS``, in the given order. NaN stands for no covisibility and for no pose."""
    rows = []
    for pair in pairs:
        m = pair.matches
        pose = _NAN7 if m.pose is None else (*quaternion(m.pose.R), *m.pose.t)
        rows.append(
            (
                *(pair.kind, m.status, pair.kf_id, pair.ref_kf_id, *split_stamp(pair.ref_stamp_ns)),
                *(len(m), m.num_inliers, np.nan if m.covisibility is None else m.covisibility),
                *(m.stopped_after_layer, *pose, m.pose is not None and m.pose.scale_known),
            )
        )
    return np.array(rows, PAIRS)


def matches_table(pairs: Sequence[PairResult], keyframe: Callable[[int], Keyframe]) -> np.ndarray:
    """(M,) ``MATCHES``: the correspondences of all pairs, one pair after the other.

    Args:
        keyframe: the keyframe of an id, for the pixels that the indices mean.
    """
    tables = [np.empty(0, MATCHES)]
    for pair in pairs:
        m = pair.matches
        if not len(m):
            continue  # perhaps since the reference cannot be read
        table = np.zeros(len(m), MATCHES)
        idx, ref_idx = m.pairs.T
        table["x"], table["y"] = keyframe(pair.kf_id).features.keypoints[idx].T
        table["ref_x"], table["ref_y"] = keyframe(pair.ref_kf_id).features.keypoints[ref_idx].T
        table["score"], table["inlier"] = m.scores, m.inliers
        table["idx"], table["ref_idx"] = idx, ref_idx
        table["kf_id"], table["ref_kf_id"] = pair.kf_id, pair.ref_kf_id
        tables.append(table)
    return np.concatenate(tables)


def read_keyframes(cloud: PointCloud2) -> np.ndarray:
    """(N,) ``KEYFRAMES`` of a message on ``~/keyframes``. Raises DataError on another contract."""
    return from_cloud(cloud, KEYFRAMES)


def read_candidates(cloud: PointCloud2) -> np.ndarray:
    """(N,) ``CANDIDATES`` of a message on ``~/loop_candidates``. Raises DataError on another contract."""
    return from_cloud(cloud, CANDIDATES)


def read_pairs(cloud: PointCloud2) -> np.ndarray:
    """(N,) ``PAIRS`` of a message on ``~/pairs``. Raises DataError on another contract."""
    return from_cloud(cloud, PAIRS)


def read_matches(cloud: PointCloud2) -> np.ndarray:
    """(M,) ``MATCHES`` of a message on ``~/matches``. Raises DataError on another contract."""
    return from_cloud(cloud, MATCHES)
