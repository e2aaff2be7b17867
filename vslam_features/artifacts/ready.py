"""Ready model files of others: placed beside the models that are built here, with their card."""

from __future__ import annotations

import shutil
from pathlib import Path

import yaml

from ..errors import ConfigError
from .cache import place, placing, writing
from .card import sidecar_path
from .catalogue import ModelEntry
from .file_kind import FileKind, require_kind
from .store import model_path


def place_ready(entry: ModelEntry, fetched: Path) -> Path:
    """Copy a fetched ONNX file to where its name is looked for, and write its card beside it.

    Raises ModelFileError where it is no ONNX file, ConfigError where the entry is one that is built, CacheError.
    """
    if entry.card is None:
        raise ConfigError(f"model '{entry.name}' is built by recipe '{entry.recipe}', it is no ready file")
    require_kind(fetched, FileKind.ONNX)
    target = model_path(entry.name, entry.card.precision)
    # The card first: a model without one would not open.
    place(sidecar_path(target), yaml.safe_dump(entry.card.to_dict(), sort_keys=False).encode())
    with placing(target) as out, open(fetched, "rb") as file, writing(target.parent):
        shutil.copyfileobj(file, out)
    return target
