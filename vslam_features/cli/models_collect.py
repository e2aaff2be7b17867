"""``models collect``: what a matcher gets of keyframe pairs, saved for ``models verify --inputs``."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path

from ..errors import BagError, ConfigError, PluginError
from .common import add_camera_argument, add_config_arguments, count, load_config, open_input, output_folder, positive
from .map_write import require_map
from .matcher_config import config_of_matcher
from .progress import ProgressBar

HELP = "save the inputs of a matcher on hard pairs of a recording, for 'models verify --inputs'"
EXAMPLE = (
    "vslam-features models collect my_bag --image-topic /camera/infra1/image_rect_raw --out saved/\n"
    "         vslam-features models collect --node /frontend --seconds 300 --out saved/\n"
    "         vslam-features models verify lighterglue --inputs saved/"
)
SECONDS = 120.0
_MAP = ".vmap"


def add_arguments(parser) -> None:
    """Register the options."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("input", nargs="?", type=Path, metavar="BAG|IMAGE_DIR|FILE.vmap",
                      help="a recording or folder of images (not of folders), which is replayed, or a map")  # fmt: skip
    what.add_argument("--node", metavar="NAME", help="a front-end that is running on this machine, such as /frontend")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the files go")
    parser.add_argument("--pairs", type=count, default=8, metavar="N",
                        help="how many, a quarter of them adjacent keyframes (default 8)")  # fmt: skip
    parser.add_argument("--model", metavar="MODEL",
                        help="matcher, by name or path (default: that of the configuration or node)")  # fmt: skip
    parser.add_argument("--force", action="store_true", help="replace the pairs that are in DIR, also of other models")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--seconds", type=positive, default=SECONDS, metavar="S",
                        help="listen to a node at most so long; Ctrl-C ends it earlier (default 120)")  # fmt: skip
    group = parser.add_argument_group("recording or folder of images")
    group.add_argument("--max-frames", type=count, default=0, metavar="N", help="only the first N images")
    group.add_argument("--image-topic", metavar="TOPIC")
    group.add_argument("--camera-info-topic", metavar="TOPIC")
    poses = group.add_mutually_exclusive_group()
    poses.add_argument("--pose-topic", metavar="TOPIC", help="PoseStamped or Odometry")
    poses.add_argument("--no-pose", dest="use_pose", action="store_false", help="leave poses out")
    group.add_argument("--fps", type=positive, default=10.0, help="rate of the stamps of a folder (default 10)")
    add_camera_argument(group)
    add_config_arguments(parser)


def run(args) -> int:
    """Replay or listen, choose, save, print. Raises the package's errors."""
    if args.pairs < 1:
        raise ConfigError("--pairs: expected one at least")
    output_folder(args.out, ())
    if args.node:
        return _of_node(args)
    config, given = config_of_matcher(args, args.model)
    _check(args, config)
    if args.input.suffix != _MAP:
        return _of_recording(args, config, given)
    require_map(args.input)
    _save(args, args.input, args.input.stem, config, [])
    return 0


def _of_recording(args, config, given) -> int:
    """Replay into a map that is there meanwhile; the exit code."""
    from ..artifacts.cache import staging
    from ..replay.runner import replay

    with open_input(args, config, given) as source, staging(args.out) as scratch:
        path = scratch / f"replay{_MAP}"
        with ProgressBar(quiet=args.json, unit="images") as bar:
            log = replay(source, progress=bar, max_frames=args.max_frames, map_path=path)
        notes = [f"the input was not read whole: {log.incomplete}"] if log.incomplete else []
        notes += [f"{n} faults in stage {stage}" for stage, n in log.fault_counts.items()]
        notes += [f"{e.name}: {e.faults} runs failed, {e.recovered} made good" for e in log.engines if e.faults]
        notes += log.map.problems
        if not path.is_file():
            raise BagError(f"{args.input}: no image became a keyframe: {log.incomplete or 'it has none'}")
        _save(args, path, source.name, source.config, notes)
    return 130 if log.interrupted else 0


