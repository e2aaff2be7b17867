"""OpenVINO: CPUs, and Intel's GPUs and NPUs."""

from __future__ import annotations

import os
import re
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import ConfigError, ModelFileError, RuntimeMissingError
from ..options import option
from .base import Active, LoadRequest, Runtime, Session, TensorSpec, backend_failure, reason
from .hardware import cpu_name, usable_cpus

_DEVICES = ("cpu", "gpu", "npu", "auto")
_DTYPES = {
    "f16": np.dtype(np.float16),
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
    "boolean": np.dtype(np.bool_),
    **{f"{kind[0]}{bits}": np.dtype(f"{kind}{bits}") for kind in ("int", "uint") for bits in (8, 16, 32, 64)},
}
_SINK = re.compile(r"/sink_port_\d+$")
_cores: list = []  # none or the one of shared_core
_making_core = threading.Lock()


class OpenVino(Runtime):
    """Runs ``.onnx`` files and OpenVINO's ``.xml`` with its ``.bin``.

    Devices: ``cpu``, ``gpu``, ``npu``, also with a number (``gpu:1``), and ``auto``: the GPU where there is one, else
    the CPU. (OpenVINO's own AUTO starts on the CPU and moves later, so that no record of a device would hold.)

    ``LoadRequest.optimise`` off asks for accuracy mode; OpenVINO always rewrites graphs, and the note says so.
    """

    @dataclass(frozen=True)
    class Options:
        """Parameters of OpenVINO."""

        precision_hint: str = option(
            "f32",
            "Type to compute in. 'auto' leaves it to OpenVINO, which takes bf16 on CPUs that have it.",
            choices=("f32", "f16", "bf16", "auto"),
        )
        shape_cache: int = option(
            128, "Compiled operations kept for input shapes that were met; memory grows with it.", low=0, high=5000
        )

    def _load(self, path: Path, request: LoadRequest) -> Session:
        ov = _library(self.options.shape_cache)
        core = shared_core()
        there = core.available_devices
        wanted = _openvino_name(request.device, there)
        model = _read(core, path)
        compiled, problem = None, ""
        if not _has(there, wanted):
            problem = f"this machine has {', '.join(there)}"
        else:
            try:
                compiled = core.compile_model(model, wanted, self._settings(wanted, request))
            except Exception as error:  # the library raises RuntimeError and others
                if wanted == "CPU":
                    raise ModelFileError(f"openvino cannot compile {path}: {_reason(error)}") from error
                problem = _reason(error)
        if problem and request.strict:
            raise RuntimeMissingError(
                f"openvino {ov.__version__}: asked for '{request.device}' ({wanted}): {problem}; "
                "install the device's driver, or set the device to 'cpu'"
            )
        if compiled is None:
            try:
                compiled = core.compile_model(model, "CPU", self._settings("CPU", request))
            except Exception as error:
                raise ModelFileError(f"openvino cannot compile {path}: {_reason(error)}") from error
        notes = [f"asked for '{request.device}' ({wanted}): {problem}"] if problem else []
        return OpenVinoSession(compiled, self._active(core, compiled, ov.__version__, request, notes), path)

    def _settings(self, device: str, request: LoadRequest) -> dict:
        settings = {"PERFORMANCE_HINT": "LATENCY", "CACHE_DIR": ""}  # no stale compiled model
        if self.options.precision_hint != "auto":
            settings["INFERENCE_PRECISION_HINT"] = self.options.precision_hint
        if not request.optimise:
            settings["EXECUTION_MODE_HINT"] = "ACCURACY"
        if device == "CPU":
            settings |= {
                "NUM_STREAMS": 1,
                "INFERENCE_NUM_THREADS": request.threads or usable_cpus(),
                "ENABLE_CPU_PINNING": False,  # cores are shared with the rest of the robot
                "CPU_RUNTIME_CACHE_CAPACITY": self.options.shape_cache,
            }
        return settings

    def _active(self, core, compiled, version, request, notes) -> Active:
        device = str(compiled.get_property("EXECUTION_DEVICES")[0]).strip("()")
        precision = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
        if self.options.precision_hint not in ("auto", precision):
            notes.append(f"asked for precision {self.options.precision_hint}, computes in {precision}")
        if not request.optimise:
            notes.append("openvino cannot switch graph optimisation off")
        name = cpu_name() if device == "CPU" else core.get_property(device, "FULL_DEVICE_NAME")
        hardware = f"{device.lower().replace('.', ':')} {name}"
        return Active("openvino", version.split("-")[0], f"{device} {precision}", hardware, "; ".join(notes))


