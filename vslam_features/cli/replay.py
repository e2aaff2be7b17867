"""``replay BAG|IMAGE_DIR``: a recording through the front end, with numbers and a report."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from .common import (
    add_camera_argument,
    add_config_arguments,
    count,
    load_config,
    not_negative,
    open_input,
    output_folder,
)

METRICS, REPORT = "metrics.json", "report.html"


def add_parser(subparsers) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "replay",
        help="run a recording or a folder of images and write metrics.json and report.html",
        description="Run a rosbag2 folder, a .mcap, .db3 or ROS 1 .bag file, or a folder of images through the front "
        "end.\nResults do not depend on the rate. In a folder of images every image is a keyframe and candidates are\n"
        "at least 10 images older, unless the configuration says otherwise.",
        epilog="example: vslam-features replay my_bag --image-topic /camera/infra1/image_rect_raw --out out/run1\n"
        "         vslam-features replay walk1 --map house.vmap && "
        "vslam-features replay walk2 --map house.vmap --map-mode localize\n"
        "exit codes: 0 complete; 1 an error, the input was not read whole, or the map not written whole; 3 complete,\n"
        "but stages or models failed; 130 interrupted (Ctrl-C; what was done by then is written).",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("input", type=Path, metavar="BAG|IMAGE_DIR", help="what to read")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to write (default: out/replay-<name>)")
    parser.add_argument("--json", action="store_true", help="print metrics.json on stdout instead of the table")
    parser.add_argument("--no-report", dest="report", action="store_false", help="write metrics.json only")
    parser.add_argument("--rate", type=not_negative, default=0.0, metavar="R",
                        help="replay at R times real time (default 0: as fast as possible)")  # fmt: skip
    parser.add_argument("--max-frames", type=count, default=0, metavar="N",
                        help="stop after N images (default 0: all)")  # fmt: skip
    parser.add_argument("--loop-matrix", type=Path, metavar="PNG",
                        help="truth for recall: grey square picture, 255 at [i, j] where image j is a true revisit of "
                        "image i; or a ground_truth.npz (found by itself in the bag of a rendered scene)")  # fmt: skip
    group = parser.add_argument_group("map (without --map it is in memory, and nothing of it is kept)")
    group.add_argument("--map", type=Path, metavar="FILE", help="the map file, such as house.vmap")
    group.add_argument("--map-mode", choices=("new", "continue", "localize"), metavar="MODE",
                       help="new: make the file (default; refuses one that is there); continue: add a session to it; "
                       "localize: recognise its places, the file never changes")  # fmt: skip
    group = parser.add_argument_group("topics of a recording (found by themselves where one fits)")
    group.add_argument("--image-topic", metavar="TOPIC")
    group.add_argument("--camera-info-topic", metavar="TOPIC")
    poses = group.add_mutually_exclusive_group()
    poses.add_argument("--pose-topic", metavar="TOPIC", help="PoseStamped or Odometry")
    poses.add_argument("--no-pose", dest="use_pose", action="store_false", help="leave poses out")
    group = parser.add_argument_group("folder of images")
    group.add_argument("--fps", type=float, default=10.0, help="rate of the synthetic stamps (default 10)")
    add_camera_argument(group)
    add_config_arguments(parser)


def run(args) -> int:
    """Replay, write, print. Raises the package's errors."""
    from ..replay.files import write_json
    from ..replay.metrics import metrics
    from ..replay.report import write_report
    from ..replay.runner import check_map_file, replay

    mode = _map_mode(args)
    check_map_file(args.map, mode)  # before what an earlier run left is removed
    config, explicit = load_config(args)
    with open_input(args, config, explicit) as source:
        truth = _load_truth(args, source)
        name = f"replay-{_out_name(args.input, source.name)}"
        out = output_folder(args.out or Path("out") / name, (METRICS, REPORT))
        with _bar(len(source), quiet=args.json) as bar:
            log = replay(
                source, progress=bar, rate=args.rate, max_frames=args.max_frames, map_path=args.map, map_mode=mode
            )
    if log.first_id and truth is not None:
        truth = None  # one that was found beside the recording; it knows nothing of keyframes of an older map
    numbers = metrics(log, truth)
    write_json(out / METRICS, numbers)
    report = write_report(out / REPORT, log, numbers) if args.report else None
    print(json.dumps(numbers, allow_nan=False) if args.json else _table(log, numbers, out, report))
    return _exit_code(log)


def _map_mode(args) -> str:
    """What to do with the map. Raises ConfigError for arguments that do not fit together."""
    from ..errors import ConfigError

    if args.map is None and args.map_mode is not None:
        raise ConfigError(f"--map-mode {args.map_mode} needs a map: name it with --map FILE")
    mode = args.map_mode or "new"
    if mode != "new" and args.loop_matrix is not None:
        raise ConfigError(
            f"--loop-matrix: tells nothing of the keyframes in {args.map}; leave it out, or replay without the map"
        )
    return mode


def _load_truth(args, source):
    """The loop truth of the input, None where there is none. Raises DataError where it is of another sequence."""
    from ..errors import DataError
    from ..replay.ground_truth import FILE_NAME
    from ..replay.loop_truth import LoopTruth

    beside = args.input / FILE_NAME
    path = args.loop_matrix or (beside if beside.is_file() else None)
    if path is None:
        return None
    retrieval = source.config.retrieval
    truth, images = LoopTruth.load(path, retrieval.exclude_frames, retrieval.exclude_s), len(source)
    # A damaged recording has fewer images than its truth.
    if len(truth) < images or (len(truth) > images and args.loop_matrix and not source.damage):
        raise DataError(
            f"{path}: is the truth of {len(truth)} images, {args.input} has {images}; "
            "give the loop matrix of this sequence with --loop-matrix (also with --max-frames: of all images)"
        )
    return truth


