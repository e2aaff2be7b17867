"""CUDA's runtime API with every return value checked: memory, streams, copies and graphs of one GPU."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..errors import BackendError, ConfigError, RuntimeMissingError
from .base import reason
from .hardware import nvidia_driver

logger = logging.getLogger(__name__)

INSTALL = (
    "pip install 'cuda-python==12.*' for a driver of CUDA 12 (nvidia-smi tells; JetPack 6: 12.6.*), "
    "'vslam_features[tensorrt]' for one of 13"
)
_DRIVER = "install NVIDIA's driver; in a container start it with the NVIDIA runtime ('docker run --gpus all')"
_NEXT_STEPS = {
    "cudaErrorMemoryAllocation": "free GPU memory, or build with smaller largest shapes",
    "cudaErrorIllegalAddress": "the GPU context of this process is lost: start it again",
    "cudaErrorLaunchFailure": "the GPU context of this process is lost: start it again",
}


@dataclass(frozen=True)
class Gpu:
    """A device.

    Args:
        index: CUDA's number of it. name: e.g. ``NVIDIA Orin``. capability: compute capability, e.g. ``8.7``.
        driver: newest CUDA version that the installed driver supports, e.g. ``12.6``.
        runtime: version of the CUDA runtime in the Python bindings.
        memory_mb: in all, MiB.
        module: version of NVIDIA's kernel module, e.g. ``540.4.0``; empty where it is not told.
    """

    index: int
    name: str
    capability: str
    driver: str
    runtime: str
    memory_mb: int
    module: str = ""

    @property
    def driver_version(self) -> str:
        """As exact as it is known: drivers that support the same CUDA are many."""
        return self.module or self.driver


def load() -> Cuda:
    """CUDA on this machine; whoever holds a ``Cuda`` knows that there is a GPU.

    Raises RuntimeMissingError where the Python bindings, the driver or a GPU are missing; says which, and what to do.
    """
    cuda = Cuda(_bindings())
    try:
        count = cuda.device_count()
    except BackendError as error:  # no driver, one that is too old, no GPU, or one that this process may not use
        raise RuntimeMissingError(f"no GPU that CUDA can use: {error}; {_DRIVER}") from error
    if count < 1:
        raise RuntimeMissingError(f"no GPU that CUDA can use: it finds none; {_DRIVER}")
    return cuda


def _bindings():
    """The module of cuda-python; before 12.8 it may have the old name only, from 13 on it has the new one only."""
    try:
        from cuda.bindings import runtime

        return runtime
    except ImportError as error:
        problem = error
    try:
        from cuda import cudart

        return cudart
    except ImportError:
        raise RuntimeMissingError(f"cuda-python cannot be imported ({problem}); {INSTALL}") from problem


class Cuda:
    """Calls of CUDA's runtime API; each raises BackendError that names the call, CUDA's error and what it says.

    Addresses are integers. Streams and graphs are objects of the bindings; ``int(stream)`` is the handle.

    Args:
        api: the module ``cuda.bindings.runtime``, or ``cuda.cudart`` of older versions.
    """

    def __init__(self, api):
        self._api = api

    def device_count(self) -> int:
        return self._call("cudaGetDeviceCount")

    def device(self, index: int) -> Gpu:
        """Facts of a GPU. Raises ConfigError where there is none of this number."""
        count = self.device_count()
        if not 0 <= index < count:
            have = ", ".join(f"cuda:{i}" for i in range(count))
            raise ConfigError(f"runtime.device 'cuda:{index}': there is no such GPU; this machine has {have}")
        p = self._call("cudaGetDeviceProperties", index)
        name = p.name.decode(errors="replace") if isinstance(p.name, bytes) else str(p.name)
        driver, runtime = (_version(self._call(f)) for f in ("cudaDriverGetVersion", "cudaRuntimeGetVersion"))
        return Gpu(
            index, name.strip("\0 "), f"{p.major}.{p.minor}", driver, runtime, p.totalGlobalMem >> 20, nvidia_driver()
        )

    def use(self, index: int) -> None:
        """Make a GPU that of the calling thread; each thread starts with GPU 0."""
        self._call("cudaSetDevice", index)

    @contextlib.contextmanager
    def on(self, index: int) -> Iterator[None]:
        """Use a GPU for a while: for what runs in a thread of others, as the end of an object does."""
        before = self._call("cudaGetDevice")
        self.use(index)
        try:
            yield
        finally:
            release(lambda: self.use(before))

    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes of the thread's GPU."""
        return self._call("cudaMemGetInfo")

    def malloc(self, size: int) -> int:
        """Address of ``size`` > 0 bytes on the thread's GPU."""
        return int(self._call("cudaMalloc", size))

    def free(self, address: int) -> None:
        self._call("cudaFree", address)

    def malloc_host(self, size: int) -> int:
        """Address of ``size`` > 0 bytes of pinned host memory."""
        return int(self._call("cudaMallocHost", size))

    def free_host(self, address: int) -> None:
        self._call("cudaFreeHost", address)

    def create_stream(self):
        """A stream that does not wait for the default one."""
        return self._call("cudaStreamCreateWithFlags", self._api.cudaStreamNonBlocking)

    def destroy_stream(self, stream) -> None:
        self._call("cudaStreamDestroy", stream)

    def synchronise(self, stream) -> None:
        """Wait for a stream; errors of what ran on it appear here."""
        self._call("cudaStreamSynchronize", stream)

    def copy_to_device(self, device: int, host: int, size: int, stream) -> None:
        kind = self._api.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._call("cudaMemcpyAsync", device, host, size, kind, stream)

    def copy_to_host(self, host: int, device: int, size: int, stream) -> None:
        kind = self._api.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self._call("cudaMemcpyAsync", host, device, size, kind, stream)

    def begin_capture(self, stream) -> None:
        """Record what is enqueued, instead of running it; what other threads do meanwhile does not disturb it."""
        self._call("cudaStreamBeginCapture", stream, self._api.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal)

    def end_capture(self, stream):
        """The graph of what was recorded."""
        return self._call("cudaStreamEndCapture", stream)

    def destroy_graph(self, graph) -> None:
        self._call("cudaGraphDestroy", graph)

    def instantiate(self, graph):
        """What can be launched of a graph, which may go then."""
        return self._call("cudaGraphInstantiate", graph, 0)

    def launch(self, executable, stream) -> None:
        self._call("cudaGraphLaunch", executable, stream)

    def destroy_executable(self, executable) -> None:
        self._call("cudaGraphExecDestroy", executable)

    def _call(self, name: str, *args):
        """What a call gives beside its error code: nothing, one value, or a tuple."""
        try:
            code, *values = getattr(self._api, name)(*args)
        except (RuntimeError, AttributeError, TypeError) as error:  # the bindings: no libcuda, or other arguments
            raise BackendError(f"{name}: {reason(error)}") from error
        if int(code):
            raise self._failure(name, code)
        return values[0] if len(values) == 1 else tuple(values) if values else None

    def _failure(self, name: str, code) -> BackendError:
        label, text = getattr(code, "name", str(code)), ""
        try:
            # The error waits for whoever asks next, which would be TensorRT; lost contexts keep theirs.
            self._api.cudaGetLastError()
            said = self._api.cudaGetErrorString(code)[1]
            text = said.decode(errors="replace") if isinstance(said, bytes) else str(said)
        except (RuntimeError, AttributeError):  # no driver that knows
            pass
        step = _NEXT_STEPS.get(label, "")
        return BackendError(f"{name}: {label}" + (f" ({text})" if text else "") + (f"; {step}" if step else ""))


def release(*steps: Callable[[], None]) -> None:
    """Take all steps; what fails is logged, and must not keep the others from giving back what they hold."""
    for step in steps:
        try:
            step()
        except BackendError as error:
            logger.warning("while releasing: %s", error)


def _version(number: int) -> str:
    """12060 is CUDA 12.6; 0: no driver."""
    return f"{number // 1000}.{number % 1000 // 10}"
