"""Builder and IBuilderConfig."""

from __future__ import annotations

import dataclasses

from fake_gpu.device import current, gpus
from fake_gpu.faults import FAULTS, misuse

from . import versions
from .dims import integer
from .enums import (
    BuilderFlag,
    HardwareCompatibilityLevel,
    MemoryPoolType,
    ProfilingVerbosity,
)
from .host_memory import host_memory
from .logger import error, inform, register
from .network import INetworkDefinition
from .objects import alive
from .plan import pack
from .profile import IOptimizationProfile
from .timing import ITimingCache, Stopped, report, timing_cache

_NO_FLAGS_WHEN_STRONG = "FP16 BF16 INT8 FP8 INT4 FP4 OBEY_PRECISION_CONSTRAINTS PREFER_PRECISION_CONSTRAINTS".split()
# What these change is not in the fake: an engine with one would not be what the real one is.
_UNKNOWN = "REFIT SAFETY_SCOPE VERSION_COMPATIBLE EXCLUDE_LEAN_RUNTIME WEIGHTLESS STRIP_PLAN REFIT_IDENTICAL".split()
_UNKNOWN += ["WEIGHT_STREAMING", "REFIT_INDIVIDUAL", "GPU_FALLBACK"]
_FLAG_OF_PRECISION = {"HALF": "FP16", "BF16": "BF16", "INT8": "INT8"}


class IBuilderConfig:
    """How to build."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.flags = 1 << int(BuilderFlag.TF32)
        self.builder_optimization_level = 3
        self.avg_timing_iterations, self.max_aux_streams, self.profile_stream = 1, -1, 0
        self.profiling_verbosity = ProfilingVerbosity.LAYER_NAMES_ONLY
        self.hardware_compatibility_level = HardwareCompatibilityLevel.NONE
        self.progress_monitor = None
        self._pools = {MemoryPoolType.WORKSPACE: gpus()[current()].memory_mb << 20}
        self._profiles: list[IOptimizationProfile] = []
        self._timing: ITimingCache | None = None
        self._previews: set = set()

    num_optimization_profiles = property(lambda self: len(self._profiles))

    def set_flag(self, flag):
        self.flags |= 1 << _flag(flag)

    def clear_flag(self, flag):
        self.flags &= ~(1 << _flag(flag))

    def get_flag(self, flag):
        return bool(self.flags >> _flag(flag) & 1)

    def set_preview_feature(self, feature, enable):
        (self._previews.add if enable else self._previews.discard)(feature)

    def get_preview_feature(self, feature):
        return feature in self._previews

    def set_memory_pool_limit(self, pool, pool_size):
        self._pools[pool] = integer(pool_size)

    def get_memory_pool_limit(self, pool):
        return self._pools.get(pool, 0)

    def add_optimization_profile(self, profile):
        """Its number, -1 where it is not valid."""
        if not isinstance(profile, IOptimizationProfile):
            raise TypeError("add_optimization_profile(): incompatible function arguments")
        if FAULTS.hit("add_optimization_profile") or not profile:
            error("addOptimizationProfile: Error Code 3: API Usage Error (the profile is not valid)")
            return -1
        self._profiles.append(profile)
        return len(self._profiles) - 1

    def create_timing_cache(self, serialized_timing_cache):
        return timing_cache(bytes(memoryview(serialized_timing_cache)))

    def set_timing_cache(self, cache, ignore_mismatch):
        if not isinstance(cache, ITimingCache):
            raise TypeError("set_timing_cache(): incompatible function arguments")
        if cache._gpu != gpus()[current()].name and not ignore_mismatch:
            error(f"setTimingCache: the timing cache was made on {cache._gpu}, not on this device")
            return False
        self._timing = cache
        return True

    def get_timing_cache(self):
        return self._timing


class Builder:
    """Builds engines. Where there is no GPU the real one crashes, so this one does."""

    def __init__(self, logger):
        if not gpus():
            raise misuse("Builder without a GPU: the real one crashes (segmentation fault)")
        register(self, logger)
        self.max_threads, self._logger = 1, logger
        alive("builders", self)

    logger = property(lambda self: self._logger)
    if not versions.ELEVEN:
        platform_has_fast_fp16 = property(lambda self: True)
        platform_has_fast_int8 = property(lambda self: True)
        platform_has_tf32 = property(lambda self: True)

    def create_network(self, flags=0):
        if FAULTS.hit("create_network"):
            return _null("createNetwork")
        return INetworkDefinition(self, integer(flags))

    def create_builder_config(self):
        return _null("createBuilderConfig") if FAULTS.hit("create_builder_config") else IBuilderConfig()

    def create_optimization_profile(self):
        if FAULTS.hit("create_optimization_profile"):
            return _null("createOptimizationProfile")
        return IOptimizationProfile()

    def is_network_supported(self, network, config):
        wrong = _wrong(network, config)
        for text in wrong:
            error(text)
        return not wrong

    def build_serialized_network(self, network, config):
        """The engine's bytes, or None, with the reason in the log."""
        if not isinstance(network, INetworkDefinition) or not isinstance(config, IBuilderConfig):
            raise TypeError("build_serialized_network(): incompatible function arguments")
        fault = FAULTS.hit("build")
        wrong = ["Error Code 10: Internal Error (Could not find any implementation for node)"] if fault else []
        wrong += _wrong(network, config)
        try:
            if not wrong:
                names = [layer.name for layer in network]
                report(config.progress_monitor, {"Tactic selection": len(names), "Weights": 1})
        except Stopped:
            wrong = ["Build was cancelled by the progress monitor"]
        if wrong:
            for text in wrong:
                error(f"IBuilder::buildSerializedNetwork: {text}")
            return None
        if config._timing is not None:
            config._timing._keys += [name for name in names if name not in config._timing._keys]
        inform("Engine generation completed.")
        return host_memory(pack(_facts(network, config), network._graph))


