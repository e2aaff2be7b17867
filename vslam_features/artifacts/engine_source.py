"""Which ONNX file an engine is built from, how its types are decided, and what it must therefore have been built for.

Strongly typed: each layer computes in the type that the file gives it, so that what is built is the file whose accuracy
was compared. Weakly typed, which TensorRT 10 can and 11 cannot: the file is fp32, TensorRT chooses, and is told for
which layers it may not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError, ModelFileError, ModelMissingError
from ..runtimes.cuda import Gpu
from ..runtimes.trt_library import Capabilities
from .card import ModelCard, read_card
from .engine_key import PATCHES, EngineWish
from .engine_store import engine_path
from .profiles import profiles_of
from .shapes import Profile
from .store import SUFFIXES, content_sha256, locate

HALF = ("fp16", "bf16")
_BF16_CAPABILITY = (8, 0)  # Ampere; what is older has no BF16 (TensorRT support matrix)


@dataclass(frozen=True)
class EngineSource:
    """``precision``: of the engine. ``typing``: strong or weak. ``reasons``: for the choice, in words.

    ``core_type``: that cores of attention compute in, ``bf16`` or ``fp32``; ``auto``: what suits their size; empty: as
    the file says.
    """

    path: Path
    card: ModelCard
    sha256: str
    precision: str
    typing: str
    core_type: str
    reasons: tuple[str, ...]


def choose_source(
    model: str, precision: str, options: Mapping[str, object], able: Capabilities, capability: str
) -> EngineSource:
    """The file and the typing.

    Args:
        model: name in the model registry, or path of an .onnx file.
        precision: that is asked for; a file that is named by its path is taken as it is where it has half precision.
        options: ``typing`` and ``attention`` of the runtime ``tensorrt``.
        able: what the library can do. capability: of the GPU, e.g. ``8.7``.
    Raises:
        ModelMissingError, ModelFileError: the file is not here, is no .onnx file, or emulates another precision.
        ConfigError: this library or this GPU cannot do what is asked for.
    """
    typing, reasons = str(options["typing"]), []
    weak_only = "" if able.weakly_typed else f"TensorRT {able.version} builds strongly typed engines only"
    if typing == "weak" and weak_only:
        raise ConfigError(f"runtime.options.typing: weak was asked for, and {weak_only}: set it to auto")
    if typing == "auto":
        typing, why = _typing(model, precision, able)
        reasons.append(why)
    path = _onnx(model, "fp32" if typing == "weak" else precision)
    card = read_card(path)
    if card.emulated:
        raise ModelFileError(f"{path}: emulates BF16 in float32 for a CPU; build from the file that it was made from")
    if typing == "weak":
        if card.precision != "fp32":
            raise ConfigError(f"{path}: is {card.precision}; weak typing takes an fp32 file and chooses types itself")
    else:
        if precision in HALF and card.precision not in HALF:
            raise ConfigError(
                f"{path}: is {card.precision}, and {precision} is asked for: a strongly typed engine computes in the "
                f"types of the file. Name the fp16 file{'' if weak_only else ', or set runtime.options.typing to weak'}"
            )
        precision = card.precision
    core_type = _core_type(precision, options, capability)
    if core_type == "fp32" != options["attention"]:
        reasons.append(f"compute capability {capability} has no BF16: cores of attention compute in fp32")
    return EngineSource(path, card, content_sha256(path), precision, typing, core_type, tuple(filter(None, reasons)))


@dataclass(frozen=True)
class EngineOrder:
    """An engine that is wanted: from what, built for what, with which shapes, and where it is kept."""

    source: EngineSource
    wish: EngineWish
    profiles: Mapping[str, Profile]
    path: Path


def order_engine(
    model: str, precision: str, options: Mapping[str, object], able: Capabilities, gpu: Gpu
) -> EngineOrder:
    """All that is to be known of an engine before there is one.

    Args:
        options: all options of the runtime ``tensorrt``.
    Raises:
        as :func:`choose_source`; ConfigError: ``shapes`` of the options cannot be.
    """
    source = choose_source(model, precision, options, able, gpu.capability)
    profiles = profiles_of(source.path, source.card, str(options["shapes"]))
    shapes = {name: [list(shape) for shape in (p.min, p.opt, p.max)] for name, p in profiles.items()}
    wish = wish_of(source.sha256, source.precision, source.typing, shapes, options, able, gpu)
    return EngineOrder(source, wish, profiles, engine_path(source.card.name, source.precision, gpu.name))


def wish_of(
    sha256: str,
    precision: str,
    typing: str,
    shapes: Mapping[str, list[list[int]]],
    options: Mapping[str, object],
    able: Capabilities,
    gpu: Gpu,
) -> EngineWish:
    """What an engine must have been built for, of a source whose file need not be here.

    Raises ConfigError where this GPU cannot do what is asked for.
    """
    wanted = {
        "cumsum": options["patches"] == "auto",
        "attention": bool(_core_type(precision, options, gpu.capability)),
    }
    kept = ("attention", "optimisation_level", "workspace_mb")
    return EngineWish(
        sha256, precision, typing, shapes, {name: number for name, number in PATCHES.items() if wanted[name]},
        gpu.name, gpu.capability, gpu.driver_version, able.version, {name: options[name] for name in kept},
    )  # fmt: skip


def _typing(model: str, precision: str, able: Capabilities) -> tuple[str, str]:
    """``auto``: strong or weak, and why."""
    strong = "strongly typed: each layer computes in the type that the file gives it, whose accuracy is known"
    if precision not in HALF:
        return "strong", strong
    try:
        path = _onnx(model, precision)
    except (ModelMissingError, ConfigError) as error:  # ConfigError: its name is none of the registry
        if not able.weakly_typed:
            raise type(error)(
                f"{error}; TensorRT {able.version} builds strongly typed engines only, for which the file must be there"
            ) from error
        try:
            _onnx(model, "fp32")
        except ModelMissingError:
            raise error from None  # neither is here: the one that was asked for is to be fetched, which brings both
        return "weak", f"weakly typed, from the fp32 file: there is no {precision} file ({error})"
    if able.weakly_typed and (had := read_card(path).precision) not in HALF:
        return "weak", f"weakly typed: {path.name} is {had}, and {precision} is asked for"
    return "strong", strong


def _core_type(precision: str, options: Mapping[str, object], capability: str) -> str:
    asked = options["attention"] if options["patches"] == "auto" else "as_is"
    if asked == "as_is" or (precision not in HALF and asked != "bf16"):
        return ""
    if asked == "bf16" and _old(capability):
        raise ConfigError(
            f"runtime.options.attention: bf16 was asked for, and compute capability {capability} has no BF16: set it "
            "to auto or fp32"
        )
    return "fp32" if _old(capability) else str(asked)


def _old(capability: str) -> bool:
    major, _, minor = capability.partition(".")
    return (int(major), int(minor or 0)) < _BF16_CAPABILITY


def _onnx(model: str, precision: str) -> Path:
    path = locate(model, precision)
    if path.suffix != ".onnx":
        others = ", ".join(SUFFIXES)
        raise ModelFileError(f"{path}: engines are built from .onnx files, not from others of {others}")
    return path
