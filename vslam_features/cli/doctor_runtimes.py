"""What ``doctor`` says of what runs the learned models: libraries, GPU, and what a session really got."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec

from ..config import Config, RuntimeConfig
from ..runtimes import cuda, trt_library
from .check import FAIL, OK, WARN, Check
from .doctor_child import Child, ChildError

# Distributions that install the same Python package, each over the other.
_ONNXRUNTIMES = {"onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino", "onnxruntime-directml"}
_LIMIT_S = 60.0  # a session of TensorRT's provider is built first


def on_gpu(runtime: RuntimeConfig) -> bool:
    """Whether the configuration asks for an NVIDIA GPU."""
    return runtime.name == "tensorrt" or runtime.device.startswith(("cuda", "tensorrt"))


def start_session(runtime: str, config: Config) -> Child | None:
    """A child that opens a session of a runtime, on the configured device where it is the configured runtime.

    None where its library is not installed.
    """
    if find_spec(runtime) is None:
        return None
    device = config.runtime.device if config.runtime.name == runtime else "cpu"
    return Child("vslam_features.cli.doctor_session:main", {"runtime": runtime, "device": device})


def start_gpu(config: Config, models: list[str]) -> Child:
    """A child that looks for GPU, CUDA, TensorRT, and the engines of the models."""
    return Child("vslam_features.cli.doctor_gpu_probe:main", {"values": config.flat(), "models": models})


def check_onnxruntime(config: Config, session: Child | None, gpu: Child) -> Iterator[Check]:
    """One distribution of it, its version, and what a session got."""
    names = {(d.metadata["Name"] or "").lower().replace("_", "-") for d in metadata.distributions()}
    installed = sorted(names & _ONNXRUNTIMES)
    if len(installed) > 1:
        wanted = "cuda" if "onnxruntime-gpu" in installed else "cpu"
        fix = f"pip uninstall -y {' '.join(installed)} && pip install 'vslam_features[{wanted}]'"
        yield Check(FAIL, "onnxruntime", f"{' and '.join(installed)} overwrite each other", fix)
    elif session is None:
        chosen = config.runtime.name == "onnxruntime" and config.runtime.device != "cpu"
        fix = "pip install 'vslam_features[cpu]', or [cuda] with an NVIDIA GPU"
        text = "not installed: learned models cannot run, sift + nearest + vlad do"
        if chosen:
            text = f"not installed, but runtime.device is {config.runtime.device}: the front-end refuses to start"
        yield Check(FAIL if chosen else WARN, "onnxruntime", text, fix)
    else:
        origin = ", ".join(installed) or "the system"
        yield from _judged("onnxruntime", origin, config, session, gpu)


def check_openvino(config: Config, session: Child | None, gpu: Child) -> Iterator[Check]:
    """Its version and devices, and what a session got; nothing where it is neither installed nor asked for."""
    if session is not None:
        yield from _judged("openvino", "", config, session, gpu)
    elif config.runtime.name == "openvino":
        text = "not installed, but runtime.name is openvino: the front-end refuses to start"
        yield Check(
            FAIL, "openvino", text, "pip install 'vslam_features[openvino]', or set runtime.name to onnxruntime"
        )


def _judged(name: str, origin: str, config: Config, session: Child, gpu: Child) -> Iterator[Check]:
    try:
        facts = session.result(_LIMIT_S)
    except ChildError as error:
        facts = {"error": str(error)}
    if problem := facts.get("error"):
        yield Check(FAIL, name, f"is installed, but cannot be used: {problem}", f"pip install --force-reinstall {name}")
        return
    configured = config.runtime.name == name
    device = config.runtime.device if configured else "cpu"
    offers = ", ".join(o.removesuffix("ExecutionProvider") for o in facts["offers"])
    text = f"{facts['version']}{f' from {origin}' if origin else ''} (offers {offers})"
    # Running on the CPU instead is what the configuration allows, where it is not strict.
    state = FAIL if config.runtime.strict else WARN
    if problem := facts.get("session_error"):
        fix = f"set runtime.device to cpu, or reinstall {name}"
        yield Check(FAIL, name, f"{text}: no session on {device}: {problem}", fix)
    elif facts["note"]:
        fix = _next_step(name, device, facts, gpu)
        yield Check(state, name, f"{text}: a session got {facts['provider']}; {facts['note']}", fix)
    else:
        yield Check(OK, name, f"{text}; a session got {facts['provider']} on {facts['on']}")


def _next_step(name: str, device: str, facts: dict, gpu: Child) -> str:
    """Told apart: the library was built without it; there is no driver; the driver is well, something else is not."""
    if name != "onnxruntime" or not device.startswith(("cuda", "tensorrt")):
        return f"install what {name} needs for '{device}', or set runtime.device to cpu"
    wanted = {"cuda": "CUDAExecutionProvider", "tensorrt": "TensorrtExecutionProvider"}[device.partition(":")[0]]
    if wanted not in facts["offers"]:
        there = "pip uninstall -y onnxruntime && pip install 'vslam_features[cuda]'"
        return f"{there}; on a Jetson NVIDIA's own build of it, or the runtime tensorrt"
    try:
        driver = gpu.result()["driver_error"]
    except ChildError as error:
        driver = str(error)
    if driver:
        return (
            f"the library has it, the machine has no working GPU ({driver}): see the line gpu, or set the device to cpu"
        )
    return "library and driver are there: CUDA or cuDNN are missing or of other versions than this onnxruntime needs"


def check_gpu(config: Config, probe: Child) -> Iterator[Check]:
    """GPU, compute capability and driver; that there is none is a fault only where one is asked for."""
    needed = on_gpu(config.runtime)
    fix = "install NVIDIA's driver (JetPack has it); in a container: docker run --gpus all, or --runtime nvidia"
    try:
        facts = probe.result(_LIMIT_S)
    except ChildError as error:
        state = FAIL if needed else WARN
        yield Check(state, "gpu", str(error), "'nvidia-smi' shows whether the driver works; restart the machine")
        return
    if problem := facts.get("device_error"):
        yield Check(FAIL, "gpu", problem, "correct runtime.device")
    elif gpu := facts.get("gpu"):
        text = f"{gpu['name']}, compute capability {gpu['capability']}, {gpu['memory_mb'] / 1024:.1f} GB"
        bindings = f", cuda-python {facts['cuda_python']}" if facts["cuda_python"] else ""
        text += f"; driver for CUDA {gpu['driver']}, CUDA runtime {gpu['runtime']}{bindings}"
        if _newer(gpu["runtime"], gpu["driver"]):
            fix = f"update the driver, or install cuda-python of {gpu['driver']}"
            yield Check(WARN, "gpu", f"{text}: the runtime is newer than the driver", fix)
        else:
            yield Check(OK, "gpu", text)
    elif not facts["driver_error"]:
        problem = facts["gpu_error"].removesuffix(f"; {cuda.INSTALL}")
        text = f"the driver finds a GPU, Python does not reach it: {problem}"
        only_tensorrt = config.runtime.name == "tensorrt"  # ONNX Runtime brings its own way to CUDA
        fix = cuda.INSTALL if only_tensorrt else ""
        yield Check(FAIL if only_tensorrt else OK, "gpu", text, fix)
    elif needed:
        module = f"; in the kernel: {facts['kernel']}" if facts["kernel"] else ""
        yield Check(FAIL, "gpu", f"runtime {_wish(config)} needs one: {facts['driver_error']}{module}", fix)
    else:
        yield Check(OK, "gpu", f"none in use, and none is asked for ({facts['driver_error']})")


def check_tensorrt(config: Config, probe: Child) -> Iterator[Check]:
    """The library; nothing where it is neither there nor asked for."""
    try:
        facts = probe.result(_LIMIT_S)
    except ChildError:
        return  # the line gpu has said so
    needed = config.runtime.name == "tensorrt"
    if able := facts.get("tensorrt"):
        typed = "weakly and strongly typed engines" if able["weakly_typed"] else "strongly typed engines only"
        built = typed if able["builds"] else "loads engines, but cannot build any"
        text = f"{able['version']} ({built}{', BF16' if able['bf16'] else ''})"
        if needed and not able["builds"]:
            yield Check(WARN, "tensorrt", text, f"install the whole library: {trt_library.INSTALL}")
        else:
            yield Check(OK, "tensorrt", text)
    elif needed:
        text = facts["tensorrt_error"].removesuffix(f"; {trt_library.INSTALL}")
        yield Check(FAIL, "tensorrt", text, trt_library.INSTALL)


def versions(sessions: dict[str, Child | None], gpu: Child) -> dict[str, str]:
    """Runtime -> version of its library, of those that answered."""
    found = {}
    for name, child in {**sessions, "tensorrt": gpu}.items():
        try:
            facts = child.result(_LIMIT_S) if child is not None else {}
        except ChildError:
            continue
        found[name] = (facts.get("tensorrt") or facts).get("version", "")
    return {name: version for name, version in found.items() if version}


def _wish(config: Config) -> str:
    return f"{config.runtime.name} on {config.runtime.device}"


def _newer(a: str, b: str) -> bool:
    """Of another major version, within which CUDA is compatible with older drivers."""
    return int(a.partition(".")[0]) > int(b.partition(".")[0])
