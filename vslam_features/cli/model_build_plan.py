"""``models build --dry-run``: what would be built, and the command that would build it, without a GPU."""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..config import Config
from ..errors import ConfigError, RuntimeMissingError


def dry_run(args, names: list[str], config: Config) -> int:
    """Print plans and commands, and build nothing. Raises the package's errors."""
    from ..artifacts.engine_source import order_engine
    from ..artifacts.engine_store import engine_state
    from ..engines import trtexec
    from ..engines.make import planned
    from ..engines.timing_cache import timing_cache_path
    from ..graph import model_file

    able, gpu = _assumed(args, config)
    for name in names:
        order = order_engine(name, config.runtime.precision, config.runtime.options, able, gpu)
        target = args.out or order.path
        state = engine_state(target, order.wish, order.source.card)
        with tempfile.TemporaryDirectory(prefix="vslam-features-engine-") as folder:
            prepared, plan = planned(order, able, Path(folder))
            patched = prepared.path.parent == Path(folder)
            onnx = target.with_name(prepared.path.name) if patched else prepared.path
            if args.save_onnx:
                if not patched:
                    raise ConfigError(
                        f"--save-onnx {args.save_onnx}: {onnx} is built from as it is, nothing is patched"
                    )
                onnx = args.save_onnx
                model_file.add_card(prepared.path, prepared.card)
                _keep(prepared.path, onnx)
        print(f"{order.source.path} for {gpu.name} (compute capability {gpu.capability})")
        print("\n".join([*plan.lines(), *(f"  {note}" for note in prepared.notes)]))
        assumed = args.assume_version or args.assume_gpu  # nobody knows what that machine has
        why = "would be built" if assumed else f"would be built: {'; '.join(state.reasons)}"
        print(f"{target} {'is up to date' if state.fits else why}")
        timings = timing_cache_path(gpu.name, gpu.capability, able.version)
        print(shlex.join(trtexec.command(plan, onnx, target.with_suffix(".plan"), timings, gpu.index)))
        note = f"; {onnx.name} is the patched graph, which --save-onnx FILE keeps" * (patched and not args.save_onnx)
        text = f"nothing was built (--dry-run){note}. What trtexec writes has no header, and is not loaded here"
        print(text, file=sys.stderr)
    return 0


def _assumed(args, config: Config):
    """What the library can do, and the GPU: those of this machine, but for what is assumed."""
    from ..runtimes import cuda, trt_library
    from ..runtimes.trt import device_index

    if args.assume_version:
        numbers = trt_library.version_numbers(args.assume_version)
        if len(numbers) < 2 or numbers < (10, 1):
            raise ConfigError(f"--assume-version {args.assume_version}: expected 10.1 or newer, e.g. 10.3 or 11.4")
        able = trt_library.Capabilities.assumed(args.assume_version)
    else:
        with _or("--assume-version 10.3"):
            able = trt_library.load().capabilities
    if not args.assume_gpu:
        with _or("--assume-gpu 'Orin 8.7'"):
            return able, cuda.load().device(device_index(config.runtime.device))
    name, _, capability = args.assume_gpu.rpartition(" ")
    if not name.strip() or len(trt_library.version_numbers(capability)) != 2:
        raise ConfigError(
            f"--assume-gpu '{args.assume_gpu}': expected its name and compute capability, e.g. 'Orin 8.7'"
        )
    return able, cuda.Gpu(device_index(config.runtime.device), name.strip(), capability, "assumed", "assumed", 0)


@contextmanager
def _or(option: str) -> Iterator[None]:
    """Whoever asks at a desk for a plan has nothing to install."""
    try:
        yield
    except RuntimeMissingError as error:
        raise RuntimeMissingError(f"{error}; or tell what the robot has, as by {option}") from error


def _keep(prepared: Path, target: Path) -> None:
    from ..artifacts.cache import place

    if target.suffix != ".onnx":
        raise ConfigError(f"--save-onnx {target}: expected a name that ends in .onnx")
    if target.exists():
        raise ConfigError(f"--save-onnx {target}: is there already; name another file, or move it away")
    place(target, prepared.read_bytes())
