"""What a map holds, in numbers."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import numpy as np

from ..types import KeyframeHeader, PairKind, Status
from .reader import MapReader
from .tables import FEATURES, GLOBAL_DESCRIPTORS, LOOPS, MATCHES, SCHEMA_VERSION, SESSIONS


def summarise(path: Path) -> dict:
    """Counts, sizes and extent of a map, ready for JSON. No array but the poses is read.

    A writer in another process may go on meanwhile. Raises MapFileError, MapDamagedError.
    """
    with MapReader(path) as reader:
        headers = reader.headers()
        features, places = _arrays(reader, FEATURES, "descriptors"), _arrays(reader, GLOBAL_DESCRIPTORS, "descriptor")
        nbytes = os.path.getsize(path)
        payload = reader.meta["payload_bytes"]
        return {
            "path": str(path),
            "bytes": nbytes,
            "payload_bytes": payload,
            "file_over_payload": round(nbytes / payload, 4) if payload else None,
            "schema_version": SCHEMA_VERSION,
            "created_by": reader.meta["software"],
            "created_ns": reader.meta["created_ns"],
            "models": [vars(m) for m in reader.identities],
            "keyframes": len(headers),
            "keypoints": sum(h.num_keypoints for h in headers),
            "descriptors": features,
            "global_descriptors": places,
            "cameras": _cameras(headers),
            "pairs": _pairs(reader),
            "loops": _loops(reader),
            "sessions": _sessions(reader, headers),
        }


def _arrays(reader: MapReader, table, name: str) -> dict[str, dict]:
    """dtype -> how many arrays, their bytes and shape ('N' where it differs)."""
    found: dict[str, dict] = {}
    for row in reader.rows(table):
        shape, dtype = list(row.shape(name)), row[f"{name}_dtype"]
        entry = found.setdefault(dtype, {"count": 0, "bytes": 0, "shape": shape})
        entry["count"] += 1
        entry["bytes"] += int(np.prod(shape)) * np.dtype(dtype).itemsize
        same = len(shape) == len(entry["shape"])
        entry["shape"] = [a if a == b else "N" for a, b in zip(shape, entry["shape"])] if same else ["N"]
    return found


def _cameras(headers: list[KeyframeHeader]) -> list[dict]:
    counts = Counter(h.camera for h in headers)
    return [
        {
            "keyframes": count,
            "size": list(camera.size) if camera else None,
            "model": camera.model if camera else None,
            "rectified": camera.rectified if camera else None,
            "K": camera.K.tolist() if camera else None,
            "D": camera.D.tolist() if camera else None,
        }
        for camera, count in counts.items()
    ]


def _pairs(reader: MapReader) -> dict[str, dict[str, int]]:
    """Kind -> status -> how many pairs were attempted."""
    counts = Counter((row["kind"], row["status"]) for row in reader.rows(MATCHES))
    out: dict[str, dict[str, int]] = {}
    for (kind, status), count in sorted(counts.items()):
        out.setdefault(_label(PairKind, kind), {})[_label(Status, status)] = count
    return out


def _loops(reader: MapReader) -> dict:
    rows = [(row["gated"], row["status"]) for row in reader.rows(LOOPS)]
    confirms = {int(s) for s in Status if s.confirms}
    tried = Counter(_label(Status, status) for gated, status in rows if not gated and status is not None)
    return {
        "candidates": sum(not gated for gated, _ in rows),
        "gated": sum(bool(gated) for gated, _ in rows),
        "tried": dict(sorted(tried.items())),
        "confirmed": sum(status in confirms for _, status in rows),
    }


def _sessions(reader: MapReader, headers: list[KeyframeHeader]) -> list[dict]:
    started = {row["id"]: (row["started_ns"], row["software"]) for row in reader.rows(SESSIONS)}
    by_session: dict[int, list[KeyframeHeader]] = {}
    for header in headers:
        by_session.setdefault(header.session, []).append(header)
    out = []
    for session, members in sorted(by_session.items()):
        begun, software = started.get(session, (0, "unknown"))
        stamps = [h.stamp_ns for h in members]
        out.append(
            {
                "session": session,
                "started_ns": begun or None,
                "software": software,
                "first_id": members[0].id,
                "keyframes": len(members),
                "first_stamp_ns": min(stamps),
                "last_stamp_ns": max(stamps),
                "span_s": (max(stamps) - min(stamps)) / 1e9,
                "extents": _extents(members),
            }
        )
    return out


def _extents(headers: list[KeyframeHeader]) -> list[dict]:
    """Of the poses of a session, by the frame that they are in."""
    by_frame: dict[tuple[str, bool], list[np.ndarray]] = {}
    for h in headers:
        if h.pose is not None:
            by_frame.setdefault((h.pose.frame_id, h.pose.scale_known), []).append(h.pose.t)
    out = []
    for (frame_id, scale_known), positions in by_frame.items():
        t = np.array(positions)
        out.append(
            {
                "frame_id": frame_id,
                "metres": scale_known,
                "poses": len(t),
                "size": (t.max(axis=0) - t.min(axis=0)).tolist(),
                "length": float(np.linalg.norm(np.diff(t, axis=0), axis=1).sum()),
            }
        )
    return out


def _label(kind, number: int) -> str:
    try:
        return kind(number).name.lower()
    except ValueError:
        return f"unknown ({number})"
