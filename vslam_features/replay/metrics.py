"""Numbers of a run as one strict JSON object, equal in every run over the same input and configuration.

Only ``latency_ms`` and ``provenance.run`` differ between runs.
"""

from __future__ import annotations

import dataclasses
import platform
from collections import Counter
from importlib.metadata import PackageNotFoundError, version

import cv2
import numpy as np

from .. import __version__
from ..errors import DataError
from ..types import PairKind, Status
from .loop_truth import LoopTruth
from .run_log import ModelRecord, PairRecord, RunLog


def metrics(log: RunLog, truth: LoopTruth | None = None) -> dict:
    """All numbers of a run.

    Medians, ``zero_match_pairs``, ``statuses`` and ``non_finite`` are over all
    attempted pairs; ``by_kind`` splits them (``track``: with the keyframes
    before, ``loop``: with retrieved ones, ``relocalisation``: with those of a
    map that is only read). A median is None without pairs; the inlier ratio
    counts pairs with a match. ``loops.pairs``: [keyframe, older keyframe] of
    the verified ones. ``retrieval.top1``: [keyframe, older keyframe,
    similarity], before verification. ``engines``: the learned models,
    see ``run_log.ModelRecord``. With ``truth`` there is ``loop_truth``, see
    :func:`judge_loops`. Of a run with a map file there is ``map``, see
    ``run_log.MapRecord`` (its size is in ``provenance.run``), and in a
    localisation ``relocalisation``: ``keyframes`` that were recognised, their
    ``share`` of all, and the ``first`` as [keyframe, image].
    """
    loops = [p for p in log.pairs if p.kind == PairKind.LOOP]
    kinds = {k: [p for p in log.pairs if p.kind == k] for k in PairKind}
    out = {
        "frames": log.frames,
        "keyframes": len(log.keyframes),
        **_of_pairs(log.pairs),
        "by_kind": {k.name.lower(): _of_pairs(pairs) for k, pairs in kinds.items() if pairs},
        "loops": {
            "candidates": len(log.candidates),
            "attempted": len(loops),
            "verified": sum(p.verified for p in loops),
            "ambiguous": sum(p.status == Status.AMBIGUOUS for p in loops),
            "gated": log.gated,
            "pairs": [[p.kf_id, p.ref_kf_id] for p in loops if p.verified],
        },
        "retrieval": {
            "top1": [[c.kf_id, c.ref_kf_id, round(c.similarity, 4)] for c in log.candidates if c.rank == 0],
        },
        "input": {
            "expected": log.expected,
            "complete": not log.incomplete,
            "reason": log.incomplete,
            "skipped": log.skipped,
            "notes": log.notes,
            "examples": {reason: texts[:3] for reason, texts in log.examples.items()},
        },
        "faults": dict(sorted(log.fault_counts.items())),
        "engines": [_engine(e) for e in log.engines],
        "latency_ms": {stage: percentiles(values) for stage, values in log.latency_ms.items()},
        "provenance": {
            "version": __version__,
            "config": log.config,
            "models": log.models,
            "instead": log.instead,
            "libraries": libraries(),
            "source": log.source,
            "max_frames": log.max_frames,
            "run": _run(log),
        },
    }
    if log.map is not None:
        out["map"] = {
            "name": log.map.name,
            "mode": log.map.mode,
            "session": log.map.session,
            "keyframes_before": log.map.before,
            "keyframes_after": log.map.after,
            "loops_with_older_sessions": sum(p.verified and p.ref_kf_id < log.first_id for p in loops),
            "problems": log.map.problems,
        }
    if log.localises:
        out["relocalisation"] = _relocalisation(log, kinds[PairKind.RELOCALISATION])
    if truth is not None:
        out["loop_truth"] = judge_loops(log, truth)
    return out