class OpenVinoSession(Session):
    """A model in OpenVINO."""

    def __init__(self, compiled, active: Active, path: Path):
        self.active = active
        self.inputs = _specs(compiled.inputs, path)
        self.outputs = _specs(compiled.outputs, path)
        self._request = compiled.create_infer_request()

    def _run(self, inputs):
        try:
            # Not infer(), which with one thread loses exceptions and returns what was there (seen in 2026.4).
            self._request.start_async(inputs, share_inputs=False)
            self._request.wait()
            return {n: np.array(self._request.get_output_tensor(i).data) for i, n in enumerate(self.outputs)}
        except Exception as error:  # the library raises RuntimeError and others
            raise backend_failure(self.active, error) from error


def _library(shape_cache: int):
    # OpenVINO's CPU plug-in has, beneath its own cache of operations by shape, that of oneDNN, for which this variable
    # is the only access. It is read once in a process; what the user has set stays.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(shape_cache))
    try:
        import openvino
    except ImportError as error:
        raise RuntimeMissingError(
            f"openvino cannot be imported ({error}); pip install 'vslam_features[openvino]'"
        ) from error
    return openvino


def shared_core():
    """The one ``openvino.Core`` of this process, which stays until the process ends.

    The CPU plug-in of a core gives the thread that loads it another stack for signals, and unmaps it at its own end.
    Where two cores do not end in the reverse of their order, or one ends in another thread, the thread is left with a
    stack that is gone (seen in 2026.4 on Linux): its next signal that Python handles, as of Ctrl-C, is a segmentation
    fault, of which ``faulthandler`` says nothing, for it has no stack either.
    """
    import openvino

    with _making_core:  # by two threads at once there would be two
        if not _cores:
            _cores.append(openvino.Core())
    return _cores[0]


def _openvino_name(device: str, there: list[str]) -> str:
    kind, colon, number = device.partition(":")
    if kind not in _DEVICES or (colon and not (number.isdecimal() and kind in ("gpu", "npu"))):
        raise ConfigError(f"openvino: unknown device '{device}'; choose one of: {', '.join(_DEVICES)}, gpu:1")
    if kind == "auto":
        return "GPU" if _has(there, "GPU") else "CPU"
    return f"{kind.upper()}.{number}" if colon else kind.upper()


def _has(there: list[str], device: str) -> bool:
    return any(d == device or d.split(".")[0] == device for d in there)


def _read(core, path: Path):
    """The model by the front end of its suffix: ``Core.read_model`` would try them all and complain on stderr."""
    try:
        if path.suffix != ".onnx":
            model = core.read_model(str(path))
        else:
            from openvino.frontend import FrontEndManager

            front_end = FrontEndManager().load_by_framework("onnx")
            model = front_end.convert(front_end.load(str(path)))
    except Exception as error:  # the library raises RuntimeError and others
        raise ModelFileError(f"openvino cannot read {path}: {_reason(error)}") from error
    if not model.outputs:  # what it makes of an empty file
        raise ModelFileError(f"openvino cannot read {path}: no outputs, the file is empty or cut off")
    return model


def _reason(error: Exception) -> str:
    """Without the chain of source files that OpenVINO puts in front."""
    return re.sub(r"^(Exception from \S+ )+", "", reason(error))


def _specs(ports, path: Path) -> dict[str, TensorSpec]:
    specs = {_name(p, path): _spec(p, path) for p in ports}
    if len(specs) < len(ports):
        raise ModelFileError(f"{path}: {len(ports)} tensors have {len(specs)} names: {sorted(specs)}")
    return specs


def _name(port, path: Path) -> str:
    """A port may have several names (of tensors that an optimisation made one): the model's own is that of its node."""
    names = port.get_names()
    if not names:
        raise ModelFileError(f"{path}: input or output {port.get_index()} of openvino's model has no name")
    node = _SINK.sub("", port.get_node().get_friendly_name())
    return node if node in names else min(names)


def _spec(port, path: Path) -> TensorSpec:
    kind = port.element_type.get_type_name()
    if kind not in _DTYPES:
        raise ModelFileError(f"{path}: tensor {_name(port, path)!r} is of type {kind}, which no array holds")
    shape = port.partial_shape
    if shape.rank.is_dynamic:
        return TensorSpec(_DTYPES[kind], None)
    return TensorSpec(_DTYPES[kind], tuple(None if d.is_dynamic else d.get_length() for d in shape))
