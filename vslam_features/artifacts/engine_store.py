"""Built engines in the cache: one a model, precision and GPU. A rebuild replaces it."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass
from pathlib import Path

from ..errors import ModelFileError
from ..runtimes.engine_file import read_engine
from .cache import cache_folder
from .card import ModelCard
from .engine_key import EngineWish, differences

_OF_THE_BUILD = {"precision", "patches", "tools", "self_check", "schema", "shapes"}  # shapes: part of the wish


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


def engine_state(path: Path, wish: EngineWish, card: ModelCard) -> EngineState:
    """What is at a path, held against a wish and the card of its source; a damaged file is one that will not do.

    The card says how the file is run, and an engine carries that of when it was built.
    """
    if not path.is_file():
        return EngineState(path, False, ("there is none",))
    try:
        header, _ = read_engine(path)
    except ModelFileError as error:
        return EngineState(path, True, (f"it is damaged: {error}",))
    reasons = differences(dataclasses.asdict(header.facts), wish)
    return EngineState(path, True, (*reasons, *_card_differences(header.card, card)))


def _card_differences(built: dict, card: ModelCard) -> list[str]:
    """In what the card of an engine is not that of its source: what a build changes, and figures for people, aside."""
    now = json.loads(card.to_json())
    names = sorted({*now, *built} - _OF_THE_BUILD)
    return [f"'{name}' of the card has changed" for name in names if built.get(name) != now.get(name)]
