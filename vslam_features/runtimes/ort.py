"""ONNX Runtime: CPU, CUDA, TensorRT, CoreML and OpenVINO by its execution providers."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import ModelFileError, RuntimeMissingError
from ..options import option
from .base import Active, LoadRequest, Runtime, Session, TensorSpec, backend_failure, reason
from .hardware import cpu_name, gpu_name, usable_cpus
from .provider_cache import cache_settings
from .provider_shapes import fixed_axes, given_shapes
from .providers import BY_DEVICE, CPU, other_settings, precision_of, provider_chain

logger = logging.getLogger(__name__)

_DTYPES = {
    "tensor(float)": np.float32,
    "tensor(double)": np.float64,
    "tensor(float16)": np.float16,
    "tensor(bool)": np.bool_,
    **{f"tensor({kind})": np.dtype(kind) for kind in "int8 int16 int32 int64 uint8 uint16 uint32 uint64".split()},
}


class OnnxRuntime(Runtime):
    """Runs ``.onnx`` files.

    Devices: ``cpu``, ``cuda``, ``tensorrt`` (with CUDA for what TensorRT cannot take), ``coreml``, ``openvino``; each
    leaves operators that it lacks to the CPU. ``cuda:1`` and ``tensorrt:1`` choose a GPU. Whether a session runs on
    what was asked for is judged by the session's own providers: the list of available ones tells what the library was
    built with, not what works on this machine.
    """

    @dataclass(frozen=True)
    class Options:
        """Parameters of ONNX Runtime."""

        spin: bool = option(
            False,
            "Threads wait for the next call by spinning: 1.2 to 3 times the CPU time where calls have pauses between "
            "them, no faster on cores that others use as well.",
        )
        cpu_arena: bool = option(
            True, "The CPU keeps the memory of the largest run for the next; off gives it back and is ~5 % slower."
        )
        cache_dir: str = option(
            "",
            "Folder of the engines and timings of TensorRT's provider; empty: 'engines' in the cache of models; "
            "'none': build at every load.",
        )
        gpu_mem_limit_mb: int = option(0, "Most GPU memory of CUDA's arena, MiB; 0: no limit.", low=0, high=1_000_000)
        conv_search: str = option(
            "heuristic",
            "How CUDA finds the algorithm of a convolution: exhaustive, ONNX Runtime's default, tries all again for "
            "every new shape of an image.",
            choices=("heuristic", "exhaustive", "default"),
        )
        tf32: bool = option(
            False,
            "CUDA multiplies float32 matrices in TF32, with 10 bits of mantissa; TensorRT's provider always does, but "
            "where the environment has NVIDIA_TF32_OVERRIDE=0.",
        )
        trt_fp16: bool = option(
            False,
            "TensorRT may compute in float16. Leave it off for fp16 files, of which it then keeps every type.",
        )
        trt_bf16: bool = option(False, "TensorRT may compute in bfloat16; ONNX Runtime 1.23 and GPUs from Ampere on.")
        trt_optimisation_level: int = option(
            3, "How long TensorRT searches for fast kernels when it builds.", low=0, high=5
        )
        trt_workspace_mb: int = option(
            0, "TensorRT's workspace, MiB; 0: all of the GPU's memory.", low=0, high=1_000_000
        )
        trt_min_shapes: str = option(
            "",
            "TensorRT's smallest input shapes by the file's names, e.g. 'a:1x16x64,b:1x16x64'; empty, and the next "
            "two: by the model's card.",
        )
        trt_opt_shapes: str = option("", "The input shapes that TensorRT optimises for.")
        trt_max_shapes: str = option("", "TensorRT's largest input shapes.")

    def _load(self, path: Path, request: LoadRequest) -> Session:
        ort = library()
        chain = provider_chain(request.device, self.options, ort.__version__)
        wanted, session, problem = chain[0][0], None, ""
        built = wanted in ort.get_available_providers()
        if not built:
            problem = "this build of the library has not got it"
        else:
            if wanted in (BY_DEVICE["cuda"], BY_DEVICE["tensorrt"]):
                _preload(ort)
            if wanted == BY_DEVICE["tensorrt"] and self.options.cache_dir not in ("", "none"):
                chain[0][1].update(cache_settings(self.options.cache_dir, path, chain[0][1], ort.__version__))
            try:
                session = self._session(ort, path, request, chain)
            except Exception as error:  # the library's own exception types have no common root
                if wanted == CPU:
                    raise ModelFileError(f"onnxruntime cannot load {path}: {reason(error)}") from error
                problem = _said(error)
            else:
                if session.get_providers()[0] != wanted:
                    problem = f"the session got {', '.join(session.get_providers())}"
                elif others := other_settings(chain, _told(session)):
                    problem = f"the session got {others}"
        if problem and session is None:
            # Also where it will be refused: if the CPU cannot load the file either, the file is what is wrong.
            session = self._cpu_session(ort, path, request)
        if problem and request.strict:
            raise RuntimeMissingError(
                f"onnxruntime {ort.__version__}: asked for '{request.device}' ({wanted}): {problem}; the library "
                f"offers {', '.join(ort.get_available_providers())}; {_fix(request.device, problem, built)}"
            )
        note = f"asked for '{request.device}' ({wanted}): {problem}" if problem else ""
        provider = session.get_providers()[0]
        device = _device(provider, session)
        name = provider + precision_of(provider, _told(session))
        run_options = ort.RunOptions()
        run_options.log_severity_level = 4  # not on stderr what the exception says
        return OrtSession(session, run_options, Active("onnxruntime", ort.__version__, name, device, note), path)

    def _cpu_session(self, ort, path, request):
        try:
            return self._session(ort, path, request, [(CPU, {})])
        except Exception as error:
            raise ModelFileError(f"onnxruntime cannot load {path}: {reason(error)}") from error

    def _session(self, ort, path, request, chain):
        settings = ort.SessionOptions()
        # A number rather than "all": for all, ONNX Runtime binds its threads to cores, which containers refuse.
        settings.intra_op_num_threads = request.threads or usable_cpus()
        settings.inter_op_num_threads = 1
        settings.add_session_config_entry("session.intra_op.allow_spinning", str(int(self.options.spin)))
        level = ort.GraphOptimizationLevel
        settings.graph_optimization_level = level.ORT_ENABLE_ALL if request.optimise else level.ORT_DISABLE_ALL
        settings.enable_mem_pattern = False  # keeps a plan for every set of input shapes that it has met
        settings.enable_cpu_mem_arena = self.options.cpu_arena
        settings.log_severity_level = 3  # errors
        if chain[0][0] == BY_DEVICE["tensorrt"]:
            for name, length in fixed_axes(path, given_shapes(self.options)).items():
                settings.add_free_dimension_override_by_name(name, length)
        # Without its own fallback, which prints to stdout and tries other providers with their default settings. Before
        # 1.23 a session is made with it all the same; what it got is looked at.
        session = ort.InferenceSession(str(path), settings, providers=chain, enable_fallback=0)
        session.disable_fallback()
        return session


class OrtSession(Session):
    """A model in ONNX Runtime."""

    def __init__(self, session, run_options, active: Active, path: Path):
        self._session, self.active = session, active
        self._run_options = run_options
        self.inputs = {i.name: _spec(i, path, ()) for i in session.get_inputs()}
        self.outputs = {o.name: _spec(o, path, None) for o in session.get_outputs()}

    def _run(self, inputs):
        try:
            values = self._session.run(list(self.outputs), inputs, self._run_options)
        except Exception as error:  # the library's own exception types have no common root
            raise backend_failure(self.active, error) from error
        return {name: np.asarray(value) for name, value in zip(self.outputs, values)}


def library():
    """The module ``onnxruntime``; raises RuntimeMissingError where it cannot be imported.

    From 1.29 on it reports its use to its maker over the network, from a thread and a database of its own, unless it is
    told not to. A robot talks to nobody without being asked: it is told so, unless the user set the variable.
    """
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    try:
        import onnxruntime
    except ImportError as error:
        raise RuntimeMissingError(
            f"onnxruntime cannot be imported ({error}); pip install 'vslam_features[cpu]', or 'vslam_features[cuda]' "
            "for an NVIDIA GPU"
        ) from error
    return onnxruntime


def _preload(ort) -> None:
    """Load CUDA and cuDNN from where pip installs them, which the system's loader does not search."""
    if not hasattr(ort, "preload_dlls"):  # before 1.21
        return
    with contextlib.redirect_stdout(io.StringIO()) as said:  # it prints what it does not find
        ort.preload_dlls()
    if said.getvalue():
        logger.info("onnxruntime.preload_dlls: %s", " ".join(said.getvalue().split()))


