"""``models build``: model files from weights that were fetched, and TensorRT engines from model files."""

from __future__ import annotations

import sys
from pathlib import Path

from ..config import Config
from ..errors import ConfigError, ModelError, ModelFileError, ParityError, PluginError
from ..runtimes import engine_file
from . import model_build_plan
from .common import add_config_arguments, load_config

HELP = "build the model file from weights that were fetched, or the TensorRT engine of a model"
EXAMPLE = """vslam-features models build xfeat
         vslam-features models build lighterglue --runtime tensorrt --precision fp16
         vslam-features models build matcher.onnx --runtime tensorrt --dry-run --assume-version 10.3 \\
                                     --assume-gpu 'Orin 8.7'"""


def add_arguments(verb) -> None:
    """Register the options."""
    verb.add_argument(
        "names", nargs="+", metavar="NAME", help="as of fetch; for an engine also the path of an .onnx file"
    )
    verb.add_argument("--precision", choices=("fp32", "fp16"), help="variant (default: fp32, or runtime.precision)")
    engine = verb.add_argument_group("TensorRT engines")
    engine.add_argument("--runtime", choices=("tensorrt",), help="build the engine for this machine's GPU")
    engine.add_argument(
        "--typing", choices=("auto", "strong", "weak"), help="who decides types: the file, or TensorRT (10.x)"
    )
    engine.add_argument("--dry-run", action="store_true", help="print plan and trtexec command; needs no GPU")
    engine.add_argument("--assume-version", metavar="V", help="of TensorRT, with --dry-run where none is installed")
    engine.add_argument("--assume-gpu", metavar="'NAME C.C'", help="name and compute capability, e.g. 'Orin 8.7'")
    engine.add_argument(
        "--save-onnx", type=Path, metavar="FILE", help="with --dry-run: keep the patched graph, for trtexec"
    )
    engine.add_argument(
        "--out", type=Path, metavar="FILE", help="the engine (default: in the cache, where it is found)"
    )
    engine.add_argument("--force", action="store_true", help="build, also where the engine is up to date")
    engine.add_argument(
        "--no-verify", action="store_true", help="leave the comparison with the reference to the first use"
    )
    add_config_arguments(verb)


def require_no_engine_options(args) -> None:
    """Raises ConfigError for options of engines where none is built."""
    names = (
        "typing",
        "dry_run",
        "assume_version",
        "assume_gpu",
        "save_onnx",
        "out",
        "force",
        "no_verify",
        "config",
        "set",
    )
    if given := [f"--{name.replace('_', '-')}" for name in names if getattr(args, name)]:
        raise ConfigError(f"{', '.join(given)}: for engines; add --runtime tensorrt")


def configured(args) -> Config:
    """The configuration that the options ask for, with the runtime ``tensorrt``. Raises ConfigError."""
    args.set = [f"runtime.name={args.runtime}", *args.set]  # what follows may set its options
    config, _ = load_config(args)
    if config.runtime.name != args.runtime:
        raise ConfigError(f"--set runtime.name={config.runtime.name}: contradicts --runtime {args.runtime}")
    values = {"runtime__precision": args.precision, "runtime__options__typing": args.typing}
    if config.runtime.device == "cpu":  # the default of other runtimes
        values["runtime__device"] = "cuda"
    return config.with_values(**{name: value for name, value in values.items() if value})


def run(args, names: list[str]) -> int:
    """Build the engine of each model that is not up to date, and compare it. Raises the package's errors."""
    config = configured(args)
    if len(names) > 1 and (args.out or args.save_onnx):
        raise ConfigError(f"--out and --save-onnx are for one model, got {len(names)}: name one")
    if args.out and args.out.suffix != ".engine":
        raise ConfigError(f"--out {args.out}: expected a name that ends in .engine")
    if not args.dry_run and (args.assume_version or args.assume_gpu or args.save_onnx):
        raise ConfigError("--assume-version, --assume-gpu and --save-onnx are for --dry-run")
    if args.dry_run:
        _require_libraries()
        return model_build_plan.dry_run(args, names, config)
    failed = 0
    for name in names:
        try:
            failed += _build(args, name, config)
        except (ModelError, ConfigError) as error:  # the others may still be built
            if len(names) == 1:
                raise
            print(f"error: {name}: {error}", file=sys.stderr)
            failed += 1
    return int(failed > 0)


