"""``models patch early-stop``: a matcher that stops where its layers show that two images do not see the same place."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from ..errors import ConfigError, DataError, ModelError, ModelFileError
from . import model_patch_file
from .common import layer_numbers

NAME = "early-stop"
HELP = "let a matcher stop where its layers show that two images do not see the same place"
EXAMPLES = """examples:
  vslam-features models patch early-stop matcher.onnx --layers 2,4,6,8
  vslam-features models patch early-stop matcher.onnx --layers 2,4 --scores 'layers.{index}.score' --num-layers 6
  vslam-features models patch early-stop matcher.onnx --layers 2,4,6,8 --like kpts0,1 --out fast.onnx --json
"""
_OUTPUTS = {"matches": "matches0", "match_scores": "mscores0", "covisibility": "covisibility_score"}


def add_arguments(patch) -> None:
    """Register the options."""
    patch.add_argument("--layers", required=True, type=layer_numbers, metavar="K,K,...", help="layers to check, from 1")
    patch.add_argument(
        "--num-layers", type=int, metavar="L", help="layers of the matcher (default: what its card says)"
    )
    patch.add_argument(
        "--scores",
        default="score_{layer}",
        metavar="NAME",
        help="names of the layers' covisibility scores in the graph, with {layer} for the number of the layer, or "
        "{index} where it counts from 0 (default: score_{layer})",
    )
    patch.add_argument(
        "--like",
        type=_axis,
        metavar="INPUT,AXIS",
        help="input and its axis, from 0, that has the length of the matches (default: the keypoints of image 0)",
    )
    patch.add_argument("--force", action="store_true", help="check layer 1 too, whose score says too little")
    patch.add_argument("--no-timing", action="store_true", help="do not run it: no times, no comparison with the plain")


def run(args) -> int:
    """Patch, and print what a stop saves. Raises the package's errors."""
    from ..graph.early_stop import add_early_stop
    from ..graph.patching import placing
    from ..graph.score_names import find_scores

    source = model_patch_file.read(args, NAME)
    card, layers = source.card, args.layers
    if card.role != "matcher":
        raise ModelFileError(f"{source.path}: its card says role '{card.role}'; only a matcher can stop early")
    num_layers = card.layers if args.num_layers is None else args.num_layers
    if not num_layers:
        raise ConfigError(f"--num-layers L is missing: the card of {source.path} does not say how many layers it has")
    if card.layers and num_layers != card.layers:  # the rule's exponents would be wrong, and agree with themselves
        raise ConfigError(
            f"--num-layers {num_layers}: the card of {source.path} says {card.layers}; leave it out, or mend the card"
        )
    done = add_early_stop(
        source.model,
        find_scores(source.model, args.scores, num_layers),
        layers,
        num_layers,
        **{ours: card.outputs.get(name, name) for ours, name in _OUTPUTS.items()},
        min_covisibility=card.inputs.get("min_covisibility", "min_covisibility"),
        like=args.like or _keypoints(source),
        force=args.force,
    )
    outputs = {value.name for value in done.model.graph.outputs}
    patched = source.patched_card(
        done.patch,
        layers=num_layers,
        early_stop_layers=tuple(layers),
        outputs={ours: theirs for ours, theirs in card.outputs.items() if theirs in outputs},
    )
    target = model_patch_file.target(args, source.path, NAME)
    with placing(source, done.model, patched, target) as staged:
        times = None if args.no_timing else _times(source, staged, patched)
    _print(args, target, patched, done, len(source.model.graph), times)
    return 0


def _keypoints(source) -> tuple[str, int] | None:
    """The input of as many keypoints as there are matches, and their axis."""
    name = source.card.inputs.get("keypoints0", "keypoints0")
    found = [value for value in source.model.graph.inputs if value.name == name and value.shape is not None]
    return (name, len(found[0].shape) - 2) if found else None


def _times(source, staged: Path, card):
    """None, with the reason on stderr, where the plain file cannot be run here: the other is proved to be valid."""
    from .model_patch_run import PlainRun
    from .model_patch_times import stop_times

    try:
        plain = PlainRun.of(source.path, source.card)
    except (ModelError, DataError) as error:
        print(f"warning: not timed, and not compared with the plain matcher: {error}", file=sys.stderr)
        return None
    return stop_times(plain, staged, card)


def _print(args, target: Path, card, done, plain_nodes: int, times) -> None:
    from ..export.text_table import aligned
    from .model_patch_times import time_cells

    constants = sum(stage.constant_bytes for stage in done.stages)
    nodes = sum(stage.nodes for stage in done.stages)
    spared = {layer: done.skipped(layer) for layer in card.early_stop_layers} | {0: (0, 0)}
    if args.json:
        print(json.dumps({
            "file": str(target),
            "patches": list(card.patches),
            "nodes": nodes,
            "plain_nodes": plain_nodes,
            "constant_bytes": constants,
            "stages": [dataclasses.asdict(stage) for stage in done.stages],
            "spared": {layer: {"nodes": n, "constant_bytes": b} for layer, (n, b) in spared.items() if layer},
            "times": times and dataclasses.asdict(times),
        }))  # fmt: skip
        return
    rows = [
        [f"layer {layer}" if layer else "never", str(nodes - n), f"{n / nodes:.0%}", f"{(constants - size) / 1e6:.2f}",
         f"{size / constants:.0%}" if constants else "-"]
        for layer, (n, size) in spared.items()
    ]  # fmt: skip
    head = ["stops after", "nodes", "spared", "constants, MB", "spared"]
    rows.append(["plain matcher", str(plain_nodes), "", "", ""])
    if times:
        head += ["ms", "of plain"]
        rows = [row + cells for row, cells in zip(rows, time_cells(times, card.early_stop_layers))]
    print(aligned([head, *rows]))
    if times:
        points = f", {times.keypoints} keypoints an image" if times.keypoints else ""
        same = "; without one the results are those of the plain matcher" if card.precision == "fp32" else ""
        print(f"times: one pair on {times.runtime}{points}, each stop forced{same}")
    print(f"{target} ({target.stat().st_size / 1e6:.1f} MB)")


def _axis(text: str) -> tuple[str, int]:
    name, _, axis = text.rpartition(",")
    if not name or not axis.strip().isdigit():
        raise argparse.ArgumentTypeError(f"expected an input and its axis as kpts0,1, got '{text}'")
    return name, int(axis)
