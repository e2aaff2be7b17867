"""``models gain``: what stopping early gains and loses on images of the user's, or on a map."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path

from ..config import Config
from ..errors import ConfigError, ModelFileError
from .common import add_camera_argument, add_config_arguments, count, output_folder, read_camera
from .matcher_config import config_of_matcher
from .progress import ProgressBar

HELP = "what stopping early gains and loses: pairs stopped, pairs lost, time, for several decays and thresholds"
EXAMPLE = (
    "vslam-features models gain lighterglue-early-stop --images corridor/ --truth loops.png --out out/gain\n"
    "         vslam-features models gain --map house.vmap --max-pairs 2000 --decays 0.3,0.5 --thresholds 0.1,0.2"
)
_JSON, _CSV, _PLOT = "gain.json", "gain.csv", "gain.png"
_DECAYS, _THRESHOLDS = (0.0, 0.2, 0.3, 0.5), (0.5, 0.8)


def add_arguments(parser) -> None:
    """Register the options."""
    parser.add_argument("model", nargs="?", metavar="MODEL",
                        help="name, or path of a model file (default: that of the configuration)")  # fmt: skip
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--images", nargs="+", type=Path, metavar="DIR", help="folders of images")
    what.add_argument("--map", type=Path, metavar="FILE.vmap", help="a map: its keyframes with the features they have")
    parser.add_argument("--features", metavar="NAME", help="feature plug-in (default: that of the model)")
    parser.add_argument("--matcher", metavar="NAME", help="matcher plug-in (default: that of the features)")
    parser.add_argument("--decays", type=_shares, metavar="D,D,...", help="default: 0,0.2,0.3,0.5 and the configured")
    parser.add_argument("--thresholds", type=_shares, metavar="T,T,...",
                        help="of min_covisibility (default: the configured one; 0.5,0.8 where it is 0)")  # fmt: skip
    parser.add_argument("--truth", type=Path, metavar="MATRIX.png",
                        help="grey square picture, 255 at [i, j] where image j truly overlaps image i, in the order of "
                        "the sorted files; other pairs may overlap too")  # fmt: skip
    parser.add_argument(
        "--scenes", action="store_true", help="each folder is another scene: across them nothing overlaps"
    )
    parser.add_argument(
        "--verified", choices=("loop", "geometry"), default="loop",
        help="which pairs must not be lost: those that verify as loops without poses do (loops.min_inliers, "
        "loops.min_inlier_share; the default), or all that geometry confirms, look-alikes among them")  # fmt: skip
    parser.add_argument("--max-pairs", type=count, default=0, metavar="N", help="that many of all pairs, evenly spread")
    parser.add_argument(
        "--plain", metavar="MODEL", help="what times are compared with (default: the same without stops)"
    )
    parser.add_argument("--time-pairs", type=count, default=12, metavar="N",
                        help="pairs that are timed for each layer with stops (default 12; 0: no times)")  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=f"write {_JSON}, {_CSV} and {_PLOT}")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_camera_argument(parser)
    add_config_arguments(parser)


def run(args) -> int:
    """Match, time, print, write. Raises the package's errors."""
    from ..replay.gain import Bar, gain_row
    from ..replay.gain_runs import require_scores, run_pairs, time_stops
    from ..replay.gain_views import choose_pairs, overlaps
    from .models_gain_table import Gain, table

    if args.scenes and len(args.images or ()) < 2:
        raise ConfigError("--scenes: each folder of --images is a scene, name at least two")
    if args.camera and args.map:
        raise ConfigError("--camera: keyframes of a map have theirs; leave it out")
    camera, config = read_camera(args.camera), _config(args)
    out = output_folder(args.out, (_JSON, _CSV, _PLOT)) if args.out else None
    with contextlib.ExitStack() as stack:
        verified, views = _open(args, config, camera, stack)
        matcher, card = verified.matcher, require_scores(verified.matcher)
        plain, plain_name = _plain(args.plain, matcher, card)
        chosen = choose_pairs(len(views), args.max_pairs)
        known = overlaps(views, chosen, args.truth, args.scenes)
        settings, configured = _settings(args, matcher.options)
        loops = config.loops.resolved(matcher.loop_inliers, matcher.loop_share)
        least = Bar(loops.min_inliers, loops.min_inlier_share) if args.verified == "loop" else Bar()
        with ProgressBar(quiet=args.json, unit="pairs") as bar:
            pairs = run_pairs(verified, views, chosen, known, least, bar)
        times = None
        if args.time_pairs and any(pair.ran for pair in pairs):
            with ProgressBar(quiet=args.json, unit="timings") as bar:
                times = time_stops(matcher, plain, views, chosen, pairs, settings, args.time_pairs, progress=bar)
    gain = Gain(
        card=card,
        runtime=matcher.runtime,
        views=f"{len(views)} keyframes of {args.map.name}" if args.map else f"{len(views)} images",
        all_pairs=len(views) * (len(views) - 1) // 2,
        pairs=pairs,
        rows=[gain_row(pairs, card.early_stop_layers, card.layers, s, times and times.costs) for s in settings],
        configured=configured,
        bar=least,
        plain=plain_name,
        times=times,
        truth=args.truth,
        scenes=args.scenes,
        notes=views.notes,
    )
    if out:
        _write(out, gain)
    print(json.dumps(gain.to_dict(), allow_nan=False) if args.json else table(gain, out))
    return 0


