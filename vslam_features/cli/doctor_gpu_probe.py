"""Child of ``doctor``: the NVIDIA driver, CUDA, TensorRT, and the engines of the configured models."""

from __future__ import annotations

import ctypes
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

from ..config import Config
from ..errors import ConfigError, VslamFeaturesError
from .doctor_child import answer, question

_KERNEL_MODULE = Path("/proc/driver/nvidia/version")


def main() -> int:
    """Question: ``values`` of the configuration, and ``models`` whose engines are asked for."""
    asked = question()
    config = Config.from_flat(asked["values"])
    facts = {"kernel": _kernel_module(), "driver_error": _driver_error(), "cuda_python": _version_of("cuda-python")}
    gpu = library = None
    try:
        from ..runtimes import cuda
        from ..runtimes.trt import device_index

        gpu = cuda.load().device(device_index(config.runtime.device) if config.runtime.name == "tensorrt" else 0)
        facts["gpu"] = asdict(gpu)
    except ConfigError as error:  # no such device
        facts["device_error"] = str(error)
    except VslamFeaturesError as error:
        facts["gpu_error"] = str(error)
    try:
        from ..runtimes import trt_library

        library = trt_library.load()  # constructs nothing: that would end the process where there is no GPU
        facts["tensorrt"] = asdict(library.capabilities)
    except VslamFeaturesError as error:
        facts["tensorrt_error"] = str(error)
    if gpu is not None and library is not None and config.runtime.name == "tensorrt":
        facts["engines"] = {model: _engine(model, config, gpu, library) for model in asked["models"]}
    return answer(facts)


def _kernel_module() -> str:
    """What the driver in the kernel says of itself; empty: there is none, or it is that of a Jetson."""
    try:
        return _KERNEL_MODULE.read_text(errors="replace").splitlines()[0]
    except (OSError, IndexError):
        return ""


def _driver_error() -> str:
    """Why the driver's own library gives no GPU; empty: it gives some. Needs no Python bindings."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return f"no driver: {error}"
    code, count = driver.cuInit(0), ctypes.c_int()
    if code:
        known = {100: "no device", 803: "driver and library are of different versions", 804: "too old for this GPU"}
        return f"the driver cannot start: cuInit returns {code} ({known.get(code, 'see CUresult')})"
    code = driver.cuDeviceGetCount(ctypes.byref(count))
    return "" if not code and count.value else f"the driver finds no GPU (cuDeviceGetCount returns {code})"


def _version_of(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _engine(model: str, config: Config, gpu, library) -> dict:
    """``source``, the file that it comes from, ``path``, ``there`` and ``reasons`` why it will not do; or ``error``."""
    from ..artifacts.engine_kept import kept_engine
    from ..artifacts.engine_source import order_engine
    from ..artifacts.engine_store import engine_state
    from ..artifacts.store import locate
    from ..runtimes.engine_file import SUFFIX, machine_differences, read_header

    r = config.runtime
    try:
        if model.endswith(SUFFIX):
            path = str(locate(model, r.precision))
            reasons = machine_differences(read_header(path).facts, gpu, library.version)
            return {"source": path, "path": path, "there": True, "reasons": reasons}
        if kept := kept_engine(model, r.precision, r.options, library.capabilities, gpu):
            return {"source": str(kept), "path": str(kept), "there": True, "reasons": []}
        order = order_engine(model, r.precision, r.options, library.capabilities, gpu)
        state = engine_state(order.path, order.wish, order.source.card)
    except VslamFeaturesError as error:
        return {"error": str(error)}
    return {
        "source": str(order.source.path),
        "path": str(state.path),
        "there": state.there,
        "reasons": list(state.reasons),
    }
