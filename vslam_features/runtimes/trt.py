"""TensorRT: engines that were built for this very GPU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ..errors import BackendError, ConfigError, ModelFileError
from ..options import option
from . import cuda, trt_library
from .base import Active, LoadRequest, Runtime, Session
from .engine_file import SUFFIX, EngineHeader, machine_differences, read_engine, read_header, rebuild
from .trt_session import Execution, TensorRtSession


class TensorRt(Runtime):
    """Runs ``.engine`` files with a header of ours, see ``engine_file``.

    Devices: ``cuda`` (or ``gpu``), and ``cuda:1``. An engine runs on nothing else, so that ``LoadRequest.strict``
    changes nothing, and what TensorRT rewrites is fixed when an engine is built: ``optimise`` neither.

    What an engine depends on are options too, since one that is missing or stale is built with them.
    """

    @dataclass(frozen=True)
    class Options:
        """Parameters of TensorRT."""

        cuda_graphs: bool = option(
            True, "Launch runs of input shapes that come often as CUDA graphs, where the model allows it."
        )
        build: str = option(
            "auto",
            "What becomes of an engine that is missing or stale: auto builds it, which takes minutes; never refuses.",
            choices=("auto", "never"),
        )
        builder: str = option(
            "auto",
            "What builds: the Python library, or the program trtexec; auto takes trtexec where the library has no "
            "builder.",
            choices=("auto", "api", "trtexec"),
        )
        typing: str = option(
            "auto",
            "Types of the network: strong has those of the file, weak lets TensorRT 10 choose from an fp32 file; auto "
            "is strong, and weak where there is no file of that precision.",
            choices=("auto", "strong", "weak"),
        )
        attention: str = option(
            "auto",
            "Type of attention cores in half-precision engines, so that they do not overflow: auto is bf16 over 2048 "
            "tokens of a map or more, fp32 over keypoints; as_is leaves them.",
            choices=("auto", "bf16", "fp32", "as_is"),
        )
        patches: str = option(
            "auto",
            "Rewrite what TensorRT miscomputes (CumSum) before a build; none: not.",
            choices=("auto", "none"),
        )
        shapes: str = option(
            "",
            "Smallest, usual and largest input shapes of an engine, where they are not to be those of the model's "
            "card, e.g. 'keypoints0: 1x1x2,1x1024x2,1x2048x2; image0: ...'.",
        )
        workspace_mb: int = option(
            0, "Memory that a build may use for scratch, MiB; 0: all of the GPU's.", low=0, high=1_000_000
        )
        optimisation_level: int = option(
            3, "How long a build searches; 5 takes hours and gives the fastest engine.", low=0, high=5
        )

    def _load(self, path: Path, request: LoadRequest) -> Session:
        index = device_index(request.device)
        if path.suffix != SUFFIX:
            raise ModelFileError(
                f"{path}: tensorrt runs {SUFFIX} files; 'vslam-features models build {path} --runtime tensorrt' makes "
                "one of an ONNX file"
            )
        header = read_header(path)
        api, library = cuda.load(), trt_library.load()
        gpu = api.device(index)
        differences = machine_differences(header.facts, gpu, library.version)
        if differences:
            raise ModelFileError(
                f"{path} was built for GPU {header.facts.gpu} ({header.facts.capability}) by TensorRT "
                f"{header.facts.tensorrt} and is none for this machine: {'; '.join(differences)}; {rebuild(header)}"
            )
        same, engine = read_engine(path)
        if same != header:
            raise ModelFileError(f"{path} was replaced by another engine while it was loaded: open the model again")
        active = Active("tensorrt", library.version, _provider(header), f"cuda:{index} {gpu.name}")
        graphs = self.options.cuda_graphs and not header.facts.has_if
        try:
            execution = Execution(library, api, index, engine, graphs, partial(_limits, header))
        except ModelFileError as error:
            raise ModelFileError(f"{path}: {error}; {rebuild(header)}") from error
        except BackendError as error:
            raise BackendError(f"{path}: {error}") from error
        return TensorRtSession(execution, active)


def device_index(device: str) -> int:
    """CUDA's number of ``cuda``, ``gpu`` or ``cuda:1``. Raises ConfigError for anything else."""
    kind, colon, number = device.partition(":")
    if kind not in ("cuda", "gpu") or (colon and not (number.isascii() and number.isdecimal())):
        raise ConfigError(f"tensorrt runs on GPUs only: set runtime.device to 'cuda' or 'cuda:1', got '{device}'")
    return int(number or 0)


def _provider(header: EngineHeader) -> str:
    """With the types that an engine computes in besides float32, for a parity record is of one precision."""
    # The card's is that of the patched model; patches of the header are what was asked for, where it has a place.
    types = {str(header.card.get("precision", "")), header.facts.precision, *header.facts.layer_precisions.values()}
    return " ".join(["TensorRT", *sorted(types - {"fp32", ""})])


def _limits(header: EngineHeader, name: str, given: tuple[int, ...]) -> str:
    """What to say where the shape of an input, or the values of a shape tensor, are outside what was built for."""
    if name not in header.facts.profiles:
        return f"the engine has one shape for '{name}'"
    least, _, most = header.facts.profiles[name]
    if len(given) == len(least) and all(a <= n <= b for a, n, b in zip(least, given, most)):
        return ""
    got, low, high = ("x".join(map(str, shape)) for shape in (given, least, most))
    return (
        f"the engine was built for '{name}' of {low} to {high}, got {got}: widen runtime.options.shapes, and "
        f"{rebuild(header)}"
    )
