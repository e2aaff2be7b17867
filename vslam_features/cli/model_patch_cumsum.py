"""``models patch cumsum``: CumSum, which some TensorRT versions miscompute, as a product with a triangular matrix."""

from __future__ import annotations

import dataclasses
import json
import sys

from ..errors import ExportError
from . import model_patch_file
from .common import count

NAME = "cumsum"
HELP = "replace each CumSum by a MatMul with a constant triangular matrix"
EXAMPLES = """examples:
  vslam-features models patch cumsum matcher.onnx
  vslam-features models patch cumsum matcher.onnx --max-size 2048 --out fixed.onnx --json
"""


def add_arguments(patch) -> None:
    """Register the options."""
    patch.add_argument(
        "--max-size",
        type=count,
        metavar="N",
        help="the most values that a CumSum may sum along; the matrix has N x N (default: 1024)",
    )
    patch.add_argument("--no-compare", action="store_true", help="do not run it: no comparison with the plain file")


def run(args) -> int:
    """Patch, and print what was replaced. Raises the package's errors."""
    from ..graph.cumsum import MAX_SIZE, PATCH, cumsum_to_matmul
    from ..graph.patching import placing
    from .model_patch_run import differences, plain_run, proves

    source = model_patch_file.read(args)
    done = cumsum_to_matmul(source.model, MAX_SIZE if args.max_size is None else args.max_size)
    if not done.sums:
        return model_patch_file.nothing_left(args, source, "has no CumSum")
    plain = None if args.no_compare else plain_run(source.path, source.card)
    patched = source.patched_card(PATCH)
    target = model_patch_file.target(args, source.path, NAME)
    report = None
    with placing(source, done.model, patched, target) as staged:
        if plain:
            report = plain.compare(staged, patched, patched.precision)
            if wrong := differences(report):
                raise ExportError(f"the patched file computes something else: {'; '.join(wrong)}; nothing was written")
            if not proves(report):
                print(f"warning: {'; '.join(report.reasons)}", file=sys.stderr)
    _print(args, target, patched, done, report)
    return 0


def _print(args, target, card, done, report) -> None:
    from ..export.text_table import aligned
    from .model_patch_run import compared

    if args.json:
        print(json.dumps({
            "file": str(target),
            "patches": list(card.patches),
            "replaced": [dataclasses.asdict(summed) for summed in done.sums],
            "constant_bytes": done.constant_bytes,
            "report": report and report.to_dict(),
        }))  # fmt: skip
        return
    rows = [["CumSum", "axis", "values", "exclusive", "reverse"]]
    rows += [
        [s.name, str(s.axis), str(s.size), "yes" if s.exclusive else "no", "yes" if s.reverse else "no"]
        for s in done.sums
    ]
    print(aligned(rows))
    print(f"replaced by MatMul; matrices: {done.constant_bytes / 2**10:.0f} KiB")
    if report:
        print(f"against the plain file, on ONNX Runtime: {compared(report)}")
    print(f"{target} ({target.stat().st_size / 1e6:.1f} MB)")
