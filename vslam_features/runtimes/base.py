"""What a runtime and its sessions are, and the one check of what goes into a model and what comes out."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import BackendError, DataError, ModelFileError, NonFiniteError


@dataclass(frozen=True)
class TensorSpec:
    """An input or output: ``shape`` has None where a size is dynamic; None as a whole where the rank is unknown."""

    dtype: np.dtype
    shape: tuple[int | None, ...] | None


@dataclass(frozen=True)
class Active:
    """What a session runs on, by its own word rather than by what was asked for.

    Args:
        runtime: plug-in name, e.g. ``onnxruntime``.
        version: of the library.
        provider: e.g. ``CPUExecutionProvider``; the first of those that the session uses.
        device: the hardware, e.g. ``cpu Intel Xeon`` or ``cuda:0 NVIDIA Orin``: a parity record holds for one.
        note: where it is not what was asked for: what was, and why not. Else empty.
    """

    runtime: str
    version: str
    provider: str
    device: str
    note: str = ""

    def __str__(self) -> str:
        return f"{self.runtime} {self.version} {self.provider}"


@dataclass(frozen=True)
class LoadRequest:
    """How to load a model.

    Args:
        device: ``cpu``, or what else the runtime offers (``cuda``, ``tensorrt``, ``coreml``, ``openvino``, ``gpu``).
        strict: raise where the device is not to be had; else run on the CPU, with a note.
        threads: of the session; 0: all cores.
        optimise: graph optimisations that change the order of floating-point operations.
    """

    device: str = "cpu"
    strict: bool = True
    threads: int = 0
    optimise: bool = True


class Session(ABC):
    """A loaded model. ``run`` may be called from one thread at a time.

    Attributes:
        inputs, outputs: tensor name -> :class:`TensorSpec`.
        active: what it runs on.
        load_ms: wall time of loading.
    """

    inputs: dict[str, TensorSpec]
    outputs: dict[str, TensorSpec]
    active: Active
    load_ms: float = 0.0

    def run(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """All outputs by name.

        Raises:
            DataError: an input is missing, unknown, of the wrong type or shape, or not finite.
            NonFiniteError: an output holds NaN or infinity; ``error.outputs`` has them all.
            BackendError: the runtime failed.
        """
        outputs = self._run(self._checked(inputs))
        bad = [name for name, value in outputs.items() if value.dtype.kind == "f" and not all_finite(value)]
        if bad:
            counts = ", ".join(f"{(~np.isfinite(outputs[n])).sum()} of {outputs[n].size} in '{n}'" for n in bad)
            raise NonFiniteError(f"{self.active}: outputs are not finite: {counts}", outputs)
        return outputs

    @abstractmethod
    def _run(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run with checked, contiguous inputs; BackendError where the library fails."""

    def _checked(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if set(inputs) != set(self.inputs):
            raise DataError(f"model inputs: expected {sorted(self.inputs)}, got {sorted(inputs)}")
        out = {}
        for name, spec in self.inputs.items():
            value = np.ascontiguousarray(inputs[name]).reshape(np.shape(inputs[name]))  # keeps 0-d arrays 0-d
            if value.dtype != spec.dtype:
                raise DataError(f"model input '{name}': expected {spec.dtype}, got {value.dtype}")
            if spec.shape is not None and (
                value.ndim != len(spec.shape) or any(s is not None and s != v for s, v in zip(spec.shape, value.shape))
            ):
                wanted = tuple("?" if s is None else s for s in spec.shape)
                raise DataError(f"model input '{name}': expected shape {wanted}, got {value.shape}")
            if value.dtype.kind == "f" and not all_finite(value):
                raise DataError(f"model input '{name}': {(~np.isfinite(value)).sum()} values are not finite")
            out[name] = value
        return out


class Runtime(ABC):
    """Loads model files. Plug-in role ``runtime``.

    Args:
        options: an instance of the plug-in's nested ``Options``.
    """

    @dataclass(frozen=True)
    class Options:
        """Parameters of the plug-in."""

    def __init__(self, options=None):
        self.options = options if options is not None else self.Options()

    def load(self, path: Path, request: LoadRequest) -> Session:
        """A session for a model file.

        Raises:
            ConfigError: the runtime knows no such device.
            RuntimeMissingError: the library, or with ``strict`` the device, is not there; names what is.
            ModelFileError: the file is not there, or the library cannot read it.
        """
        path = Path(path)
        if not path.is_file():
            raise ModelFileError(f"{path}: no such model file")
        start = time.perf_counter()
        try:
            session = self._load(path, request)
        except UnicodeDecodeError as error:  # from the bindings of a library, at any name in the file
            raise ModelFileError(f"{path}: damaged, holds a name that is not UTF-8: {reason(error)}") from error
        session.load_ms = (time.perf_counter() - start) * 1e3
        return session

    @abstractmethod
    def _load(self, path: Path, request: LoadRequest) -> Session: ...


def reason(error: Exception, limit: int = 400) -> str:
    """What a library said, in one line."""
    text = str(error)
    if isinstance(error, UnicodeDecodeError):  # its binding failed on the message, which quotes a damaged file
        text = error.object.decode("utf-8", errors="replace")
    return " ".join(text.split())[:limit] or type(error).__name__


def backend_failure(active: Active, error: Exception) -> BackendError:
    """The typed error for whatever a library raised while it ran."""
    return BackendError(f"{active}: {type(error).__name__}: {reason(error)}")


def all_finite(value: np.ndarray) -> bool:
    """True where no element is NaN or infinite. A sum tells, in a third of the time, unless it overflows by itself."""
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(value.sum()):
            return True
    return bool(np.isfinite(value).all())
