"""``map info``: what a map holds."""

from __future__ import annotations

import json
from datetime import datetime, timezone

from .map_write import megabytes, require_map


def info(args) -> int:
    """Print what a map holds."""
    from ..maps.summary import summarise

    require_map(args.map)
    numbers = summarise(args.map)
    if args.sheet:
        from ..maps.reader import MapReader
        from .map_sheet import write_sheet

        with MapReader(args.map) as reader:
            numbers["sheet"] = {"path": str(args.sheet), "keyframes": write_sheet(reader, args.sheet)}
    print(json.dumps(numbers, allow_nan=False) if args.json else _table(numbers))
    return 0


def _table(m: dict) -> str:
    payload = megabytes(m["payload_bytes"])
    over = f", {m['file_over_payload']:.3f} x its arrays ({payload})" if m["payload_bytes"] else ""
    made = f"schema version {m['schema_version']}, made {_date(m['created_ns'])} by {m['created_by']}"
    rows = [("file", megabytes(m["bytes"]) + over), ("format", made)]
    rows += [
        (model["role"], f"{model['name']} (weights {model['sha256'][:12]}, preprocessing {model['preprocessing']})")
        for model in m["models"]
    ]
    mean = f", {m['keypoints'] / m['keyframes']:.0f} keypoints each" if m["keyframes"] else ""
    rows.append(("keyframes", f"{m['keyframes']}{mean}"))
    for title, arrays in (("descriptors", m["descriptors"]), ("global descriptors", m["global_descriptors"])):
        parts = [
            f"{a['count']} x {dtype} ({', '.join(map(str, a['shape']))}), {megabytes(a['bytes'])}"
            for dtype, a in arrays.items()
        ]
        rows.append((title, "; ".join(parts) or "none"))
    rows += [(f"pairs, {kind}", _counts(statuses)) for kind, statuses in m["pairs"].items()]
    loops = m["loops"]
    tried = f"; tried: {_counts(loops['tried'])}" if loops["tried"] else ""
    rows.append(
        ("loops", f"{loops['confirmed']} confirmed, {loops['candidates']} candidates, {loops['gated']} gated{tried}")
    )
    rows += [("camera", f"{_camera(c)}, {c['keyframes']} keyframes") for c in m["cameras"]]
    for s in m["sessions"]:
        text = f"{s['keyframes']} keyframes from id {s['first_id']} on, {s['span_s']:.1f} s, {_date(s['started_ns'])}"
        rows.append((f"session {s['session']}", text))
        rows += [("", _extent(e)) for e in s["extents"]]
    if "sheet" in m:
        rows.append(("sheet", f"{m['sheet']['path']}, {m['sheet']['keyframes']} keyframes"))
    return "\n".join([m["path"], *(f"  {name:<20} {value}" for name, value in rows)])


def _camera(camera: dict) -> str:
    if camera["size"] is None:
        return "uncalibrated"
    (fx, _, cx), (_, fy, cy), _ = camera["K"]
    kind = "rectified" if camera["rectified"] else camera["model"] if camera["D"] else "no distortion"
    return f"{camera['size'][0]}x{camera['size'][1]}, fx {fx:.1f} fy {fy:.1f} cx {cx:.1f} cy {cy:.1f}, {kind}"


def _extent(e: dict) -> str:
    x, y, z = e["size"]
    unit = " m" if e["metres"] else " (no scale)"
    return f"  {e['poses']} poses in '{e['frame_id']}': {x:.2f} x {y:.2f} x {z:.2f}{unit}, path {e['length']:.2f}{unit}"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def _date(ns: int | None) -> str:
    if not ns:
        return "at an unknown time"
    try:
        return datetime.fromtimestamp(ns / 1e9, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return f"at {ns} ns"
