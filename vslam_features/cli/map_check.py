"""``map verify`` and ``map recover``: damaged maps."""

from __future__ import annotations

import json
import sys
from collections import Counter
from itertools import islice

from .map_write import megabytes, require_free, require_map
from .progress import ProgressBar

_SHOWN = 20


def verify(args) -> int:
    """Check a map, print the table; 1 where it is damaged."""
    from ..maps.verify import verify as verify_map

    require_map(args.map)
    with ProgressBar(quiet=args.json, unit="rows") as bar:
        report = verify_map(args.map, bar)
    print(json.dumps(report.to_dict(), allow_nan=False) if args.json else _table(report))
    return 1 if report.damaged else 0


def _table(report) -> str:
    lines = [f"{report.path}: {'DAMAGED' if report.damaged else 'intact'}, {megabytes(report.nbytes)}"]
    if report.rows:
        lines.append(f"  {'table':<20} {'rows':>8} {'intact':>8}")
        lines += [f"  {name:<20} {rows:>8} {report.intact[name]:>8}" for name, rows in report.rows.items()]
        whole = int(report.intact_keyframes.sum())
        lines.append(f"  keyframes intact with all that belongs to them: {whole} of {len(report.intact_keyframes)}")
        if report.damaged and whole:
            lines.append(f"    {_ranges(report.intact_ranges)}")
    for title, findings, count in (
        ("damaged", report.damages, report.num_damages),
        ("odd, but not damaged", report.oddities, report.num_oddities),
    ):
        if count:
            lines.append(f"  {title}: {count}")
            lines += [f"    {finding}" for finding in findings[:_SHOWN]]
            lines += [f"    ... and {count - _SHOWN} more"] if count > _SHOWN else []
    lines += [f"  note: {note}" for note in report.notes]
    if report.damaged and report.nbytes and (report.intact_keyframes.any() or not report.rows):
        lines.append(f"  save what is intact: vslam-features map recover {report.path} NEW.vmap")
    return "\n".join(lines)


def _ranges(ranges: list[tuple[int, int]]) -> str:
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges[:_SHOWN])
    return text + (f" and {len(ranges) - _SHOWN} more ranges" if len(ranges) > _SHOWN else "")


def recover(args) -> int:
    """Save what is intact; 0 where anything is."""
    from ..maps.reader import MapReader
    from ..maps.recover import recover as recover_map

    require_map(args.map)
    require_free(args)
    models = None
    if args.like:
        with MapReader(args.like) as reader:
            models = reader.models
    with ProgressBar(quiet=args.json) as bar:
        report = recover_map(args.map, args.target, bar, models=models, overwrite=args.force)
    if args.json:
        print(json.dumps(_to_dict(report), allow_nan=False))
        return 0
    saved = f"{len(report.ids)} of {report.found} keyframes saved"
    print(f"{report.target}: {saved}, with {report.matches} pairs and {report.loops} loop candidates")
    if any(old != new for old, new in report.ids.items()):
        print(f"  old ids of keyframes 0 to {len(report.ids) - 1}: {_ranges(_runs(list(report.ids)))}")
    for reason, count in Counter(report.lost.values()).most_common(_SHOWN):
        first = next(old for old, why in report.lost.items() if why == reason)
        print(f"  lost: {count} (the first is {first}): {reason}")
    for what, count in report.without.items():
        print(f"  saved without: {count} {what}")
    for note in report.notes:
        print(f"  note: {note}")
    if report.lost:
        print("what is lost cannot be read in any way; keep the damaged file", file=sys.stderr)
    return 0


def _runs(ids: list[int]) -> list[tuple[int, int]]:
    """Runs of ascending ids."""
    runs: list[tuple[int, int]] = []
    for i in ids:
        if runs and runs[-1][1] == i - 1:
            runs[-1] = runs[-1][0], i
        else:
            runs.append((i, i))
    return runs


def _to_dict(report) -> dict:
    return {
        "source": str(report.source),
        "target": str(report.target),
        "found": report.found,
        "saved": len(report.ids),
        "old_ids": list(report.ids),
        "lost": {str(old): why for old, why in islice(report.lost.items(), 10_000)},
        "without": dict(report.without),
        "matches": report.matches,
        "loops": report.loops,
        "notes": report.notes,
    }
