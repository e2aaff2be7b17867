"""An engine by TensorRT's Python API. Every return value is looked at; what was made ends with the build."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from ..errors import BackendError, ConfigError, ModelFileError
from ..runtimes.base import reason
from ..runtimes.cuda import Cuda
from ..runtimes.trt_library import Library, words
from . import timing_cache
from .plan import BuildPlan

logger = logging.getLogger(__name__)

Steps = Callable[[str, int, int], None]
"""Called with the name of a phase, its steps done, and its steps in all."""

_TYPES = {"bf16": "BF16", "fp32": "FLOAT"}


def build(library: Library, cuda: Cuda, device: int, plan: BuildPlan, onnx: Path, timings: Path, steps: Steps) -> bytes:
    """The serialised engine.

    Args:
        device: number of the GPU. onnx: the prepared file. timings: of earlier builds; renewed. steps: see there.
    Raises:
        ModelFileError: TensorRT cannot parse the file, or its network has not the layers or inputs of the plan.
        ConfigError: a profile is not valid.
        BackendError: the build failed; with the last errors that TensorRT logged.
        RuntimeMissingError: the library has no builder.
    """
    builder = library.builder(cuda, device)
    try:
        return _built(library, builder, plan, onnx, timings, steps)
    except (MemoryError, RuntimeError, TypeError, AttributeError, ValueError) as error:  # of its bindings
        raise BackendError(f"TensorRT {library.version} failed: {type(error).__name__}: {reason(error)}") from error


def _built(library: Library, builder, plan: BuildPlan, onnx: Path, timings: Path, steps: Steps) -> bytes:
    trt = library.module
    network = _made(library, builder.create_network, _bits(trt.NetworkDefinitionCreationFlag, plan.network_flags))
    _parse(library, network, onnx)
    config = _made(library, builder.create_builder_config)
    for flag in plan.flags:
        config.set_flag(getattr(trt.BuilderFlag, flag))
    for flag in plan.cleared:
        config.clear_flag(getattr(trt.BuilderFlag, flag))
    if plan.workspace_mb:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, plan.workspace_mb << 20)
    config.builder_optimization_level = plan.optimisation_level
    if plan.layers:
        _constrain(trt, network, plan, onnx)
    if plan.profiles:
        _add_profile(library, builder, config, network, plan, onnx)
    timing_cache.attach(config, timings)
    monitor = _monitor(trt, steps) if library.capabilities.progress else None
    if monitor is not None:
        config.progress_monitor = monitor
    with library.listening() as said:
        supported = builder.is_network_supported(network, config)
        built = builder.build_serialized_network(network, config) if supported else None
    if isinstance(getattr(monitor, "stopped", None), BaseException):
        raise monitor.stopped
    if built is None:
        raise BackendError(
            f"TensorRT {plan.version} built no engine from {onnx.name}: {words(said)}. Where memory ran out, free "
            "some, or set runtime.options.workspace_mb or smaller runtime.options.shapes"
        )
    timing_cache.keep(config, timings)
    return bytes(built)


def _made(library: Library, call: Callable, *args):
    """What a method of the builder makes. Raises BackendError where that is nothing."""
    with library.listening() as said:
        found = call(*args)
    if found is None:
        raise BackendError(f"TensorRT {library.version}: {call.__name__} gave nothing: {words(said)}")
    return found


def _bits(flags, names) -> int:
    return sum(1 << int(getattr(flags, name)) for name in names)


def _parse(library: Library, network, onnx: Path) -> None:
    parser = library.module.OnnxParser(network, library.logger)
    with library.listening() as said:
        parsed = parser.parse_from_file(str(onnx))
    errors = [parser.get_error(i) for i in range(parser.num_errors)]
    if not parsed:
        told = "; ".join(f"{e.node_operator()} '{e.node_name()}': {e.desc()}" for e in errors[:4]) or words(said)
        more = f"; and {len(errors) - 4} more" if len(errors) > 4 else ""
        raise ModelFileError(f"TensorRT {library.version} cannot parse {onnx.name}: {told}{more}")


def _constrain(trt, network, plan: BuildPlan, onnx: Path) -> None:
    """Set precision and output types of the plan's layers, each of which must be there."""
    dtype = getattr(trt.DataType, _TYPES[plan.layer_type])
    wanted = set(plan.layers)
    for layer in (network.get_layer(i) for i in range(network.num_layers)):
        if layer.name in wanted:
            wanted.discard(layer.name)
            layer.precision = dtype
            for i in range(layer.num_outputs):
                layer.set_output_type(i, dtype)
    if wanted:
        missing = sorted(wanted)
        raise ModelFileError(
            f"{onnx.name}: TensorRT {plan.version} has no layer for {len(missing)} of {len(plan.layers)} nodes of "
            f"attention ('{missing[0]}', ...): they would be left to half precision, in which they may overflow; build "
            "strongly typed from the fp16 file (runtime.options.typing strong)"
        )


def _add_profile(library: Library, builder, config, network, plan: BuildPlan, onnx: Path) -> None:
    inputs = {tensor.name: tensor for tensor in (network.get_input(i) for i in range(network.num_inputs))}
    profile = _made(library, builder.create_optimization_profile)
    if missing := sorted(set(plan.profiles) - set(inputs)):
        raise ModelFileError(f"{onnx.name}: TensorRT sees no input '{missing[0]}', it has {', '.join(sorted(inputs))}")
    shapes = "; ".join(f"{name}: {p}" for name, p in plan.profiles.items())
    refused = f"TensorRT {plan.version} does not take these shapes: {shapes}: set runtime.options.shapes"
    try:
        for name, p in plan.profiles.items():
            if not p.values:
                profile.set_shape(name, p.min, p.opt, p.max)
            elif inputs[name].is_shape_tensor:  # else it is data of fixed shape
                profile.set_shape_input(name, p.min, p.opt, p.max)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"{refused} ({reason(error)})") from error
    if not profile or config.add_optimization_profile(profile) < 0:
        raise ConfigError(refused)


def _monitor(trt, steps: Steps):
    """Tells ``steps`` of the phases. TensorRT calls it from its threads, and stops where it answers False."""

    class Monitor(trt.IProgressMonitor):
        def __init__(self):
            trt.IProgressMonitor.__init__(self)
            self.sizes: dict[str, int] = {}
            self.stopped: BaseException | None = None

        def phase_start(self, phase_name, parent_phase, num_steps):
            self.sizes[phase_name] = num_steps

        def step_complete(self, phase_name, step):
            try:
                steps(phase_name, step + 1, self.sizes.get(phase_name, 0))
            except BaseException as error:  # passed on by the build: no exception gets through its threads
                self.stopped = error
                return False
            return True

        def phase_finish(self, phase_name):
            self.sizes.pop(phase_name, None)

    return Monitor()
