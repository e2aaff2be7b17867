"""Where exported files go: staged until all checks passed, then placed with their cards, or not at all."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import torch

from .. import __version__
from ..artifacts.cache import adopt
from ..artifacts.card import ModelCard, read_card, set_aside_sidecar
from ..artifacts.store import model_path
from ..errors import ConfigError, ExportError
from ..graph.fp16 import Half
from . import onnx_file
from .graph_table import GraphFacts
from .self_check import SelfCheck

PRECISIONS = ("fp32", "fp16")
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Exported:
    """A model's files. ``files``: precision -> where it is; ``half``: figures of the fp16 pass."""

    card: ModelCard
    files: dict[str, Path]
    graphs: dict[str, GraphFacts]
    check: SelfCheck
    half: Half


def target(name: str, precision: str, folder: Path | None) -> Path:
    """Of a model's file; ``folder`` None: where models of the cache are looked for by name. Raises ConfigError."""
    path = model_path(name, precision)
    if folder is None:
        return path
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--out {folder}: is no folder")
    return folder / path.name


def tools() -> dict[str, str]:
    """What makes the files, for their cards: name -> version."""
    made_by = {name: version(name) for name in ("torch", "onnx", "onnxscript", "onnx-ir")}
    return {"vslam_features": __version__, **made_by}


def sha256_of_state(network: torch.nn.Module) -> str:
    """Of the names and values of a network's state dict, in their order."""
    digest = hashlib.sha256()
    for name, value in network.state_dict().items():
        digest.update(name.encode())
        digest.update(value.numpy())
    return digest.hexdigest()


def finish(staged: Mapping[str, Path], card: ModelCard) -> None:
    """Add the card to files by precision. Raises ExportError where it is not read back as it was written."""
    for precision, path in staged.items():
        of_file = replace(card, precision=precision)
        onnx_file.add_card(path, of_file)
        if read_card(path) != of_file:
            raise ExportError(f"the card of {path.name} is not read back as it was written")


def place(staged: Mapping[str, Path], targets: Mapping[str, Path]) -> None:
    """Rename finished files to their places; a card beside an older one is set aside. Raises CacheError."""
    for precision, path in staged.items():
        set_aside_sidecar(targets[precision])
        adopt(path, targets[precision])
