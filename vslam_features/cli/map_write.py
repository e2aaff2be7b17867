"""``map merge`` and ``map compact``: new maps of old ones."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import MapError
from .progress import ProgressBar


def merge(args) -> int:
    """Join two maps."""
    from ..maps.merge import merge as merge_maps

    require_free(args)
    with ProgressBar(unit="keyframes") as bar:
        count = merge_maps(args.a, args.b, args.target, bar, overwrite=args.force)
    print(f"{args.target}: {count} keyframes, {megabytes(args.target.stat().st_size)}")
    return 0


def compact(args) -> int:
    """Write a map anew."""
    from ..maps.copy import compact_map

    target = args.target or args.map
    if args.target:
        require_free(args)
    before = args.map.stat().st_size if args.map.is_file() else 0
    after = compact_map(args.map, target)
    print(f"{target}: {megabytes(after)}, was {megabytes(before)}")
    return 0


def require_free(args) -> None:
    """Raises MapError where OUT is there and is not to be replaced, before any work is done."""
    target: Path = args.target
    if os.path.lexists(target) and not target.is_dir() and not args.force:  # what folders are good for the writers know
        raise MapError(f"{target} is there already: choose another name, or replace it with --force")


def require_map(path: Path) -> None:
    """Raises MapError where there is no file of this name."""
    if path.is_dir():
        raise MapError(f"{path} is a folder: give the name of a map file in it")
    if not path.exists():
        raise MapError(f"{path}: there is no such map")


def megabytes(count: int) -> str:
    """As people read it."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count} bytes"