def _config(args) -> Config:
    """The configuration with the plug-ins that suit the model. Raises ConfigError, ModelError."""
    chosen = {"features.name": args.features, "matcher.name": args.matcher}
    args.set[:0] = [f"{name}={value}" for name, value in chosen.items() if value]  # options are those of the chosen
    config, _ = config_of_matcher(args, args.model)
    return config.with_values(loops__enabled=False)


def _open(args, config: Config, camera, stack: contextlib.ExitStack):
    """The verified matcher and the views that it matches."""
    from .. import registry
    from ..frontend import FrontEnd
    from ..geometry import Verifier
    from ..maps.reader import MapReader
    from ..matching.base import require_kind
    from ..matching.verified import VerifiedMatcher
    from ..models import Models
    from ..replay.gain_runs import require_scores
    from ..replay.gain_views import descriptor_length, views_of_images, views_of_map
    from .map_write import require_map

    if args.images:
        front_end = FrontEnd(config, _told)
        require_scores(front_end.matcher.matcher)  # before the work of the features
        with ProgressBar(quiet=args.json, unit="images") as bar:
            return front_end.matcher, views_of_images(args.images, front_end.config, front_end.extract, camera, bar)
    require_map(args.map)
    reader = stack.enter_context(MapReader(args.map))
    views = views_of_map(reader)
    plugin = registry.get("matcher", config.matcher.name)
    matcher = plugin(options=plugin.Options(**config.matcher.options), models=Models(config, _told))
    features = views.get(0)[0]
    require_kind(matcher, config.matcher.name, features.descriptors.ndim == 3, features.model.name)
    matcher.require(features.model, descriptor_length(features))
    return VerifiedMatcher(matcher, Verifier(config.geometry)), views


def _plain(name: str | None, matcher, card):
    """The matcher that times are compared with, and what it is, in words.

    Raises ModelFileError for a ``--plain`` that stops early.
    """
    import dataclasses

    from ..artifacts.stop_rule import NEVER
    from ..replay.gain_runs import NO_STOP, plain_twin, with_setting

    name = name or str(plain_twin(card) or "")
    if not name:
        return with_setting(matcher, NO_STOP), f"{card.name} itself without a stop, for its plain twin is not here"
    plain = type(matcher)(dataclasses.replace(matcher.options, model=name, **NEVER), matcher.models)
    found = plain.engine.model
    if found.card.early_stop_layers:
        raise ModelFileError(f"--plain {name}: stops early itself; name the model without early stop")
    return plain, f"{found.card.name} {found.card.precision} ({found.path.name})"


def _settings(args, options):
    """All settings of the table, and that of the configuration where it stops at all (else None)."""
    from ..replay.gain import Setting

    own = Setting(options.min_covisibility, options.early_stop_decay)
    configured = own if own.min_covisibility > 0 and own.decay < 1 else None
    thresholds = args.thresholds or ([own.min_covisibility] if configured else _THRESHOLDS)
    decays = args.decays or sorted({*_DECAYS, *([own.decay] if configured else [])})
    settings = [Setting(t, d) for t in sorted(set(thresholds)) for d in sorted(set(decays))]
    if configured and configured not in settings:
        settings.append(configured)
    return settings, configured


def _write(out: Path, gain) -> None:
    from ..replay.files import write_json, write_whole
    from ..replay.gain_csv import pairs_csv
    from ..replay.gain_plot import gain_plot
    from ..replay.pictures import encode

    checked, layers = gain.card.early_stop_layers, gain.card.layers
    decays = [row.setting.decay for row in gain.rows if row.setting.decay < 1]  # at 1 there are no limits
    decay = gain.configured.decay if gain.configured else max(decays, default=1.0)
    write_json(out / _JSON, gain.to_dict())
    write_whole(out / _CSV, pairs_csv(gain.pairs, gain.rows, checked))
    write_whole(out / _PLOT, encode(gain_plot(gain.rows, gain.pairs, checked, layers, decay, gain.title), ".png"))


def _told(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _shares(text: str) -> list[float]:
    """Argument type: numbers in [0, 1] with commas between."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(0 <= value <= 1 for value in values):
        raise argparse.ArgumentTypeError(f"expected numbers from 0 to 1 with commas between, got '{text}'")
    return values
