"""``map export`` and ``map import``: other formats."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from ..errors import ConfigError, MapFileError
from .map_write import megabytes, require_free, require_map
from .progress import ProgressBar


def add_import_arguments(verb) -> None:
    """Options of ``map import``."""
    verb.add_argument(
        "--global", dest="places", type=Path, metavar="FILE", help="hloc: global descriptors (default: beside SOURCE)"
    )
    verb.add_argument("--matches", type=Path, metavar="FILE", help="hloc: matches (default: beside SOURCE)")
    verb.add_argument("--like", type=Path, metavar="MAP", help="a map whose models made these descriptors, too")
    verb.add_argument("--image-size", metavar="WxH", help="tinynav: where the map holds no images")


def export_map(args) -> int:
    """Write another format."""
    from ..maps.reader import MapReader

    if args.to == "colmap":
        from ..exchange.colmap import export_colmap as export
    else:
        from ..exchange.hloc import export_hloc as export
    require_map(args.map)
    require_free(args)
    with MapReader(args.map) as reader, ProgressBar(unit="keyframes") as bar:
        count = export(reader, args.target, bar, overwrite=args.force)
        maps = count > 0 and reader.keyframe(0).features.descriptors.ndim == 3
    print(f"{args.target}: {count} images")
    if maps:
        print(f"the descriptors are dense maps, which {args.to} has no place for: left out", file=sys.stderr)
    return 0


def import_map(args) -> int:
    """Make a map of another format."""
    _check_options(args)
    require_free(args)
    models = _models(args.like)
    with ProgressBar(unit="keyframes") as bar:
        shared = {**models, "progress": bar, "overwrite": args.force}
        count = (_hloc if args.format == "hloc" else _tinynav)(args, shared)
    print(f"{args.target}: {count} keyframes, {megabytes(args.target.stat().st_size)}")
    return 0


def _check_options(args) -> None:
    """Raises ConfigError for options of the other format."""
    if args.format == "hloc" and args.image_size:
        raise ConfigError("--image-size: is for maps of tinynav; hloc's files hold the sizes of images")
    if args.format == "tinynav" and (args.places or args.matches):
        raise ConfigError("--global, --matches: are for hloc; a map of tinynav is one folder")


def _hloc(args, shared: dict) -> int:
    from ..exchange.hloc import FEATURES, GLOBAL, MATCHES
    from ..exchange.hloc_import import import_hloc

    folder = args.source if args.source.is_dir() else args.source.parent
    features = folder / FEATURES if args.source.is_dir() else args.source
    beside = {GLOBAL: args.places, MATCHES: args.matches}
    for name, given in beside.items():
        if given is None and (folder / name).is_file():
            beside[name] = folder / name
    return import_hloc(features, args.target, global_descriptors=beside[GLOBAL], matches=beside[MATCHES], **shared)


def _tinynav(args, shared: dict) -> int:
    from ..exchange.legacy import import_legacy

    return import_legacy(args.source, args.target, image_size=_size(args.image_size), **shared)


def _models(like: Path | None) -> dict:
    from ..maps.reader import MapReader

    if like is None:
        return {}
    with MapReader(like) as reader:
        if reader.models is None:
            raise MapFileError(f"--like {like}: the map has no keyframes, and so names no models")
        first = reader.keyframe(0)
        place = next((d for _, d in reader.global_descriptors()), None)
        return {
            "model": reader.models.features,
            "global_model": reader.models.global_descriptor,
            "like": replace(first, global_descriptor=place),
        }


def _size(text: str | None) -> tuple[int, int] | None:
    if not text:
        return None
    width, _, height = text.lower().partition("x")
    if not (width.isdecimal() and height.isdecimal() and 0 < int(width) < 1 << 16 and 0 < int(height) < 1 << 16):
        raise ConfigError(f"--image-size {text}: expected WIDTHxHEIGHT in pixels, e.g. 640x480")
    return int(width), int(height)
