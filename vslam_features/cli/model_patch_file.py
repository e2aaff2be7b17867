"""The file that a patch is of, and where the patched one goes: what all patches have in common."""

from __future__ import annotations

import json
from pathlib import Path


def add_options(patch) -> None:
    """Register the options that all patches take."""
    patch.add_argument(
        "model", metavar="MODEL", help="path of an .onnx file with a card inside or beside it, or a name"
    )
    patch.add_argument(
        "--precision", choices=("fp32", "fp16"), default="fp32", help="variant of a name (default: fp32)"
    )
    patch.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="the patched file (default: <stem>_<patch>.onnx beside the file, of a name in this folder)",
    )
    patch.add_argument("--json", action="store_true", help="print one JSON object")


def read(args, kind: str = ""):
    """The file, graph and card that the options name, without a patch of this kind yet. Raises as ``Source.read``."""
    from ..artifacts.store import locate
    from ..graph.patching import Source

    return Source.read(locate(args.model, args.precision), kind)


def target(args, path: Path, kind: str) -> Path:
    """Beside a file; of a name in this folder, for the cache holds what is fetched and built."""
    from ..artifacts.store import SUFFIXES

    folder = path.parent if Path(args.model).suffix in SUFFIXES else Path()
    return args.out or folder / f"{path.stem}_{kind.replace('-', '_')}.onnx"


def nothing_left(args, source, what: str) -> int:
    """Say that a file is as the patch would make it; the exit code. ``what``: it has or does, in words."""
    before = f"; patches of its card: {', '.join(source.card.patches)}" if source.card.patches else ""
    if args.json:
        print(json.dumps({"file": str(source.path), "patches": list(source.card.patches), "nothing_left": what}))
    else:
        print(f"nothing left to do, and nothing written: {source.path} {what}{before}")
    return 0
