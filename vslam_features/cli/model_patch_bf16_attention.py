"""``models patch bf16-attention``: the cores of attention in BF16, or a twin that emulates it on a CPU."""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

from ..artifacts.card import PRECISIONS
from . import model_patch_file
from .common import count

NAME = "bf16-attention"
HELP = "compute the cores of attention in BF16, where half precision may overflow"
EXAMPLES = """examples:
  vslam-features models patch bf16-attention matcher.onnx
  vslam-features models patch bf16-attention matcher.onnx --min-tokens 1024
  vslam-features models patch bf16-attention matcher.onnx --emulate    # a twin that a CPU runs, to predict accuracy
"""
_LABEL = "attention in BF16, emulated, against the plain file"


def add_arguments(patch) -> None:
    """Register the options."""
    patch.add_argument(
        "--emulate", action="store_true", help="write the twin that rounds to BF16 in float32; never to be built from"
    )
    patch.add_argument(
        "--min-tokens",
        type=count,
        default=0,
        metavar="N",
        help="leave cores as they are that attend to fewer tokens, where the graph says how many (default: change all)",
    )
    patch.add_argument(
        "--centre-keys",
        action="store_true",
        help="take their mean from the keys first: the same attention, with smaller logits and smaller rounding errors",
    )
    patch.add_argument("--no-compare", action="store_true", help="do not run the twin: no figures of its accuracy")


def run(args) -> int:
    """Patch, and print what was found. Raises the package's errors."""
    from ..graph.bf16_attention import attention_in_bf16
    from ..graph.patching import placing
    from .model_patch_run import compared, plain_run

    source = model_patch_file.read(args)
    options = {"min_tokens": args.min_tokens, "centre_keys": args.centre_keys}
    done = attention_in_bf16(source.model, emulate=args.emulate, **options)
    if not done.cores:
        what = f"{'emulates' if args.emulate else 'computes'} attention in BF16 already, in {done.done} cores"
        return model_patch_file.nothing_left(args, source, what)
    plain = None if args.no_compare else plain_run(source.path, source.card)
    precision = max(source.card.precision, "bf16", key=PRECISIONS.index)
    patched, report = source.patched_card(done.patch, precision=precision), None
    if plain:
        twin = done if done.emulated else attention_in_bf16(source.model, emulate=True, **options)
        report = _compared(twin, plain, patched)
        patched = replace(patched, self_check={**patched.self_check, _LABEL: compared(report)})
    kind = f"{NAME}-emulated" if args.emulate else NAME
    target = model_patch_file.target(args, source.path, kind)
    with placing(source, done.model, patched, target):
        pass
    _print(args, target, patched, done, report)
    return 0


def _compared(twin, plain, card):
    """What the emulated twin computes against the plain file; a device decides, so that nothing is refused here."""
    from ..graph import model_file
    from .model_patch_run import differences, proves

    with tempfile.TemporaryDirectory(prefix="bf16-attention-") as folder:
        path = Path(folder) / "emulated.onnx"
        model_file.write(twin.model, path)
        report = plain.compare(path, card, card.precision)
    if wrong := differences(report) or ([] if proves(report) else report.reasons):
        print(f"warning: emulated on a CPU, against the plain file: {'; '.join(wrong)}", file=sys.stderr)
    return report


def _print(args, target: Path, card, done, report) -> None:
    from ..export.text_table import aligned
    from .model_patch_run import compared

    shapes = [tuple(_known(size) for size in (core.heads, core.queries, core.keys)) for core in done.cores]
    if args.json:
        print(json.dumps({
            "file": str(target),
            "patches": list(card.patches),
            "emulated": done.emulated,
            "cores": [
                {"name": core.softmax.name, "heads": heads, "queries": queries, "keys": keys}
                for core, (heads, queries, keys) in zip(done.cores, shapes)
            ],
            "centred": done.centred,
            "spared": done.spared,
            "done_before": done.done,
            "report": report and report.to_dict(),
        }))  # fmt: skip
        return
    rows = [["cores", "heads", "tokens", "attend to"]]  # ?: the graph does not fix it
    for shape, number in Counter(shapes).items():
        rows.append([str(number), *("?" if size is None else str(size) for size in shape)])
    print(aligned(rows))
    if done.spared:
        print(f"{done.spared} cores with fewer than {done.min_tokens} tokens stay as they are")
    if done.centred is not None:
        print(f"keys of {done.centred} cores are centred")
    if report:
        print(f"emulated on ONNX Runtime, against the plain file: {compared(report)}")
    if done.emulated:
        print("this file predicts what BF16 does to the accuracy; build from one without --emulate")
    print(f"{target} ({target.stat().st_size / 1e6:.1f} MB)")


def _known(size) -> int | None:
    return size if isinstance(size, int) else None
