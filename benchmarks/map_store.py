#!/usr/bin/env python3
"""Map files against ``shelve`` with pickle, plain ``.npz`` files and a plain file, on this machine's disk.

    python benchmarks/map_store.py
    python benchmarks/map_store.py --quick --dir /mnt/disk --json map_store.json

1000 keyframes of 2.1 MB (64x64x256 fp16 descriptors, keypoints, scores, an
8448-d global descriptor, matches). All contenders run in one process, one after
the other in random order on the same keyframe, round after round, because
other work on the machine slows all of them. Before each one a small file is
synced: a sync also pays for what others left to the file system's own journal. After each one what it wrote is dropped
from the page cache, so that all write into memory that was used before: in a virtual machine memory that is touched for
the first time costs several times the writing. Each is on the disk when its time ends:

- **vmap**: one transaction of SQLite, rollback journal, ``synchronous=FULL``; **vmap of 24**: 24 keyframes in one,
  as where they come faster than the disk takes them, which is when throughput matters;
- **raw**: write to the end of one file, fsync;
- **shelve**: pickle 5, ``sync()``, fsync of all its files;
- **npz**: ``numpy.savez`` to a file of its own, fsync of it (a kill leaves half
  a file, a power cut may take its name); **npz placed**: under another name,
  fsync, rename, fsync of the folder, so whole or not at all, as in a map. Both
  take each fourth keyframe only, to spare the disk.

Reads: keyframes in random order from the page cache (warm), and after it was
emptied (cold). The first read of an array also checks its checksum and that it
is finite; a plain read which does the same (zlib's CRC-32, numpy's isfinite)
stands beside it. Later reads are against a plain read of the same bytes; they
are to cost few milliseconds more, and are not within 1.2 of it, see docs/maps.md.

Opening, memory and copies are measured in processes of their own, see
``_map_memory.py``. Takes up to 10 GB in a temporary folder below ``--dir``, which
is removed at the end. The exit code is 1 where a criterion is not met.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import _map_memory
import numpy as np
from _criteria import Criterion, table
from _map_contenders import NPZ_EVERY, Npz, Raw, Shelve, Vmap, Waiting, forget, remember, settle
from _map_data import Keyframes, arrays_of
from tqdm import tqdm

COMMIT_RATIO, COMMIT_MS = 1.5, 25.0
LATER_MS = {"warm": 1.0, "cold": 3.0}
OPEN_S, READ_RATIO, PEAK_MIB, SIZE_RATIO, COPY_EXTRA_S = 1.0, 1.2, 300e6 / 2**20, 1.03, 1.0
_COLD, _PASSES, _COPIES, _SETTLE_S = 60, 2, 3, 0.02
_WAITING = f"vmap of {Waiting.at_once}"


def time_commits(stores: dict, keyframes: Keyframes, count: int, folder: Path) -> tuple[dict, int]:
    """Milliseconds of each commit by contender, and the bytes of all arrays."""
    rng, times, payload = np.random.default_rng(0), {name: [] for name in stores}, 0
    for kf_id in tqdm(range(count), desc="commits", unit="kf", file=sys.stderr):
        entry = keyframes.entry(kf_id)
        payload += sum(a.nbytes for a in arrays_of(entry).values())
        for name in rng.permutation(list(stores)):
            if kf_id % NPZ_EVERY and isinstance(stores[name], Npz):
                continue
            run = stores[name].write(entry)
            settle(folder)
            start = time.perf_counter()
            run()
            times[name].append((time.perf_counter() - start) * 1e3)
            stores[name].forget()
    return {name: np.array(values) for name, values in times.items()}, payload


def time_reads(vmap: Vmap, raw: Raw, count: int) -> dict[str, np.ndarray]:
    """Milliseconds of each read by ``temperature, who``."""
    rng, times = np.random.default_rng(1), {}

    def timed(key: str, run, kf_id: int) -> None:
        if key.startswith("cold"):
            time.sleep(_SETTLE_S)  # what a read has the system read ahead is not to be paid for by the next
        start = time.perf_counter()
        run(kf_id)
        times.setdefault(key, []).append((time.perf_counter() - start) * 1e3)

    for path in (vmap.path, raw.path):
        remember(path)
    vmap.open()
    for i in tqdm(range(_PASSES + 1), desc="warm reads", unit="pass", file=sys.stderr):
        for kf_id in map(int, rng.permutation(count)):
            timed("warm first" if i == 0 else "warm later", vmap.read, kf_id)
            timed("warm first raw checked" if i == 0 else "warm later raw", _checked(raw, i), kf_id)
            if i == 0:
                timed("warm first raw", raw.read, kf_id)
    for i in tqdm(range(2 * _PASSES), desc="cold reads", unit="pass", file=sys.stderr):
        first = i % 2 == 0
        if first:
            vmap.open()
            chosen = list(map(int, rng.permutation(count)[:_COLD]))
        forget(vmap.path), forget(raw.path)
        for kf_id in chosen:
            timed("cold first" if first else "cold later", vmap.read, kf_id)
            timed("cold first raw checked" if first else "cold later raw", _checked(raw, 0 if first else 1), kf_id)
    return {key: np.array(values) for key, values in times.items()}


def _checked(raw: Raw, later: int):
    return raw.read if later else raw.read_checked


def time_others(stores: dict, count: int) -> dict[str, np.ndarray]:
    """Milliseconds of warm random reads of what is compared with, for information."""
    rng, times = np.random.default_rng(2), {name: [] for name in ("shelve", "npz")}
    for kf_id in rng.permutation(np.arange(0, count, NPZ_EVERY))[:60]:
        for name, values in times.items():
            stores[name].read(int(kf_id))  # into the page cache
            start = time.perf_counter()
            stores[name].read(int(kf_id))
            values.append((time.perf_counter() - start) * 1e3)
    return {name: np.array(values) for name, values in times.items()}


def time_copies(path: Path) -> list[dict[str, float]]:
    """Seconds of ``copy_map`` and of a plain copy with fsync, one after the other."""
    rows = []
    for _ in tqdm(range(_COPIES), desc="copies", unit="pair", file=sys.stderr):
        child = _map_memory.in_child("copy", path)
        target = path.with_suffix(".plain")
        start = time.perf_counter()
        with open(path, "rb") as source, open(target, "wb") as out:
            shutil.copyfileobj(source, out, 4 << 20)
            out.flush()
            os.fsync(out.fileno())
        rows.append({"vmap_s": child["seconds"], "plain_s": time.perf_counter() - start, "peak": child["peak_mib"]})
        target.unlink()
    return rows


def open_large(path: Path, count: int) -> tuple[list[dict], dict, dict]:
    """Grow the map to ``count`` keyframes through the store, open it again and again, read it at random."""
    have = _map_memory.in_child("open", path)["keyframes"]
    print(f"growing the map to {count} keyframes ...", file=sys.stderr)
    written = _map_memory.in_child("write", path, count - have)
    opened = []
    for i in tqdm(range(6), desc="opens", unit="", file=sys.stderr):
        if cold := i >= 3:
            forget(path)
        opened.append(_map_memory.in_child("open", path) | {"cold": cold})
    return opened, written, _map_memory.in_child("read", path, 1000)


def run(folder: Path, args) -> dict:
    """All figures and the criteria."""
    count = 100 if args.quick else 1000
    out: dict = {"keyframes": count, "load_before": os.getloadavg()}
    vmap, raw, shelf = Vmap(folder), Raw(folder), Shelve(folder)
    stores = {
        "vmap": vmap,
        _WAITING: Waiting(folder),
        "raw": raw,
        "shelve": shelf,
        "npz": Npz(folder, False),
        "npz placed": Npz(folder, True),
    }
    commits, payload = time_commits(stores, Keyframes(), count, folder)
    for store in stores.values():
        store.finish()
    others = time_others(stores, count)
    shelf.close()
    for child in folder.iterdir():
        if child.is_dir():
            shutil.rmtree(child)
    reads = time_reads(vmap, raw, count)
    vmap.close(), raw.close()
    size = vmap.path.stat().st_size
    copies = time_copies(vmap.path)
    raw.path.unlink()
    opened, written, read_back = open_large(vmap.path, 2 * count)

    print(f"\nload of the machine {out['load_before'][0]:.1f} before, {os.getloadavg()[0]:.1f} after")
    print(f"{payload / count / 1e6:.2f} MB a keyframe; shelve is {shelf.backend}\n")
    mb = payload / 1e6
    print(f"{'commit':<14} {'median ms':>10} {'p95 ms':>8} {'max ms':>8} {'MB/s':>7}")
    stored = {name: len(t) - len(t) % stores[name].at_once for name, t in commits.items()}
    rates = {name: mb * stored[name] / count / (t.sum() / 1e3) for name, t in commits.items()}
    for name, t in commits.items():
        t = t[stores[name].at_once - 1 :: stores[name].at_once]  # the calls that store
        print(f"{name:<14} {np.median(t):>10.2f} {_p95(t):>8.2f} {t.max():>8.1f} {rates[name]:>7.0f}")
    single = {name: rates["vmap"] / rates[name] for name in ("shelve", "npz placed", "npz")}
    print("for information: one keyframe a transaction /", ", ".join(f"{n} {r:.2f}" for n, r in single.items()))
    print(f"\n{'read':<30} {'median ms':>10} {'p95 ms':>8}")
    for name, t in {**reads, **{f"warm {name}": t for name, t in others.items()}}.items():
        print(f"{name:<30} {np.median(t):>10.2f} {_p95(t):>8.2f}")
    first = np.median(reads["warm first"]) / np.median(reads["warm first raw"])
    print(f"for information: warm, first read with its checks / plain read without any: {first:.2f}")
    print(f"\n{'open':<14} {'s':>6} {'headers':>8} {'global':>8} {'loops':>6}   of {opened[0]['keyframes']} keyframes")
    for o in opened:
        parts = f"{o['headers_s']:>8.3f} {o['descriptors_s']:>8.3f} {o['loops_s']:>6.3f}"
        print(f"{'cold' if o['cold'] else 'warm':<14} {o['seconds']:>6.3f} {parts}")
    copy_s, plain_s = (float(np.median([c[k] for c in copies])) for k in ("vmap_s", "plain_s"))
    print(f"\ncopy of {size / 1e6:.0f} MB: {size / 1e6 / copy_s:.0f} MB/s, plain {size / 1e6 / plain_s:.0f} MB/s")
    peaks = {"write": written["peak_mib"], "open": max(o["peak_mib"] for o in opened)}
    peaks |= {"read": read_back["peak_mib"], "copy": max(c["peak"] for c in copies)}
    print(f"peak memory, MiB: {', '.join(f'{name} {value:.0f}' for name, value in peaks.items())}; ", end="")
    print(f"most keyframes that waited: {written['most_waiting']}")

    def ratio(name: str, base: str) -> float:
        return float(np.median(reads[name]) / np.median(reads[base]))

    def beyond(name: str, base: str) -> float:
        return float(np.median(reads[name]) - np.median(reads[base]))

    later = ", ".join(f"{kind} {ratio(f'{kind} later', f'{kind} later raw'):.2f}" for kind in LATER_MS)
    print(f"for information: later reads / plain reads of the same bytes: {later}")

    limit = max(COMMIT_RATIO * _p95(commits["raw"]), COMMIT_MS)
    criteria = [
        Criterion("commit, p95", _p95(commits["vmap"]), limit, "ms"),
        *(
            Criterion(f"throughput of {Waiting.at_once} / {name}", rates[_WAITING] / rates[name], 1.0, at_least=True)
            for name in single
        ),
        Criterion("open, warm, slowest", max(o["seconds"] for o in opened if not o["cold"]), OPEN_S, "s"),
        Criterion("open, cold, slowest", max(o["seconds"] for o in opened if o["cold"]), OPEN_S, "s"),
        *(
            Criterion(f"later read, {kind}, over a plain read", beyond(f"{kind} later", f"{kind} later raw"), ms, "ms")
            for kind, ms in LATER_MS.items()
        ),
        Criterion("first read, warm / plain + checks", ratio("warm first", "warm first raw checked"), READ_RATIO),
        Criterion("first read, cold / plain + checks", ratio("cold first", "cold first raw checked"), READ_RATIO),
        Criterion("peak memory", max(peaks.values()), PEAK_MIB, "MiB"),
        Criterion("file / payload", size / payload, SIZE_RATIO),
        Criterion("copy, over a plain copy", copy_s - plain_s, COPY_EXTRA_S, "s"),
    ]
    print(f"\n{table(criteria)}")
    spread = {
        key: {n: dict(zip(("p5", "median", "p95"), np.percentile(t, (5, 50, 95)).round(3).tolist())) for n, t in v}
        for key, v in (("commit_ms", commits.items()), ("read_ms", (reads | others).items()))
    }
    out |= spread | {"rates_mb_s": rates, "shelve": shelf.backend, "open": opened, "write": written, "copies": copies}
    out |= {"peaks_mib": peaks, "file_over_payload": size / payload, "load_after": os.getloadavg()}
    return out | {"criteria": [c.to_dict() for c in criteria]}


def _p95(times: np.ndarray) -> float:
    return float(np.percentile(times, 95))


def _file_system(folder: Path) -> str:
    """Of the longest mount point above a folder."""
    found, best = "unknown", -1
    for line in Path("/proc/mounts").read_text().splitlines():
        _, mount, kind, *_ = line.split()
        if (mount == "/" or f"{folder}/".startswith(mount + "/")) and len(mount) > best:
            found, best = kind, len(mount)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path(), help="on the disk to measure (default: this folder)")
    parser.add_argument("--quick", action="store_true", help="100 keyframes instead of 1000")
    parser.add_argument("--json", type=Path, help="also write all figures here")
    args = parser.parse_args()
    base = args.dir.resolve()
    kind = _file_system(base)
    if kind in ("tmpfs", "ramfs"):
        parser.error(f"{base} is a {kind}, in memory: give a folder on a disk with --dir")
    need = 1.1e9 if args.quick else 10e9
    if shutil.disk_usage(base).free < need:
        parser.error(f"{base} has less than {need / 1e9:.1f} GB free: choose another disk with --dir")
    with tempfile.TemporaryDirectory(prefix="map_store_", dir=base) as folder:
        out = run(Path(folder), args) | {"file_system": kind}
    if args.json:
        args.json.write_text(json.dumps(out, indent=1))
    return 0 if all(c["met"] for c in out["criteria"]) else 1


if __name__ == "__main__":
    sys.exit(main())
