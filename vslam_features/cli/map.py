"""``map``: map files: look at them, check, recover, join and exchange them."""

from __future__ import annotations

import argparse
from pathlib import Path

from . import map_check, map_exchange, map_show, map_write

_EXAMPLES = """examples:
  vslam-features map info building.vmap --sheet building.png
  vslam-features map verify building.vmap
  vslam-features map recover damaged.vmap saved.vmap
"""


def add_parser(subparsers) -> None:
    """Register the command and its verbs."""
    parser = subparsers.add_parser(
        "map",
        help="map files: info, verify, recover, merge, compact, export, import",
        description="Map files (.vmap): what is in them, whether they are whole, and other formats.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True, dest="verb")

    verb = _verb(verbs, "info", "what a map holds; also while it is written", "vslam-features map info a.vmap")
    _map(verb)
    verb.add_argument("--sheet", type=Path, metavar="FILE.png", help="write a picture of its thumbnails, with loops")
    _json(verb)

    example = "vslam-features map verify a.vmap"
    verb = _verb(verbs, "verify", "check every row and every array; the exit code is 1 where one is damaged", example)
    _map(verb)
    _json(verb)

    example = "vslam-features map recover damaged.vmap saved.vmap"
    verb = _verb(verbs, "recover", "save the intact keyframes of a damaged map into a new one", example)
    _map(verb)
    _target(verb)
    verb.add_argument(
        "--like",
        type=Path,
        metavar="MAP",
        help="an intact map of the same models, where the damaged one lost their names",
    )
    _json(verb)

    example = "vslam-features map merge monday.vmap tuesday.vmap both.vmap"
    verb = _verb(verbs, "merge", "join two maps of the same models", example)
    _map(verb, "a", "A")
    _map(verb, "b", "B")
    _target(verb)

    example = "vslam-features map compact a.vmap small.vmap"
    verb = _verb(verbs, "compact", "write a map anew without the space that is lost in it", example)
    _map(verb)
    _target(verb, optional=True)

    example = "vslam-features map export a.vmap database.db --to colmap"
    verb = _verb(verbs, "export", "write a map as a COLMAP database, or as hloc's files in a folder", example)
    _map(verb)
    _target(verb, "the database, or the folder")
    verb.add_argument("--to", required=True, choices=("colmap", "hloc"), help="format")

    example = (
        "vslam-features map import hloc/ a.vmap --from hloc\n"
        "         vslam-features map import outputs/feats-superpoint-n4096-r1024.h5 a.vmap --from hloc "
        "--global outputs/global-feats-netvlad.h5\n"
        "         vslam-features map import tinynav_map/ a.vmap --from tinynav"
    )
    verb = _verb(verbs, "import", "make a map of hloc's files, or of a map of tinynav", example)
    verb.add_argument(
        "source",
        type=Path,
        metavar="SOURCE",
        help="hloc: the file of features, or a folder with features.h5; tinynav: the folder",
    )
    _target(verb)
    verb.add_argument("--from", dest="format", required=True, choices=("hloc", "tinynav"), help="format")
    map_exchange.add_import_arguments(verb)


def _verb(verbs, name: str, text: str, example: str) -> argparse.ArgumentParser:
    verb = verbs.add_parser(
        name,
        help=text,
        description=text[0].upper() + text[1:] + ".",
        epilog=f"example: {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verb.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show tracebacks of errors")
    return verb


def _map(verb, name: str = "map", metavar: str = "MAP") -> None:
    verb.add_argument(name, type=Path, metavar=metavar, help="a map file")


def _target(verb, text: str = "the new map", optional: bool = False) -> None:
    text += " (default: in place)" if optional else ""
    verb.add_argument("target", type=Path, metavar="OUT", help=text, nargs="?" if optional else None)
    verb.add_argument("--force", action="store_true", help="replace OUT where it is there")


def _json(verb) -> None:
    verb.add_argument("--json", action="store_true", help="print one JSON object")


def run(args) -> int:
    """Run a verb. Raises the package's errors."""
    verbs = {
        "info": map_show.info,
        "verify": map_check.verify,
        "recover": map_check.recover,
        "merge": map_write.merge,
        "compact": map_write.compact,
        "export": map_exchange.export_map,
        "import": map_exchange.import_map,
    }
    return verbs[args.verb](args)
