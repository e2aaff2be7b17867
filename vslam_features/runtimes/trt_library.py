"""The library ``tensorrt``: what the installed version can do, and the objects that need a GPU."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import BackendError, ModelFileError, RuntimeMissingError
from .base import reason
from .cuda import Cuda

logger = logging.getLogger(__name__)

INSTALL = (
    "on x86-64 pip install 'tensorrt-cu12<11' for a driver of CUDA 12 (nvidia-smi tells), 'vslam_features[tensorrt]' "
    "for one of 13; on a Jetson it is in JetPack 6 (apt: python3-libnvinfer)"
)
_OLDEST = (10, 1)  # from which on contexts can share their memory, which the sessions here do
_KEPT = 8  # errors of TensorRT that a message quotes at most
_loading = threading.Lock()
_loaded: list[Library] = []  # none or the one of this process: TensorRT takes one logger


@dataclass(frozen=True)
class Capabilities:
    """What a version of TensorRT can be asked for.

    Args:
        version: e.g. ``10.3.0``.
        builds: it has a builder; the lean and dispatch libraries have none.
        weakly_typed: flags let it choose types; where it can, a strongly typed network has to be asked for.
        layer_precisions: the type of a layer can be set, and obeyed.
        bf16: it knows the type.
        unequal_branches: the branches of an If may give tensors of different shapes (10.11 and newer).
        progress: it reports how far a build is.
    """

    version: str
    builds: bool
    weakly_typed: bool
    layer_precisions: bool
    bf16: bool
    unequal_branches: bool
    progress: bool

    @classmethod
    def of(cls, trt) -> Capabilities:
        """Of a module, by what it has: 11 has neither the flags nor the attributes of weakly typed networks."""
        flags = getattr(trt, "BuilderFlag", None)
        version = str(trt.__version__)
        return cls(
            version,
            builds=hasattr(trt, "Builder"),
            weakly_typed=hasattr(flags, "FP16"),
            layer_precisions=hasattr(flags, "OBEY_PRECISION_CONSTRAINTS")
            and hasattr(getattr(trt, "ILayer", None), "precision"),
            bf16=hasattr(trt.DataType, "BF16"),
            unequal_branches=version_numbers(version) >= (10, 11),
            progress=hasattr(trt, "IProgressMonitor"),
        )

    @classmethod
    def assumed(cls, version: str) -> Capabilities:
        """Of a version that is not installed, by its release notes; 10.1 or newer."""
        weak = version_numbers(version) < (11,)
        return cls(version, True, weak, weak, True, version_numbers(version) >= (10, 11), True)


def load() -> Library:
    """The installed library; needs no GPU. Raises RuntimeMissingError where there is none, or too old a one."""
    try:
        import tensorrt
    except (ImportError, OSError) as error:  # OSError: its bindings do not find libnvinfer
        raise RuntimeMissingError(f"tensorrt cannot be imported ({reason(error)}); {INSTALL}") from error
    version = str(tensorrt.__version__)
    if version_numbers(version) < _OLDEST:
        oldest = ".".join(map(str, _OLDEST))
        raise RuntimeMissingError(f"tensorrt {version} is too old, {oldest} or newer is needed; {INSTALL}")
    with _loading:
        if not _loaded or _loaded[0].module is not tensorrt:
            _loaded[:] = [Library(tensorrt)]
        return _loaded[0]


class Library:
    """TensorRT in this process.

    What constructs an object of TensorRT takes a :class:`Cuda`, which exists only where there is a GPU: without one
    ``trt.Runtime`` and ``trt.Builder`` end the process with a segmentation fault.

    Attributes:
        module: ``tensorrt`` itself. logger: its ``ILogger``, the one of the process.
        capabilities: see there.
    """

    def __init__(self, trt):
        self.module = trt
        self.capabilities = Capabilities.of(trt)
        self.version = self.capabilities.version
        self._listeners: list[tuple[int, deque[str]]] = []  # the thread that listens, and what it hears
        self._lock = threading.RLock()  # a collected session, which TensorRT logs, may end within
        self.logger = _logger(trt, self._log)

    def deserialise(self, cuda: Cuda, device: int, engine: bytes):
        """An ``ICudaEngine`` on a GPU. Raises ModelFileError with TensorRT's words; BackendError: no runtime."""
        with self.listening() as said:
            try:
                # No name for the runtime: a name would keep it alive for as long as anybody keeps the error below.
                loaded = self._new(cuda, device, "Runtime").deserialize_cuda_engine(engine)
            except BackendError:
                raise
            except Exception as error:  # its bindings raise RuntimeError and TypeError
                raise ModelFileError(f"TensorRT {self.version} cannot load the engine: {reason(error)}") from error
        if loaded is None:
            raise ModelFileError(f"TensorRT {self.version} cannot load the engine: {words(said)}")
        return loaded

    def builder(self, cuda: Cuda, device: int):
        """A ``Builder`` on a GPU. Raises RuntimeMissingError: the lean library has none; BackendError."""
        if not self.capabilities.builds:
            raise RuntimeMissingError(f"tensorrt {self.version} is a lean library, which has no builder; {INSTALL}")
        return self._new(cuda, device, "Builder")

    @contextlib.contextmanager
    def listening(self) -> Iterator[deque[str]]:
        """The last errors that TensorRT logs meanwhile, for a message: see :func:`words`.

        Those of this thread, and of threads in which nobody listens, as a builder has them: what TensorRT says of
        another session in another thread is not for this one.
        """
        said: deque[str] = deque(maxlen=_KEPT)
        with self._lock:
            self._listeners.append((threading.get_ident(), said))
        try:
            yield said
        finally:
            with self._lock:
                self._listeners = [other for other in self._listeners if other[1] is not said]

    def _new(self, cuda: Cuda, device: int, name: str):
        cuda.use(device)
        with self.listening() as said:
            try:
                return getattr(self.module, name)(self.logger)
            except Exception as error:  # TypeError, where the library returned nothing
                why = words(said) if said else reason(error)
                raise BackendError(f"TensorRT {self.version} gives no {name}: {why}") from error

    def _log(self, severity, message: str) -> None:
        """Called by TensorRT, from any thread. Errors reach people in an exception, where one follows."""
        levels = self.module.ILogger.Severity
        text = " ".join(message.split())
        if severity in (levels.INTERNAL_ERROR, levels.ERROR):
            with self._lock:
                thread = threading.get_ident()
                own = [said for listener, said in self._listeners if listener == thread]
                hear = own or [said for _, said in self._listeners]
                for said in hear:
                    said.append(text)
            logger.log(logging.INFO if hear else logging.ERROR, "TensorRT: %s", text)
        else:
            logger.log(logging.INFO if severity == levels.WARNING else logging.DEBUG, "TensorRT: %s", text)


def words(said: deque[str]) -> str:
    """What TensorRT said, in one line."""
    return " | ".join(dict.fromkeys(said)) or "it gave no reason"


def version_numbers(version: str) -> tuple[int, ...]:
    """``10.13.3.9`` as numbers; stops at the first part that is none."""
    numbers = []
    for part in version.split("."):
        if not (part.isascii() and part.isdecimal()):
            break
        numbers.append(int(part))
    return tuple(numbers)


def _logger(trt, log):
    class Logger(trt.ILogger):
        def __init__(self):
            trt.ILogger.__init__(self)  # its bindings need this call by name

        def log(self, severity, msg):
            log(severity, msg)

    return Logger()