def _out_name(path: Path, name: str) -> str:
    """``run.1`` of ``run.1.mcap``, whose short name is ``run`` as that of ``run.2.mcap`` is."""
    return path.stem if path.is_file() else name


class _bar:
    """A progress bar on stderr; callable with (done, total)."""

    def __init__(self, total: int, quiet: bool):
        from tqdm import tqdm

        # In a log file a line every ten seconds is enough.
        slow = not sys.stderr.isatty()
        self._bar = tqdm(total=total, unit="img", file=sys.stderr, disable=quiet, mininterval=10 if slow else 0.1)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._bar.close()

    def __call__(self, done: int, total: int) -> None:
        self._bar.total = total
        self._bar.update(min(done, total) - self._bar.n)


def _table(log, numbers: dict, out: Path, report: Path | None) -> str:
    from ..replay.report import judge

    verdict, track = judge(log, numbers), numbers["by_kind"].get("track", numbers)
    frame = numbers["latency_ms"].get("frame")
    rows = [
        ("images", f"{log.frames} of {log.expected}" if log.expected_known else f"{log.frames}, the input is damaged"),
        ("keyframes", numbers["keyframes"]),
        ("consecutive pairs", f"{track['pairs']}, {track['zero_match_pairs']} without a match"),
        ("  median", f"{_n(track['matches_median'])} matches, {_n(track['inliers_median'])} inliers"),
        ("  statuses", ", ".join(f"{n} {s}" for s, n in track["statuses"].items()) or "-"),
        *_places(numbers),
        ("an image takes", f"{frame['p50']:.0f} ms (p95 {frame['p95']:.0f})" if frame else "-"),
    ]
    for e in log.engines:
        text = f"{e.runs} runs on {e.runtime} {e.precision}"
        text += f", {e.faults} failed: {e.recovered} made good, {e.lost} lost" if e.faults else ""
        rows.append((f"  {e.name}", text))
    if log.map is not None:
        m = numbers["map"]
        text = f"{m['keyframes_after']} keyframes, {m['keyframes_after'] - m['keyframes_before']} of them new"
        rows.append(("map", f"{m['name']}, {m['mode']}: {text}; {log.map.file_bytes / 1e6:.1f} MB"))
        rows += [("  not whole", problem) for problem in m["problems"]]
    if log.instead:
        rows.append(("instead", log.instead))
    truth = numbers.get("loop_truth")
    if truth and truth["queries"]:
        rows.append(("recall@1, @5", f"{truth['recall_at_1']:.3f}, {truth['recall_at_5']:.3f} of {truth['queries']}"))
        rows.append(("true, false loops", f"{truth['queries_with_loop']} queries, {len(truth['false_loops'])} false"))
    if log.fault_counts:
        rows.append(("faults", ", ".join(f"{n} {stage}" for stage, n in log.fault_counts.items())))
    for reason, n in log.skipped.items():
        rows.append(("skipped", f"{n} x {reason}"))
        rows += [("  for example" if n > 1 else "", text) for text in log.examples.get(reason, [])[:1]]
    rows += [("note", reason if n == 1 else f"{n} x {reason}") for reason, n in log.notes.items()]
    lines = [f"{log.source.get('name')}: {verdict.title}"]
    lines += [f"  {name:<18} {value}" for name, value in rows]
    lines += [f"  {'metrics':<18} {out / METRICS}"]
    lines += [f"  {'report':<18} {report}"] if report else []
    return "\n".join(lines)


def _places(numbers: dict) -> list[tuple]:
    loops = numbers["loops"]
    if located := numbers.get("relocalisation"):
        first = f", first in image {located['first'][1]}" if located["first"] else ""
        text = f"{located['keyframes']} of {numbers['keyframes']} keyframes{first}"
        tried = f"{located['verified']} of {located['attempted']} tried"
        rows = [("recognised in map", text), ("  pairs verified", tried)]
        statuses = numbers["by_kind"].get("relocalisation", {}).get("statuses", {})
        text = ", ".join(f"{n} {status}" for status, n in statuses.items()) or "-"
        return [*rows, ("  statuses", text), ("  gated", loops["gated"])]
    statuses = numbers["by_kind"].get("loop", {}).get("statuses", {})
    return [
        ("loops verified", f"{loops['verified']} of {loops['attempted']} tried"),
        ("  statuses", ", ".join(f"{n} {status}" for status, n in statuses.items()) or "-"),
        ("  gated", loops["gated"]),
    ]


def _exit_code(log) -> int:
    """130 for an interrupted run, 1 for a partial read or map, 3 for faults; the reason goes to stderr."""
    from ..replay.report import many

    problems = log.map.problems if log.map is not None else []
    for problem in problems:
        print(f"error: the map is not whole: {problem}", file=sys.stderr)
    if log.interrupted:
        print(f"error: {log.incomplete}; this much is written", file=sys.stderr)
        return 130
    if not log.frames:
        print(f"error: no image was processed: {log.incomplete or 'the input has none'}", file=sys.stderr)
        return 1
    if log.incomplete:
        print(f"error: the input was not read whole: {log.incomplete}", file=sys.stderr)
        return 1
    if problems:
        return 1
    if lost := sum(e.lost for e in log.engines):
        last = next(e.last_fault for e in log.engines if e.lost)
        print(f"error: {many(lost, 'run')} of the models {'is' if lost == 1 else 'are'} lost: {last}", file=sys.stderr)
        return 3
    if log.fault_counts:
        total = many(sum(log.fault_counts.values()), "fault")
        print(f"error: {total} in {', '.join(log.fault_counts)}; what they concern is lost", file=sys.stderr)
        return 3
    return 0


def _n(value) -> str:
    return "-" if value is None else f"{value:g}"
