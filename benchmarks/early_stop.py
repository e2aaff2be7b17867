#!/usr/bin/env python3
"""What stopping early spares, and what it costs where a pair does not stop.

    vslam-features models fetch lighterglue lighterglue-early-stop lightglue-aliked lightglue-aliked-early-stop
    python benchmarks/early_stop.py --data ../shared/data
    python benchmarks/early_stop.py --models lighterglue --keypoints 2048

Each model that stops early runs beside its plain one, in one process on the
same number of threads, on the same pairs of pictures (``reichstag_pairs``
resized to 640x480), round after round: only the ratios count. A stop after the
first checked layer is forced by min_covisibility 1 and decay 0, which every
score is below.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import _ours
import numpy as np
from _criteria import Criterion, table
from _timing import fastest_ratio, interleaved

from vslam_features.artifacts.card import read_card
from vslam_features.artifacts.store import locate
from vslam_features.runtimes.base import LoadRequest, Session
from vslam_features.runtimes.ort import OnnxRuntime

# plain, stopping, most that a stop after the first checked layer may take, in shares of the plain model
MODELS = [
    ("lighterglue", "lighterglue-early-stop", 0.45),  # after 2 of 6
    ("lightglue-aliked", "lightglue-aliked-early-stop", 0.30),  # after 2 of 9
]
MOST_WITHOUT_STOP = 1.08
NEVER, ALWAYS = (0.0, 1.0), (1.0, 0.0)  # min_covisibility, early_stop_decay


def measure(plain: str, stopping: str, limit: float, args) -> list[Criterion]:
    """Ratios of one model to its plain one, and a line of what was measured."""
    paths = [locate(name, "fp32") for name in (plain, stopping)]
    sessions = [OnnxRuntime(OnnxRuntime.Options()).load(p, LoadRequest(threads=args.threads)) for p in paths]
    card = read_card(paths[1])
    pairs = [
        _ours.graph_inputs(pair) for pair in _ours.pairs(plain, args.data, args.pairs, args.keypoints, args.threads)
    ]
    stops = [_run(sessions[1], pair, ALWAYS)["stopped_after_layer"] for pair in pairs]
    stays = [_run(sessions[1], pair, NEVER)["stopped_after_layer"] for pair in pairs]
    first = card.early_stop_layers[0]
    if set(map(int, stops)) != {first} or any(map(int, stays)):
        raise SystemExit(f"{stopping}: stopped after {sorted(map(int, stops))} and {sorted(map(int, stays))}")
    runs = {
        "plain": lambda pair: sessions[0].run(pair),
        "no stop": lambda pair: _run(sessions[1], pair, NEVER),
        "stop": lambda pair: _run(sessions[1], pair, ALWAYS),
    }
    times = interleaved(runs, pairs, args.rounds * len(pairs))
    sides = [len(pair[f"keypoints{i}"]) for pair in pairs for i in (0, 1)]
    medians = ", ".join(f"{name} {np.median(values):.1f} ms" for name, values in times.items())
    print(f"{stopping}: {np.mean(sides):.0f} keypoints, {args.threads} threads, {medians}")
    name = f"{stopping}: stop after {first} of {card.layers}"
    return [
        Criterion(name, fastest_ratio(times["stop"], times["plain"], len(pairs)), limit, "x"),
        Criterion(
            f"{stopping}: no stop", fastest_ratio(times["no stop"], times["plain"], len(pairs)), MOST_WITHOUT_STOP, "x"
        ),
    ]


def _run(session: Session, pair: dict, limits: tuple[float, float]) -> dict:
    names = "min_covisibility", "early_stop_decay"
    return session.run(pair | {name: np.array(value, np.float32) for name, value in zip(names, limits)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder with reichstag_pairs/")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--keypoints", type=int, default=1024)
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=10, help="runs of each pair by each model")
    parser.add_argument("--models", nargs="+", choices=[m[0] for m in MODELS], default=[], help="by their plain names")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    chosen = [m for m in MODELS if not args.models or m[0] in args.models]
    criteria = [criterion for model in chosen for criterion in measure(*model, args)]
    print(table(criteria))
    if args.json:
        args.json.write_text(json.dumps([c.to_dict() for c in criteria], indent=1))
    raise SystemExit(not all(c.met for c in criteria))


if __name__ == "__main__":
    main()
