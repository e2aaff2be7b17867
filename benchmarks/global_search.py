#!/usr/bin/env python3
"""Search among global descriptors of 8448 numbers: our indexes against those of faiss, on this machine.

    python benchmarks/global_search.py
    python benchmarks/global_search.py --quick --json global_search.json

10,000 and 50,000 descriptors in ``flat`` (f32) and ``faiss`` (f16), in faiss's ``IndexFlatIP`` (f32) and
``IndexScalarQuantizer`` (f16), all with their default numbers of threads:

- **time**: one query at a time, as the front-end asks, and 64 at once; all in one process, in random order, query after
  query, because other work on the machine slows all of them;
- **right**: our results against inner products in f64 of all vectors as they are stored; half of the queries may only
  find the older half;
- **memory** and **time of an add**: each in a process of its own, one add after the other, see ``_global_index.py``.

Takes up to 7 GB of memory and some minutes. The exit code is 1 where a criterion is not met.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import numpy as np
from _criteria import Criterion, table
from _global_index import DIMENSION, MAKE, STEP, descriptors, in_child, queries
from tqdm import tqdm

TIME_RATIO, FLAT_MEMORY, FAISS_MEMORY, ADD_RATIO = 1.1, 2.2, 1.1, 1.5
OURS = {"flat": np.float32, "faiss": np.float16}
_TOP, _QUERIES, _TIED = 10, 64, 1e-12
_PAUSE_S = 0.02  # threads of the one before go on waiting for work for a while


def filled(count: int) -> dict:
    """All indexes with the first ``count`` descriptors."""
    indexes = {name: make() for name, make in MAKE.items()}
    for i, d in enumerate(tqdm(descriptors(count), f"{count} adds", count // STEP, unit_scale=STEP, file=sys.stderr)):
        for index in indexes.values():
            index.add_batch(i * STEP, d)
    return indexes


def time_searches(indexes: dict, asked: np.ndarray, rounds: int, k: int = 5) -> dict[str, np.ndarray]:
    """Milliseconds of each search, (rounds,) by index."""
    rng, times = np.random.default_rng(0), {name: [] for name in indexes}
    for i in tqdm(range(rounds + 1), f"searches for {len(asked[0])}", unit="round", file=sys.stderr):
        for name in rng.permutation(list(indexes)):
            time.sleep(_PAUSE_S)
            start = time.perf_counter()
            indexes[name].search(asked[i % len(asked)], k)
            times[name].append((time.perf_counter() - start) * 1e3)
    return {name: np.array(values[1:]) for name, values in times.items()}


def wrong_answers(indexes: dict, count: int, asked: np.ndarray) -> dict[str, int]:
    """Queries whose best ten are not those of f64, apart from ties, by index."""
    newest = np.where(np.arange(len(asked)) % 2, count, count // 2)
    wide, truth = asked.astype(np.float64).T, {name: [] for name in OURS}
    for d in tqdm(descriptors(count), "in f64", count // STEP, unit_scale=STEP, file=sys.stderr):
        for name, dtype in OURS.items():
            truth[name].append(d.astype(dtype).astype(np.float64) @ wide)
    wrong = {}
    for name in OURS:
        similarity = np.concatenate(truth[name]).T
        found = indexes[name].index.search_batch(asked, _TOP, newest)
        wrong[name] = sum(not _right(*row) for row in zip(found, similarity, newest))
    return wrong


def _right(found, similarity: np.ndarray, newest: int) -> bool:
    ids, values = found
    best = np.sort(similarity[: newest + 1])[::-1][:_TOP]
    return (
        len(set(ids.tolist())) == len(best)
        and ids.max() <= newest
        and np.abs(similarity[ids] - best).max() <= _TIED
        and np.abs(values - best).max() <= 2**-23
    )


def run(counts: tuple[int, int], rounds: int) -> dict:
    """All figures and the criteria."""
    out: dict = {"load_before": os.getloadavg(), "cpus": os.cpu_count(), "sizes": {}}
    for count in counts:
        indexes, asked = filled(count), queries(count, _QUERIES)
        wrong = wrong_answers(indexes, count, asked)
        single = time_searches(indexes, asked[:, None], rounds)
        batch = time_searches(indexes, asked[None], 2)
        del indexes
        alone = {name: in_child(name, count) for name in tqdm(MAKE, "memory", unit="index", file=sys.stderr)}
        out["sizes"][count] = {"wrong": wrong, "memory": alone}
        for key, times in (("single_ms", single), ("batch_ms", batch)):
            spread = {n: np.percentile(t, (5, 50, 95)).round(3).tolist() for n, t in times.items()}
            out["sizes"][count][key] = {n: dict(zip(("p5", "median", "p95"), s)) for n, s in spread.items()}
    out["load_after"] = os.getloadavg()
    small, large = (out["sizes"][count] for count in counts)
    fastest = min(small["single_ms"][name]["median"] for name in MAKE if name not in OURS)
    criteria = [
        Criterion(
            f"flat, {counts[0]}: time / faster of faiss", small["single_ms"]["flat"]["median"] / fastest, TIME_RATIO
        ),
        Criterion(f"flat, {counts[0]}: peak memory / f16", small["memory"]["flat"]["peak"], FLAT_MEMORY),
        Criterion(f"faiss, {counts[1]}: peak memory / f16", large["memory"]["faiss"]["peak"], FAISS_MEMORY),
    ]
    for count, size in out["sizes"].items():
        for name in OURS:
            add = size["memory"][name]
            criteria.append(Criterion(f"{name}, {count}: wrong answers", size["wrong"][name], 0))
            criteria.append(
                Criterion(f"{name}, {count}: add, second / first half", add["last_us"] / add["first_us"], ADD_RATIO)
            )
    return out | {"criteria": criteria}


def show(out: dict) -> None:
    print(
        f"load of the machine {out['load_before'][0]:.1f} before, {out['load_after'][0]:.1f} after, {out['cpus']} CPUs"
    )
    for count, size in out["sizes"].items():
        print(f"\n{count} descriptors, {2 * DIMENSION * count / 1e6:.0f} MB in f16; times are medians")
        head = f"{'index':<22} {'one, ms':>8} {'p95':>7} {f'{_QUERIES}, ms':>8} {'peak / f16':>10}"
        print(f"{head} {'add, us: 1st half':>17} {'2nd':>6}")
        for name in MAKE:
            one, many, alone = size["single_ms"][name], size["batch_ms"][name], size["memory"][name]
            print(
                f"{name:<22} {one['median']:>8.2f} {one['p95']:>7.2f} {many['median']:>8.0f} {alone['peak']:>10.3f} "
                f"{alone['first_us']:>17.1f} {alone['last_us']:>6.1f}"
            )
    print(f"\n{table(out['criteria'])}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="5000 and 30,000 descriptors instead")
    parser.add_argument("--json", type=Path, help="also write all figures here")
    args = parser.parse_args()
    out = run((5000, 30_000) if args.quick else (10_000, 50_000), 20 if args.quick else 40)
    show(out)
    if args.json:
        args.json.write_text(json.dumps(out | {"criteria": [c.to_dict() for c in out["criteria"]]}, indent=1))
    return 0 if all(c.met for c in out["criteria"]) else 1


if __name__ == "__main__":
    sys.exit(main())