def judge_loops(log: RunLog, truth: LoopTruth) -> dict:
    """Retrieval and loops against the truth.

    ``queries``: keyframes with a true revisit among the candidates allowed;
    ``recall_at_k``: share of them with a true one among the first k, before
    verification; ``queries_with_loop``: those with a verified loop that is
    true; ``false_loops``: verified ones that are wrong beyond doubt, as image
    positions.

    Raises:
        DataError: the truth is of a shorter sequence, or tells nothing of keyframes of a map that was there before.
    """
    if log.first_id:
        raise DataError(
            f"loop matrix: is of the images of this run, but {log.first_id} keyframes were in the map before; "
            "leave the matrix out, or replay without the map"
        )
    position = {k.id: k.position for k in log.keyframes}
    if position and max(position.values()) >= len(truth):
        raise DataError(
            f"loop matrix: is for {len(truth)} images, the run has image {max(position.values())}; "
            "give the matrix of this sequence"
        )
    exclude = int(log.config.get("retrieval", {}).get("exclude_frames", 0))
    queries = [k.id for k in log.keyframes if truth.has_revisit(k.position, exclude)]
    hits: dict[int, int] = {}  # keyframe -> best rank of a true candidate
    for c in log.candidates:
        if truth.is_true(position[c.kf_id], position[c.ref_kf_id]):
            hits[c.kf_id] = min(c.rank, hits.get(c.kf_id, c.rank))
    loops = [p for p in log.pairs if p.kind == PairKind.LOOP and p.verified]
    inside = {p.kf_id for p in loops if truth.is_true(position[p.kf_id], position[p.ref_kf_id])}
    false = [(position[p.kf_id], position[p.ref_kf_id]) for p in loops]
    n = len(queries)
    return {
        "queries": n,
        "recall_at_1": round(sum(hits.get(q, 99) < 1 for q in queries) / n, 4) if n else None,
        "recall_at_5": round(sum(hits.get(q, 99) < 5 for q in queries) / n, 4) if n else None,
        "queries_with_loop": sum(q in inside for q in queries),
        "tolerance": truth.tolerance,
        "false_loops": [[i, j] for i, j in false if truth.is_false(i, j)],
    }


def percentiles(values) -> dict[str, float]:
    """p50 and p95 in milliseconds, three decimals."""
    p50, p95 = np.percentile(np.asarray(values, np.float64), [50, 95])
    return {"p50": round(float(p50), 3), "p95": round(float(p95), 3)}


def libraries() -> dict[str, str]:
    """Versions of what computes the results."""
    out = {"python": platform.python_version(), "numpy": np.__version__, "opencv": cv2.__version__}
    for name in ("poselib", "rosbags", "onnxruntime", "onnxruntime-gpu", "openvino"):
        try:
            out[name] = version(name)
        except PackageNotFoundError:
            continue
    return out


def _engine(record: ModelRecord) -> dict:
    return {name: value for name, value in dataclasses.asdict(record).items() if name != "incidents"}


def _run(log: RunLog) -> dict:
    out = {**log.run, "incidents": {e.name: e.incidents for e in log.engines}}
    return out if log.map is None else {**out, "map_file_bytes": log.map.file_bytes}


def _relocalisation(log: RunLog, pairs: list[PairRecord]) -> dict:
    recognised = {p.kf_id for p in pairs if p.verified}
    first = next(([k.id, k.position] for k in log.keyframes if k.id in recognised), None)
    return {
        "attempted": len(pairs),
        "verified": sum(p.verified for p in pairs),
        "ambiguous": sum(p.status == Status.AMBIGUOUS for p in pairs),
        "keyframes": len(recognised),
        "share": round(len(recognised) / len(log.keyframes), 4) if log.keyframes else None,
        "first": first,
        "pairs": [[p.kf_id, p.ref_kf_id] for p in pairs if p.verified],
    }


def _of_pairs(pairs: list[PairRecord]) -> dict:
    ratios = [p.inlier_ratio for p in pairs if p.num_matches]
    statuses = Counter(p.status for p in pairs)
    return {
        "pairs": len(pairs),
        "matches_median": _median([p.num_matches for p in pairs]),
        "inliers_median": _median([p.num_inliers for p in pairs]),
        "inlier_ratio_median": _median(ratios),
        "zero_match_pairs": sum(p.num_matches == 0 for p in pairs),
        "statuses": {status.label: statuses[status] for status in Status if statuses[status]},
        "non_finite": statuses[Status.NON_FINITE],
    }


def _median(values: list) -> float | None:
    return round(float(np.median(values)), 4) if values else None
