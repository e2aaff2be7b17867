"""The pairs that a model file is compared on with its reference, whoever asks."""

from __future__ import annotations

import contextlib
import logging

from .artifacts import cases
from .artifacts.binding import Binding
from .artifacts.dense_cases import Describe, dense_cases
from .artifacts.engine_cases import engine_cases, largest_inputs
from .artifacts.store import locate
from .errors import ConfigError, ModelError, ModelFileError
from .reference import ModelFile, Reference
from .runtimes.base import LoadRequest, Session

logger = logging.getLogger(__name__)


def gate_pairs(file: ModelFile, session: Session, reference: Reference) -> list[cases.Case]:
    """The pairs that ship, for the model of a session; of an engine also its largest inputs, and a pair again.

    What has no golden outputs is left out of an engine's where there is nothing to compare it with.
    Raises ModelFileError where the features model of a matcher of maps gives others than it takes.
    """
    chosen = _shipped(file, session, reference.threads)
    if file.path.suffix == ".engine":
        more = engine_cases(file.card, chosen, largest_inputs(file.path, file.card))
        chosen = chosen + [case for case in more if case.expected is not None or reference.proves]
    return chosen


def features_of(matcher: ModelFile) -> ModelFile:
    """The file of a matcher's features model: by its name in the cache, else one of that name beside the matcher.

    Raises ModelError or ConfigError where there is none.
    """
    name = matcher.card.features_model
    try:
        return ModelFile.at(locate(name, "fp32"))
    except (ModelError, ConfigError):
        for path in sorted(matcher.path.parent.glob("*.onnx")):
            with contextlib.suppress(ModelError):
                file = ModelFile.at(path)
                if (file.card.role, file.card.name) == ("features", name):
                    return file
        raise


def _shipped(file: ModelFile, session: Session, threads: int) -> list[cases.Case]:
    binding = Binding(session, file.card, str(file.path))
    if file.card.role != "matcher":
        return cases.shipped_cases(file.card)
    if binding.dense:
        takes = binding.map_shape("descriptors0")
        return dense_cases(_describe(file, takes, threads), takes)
    return cases.shipped_cases(file.card, binding.channels("descriptors0") or 64)


def _describe(matcher: ModelFile, takes: tuple[int, int, int] | None, threads: int) -> Describe | None:
    """Maps of pictures by a matcher's features model on ONNX Runtime's CPU; None where it is not here.

    Raises ModelFileError where they are of another shape (C, h, w) than the matcher ``takes``.
    """
    try:
        file = features_of(matcher)
        session = file.load("onnxruntime", {}, LoadRequest(threads=threads))
        binding = Binding(session, file.card, str(file.path))
        binding.require(("image",), ("descriptors",))
    except (ModelError, ConfigError) as error:  # ConfigError: its name is none of the registry
        name = matcher.card.features_model
        why = f"of '{name}': {error}" if name else "of pictures: its card names no features_model"
        logger.warning("%s: compared on seeded maps instead of maps %s", matcher.card.name, why)
        return None
    gives = binding.map_shape("descriptors")
    tokens = matcher.card.layouts.get("descriptors0") == "tokens"  # which tell how many cells, not in how many rows
    if takes and gives and (_cells(takes) != _cells(gives) if tokens else takes != gives):
        raise ModelFileError(f"{matcher.path}: takes maps {takes}, its features model {file.path} gives {gives}")
    return lambda image: binding.run({"image": file.card.preprocessing.apply(image)})["descriptors"]


def _cells(shape: tuple[int, int, int]) -> tuple[int, int]:
    """Channels and cells of a map (C, h, w)."""
    return shape[0], shape[1] * shape[2]