def _require_libraries() -> None:
    """Raises PluginError where what builds engines is not installed."""
    try:
        from ..engines import make  # noqa: F401
    except ImportError as error:
        raise PluginError(
            f"building engines needs onnx and onnx-ir ({error}): pip install 'vslam_features[models]'. An engine that "
            "another machine built does not serve here"
        ) from error


def _build(args, name: str, config: Config) -> int:
    """Build where it has to be, and compare; 1 where the engine does not compute what its reference does."""
    from ..artifacts.cache import locked
    from ..artifacts.engine_source import order_engine
    from ..artifacts.engine_store import engine_state
    from ..runtimes import cuda, trt_library
    from ..runtimes.trt import device_index
    from .model_build_progress import BuildProgress

    library, device = trt_library.load(), cuda.load()
    gpu = device.device(device_index(config.runtime.device))
    options = config.runtime.options
    order = order_engine(name, config.runtime.precision, options, library.capabilities, gpu)
    target = args.out or order.path
    if target.is_dir():
        raise ConfigError(f"{target}: is a folder, where the engine of {name} is to be written; name a file")

    def reasons() -> str:
        told = "; ".join(engine_state(target, order.wish, order.source.card).reasons)
        return told or ("--force" if args.force else _unloadable(target, library, device, gpu))

    seen, why = _stamp(target), reasons()
    if why:  # else no lock is needed, which a cache that may not be written to does not give
        _require_libraries()
        from ..engines.make import Machine, make

        with locked(target, lambda: _tell(f"{name}: waiting for another process that builds {target}")):
            if _stamp(target) != seen:  # that process has built it
                why = reasons()
            if why:
                _tell(f"{name}: building the engine of {order.source.path} for {gpu.name}: {why}")
                with BuildProgress() as steps:
                    make(order, target, Machine(library, device, gpu), str(options["builder"]), _tell, steps)
    if not why:
        print(f"{name}: {target} is up to date")
        if (passed := _recorded(target, gpu)) is not None:
            return int(not passed)
    if args.no_verify:
        print(f"{name}: {target}; it is compared with its reference at its first use")
        return 0
    return _verify(name, target, config)


def _unloadable(target: Path, library, device, gpu) -> str:
    """Why TensorRT does not take an engine whose header fits; else whoever is told to build it again would be stuck."""
    try:
        library.deserialise(device, gpu.index, engine_file.read_engine(target)[1])
    except ModelFileError as error:
        return str(error)
    return ""


def _stamp(path: Path) -> tuple[int, int] | None:
    """Which file lies there; None: none."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns


def _recorded(target: Path, gpu) -> bool | None:
    """Whether an engine passed its comparison on this GPU; None: there was none, as where a build was interrupted."""
    from ..artifacts.card import read_card
    from ..artifacts.records import card_id, gate_id, records_of
    from ..artifacts.store import content_sha256

    card = read_card(target)
    kept = [r for r in records_of(content_sha256(target)) if r.device == f"cuda:{gpu.index} {gpu.name}"]
    valid = [r for r in kept if (r.gate, r.card) == (gate_id(card), card_id(card))] or [r for r in kept if r.objects]
    failed = next((r for r in valid if not r.passed), None)
    if failed is not None:
        reasons = "; ".join(failed.reasons[:3])
        _tell(f"error: {target} failed its comparison: {reasons}; see 'vslam-features models verify {target}'")
    return failed is None if valid else None


def _verify(name: str, target: Path, config: Config) -> int:
    """The gate. An engine that fails stays, with a record that keeps it from being run."""
    from ..artifacts.gate_table import table
    from . import models_verify

    try:
        report = models_verify.verify(str(target), config)
    except ParityError as error:
        print(f"error: {name}: {error}", file=sys.stderr)
        return 1
    if report.unfinished:
        _tell(f"error: {name}: {report.reasons[-1]}; the engine stays, and is compared at its first use")
        return 1
    outcome = "equals" if report.passed else "differs from"
    print(f"{name}: the engine {outcome} its reference on {len(report.rows)} pairs\n{table(report)}")
    if not report.passed:
        _tell(
            f"error: {name}: {target} failed its comparison and is refused from now on (its record says so); choose "
            "another precision, or runtime.options.typing"
        )
    return 0 if report.passed else 1


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