def _of_node(args) -> int:
    """Listen until there is enough, then read the node's map; the exit code."""
    if find_spec("rclpy") is None:
        raise PluginError(
            "--node needs ROS 2, and rclpy is not there: source your ROS installation, or install the extra 'ros' "
            "(pip install 'vslam_features[ros]'); a recording needs none: models collect BAG"
        )
    from ..ros.collector_node import listen

    if args.model:
        _check(args, config_of_matcher(args, args.model)[0])  # before listening
    with ProgressBar(quiet=args.json, unit="pairs") as bar:
        heard = listen(args.node, args.pairs, args.seconds, bar)
    config = _config_of_node(args, heard)
    _check(args, config)
    _save(args, heard.map_path, args.node.strip("/"), config, list(heard.notes))
    return 0


def _config_of_node(args, heard):
    """The configuration with the node's plug-ins and its matcher's model, where no others are named."""
    _, given = load_config(args)
    if not args.model:
        args.set[:0] = [f"{name}={plugin}" for name, plugin in heard.plugins.items() if name not in given]
    model = args.model or (None if "matcher.options.model" in given else heard.matcher)
    return config_of_matcher(args, model)[0]


def _check(args, config) -> None:
    """What can be told before the work: the matcher runs a model, and the folder has no pairs of other features."""
    from ..artifacts.card import read_card
    from ..artifacts.saved_pairs import require_same_features
    from ..artifacts.store import locate

    if "model" not in config.matcher.options:
        raise PluginError(
            f"matcher '{config.matcher.name}' runs no model, so that there is nothing to verify: name one with "
            "--model, such as lighterglue"
        )
    card = read_card(locate(config.matcher.options["model"], config.runtime.precision))
    if not args.force:
        require_same_features(args.out, card.features_model)


def _save(args, path: Path, source: str, config, notes: list[str]) -> None:
    """Choose pairs of a map, save and print them."""
    from ..maps.reader import MapReader
    from ..replay.collect_map import collect, require_matcher, wide_pairs

    matcher = _matcher(config)
    name = matcher.matcher.engine.model.card.name
    with MapReader(path) as reader:
        require_matcher(reader, matcher, config.matcher.name, source)
        with ProgressBar(quiet=args.json, unit="searches") as bar:
            more = wide_pairs(reader, matcher, args.pairs, bar)
        if (counts := matcher.matcher.engine.counts).faults:
            notes.append(f"{name}: {counts.faults} of {counts.runs} searches failed, {counts.recovered} made good")
        with ProgressBar(quiet=args.json, unit="keyframes") as bar:
            found = collect(
                reader, args.out, args.pairs, matcher=name, source=source, more=more, replace=args.force, progress=bar
            )
    _print(args, found, [*notes, *found.notes], name)


def _matcher(config):
    from .. import registry
    from ..geometry import Verifier
    from ..matching.verified import VerifiedMatcher
    from ..models import Models

    plugin = registry.get("matcher", config.matcher.name)
    options = plugin.Options(**config.matcher.options)
    return VerifiedMatcher(plugin(options=options, models=Models(config, _told)), Verifier(config.geometry))


def _print(args, found, notes: list[str], matcher: str) -> None:
    from ..export.text_table import aligned

    features = found.pairs[0][1].features
    if args.json:
        rows = [
            {
                "kind": pair.kind,
                "keyframes": list(pair.keyframes),
                "stamps_ns": list(pair.stamps_ns),
                "seconds_apart": pair.seconds_apart,
                "matches": pair.matches,
                "inliers": pair.inliers,
                "file": str(path),
            }
            for path, pair in found.pairs
        ]
        out = {"matcher": matcher, "features": vars(features), "pairs": rows, "notes": notes}
        print(json.dumps(out, allow_nan=False))
        return
    rows = [["kind", "keyframes", "s apart", "matches", "inliers", "file"]]
    for path, p in found.pairs:
        cells = p.kind, f"{p.keyframes[0]} {p.keyframes[1]}", f"{p.seconds_apart:.1f}", p.matches, p.inliers, path.name
        rows.append([str(cell) for cell in cells])
    print(aligned(rows))
    for note in notes:
        print(f"note: {note}")
    print(
        f"{len(found.pairs)} pairs of {features.name} features in {args.out}: vslam-features models verify {matcher} "
        f"--inputs {args.out}"
    )


def _told(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
