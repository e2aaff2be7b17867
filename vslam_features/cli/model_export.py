"""``models export``: networks that exist as PyTorch modules, to checked ONNX files."""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path

from ..errors import ConfigError, PluginError
from .common import layer_numbers

HELP = "export a network from its PyTorch weights to ONNX, fp32 and fp16, and check the files"
EXAMPLE = """vslam-features models export megaloc --weights model.safetensors --images my_images/
         vslam-features models export flexglue --tiny --early-stop-layers 2,4,6,8"""
MODELS = ("megaloc", "flexglue")


def add_arguments(parser) -> None:
    """Register the options."""
    parser.add_argument("model", metavar="MODEL", choices=MODELS, help=", ".join(MODELS))
    parser.add_argument("--weights", type=Path, metavar="FILE",
                        help="weights, .safetensors or .pth: of megaloc the published ones; of flexglue those of the "
                             "network of this package, which the FlexGlue release does not fit")  # fmt: skip
    parser.add_argument("--images", nargs="+", type=Path, default=[], metavar="FILE|DIR",
                        help="pictures for the self-check; flexglue: two a pair (default: four that ship)")  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where the files go (default: the cache)")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--tiny", action="store_true",
                      help="a small network for tests; without --weights megaloc's are random, with flexglue's "
                           "pictures that overlap match")  # fmt: skip
    kind.add_argument("--random", action="store_true",
                      help="random weights of the full size: to time a machine, of no use for places")  # fmt: skip
    parser.add_argument("--early-stop-layers", type=layer_numbers, default=[], metavar="K,K,...",
                        help="flexglue: also a matcher that stops after these layers, from 1")  # fmt: skip
    parser.add_argument("--force", action="store_true", help="flexglue: check layer 1 too, whose score says too little")
    parser.add_argument("--raw", action="store_true",
                        help="megaloc: compare the graphs with and without rewrites; keep no file")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args) -> int:
    """Export and print what came of it. Raises the package's errors."""
    if args.random and args.weights:
        raise ConfigError("--random makes the weights: leave --weights out")
    if args.raw and (args.out or args.images):
        raise ConfigError("--raw compares graphs and keeps no file: leave --out and --images out")
    if args.raw and args.model != "megaloc":
        raise ConfigError(f"--raw: there is one graph of {args.model} only")
    if (args.early_stop_layers or args.force) and args.model != "flexglue":
        raise ConfigError(f"--early-stop-layers and --force: {args.model} is no matcher")
    if not (args.weights or args.tiny or args.random):
        raise ConfigError(f"--weights FILE is missing: {_how_to_get(args.model)}; --tiny and --random need none")
    try:
        from ..export.placement import Exported  # noqa: F401
    except ImportError as error:
        raise PluginError(
            f"exporting needs torch and its ONNX exporter ({error}): pip install 'vslam_features[export]', or export "
            "on another machine and copy its folder of models here"
        ) from error
    return (_megaloc if args.model == "megaloc" else _flexglue)(args, _Steps())


def _how_to_get(model: str) -> str:
    if model == "flexglue":
        return (
            "a state dict of vslam_features.networks.flexglue.FlexGlue (weights of the FlexGlue release do not fit, "
            "its ONNX files are used as they are: docs/flexglue.md)"
        )
    from ..artifacts.catalogue import find_entry

    return find_entry(model).how_to_get()


def _megaloc(args, steps) -> int:
    from ..export import recipe
    from ..export.graph_table import graph_table

    source = recipe.Source(args.weights, args.tiny)
    if args.raw:
        facts = recipe.compare_raw(source, steps, args.debug)
        result = {"graphs": {title: vars(f) for title, f in facts.items()}, **steps.figures()}
        print(json.dumps(result) if args.json else graph_table(facts))
        return 0
    made = recipe.export_megaloc(source, args.images, args.out, steps, args.debug)
    for note in _notes(made.card, source):
        print(note, file=sys.stderr)
    if args.json:
        print(json.dumps(_result(made) | steps.figures(), allow_nan=False))
        return 0
    _print(made)
    _print_passed(steps)
    return 0


def _flexglue(args, steps) -> int:
    from ..export.flexglue import Source, export_flexglue

    source = Source(args.weights, args.tiny)
    layers = tuple(args.early_stop_layers)
    made = export_flexglue(source, layers, args.images, args.out, steps, args.debug, args.force)
    if source.weights is None:
        print(f"{source.name()}: {made[0].card.version}: made, not trained, of no use for places", file=sys.stderr)
    if args.json:
        print(json.dumps({"models": [_result(one) for one in made], **steps.figures()}, allow_nan=False))
        return 0
    for one in made:
        print(f"-- {one.card.name}")
        _print(one)
        print()
    _print_passed(steps)
    return 0


def _print(made) -> None:
    from ..export.graph_table import graph_table

    print(graph_table(made.graphs))
    print(f"\n{_half(made.half)}\n\nself-check\n{made.check.table()}\n")
    for path in made.files.values():
        print(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")


def _print_passed(steps) -> None:
    figures = steps.figures()
    print(f"PASSED in {figures['seconds']:.0f} s, {figures['peak_mb'] / 1e3:.1f} GB of memory at most")


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


def _result(made) -> dict:
    return {
        "name": made.card.name,
        "files": {p: str(path) for p, path in made.files.items()},
        "megabytes": {p: round(path.stat().st_size / 1e6, 2) for p, path in made.files.items()},
        "graphs": {p: vars(facts) for p, facts in made.graphs.items()},
        "fp16": {n: getattr(made.half, n) for n in ("blocked", "casts", "wide", "below_range")},
        "self_check": made.check.to_dict(),
    }
