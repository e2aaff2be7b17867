"""Built engines in the cache: one a model, precision and GPU. A rebuild replaces it."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path

from ..errors import ModelFileError
from ..runtimes.engine_file import read_engine
from .cache import cache_folder
from .engine_key import EngineWish, differences


@dataclass(frozen=True)
class EngineState:
    """Where an engine belongs, and why what is there will not do; no reasons: it fits."""

    path: Path
    there: bool
    reasons: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether it is there and what is wished for."""
        return self.there and not self.reasons


def engine_path(name: str, precision: str, gpu: str) -> Path:
    """Where the engine of a model is kept. Of the names of model and GPU what is no letter or digit becomes a dash."""
    slug = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") or "gpu"
    model = re.sub(r"[^\w.+-]+", "-", name).lstrip(".") or "model"  # a card's name may be anything
    return cache_folder("engines") / f"{model}.{precision}.{slug}.engine"


def engine_state(path: Path, wish: EngineWish) -> EngineState:
    """What is at a path, held against a wish; a damaged file is one that will not do."""
    if not path.is_file():
        return EngineState(path, False, ("there is none",))
    try:
        header, _ = read_engine(path)
    except ModelFileError as error:
        return EngineState(path, True, (f"it is damaged: {error}",))
    return EngineState(path, True, tuple(differences(dataclasses.asdict(header.facts), wish)))
