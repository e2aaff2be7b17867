"""``models export``: networks that exist as PyTorch modules, to checked ONNX files."""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path

from ..errors import ConfigError, PluginError

HELP = "export a network from its PyTorch weights to ONNX, fp32 and fp16, and check the files"
EXAMPLE = """vslam-features models export megaloc --weights model.safetensors --images my_images/
         vslam-features models export megaloc --tiny"""
MODELS = ("megaloc",)


def add_arguments(parser) -> None:
    """Register the options."""
    parser.add_argument("model", metavar="MODEL", choices=MODELS, help="megaloc")
    parser.add_argument("--weights", type=Path, metavar="FILE", help="the published weights, .safetensors or .pth")
    parser.add_argument("--images", nargs="+", type=Path, default=[], metavar="FILE|DIR",
                        help="pictures for the self-check (default: four that ship)")  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where the files go (default: the cache)")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--tiny", action="store_true", help="a small network for tests; random unless --weights")
    kind.add_argument("--random", action="store_true",
                      help="random weights of the full size: to time a machine, of no use for places")  # fmt: skip
    parser.add_argument("--raw", action="store_true", help="compare the graphs with and without rewrites; keep no file")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args) -> int:
    """Export and print what came of it. Raises the package's errors."""
    if args.random and args.weights:
        raise ConfigError("--random makes the weights: leave --weights out")
    if args.raw and (args.out or args.images):
        raise ConfigError("--raw compares graphs and keeps no file: leave --out and --images out")
    if not (args.weights or args.tiny or args.random):
        from ..artifacts.catalogue import find_entry

        raise ConfigError(
            f"--weights FILE is missing: {find_entry(args.model).how_to_get()}; --tiny and --random need none"
        )
    try:
        from ..export import recipe
        from ..export.graph_table import graph_table
    except ImportError as error:
        raise PluginError(
            f"exporting needs torch and its ONNX exporter ({error}): pip install 'vslam_features[export]', or export "
            "on another machine and copy its folder of models here"
        ) from error
    source, steps = recipe.Source(args.weights, args.tiny), _Steps()
    if args.raw:
        facts = recipe.compare_raw(source, steps, args.debug)
        result = {"graphs": {title: vars(f) for title, f in facts.items()}, **steps.figures()}
        print(json.dumps(result) if args.json else graph_table(facts))
        return 0
    made = recipe.export_megaloc(source, args.images, args.out, steps, args.debug)
    for note in _notes(made.card, source):
        print(note, file=sys.stderr)
    if args.json:
        print(json.dumps(_result(made, steps), allow_nan=False))
        return 0
    print(graph_table(made.graphs))
    print(f"\n{_half(made.half)}\n\nself-check\n{made.check.table()}\n")
    for path in made.files.values():
        print(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")
    figures = steps.figures()
    print(f"PASSED in {figures['seconds']:.0f} s, {figures['peak_mb'] / 1e3:.1f} GB of memory at most")
    return 0


class _Steps:
    """A line on stderr for each step, with the time since the start."""

    def __init__(self):
        self._start = time.monotonic()

    def __call__(self, text: str) -> None:
        print(f"{time.monotonic() - self._start:6.1f} s  {text}", file=sys.stderr, flush=True)

    def figures(self) -> dict:
        """Time, and the peak of this process's memory."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
        return {"seconds": round(time.monotonic() - self._start, 1), "peak_mb": round(peak)}


def _half(half) -> str:
    small = f", {half.below_range} values of constants below its range" if half.below_range else ""
    return f"fp16 twin: {half.blocked} nodes compute in fp32, {half.casts} casts{small}"


def _notes(card, source) -> list[str]:
    if source.weights is None:
        return [f"{card.name}: random weights, of no use for places"]
    if not card.version:
        return [f"note: {source.weights} is not the published file of megaloc (sha256 {card.source_sha256})"]
    return []


def _result(made, steps) -> dict:
    return {
        "name": made.card.name,
        "files": {p: str(path) for p, path in made.files.items()},
        "megabytes": {p: round(path.stat().st_size / 1e6, 2) for p, path in made.files.items()},
        "graphs": {p: vars(facts) for p, facts in made.graphs.items()},
        "fp16": {n: getattr(made.half, n) for n in ("blocked", "casts", "wide", "below_range")},
        "self_check": made.check.to_dict(),
        **steps.figures(),
    }
