"""``models verify``: a model against its reference, pair by pair."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections import Counter
from pathlib import Path

from ..config import Config
from ..errors import DataError, ModelError
from .common import add_config_arguments, load_config

HELP = "compare a model with its reference, pair by pair; the exit code is 1 where it fails"
EXAMPLE = "vslam-features models verify xfeat --set runtime.name=openvino --images my_images/"


def add_arguments(parser) -> None:
    """Register the options."""
    parser.add_argument("model", metavar="MODEL", help="name, or path of a model file")
    parser.add_argument("--reference", default="", metavar="REF", help="model to compare with (default: what ships)")
    parser.add_argument("--images", nargs="+", type=Path, default=[], metavar="FILE|DIR", help="pictures of yours, too")
    parser.add_argument("--inputs", nargs="+", type=Path, default=[], metavar="NPZ|DIR",
                        help="saved inputs (incidents, collected pairs) instead of the pairs that ship")  # fmt: skip
    parser.add_argument("--precision", choices=("fp32", "fp16"), help="variant (default: runtime.precision)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_config_arguments(parser)


def run(args) -> int:
    """Compare, print the table, exit 1 on failure."""
    from ..artifacts.gate_table import engine_rows, table

    config, _ = load_config(args)
    if args.precision:
        config = config.with_values(runtime__precision=args.precision)
    inputs, notes = _saved(args.inputs, args.model, config) if args.inputs else ([], [])
    report = verify(args.model, config, args.reference, args.images, inputs)
    if args.json:
        engines = engine_rows(report) if report.role == "matcher" else []
        print(json.dumps({**report.to_dict(), "engines": engines, "recorded": notes}, allow_nan=False))
    else:
        print("\n".join([*notes, table(report), f"record: {report.record}"]))
    return 0 if report.passed and not report.objection else 1


def verify(model: str, config: Config, reference: str = "", images=(), inputs=()):
    """The parity report, with a line of progress on stderr; a matcher's features of pictures are extracted first."""
    from ..models import Models

    live = sys.stderr.isatty()

    def progress(text: str) -> None:
        print(f"\r\033[K{text}" if live else text, end="" if live else "\n", file=sys.stderr, flush=True)

    models = Models(config, progress)
    # The runtime that is judged does not make what it is judged on.
    trusted = config.with_values(runtime__name="onnxruntime", runtime__device="cpu", runtime__precision="fp32")
    extract = _extractor(model, config, Models(trusted, progress)) if images else None
    try:
        return models.verify(model, reference=reference, images=images, inputs=inputs, extract=extract)
    finally:
        if live:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def _extractor(model: str, config: Config, models):
    """Features of a picture by the model that a matcher's card names; None for other roles."""
    from ..artifacts.store import locate
    from ..reference import ModelFile
    from ..types import Frame

    file = ModelFile.at(locate(model, config.runtime.precision))
    if file.card.role != "matcher" or not file.card.features_model:
        return None
    plugin, options = _plugin_of(file, config, models)
    features = plugin(max_keypoints=1024, long_side=config.features.long_side, options=options, models=models)

    def extract(image):
        found = features.extract(Frame(0, "camera", image))
        return found.keypoints, found.descriptors

    return extract


def _plugin_of(matcher, config: Config, models):
    """The plug-in for a matcher's features model and its options: that of the configuration where this is its model."""
    from .. import registry
    from ..artifacts.card import read_card
    from ..artifacts.store import locate
    from ..gate_pairs import features_of

    name = matcher.card.features_model

    with contextlib.suppress(ModelError):  # the configured one need not be here
        own = config.features.options.get("model")
        if own and read_card(locate(own, "fp32")).name == name:  # it may be a file by its path
            plugin = registry.get("features", config.features.name)
            return plugin, plugin.Options(**config.features.options)
    if name in registry.names("features"):
        plugin = registry.get("features", name)
    else:  # these two run any model of features: cards tell how
        name = str(features_of(matcher).path)
        plugin = registry.get("features", "flexglue" if models.open("features", name).binding.dense else "xfeat")
    learned = "model" in {f.name for f in dataclasses.fields(plugin.Options)}
    return plugin, plugin.Options(model=name) if learned else plugin.Options()


def _saved(paths: list[Path], model: str, config: Config) -> tuple[list[Path], list[str]]:
    """The saved inputs of a model, and lines: what pairs and incidents say of themselves, how many are of others.

    Raises DataError where all are incidents of others.
    """
    from ..artifacts import incidents, saved_pairs
    from ..artifacts.card import read_card
    from ..artifacts.cases import saved_files
    from ..artifacts.npz import read_arrays
    from ..artifacts.store import locate

    card = read_card(locate(model, config.runtime.precision))
    files, lines, others = [], [], Counter()
    for file in saved_files(paths):
        try:
            if pair := saved_pairs.parse(file, read_arrays(file)):
                files.append(file)
                lines.append(f"{file.name}: {pair.text}")
                continue
            found = incidents.load(file)
        except DataError:  # plain inputs, or damaged: the comparison tells
            files.append(file)
            continue
        if (found.role, found.name) == (card.role, card.name):
            files.append(file)
            lines.append(f"recorded in {file.name}: {found.name} on {found.runtime}: {found.fault}")
        else:
            others[f"{found.name} ({found.role})"] += 1
    text = ", ".join(f"{name}: {count}" for name, count in sorted(others.items()))
    if not files:
        raise DataError(
            f"--inputs: no incident is of {card.name} ({card.role}), there are some of {text}; verify those"
        )
    if others:
        lines.append(f"left out, incidents of other models: {text}")
    return files, lines
