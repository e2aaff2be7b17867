#!/usr/bin/env python3
"""Speed and memory of the learned models as the plug-ins run them, against the upstream packages in torch.

    vslam-features models fetch all
    python benchmarks/model_speed.py --data ../shared/data --threads 2
    python benchmarks/model_speed.py --parts end-to-end --runtimes onnxruntime
    python benchmarks/model_speed.py --random-n 300

All engines run in one process on the same number of threads, one after the
other on the same input (``reichstag_pairs`` resized to 640x480), round after
round: of a table's ratios only the medians over the rounds count, because
other work on the machine slows all of them. Quartiles stand in parentheses.

- **models**: ms an image (uint8 image to features) or a pair (features to
  matches) by the plug-in, against upstream's eager modules. Both sides turn
  the image into a tensor in the same way. ``effnet_cov`` includes the pooling,
  which the port in torch has not.
- **end-to-end**: two files, decoded, to verified matches, against the bare
  runs of the models and the solver on data prepared before, and the parts.
- **memory**: each engine in a process of its own; ``_memory.py`` defines
  ``growth`` (peak of the runs above the loaded model) and ``total``.
- ``--random-n N``: LighterGlue on N pairs of random sizes, time and memory.

Without torch and the upstream packages (``make test-export`` installs them)
their columns are empty. Of upstream's ALIKED the deformable convolution is a
stand-in for torchvision's, see ``_upstream.py``.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import _end_to_end
import _memory
import _ours
import _upstream
from _timing import Spread, interleaved

TORCH = "torch"
# model, keypoints, goal of the ratio to torch (None: none)
MODELS = [
    ("xfeat", 1024, 0.8),
    ("xfeat", 2048, 0.8),
    ("lighterglue", 1024, 1.1),
    ("lighterglue", 2048, 1.25),
    ("aliked-n16", 1024, None),
    ("aliked-t16", 1024, None),
    ("lightglue-aliked", 1024, None),
    ("effnet_cov", 0, None),
]
END_TO_END = [("xfeat", "lighterglue", 1024), ("xfeat", "lighterglue", 2048), ("aliked", "lightglue", 1024)]
END_TO_END_GOAL = 1.05
MEMORY = [("xfeat", 2048, 0.5), ("aliked-n16", 1024, 1.05), ("aliked-t16", 1024, 1.05)]
PARTS = ("models", "end-to-end", "memory")


def time_models(args) -> list[dict]:
    """A row a model, number of keypoints and runtime."""
    print(f"\n{'model':<17} {'keypoints':>9} {'engine':<12} {'ms':>24} {'torch ms':>24} {'ratio':>21}  goal")
    rows = []
    for model, keypoints, goal in MODELS:
        if args.models and model not in args.models:
            continue
        if _ours.PLUGINS[model][0] == "matcher":
            items = _ours.pairs(model, args.data, 5, keypoints, args.threads)
            keypoints = round(sum(len(side) for pair in items for side in pair) / (2 * len(items)))
        else:
            items = _ours.images(args.data, 5)
        runs = {name: _ours.load(model, name, args.threads, keypoints) for name in args.runtimes}
        if not (lacking := _upstream.missing(model)):
            upstream = _upstream.load(model, keypoints, args.threads)
            matcher = _ours.PLUGINS[model][0] == "matcher"
            runs[TORCH] = (lambda pair, f=upstream: f(_ours.graph_inputs(pair))) if matcher else upstream
        times = interleaved(runs, items, args.rounds)
        for name in args.runtimes:
            row = {"model": model, "keypoints": keypoints, "engine": name, "ms": Spread.of(times[name]), "goal": goal}
            row |= {"torch_ms": None, "ratio": None, "note": f"not installed: {lacking}" if lacking else ""}
            if TORCH in times:
                row |= {"torch_ms": Spread.of(times[TORCH]), "ratio": Spread.of(times[name] / times[TORCH])}
            rows.append(row)
            print(
                f"{model:<17} {keypoints:>9} {name:<12} {row['ms']!s:>24} {_text(row['torch_ms']):>24} "
                f"{_text(row['ratio']):>21}  {_judged(row['ratio'] and row['ratio'].median, goal)}{row['note']}"
            )
    return rows


def time_end_to_end(args) -> list[dict]:
    """A row a method and runtime; the goal is the ratio of the whole to the bare runs."""
    files, rows = _ours.image_files(args.data)[:10], []
    print(f"\n{'method':<20} {'keypoints':>9} {'engine':<12} {'ms a pair':>24} {'bare ms':>24} {'ratio':>21}  goal")
    for features, matcher, keypoints in END_TO_END:
        if args.models and features not in args.models:
            continue
        for runtime in args.runtimes:
            row = _end_to_end.measure(features, matcher, runtime, args.threads, keypoints, files, 4 * args.rounds)
            rows.append(row | {"goal": END_TO_END_GOAL})
            print(
                f"{row['method']:<20} {row['keypoints']:>9} {runtime:<12} {row['ms']!s:>24} {row['bare_ms']!s:>24} "
                f"{row['ratio']!s:>21}  {_judged(row['ratio'].median, END_TO_END_GOAL)}"
            )
            parts = ", ".join(f"{name} {value:g}" for name, value in row["parts_ms"].items())
            print(f"{'':<20} fastest runs {row['fastest_ratio']:.3f}; {row['solver']}; ms: {parts}")
    return rows


def measure_memory(args) -> list[dict]:
    """A row a model and engine, and the ratios to torch."""
    rows = []
    print(
        f"\n{'model':<12} {'engine':<12} {'loaded':>8} {'growth':>8} {'total':>8} MiB {'growth/torch':>13} total/torch"
    )
    for model, keypoints, goal in MEMORY:
        if args.models and model not in args.models:
            continue
        for name in args.runtimes:
            _ours.load(model, name, args.threads, keypoints)  # the parity gate of a first use runs here
        engines = [*([] if _upstream.missing(model) else [TORCH]), *args.runtimes]
        found = {e: _memory.in_child(model, e, keypoints, args.threads, args.rounds, args.data) for e in engines}
        for name, values in found.items():
            row = {"model": model, "engine": name, **values, "goal": goal}
            if TORCH in found:
                row |= {f"{key}_ratio": round(values[key] / found[TORCH][key], 3) for key in ("growth", "total")}
            rows.append(row)
            ratios = [row.get("growth_ratio"), row.get("total_ratio")] if name != TORCH else [None, None]
            texts = [_judged(ratio, goal) if ratio else "" for ratio in ratios]
            print(
                f"{model:<12} {name:<12} {values['loaded']:>8} {values['growth']:>8} {values['total']:>8}     "
                f"{ratios[0] or '':>6} {texts[0]:<20} {ratios[1] or '':>6} {texts[1]}"
            )
    return rows


def match_random_sizes(args) -> list[dict]:
    """A row a runtime."""
    (pair,) = _ours.pairs("lighterglue", args.data, 1, 2048, args.threads)
    rows = []
    for name in args.runtimes:
        run = _ours.load("lighterglue", name, args.threads, 2048)
        row = {"model": "lighterglue", "engine": name, **_memory.random_sizes(run, pair, args.random_n)}
        rows.append(row)
        print(
            f"lighterglue on {name}, {row['calls']} pairs of 0 to {len(pair[0])} keypoints: median "
            f"{row['median_ms']:.0f} ms, worst {row['worst_ms']:.0f} ms ({row['worst_ratio']:.2f} x, "
            f"{row['cpu_worst_ratio']:.2f} x of CPU time); resident "
            f"{row['warm_mib']:.0f} MiB after the warm-up, {row['end_mib']:.0f} at the end, most "
            f"{row['growth_mib']:+.0f} MiB between"
        )
    return rows


def _text(spread: Spread | None) -> str:
    return "" if spread is None else str(spread)


def _judged(ratio: float | None, goal: float | None) -> str:
    if goal is None or ratio is None:
        return ""
    return f"<= {goal:g} {'met' if ratio <= goal else 'NOT MET'} "


def _machine(threads: int) -> dict:
    versions = {}
    for package in ("onnxruntime", "openvino", "torch", "numpy", "opencv-python-headless", "poselib"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {"cpus": os.cpu_count(), "machine": platform.machine(), "threads": threads, "versions": versions}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--threads", type=int, default=2, help="of every engine (default: 2)")
    parser.add_argument(
        "--rounds", type=int, default=15, help="timed runs of every engine; end to end four times as many (default: 15)"
    )
    parser.add_argument("--runtimes", nargs="+", default=["onnxruntime", "openvino"])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--models", nargs="+", metavar="NAME", help="only these (default: all)")
    parser.add_argument("--random-n", type=int, metavar="N", help="instead: LighterGlue on N pairs of random sizes")
    parser.add_argument("--json", type=Path, help="also write all figures here")
    args = parser.parse_args()
    runtimes = [name for name in args.runtimes if importlib.util.find_spec(name)]
    if left_out := set(args.runtimes) - set(runtimes):
        print(f"left out, not installed: {', '.join(sorted(left_out))}")
    args.runtimes = runtimes
    out = {"machine": _machine(args.threads), "load_before": os.getloadavg()}
    print(f"{out['machine']}")
    if args.random_n:
        out["random_n"] = match_random_sizes(args)
    else:
        steps = {"models": time_models, "end-to-end": time_end_to_end, "memory": measure_memory}
        out |= {name: steps[name](args) for name in args.parts}
    out["load_after"] = os.getloadavg()
    print(f"\nload of the machine (1 min): {out['load_before'][0]:.1f} before, {out['load_after'][0]:.1f} after")
    if args.json:
        args.json.write_text(json.dumps(out, indent=1, default=asdict))


if __name__ == "__main__":
    main()
