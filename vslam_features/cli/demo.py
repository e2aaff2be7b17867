"""``demo``: a rendered scene through player, front-end and recorder as real processes over DDS."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from ..errors import PluginError
from .common import count, positive
from .isolation import ended_by_signals, environment, locked
from .processes import ProcessError, Processes

RATE_HZ = 4.0
SETTLE_S = 60.0
QUIET_S = 4.0
START_S = 300.0  # models without a parity record are verified before the front-end answers


def add_parser(subparsers) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "demo",
        help="render a scene, run it through the ROS nodes, and judge the result against the truth",
        description="Renders a scene with known geometry into a rosbag2, plays it to the front-end over DDS on this\n"
        "machine, records what comes back, and compares every loop with the truth.",
        epilog="example: vslam-features demo --scene corridor --out out/demo\n"
        "exit codes: 0 everything as it should be; 1 something was lost, wrong, or a process failed.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("out/demo"), metavar="DIR", help="default: out/demo")
    parser.add_argument("--scene", default="corridor", metavar="NAME", help="corridor (default), room or twin_rooms")
    parser.add_argument("--frames", type=count, default=0, metavar="N", help="only the first n frames (default: all)")
    parser.add_argument("--rate-hz", type=positive, default=RATE_HZ, metavar="HZ",
                        help=f"images a second (default {RATE_HZ:g}; two cores do all the work here)")  # fmt: skip


def run(args) -> int:
    """Run the demo. Raises the package's errors."""
    if find_spec("rclpy") is None:
        raise PluginError(
            "demo needs ROS 2, and rclpy is not there: run 'make demo', install the extra 'ros' "
            "(pip install 'vslam_features[ros]'), or source your ROS installation"
        )
    with ended_by_signals(), locked(args.out):
        return _run(args)


def _run(args) -> int:
    start, out = time.monotonic(), args.out
    bag, recorded_hz = _render(args, out)
    total = len(_truth(bag))
    shutil.rmtree(out / "logs", ignore_errors=True)
    (out / "progress.json").unlink(missing_ok=True)
    with Processes(out / "logs", environment(out)) as processes:
        progress = _play(processes, args.scene, out, total, args.rate_hz, args.rate_hz / recorded_hz)
    numbers = json.loads((out / "metrics.json").read_text())
    problems = _problems(progress, numbers, total)
    print(_table(args, out, progress, numbers, total, time.monotonic() - start))
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0


def _render(args, out: Path) -> tuple[Path, float]:
    from tqdm import tqdm

    from ..replay.bag_writer import write_scene_bag
    from ..replay.scenes import make_scene

    scene = make_scene(args.scene, num_frames=args.frames, noise_sigma=2.0)
    bag = out / "bag"
    with tqdm(total=len(scene), desc=f"rendering {args.scene}", unit="img", file=sys.stderr) as bar:
        write_scene_bag(scene, bag, overwrite=True, progress=lambda done, *_: bar.update(done - bar.n))
    return bag, scene.options.fps


def _truth(bag: Path):
    from ..replay.ground_truth import GroundTruth

    return GroundTruth.load(bag)


def _play(processes: Processes, scene: str, out: Path, total: int, hz: float, speed: float) -> dict:
    """Start the processes, follow them to the end; the last progress. Raises ProcessError."""
    from ..replay.bag_writer import Topics

    topics, nodes, bag = Topics(), "vslam_features.ros.entry", (out / "bag").resolve()
    remaps = _ros_args(remap={"image": topics.image, "camera_info": topics.camera_info, "pose": topics.pose})
    # Player and recorder share the two cores of a small machine: half of the default keypoints leave them room.
    parameters = {"pose_type": "pose", "image_qos": "reliable", "rectified": "yes", "features.max_keypoints": 1024}
    pid = processes.start("front-end", f"{nodes}:frontend", *remaps, *_ros_args(parameters)[1:])
    recorder = {"out": out.resolve(), "truth": bag, "name": f"demo {scene}"}
    processes.start("recorder", f"{nodes}:recorder", *remaps, *_ros_args(recorder)[1:])
    _wait(
        processes,
        out,
        "front-end",
        lambda p: p.get("active") and p.get("connected"),
        START_S,
        "the front-end to answer",
    )
    player = {"path": bag, "rate": speed, "min_subscribers": 2}
    processes.start("player", f"{nodes}:player", *_ros_args(player))
    from tqdm import tqdm

    with tqdm(total=total, desc=f"playing at {hz:g} Hz (front-end pid {pid})", unit="img", file=sys.stderr) as bar:
        changed, last = time.monotonic(), None
        while True:
            progress = _progress(out)
            bar.update(progress.get("processed", 0) - bar.n)
            bar.set_postfix({k: progress.get(k, 0) for k in ("keyframes", "loops", "dropped")})
            if progress != last:
                changed, last = time.monotonic(), progress
            played = processes.ended("player")
            # Diagnostics come once a second: what they say of an image or two that have just come is not the last word.
            whole = progress.get("received", 0) >= total or time.monotonic() - changed > QUIET_S
            if played and whole and _settled(progress):
                break
            if time.monotonic() - changed > SETTLE_S:
                raise ProcessError(f"nothing has changed for {SETTLE_S:g} s; last seen: {progress}")
            time.sleep(0.25)
    processes.forget("player")
    processes.stop("front-end", 20)
    processes.stop("recorder", 60)
    return _progress(out)


