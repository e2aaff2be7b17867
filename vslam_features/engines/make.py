"""An engine file: prepared, planned, built by TensorRT's Python API or trtexec, and written whole or not at all."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .. import __version__
from ..artifacts.cache import placing, staging, writing
from ..artifacts.engine_source import EngineOrder
from ..artifacts.store import content_sha256
from ..errors import ModelFileError
from ..runtimes import engine_file
from ..runtimes.cuda import Cuda, Gpu
from ..runtimes.trt_library import Capabilities, Library
from . import build, trtexec
from .plan import BuildPlan, make_plan
from .prepare import Prepared, prepare
from .timing_cache import timing_cache_path


@dataclass(frozen=True)
class Machine:
    """TensorRT and the GPU that are built with."""

    library: Library
    cuda: Cuda
    gpu: Gpu


def planned(order: EngineOrder, able: Capabilities, folder: Path) -> tuple[Prepared, BuildPlan]:
    """The prepared graph, written to a folder, and the plan for it. Raises as :func:`~.prepare.prepare`."""
    prepared = prepare(order.source, order.wish, able, folder)
    # What is fixed has no profile: trtexec refuses shapes of a model without a dynamic one (NVIDIA/TensorRT#2043).
    profiles = {name: p for name, p in order.profiles.items() if p.values or p.min != p.max}
    return prepared, make_plan(order.source, order.wish, profiles, prepared.layers, prepared.core_type, able)


def make(
    order: EngineOrder,
    target: Path,
    machine: Machine,
    builder: str,
    tell: Callable[[str], None],
    steps: build.Steps,
) -> engine_file.EngineHeader:
    """Build an engine and place it; an older one is replaced when it is there.

    Args:
        builder: ``api``, ``trtexec``, or ``auto``: the API where the library has a builder.
        tell: called with what is said to people, a line at a time. steps: of TensorRT's phases, see ``build.Steps``.
    Raises:
        ModelFileError, ConfigError, ExportError: the graph or its shapes cannot be built. RuntimeMissingError: what
        builds is not here. BackendError: the build failed. CacheError: the disk is full, or may not be written to.
    """
    start, gpu = time.monotonic(), machine.gpu
    timings = timing_cache_path(gpu.name, gpu.capability, machine.library.version)
    with staging(target.parent) as folder:
        able = machine.library.capabilities
        prepared, plan = planned(order, able, folder)
        for line in (*plan.lines(), *(f"  {note}" for note in prepared.notes)):
            tell(line)
        if by_program := builder == "trtexec" or (builder == "auto" and not able.builds):
            if plan.layers:
                tell("  warning: trtexec does not tell whether it found these layers: the comparison that follows will")
            with writing(timings.parent):
                timings.parent.mkdir(parents=True, exist_ok=True)
            saved = folder / "built.engine"
            words = trtexec.command(plan, prepared.path, saved, timings, gpu.index)
            engine = trtexec.build(words, saved, trtexec.tell)
        else:
            engine = build.build(machine.library, machine.cuda, gpu.index, plan, prepared.path, timings, steps)
        if content_sha256(order.source.path) != order.source.sha256:
            raise ModelFileError(f"{order.source.path}: its content changed while its engine was built: build it again")
        header = _header(order, prepared, plan, gpu, "trtexec" if by_program else "tensorrt")
        with placing(target) as file, writing(target.parent):
            header = engine_file.write(file, header, engine)
    tell(f"{target} ({target.stat().st_size / 1e6:.1f} MB), built in {time.monotonic() - start:.0f} s")
    return header


def _header(
    order: EngineOrder, prepared: Prepared, plan: BuildPlan, gpu: Gpu, program: str
) -> engine_file.EngineHeader:
    wish = order.wish
    facts = engine_file.BuildFacts(
        key=wish.key(), gpu=gpu.name, capability=gpu.capability, driver=gpu.driver_version, cuda=gpu.runtime,
        tensorrt=plan.version, source=str(order.source.path.absolute()), source_sha256=order.source.sha256,
        built_from_sha256=prepared.sha256, precision=wish.precision, typing=wish.typing, has_if=prepared.has_if,
        patches=dict(wish.patches), profiles=dict(wish.profiles), options=dict(wish.options),
        layer_precisions=dict.fromkeys(plan.layers, plan.layer_type),
        made_with={"vslam_features": __version__, program: plan.version},
        time=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    )  # fmt: skip
    return engine_file.EngineHeader(prepared.card.to_dict(), facts)
