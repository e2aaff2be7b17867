"""Engines whose ONNX file is not here, as on a robot that got no more than what runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from ..errors import ConfigError, ModelError
from ..runtimes.cuda import Gpu
from ..runtimes.engine_file import BuildFacts, EngineHeader, read_engine, read_header
from ..runtimes.trt_library import Capabilities
from .cache import cache_folder
from .engine_key import differences
from .engine_source import HALF, wish_of
from .shapes import parse_profiles
from .store import SUFFIXES, locate


def kept_engine(model: str, precision: str, options: Mapping[str, object], able: Capabilities, gpu: Gpu) -> Path | None:
    """The engine of a model in the cache, for this machine and these options; None: its source is here, or there is
    none that fits.

    Whether it was built from the right file cannot be told without that file: its parity record says what it computes.

    Args:
        as :func:`~.engine_source.order_engine`.
    """
    for path in sorted(cache_folder("engines").glob("*.engine")):
        try:
            header = read_header(path)
            if _is_of(header, model, precision) and _gone(model, header.facts) and _fits(header, options, able, gpu):
                read_engine(path)
                return path
        except ModelError:  # damaged
            continue
    return None


def _is_of(header: EngineHeader, model: str, precision: str) -> bool:
    facts = header.facts
    if Path(model).suffix in SUFFIXES:  # which is taken as it is where it has half precision
        named = facts.source == str(Path(model).expanduser().absolute())
        return named and (facts.precision == precision or facts.precision in HALF)
    return header.card.get("name") == model and facts.precision == precision


def _gone(model: str, facts: BuildFacts) -> bool:
    """Whether the file that it would be built from is not here: else that one decides."""
    try:
        locate(model, "fp32" if facts.typing == "weak" else facts.precision)
    except (ModelError, ConfigError):  # ConfigError: its name is none of the registry
        return True
    return False


def _fits(header: EngineHeader, options: Mapping[str, object], able: Capabilities, gpu: Gpu) -> bool:
    """Whether it is the engine that these options ask for, as far as that depends on them and on this machine."""
    facts = header.facts
    if options["typing"] not in ("auto", facts.typing):
        return False
    try:
        wish = wish_of(facts.source_sha256, facts.precision, facts.typing, facts.profiles, options, able, gpu)
    except ConfigError:
        return False
    return not differences(dataclasses.asdict(facts), wish) and _shapes_fit(header, str(options["shapes"]))


def _shapes_fit(header: EngineHeader, asked: str) -> bool:
    """Whether shapes that were asked for are those of an engine; axes in front that are 1 may be left out."""
    names = header.card.get("inputs") or {}
    for name, profile in parse_profiles(asked).items():
        built = header.facts.profiles.get(names.get(name, name))
        wanted = [list(shape) for shape in (profile.min, profile.opt, profile.max)]
        if built is None or [[1] * (len(b) - len(w)) + w for b, w in zip(built, wanted)] != built:
            return False
    return True