def _settled(p: dict) -> bool:
    """True where everything that came in was processed, and everything that goes out has come."""
    done = p["received"] == p["processed"] + p["dropped"] and not p["waiting"] and not p["loop_queue"]
    searched = p["searched"] + p["not_searched"]
    return bool(done and p["received"] and searched == p["keyframes"] == p["front_end_keyframes"])


def _wait(processes: Processes, out: Path, name: str, ready, timeout_s: float, what: str) -> None:
    end = time.monotonic() + timeout_s
    while not ready(_progress(out)):
        processes.ended(name)
        if time.monotonic() > end:
            raise ProcessError(f"waited {timeout_s:g} s for {what}; see the logs in {out / 'logs'}")
        time.sleep(0.1)


def _progress(out: Path) -> dict:
    try:
        return json.loads((out / "progress.json").read_text())
    except FileNotFoundError:
        return {}


def _ros_args(parameters: dict | None = None, remap: dict | None = None) -> list[str]:
    out = ["--ros-args"]
    for name, value in (parameters or {}).items():
        # As YAML: without quotes a folder named 2024 or true is no text.
        out += ["-p", f"{name}:={json.dumps(str(value) if isinstance(value, Path) else value)}"]
    for name, value in (remap or {}).items():
        out += ["-r", f"{name}:={value}"]
    return out


def _problems(p: dict, numbers: dict, total: int) -> list[str]:
    """What is not as it should be, each in a sentence."""
    truth, out = numbers["loop_truth"], []
    if p["received"] != total:
        out.append(f"{p['received']} of {total} images came to the front-end")
    if p["received"] != p["processed"] + p["dropped"]:
        out.append(f"received {p['received']} images, but processed {p['processed']} and dropped {p['dropped']}")
    out += [f"{p[n]} images {n}: too slow a machine for this rate" for n in ("dropped", "missing") if p[n]]
    if p["not_searched"]:
        out.append(f"the loops of {p['not_searched']} keyframes were not searched: too slow a machine for this rate")
    if truth["queries_with_loop"] != truth["queries"]:
        out.append(
            f"{truth['queries'] - truth['queries_with_loop']} of {truth['queries']} true loops were not verified"
        )
    if truth["false_loops"]:
        out.append(f"false loops between images {truth['false_loops']}")
    if numbers["faults"]:
        out.append(f"stages failed: {numbers['faults']}")
    out += [
        f"{e['name']}: {e['lost']} runs of the model are lost: {e['last_fault']}"
        for e in numbers["engines"]
        if e["lost"]
    ]
    return out


def _models(numbers: dict) -> str:
    """What ran, and on what; the whole warning where it is not what is configured."""
    if instead := numbers["provenance"]["instead"]:
        return instead
    engines = numbers["engines"]
    if not engines:
        return "none, all plug-ins are classical"
    runtimes = ", ".join(dict.fromkeys(e["runtime"] for e in engines))
    return (
        f"{' + '.join(e['name'] for e in engines)} on {runtimes}; {sum(e['recovered'] for e in engines)} runs repeated"
    )


def _table(args, out: Path, p: dict, numbers: dict, total: int, seconds: float) -> str:
    truth, track, latency = numbers["loop_truth"], numbers["by_kind"].get("track", {}), numbers["latency_ms"]
    e2e = latency.get("image to keyframe", {"p50": float("nan"), "p95": float("nan")})
    rows = [
        ("scene", f"{args.scene}, {total} images at {args.rate_hz:g} Hz over DDS, {seconds:.0f} s in all"),
        (
            "images",
            f"received {p['received']} = processed {p['processed']} + dropped {p['dropped']}; missing {p['missing']}",
        ),
        (
            "keyframes",
            f"{numbers['keyframes']}, matched with the one before: median {track.get('inliers_median')} inliers",
        ),
        (
            "loops",
            f"{truth['queries_with_loop']} of {truth['queries']} true ones verified, {len(truth['false_loops'])} false",
        ),
        ("retrieval", f"recall@1 {truth['recall_at_1']}, recall@5 {truth['recall_at_5']}"),
        ("image to keyframe", f"{e2e['p50']:.0f} ms (p95 {e2e['p95']:.0f})"),
        ("models", _models(numbers)),
        ("faults", ", ".join(f"{n} {s}" for s, n in numbers["faults"].items()) or "none"),
        ("metrics", out / "metrics.json"),
        ("report", out / "report.html"),
    ]
    return "\n".join(["", "vslam_features demo", *(f"  {name:<18} {value}" for name, value in rows)])
