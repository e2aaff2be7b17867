"""``map merge`` and ``map compact``: new maps of old ones."""

from __future__ import annotations

from ..errors import MapError
from .progress import ProgressBar


def merge(args) -> int:
    """Join two maps."""
    from ..maps.merge import merge as merge_maps

    with ProgressBar(unit="keyframes") as bar:
        count = merge_maps(args.a, args.b, args.target, bar, overwrite=args.force)
    print(f"{args.target}: {count} keyframes, {megabytes(args.target.stat().st_size)}")
    return 0


def compact(args) -> int:
    """Write a map anew."""
    from ..maps.copy import compact_map

    target = args.target or args.map
    if args.target and args.target.exists() and not args.force:
        raise MapError(f"{args.target} is there already: choose another name, or --force")
    before = args.map.stat().st_size if args.map.is_file() else 0
    after = compact_map(args.map, target)
    print(f"{target}: {megabytes(after)}, was {megabytes(before)}")
    return 0


def megabytes(count: int) -> str:
    """As people read it."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count} bytes"
