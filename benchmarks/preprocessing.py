#!/usr/bin/env python3
"""Time of the input of a model by each resize kernel, against OpenCV's INTER_AREA in the same interleaved run.

    python benchmarks/preprocessing.py
    python benchmarks/preprocessing.py --threads 1 2 --image 1280 720 --json figures.json

A run is the whole of ``Preprocessing.apply``: uint8 RGB image to f32 tensor,
with mean and std. Prints medians, and ratios round by round to ``area``. Exit code 1 where ``antialias`` or
``pillow`` take more than 1.3 times that on one thread. OpenCV's INTER_AREA
runs on more threads where it may, the other two on one: so with more threads
ratios say how idle the machine is, and are shown only.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import cv2
import numpy as np
from _timing import Spread, fastest_ratio, interleaved

from vslam_features.artifacts.preprocessing import Preprocessing
from vslam_features.artifacts.resize import KERNELS

LIMIT = 1.3
JUDGED = ("antialias", "pillow")
IMAGES = 4
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet


def measure(image: tuple[int, int], size: tuple[int, int], threads: int, rounds: int) -> dict[str, dict]:
    """Kernel -> median ms, spread of the ratios to ``area``, and their ratio by the fastest runs.

    ``image``, ``size``: (width, height) before and after.
    """
    cv2.setNumThreads(threads)
    rng = np.random.default_rng(0)
    pictures = [rng.integers(0, 256, (image[1], image[0], 3), np.uint8) for _ in range(IMAGES)]
    runs = {kernel: Preprocessing("rgb", *size, kernel, MEAN, STD).apply for kernel in KERNELS}
    times = interleaved(runs, pictures, rounds, seed=0)
    return {
        name: {
            "ms": Spread.of(t).median,
            "ratio": vars(Spread.of(t / times["area"])),
            "fastest_ratio": fastest_ratio(t, times["area"], IMAGES),
        }
        for name, t in times.items()
    }


def show(threads: int, found: dict[str, dict]) -> None:
    print(f"\nOpenCV threads {threads}\n{'kernel':<12}{'ms':>8}  ratio to area (quartiles)   of the fastest")
    for name, row in found.items():
        print(f"{name:<12}{row['ms']:>8.2f}  {Spread(**row['ratio'])!s:<28}{row['fastest_ratio']:>6.2f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--image", type=int, nargs=2, default=(640, 480), metavar=("W", "H"), help="default: 640 480")
    parser.add_argument("--size", type=int, nargs=2, default=(322, 322), metavar=("W", "H"), help="default: 322 322")
    parser.add_argument("--threads", type=int, nargs="+", default=[1], help="of OpenCV; default: 1, which is judged")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--json", type=Path, help="also write all figures here")
    args = parser.parse_args()
    load = os.getloadavg()
    found = {}
    for threads in args.threads:
        found[threads] = measure(tuple(args.image), tuple(args.size), threads, args.rounds)
        show(threads, found[threads])
    criteria = {k: found[1][k]["ratio"]["median"] for k in JUDGED} if 1 in found else {}
    print(f"\nload {load[0]:.1f} before, {os.getloadavg()[0]:.1f} after")
    for kernel, ratio in criteria.items():
        print(f"{kernel:<12}{ratio:>6.2f} <= {LIMIT} {'PASS' if ratio <= LIMIT else 'FAIL'}")
    if args.json:
        args.json.write_text(json.dumps({"threads": found, "criteria": criteria, "limit": LIMIT}, indent=1))
    return 0 if all(ratio <= LIMIT for ratio in criteria.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