def _said(error: Exception) -> str:
    """What ONNX Runtime said, without the place in its source that comes first and would leave no room for it."""
    return re.sub(r"^\S+\.cc:\d+ [^()]*\([^()]*\) ", "", reason(error, 4000))[:400]


def _fix(device: str, problem: str, built: bool) -> str:
    """``built``: the library has the device's provider."""
    if "associated shape profiles" in problem:  # what the library says where TensorRT takes parts of a graph only
        return (
            "TensorRT takes only parts of this graph, and what goes into a part needs shapes, too: add these names to "
            "all of trt_min_shapes, trt_opt_shapes and trt_max_shapes, or set the device to 'cuda'"
        )
    if built and device.startswith(("cuda", "tensorrt")):
        libraries = "CUDA, cuDNN and TensorRT" if device.startswith("tensorrt") else "CUDA and cuDNN"
        return (
            f"install a driver, {libraries} that fit this build ('vslam-features doctor' shows what is there), or set "
            "the device to 'cpu'"
        )
    if device.startswith(("cuda", "tensorrt")):
        return "install 'vslam_features[cuda]' in place of [cpu] and a driver that fits, or set the device to 'cpu'"
    return "install a build of onnxruntime that has it and its driver, or set the device to 'cpu'"


def _told(session) -> dict[str, str]:
    """The settings of the first provider, by the session's word."""
    return session.get_provider_options().get(session.get_providers()[0], {})


def _device(provider: str, session) -> str:
    if provider not in (BY_DEVICE["cuda"], BY_DEVICE["tensorrt"]):
        return f"cpu {cpu_name()}"
    number = _told(session).get("device_id", "0")
    return f"cuda:{number} {gpu_name()}".strip()


def _spec(port, path: Path, without_shape: tuple | None) -> TensorSpec:
    """ONNX Runtime gives [] for scalars and for unknown ranks: ``without_shape`` is what to make of it.

    ONNX demands a shape for every input, so that there it means a scalar.
    """
    if port.type not in _DTYPES:
        raise ModelFileError(f"{path}: tensor {port.name!r} is a {port.type}, which no array holds")
    shape = tuple(s if isinstance(s, int) and s >= 0 else None for s in port.shape) if port.shape else without_shape
    return TensorSpec(np.dtype(_DTYPES[port.type]), shape)