def _facts(network: INetworkDefinition, config: IBuilderConfig) -> dict:
    gpu = gpus()[current()]
    found = network._facts
    precisions = {}
    if not versions.ELEVEN and _obeys(config):
        precisions = {each.name: each.precision.name for each in network if each.precision_is_set}
    return {
        "version": versions.VERSION,
        "gpu": gpu.name,
        "capability": list(gpu.capability),
        "network": network.name,
        "flags": [name for name, flag in BuilderFlag.__members__.items() if config.get_flag(flag)],
        "strongly_typed": network._strong(),
        "layer_precisions": precisions,
        "layers": [each.name for each in network],
        "profiles": [{"shapes": each._shapes, "values": each._values} for each in config._profiles or [_empty()]],
        "inputs": [dataclasses.asdict(each) for each in found.inputs],
        "outputs": [dataclasses.asdict(each) for each in found.outputs],
        "has_if": found.has_if,
        "ks": found.ks,
        "optimization_level": config.builder_optimization_level,
        "workspace": config.get_memory_pool_limit(MemoryPoolType.WORKSPACE),
    }


def _obeys(config: IBuilderConfig) -> bool:
    """Without one of these flags precisions of layers are no more than words."""
    names = ("OBEY_PRECISION_CONSTRAINTS", "PREFER_PRECISION_CONSTRAINTS")
    return any(config.get_flag(getattr(BuilderFlag, name)) for name in names)


def _empty() -> IOptimizationProfile:
    return IOptimizationProfile()


def _wrong(network: INetworkDefinition, config: IBuilderConfig) -> list[str]:
    """Why there can be no engine."""
    if not network.num_layers or not network.num_outputs:
        return ["Error Code 4: Internal Error (Network must have at least one output)"]
    flags = {name for name, flag in BuilderFlag.__members__.items() if config.get_flag(flag)}
    if flags & set(_UNKNOWN) or config.hardware_compatibility_level != HardwareCompatibilityLevel.NONE:
        raise misuse(f"the fake does not know what an engine with {sorted(flags)} is like")
    wrong = []
    if gpus()[current()].capability < (8, 0) and ("BF16" in flags or "BF16" in network._facts.types.values()):
        wrong.append("BF16 is not supported on this platform: it takes compute capability 8.0")
    needed = any(-1 in each.shape or each.is_shape for each in network._facts.inputs)
    if needed and not config._profiles:
        wrong.append("Network has dynamic or shape inputs, but no optimization profile has been defined.")
    for profile in config._profiles:
        wrong += profile._misses(network._facts.inputs)
    if versions.ELEVEN:
        return [f"Error Code 4: API Usage Error ({text})" for text in wrong]
    if network._strong():
        wrong += [
            f"{name} is not allowed in a strongly typed network" for name in _NO_FLAGS_WHEN_STRONG if name in flags
        ]
    for layer in network:
        flag = _FLAG_OF_PRECISION.get(layer.precision.name)
        if layer.precision_is_set and flag and flag not in flags:
            wrong.append(f"{layer.name} has precision {layer.precision.name}, and the flag {flag} is not set")
    return [f"Error Code 4: API Usage Error ({text})" for text in wrong]


def _flag(flag) -> int:
    if not isinstance(flag, BuilderFlag):
        raise TypeError(f"incompatible function arguments: expected BuilderFlag, got {type(flag).__name__}")
    return int(flag)


def _null(call: str) -> None:
    error(f"{call}: Error Code 2: OutOfMemory (ordered fault)")
