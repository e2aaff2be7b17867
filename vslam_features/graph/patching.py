"""A patch of a model file: the graph is changed, the card says so, and a new file is written whole or not at all.

A patch is a function of a graph, such as :func:`~.early_stop.add_early_stop`; here is what all patches of files share.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import onnx_ir as ir

from .. import __version__
from ..artifacts.cache import adopt, staging
from ..artifacts.card import METADATA_KEY, ModelCard, read_card, set_aside_sidecar
from ..errors import ConfigError, ExportError, ModelFileError
from ..runtimes.onnx_header import read_metadata
from . import model_file

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """A model file that is to be patched, with the card inside it or beside it."""

    path: Path
    model: ir.Model
    card: ModelCard

    @classmethod
    def read(cls, path: Path, kind: str = "") -> Source:
        """Read a file that does not have a patch of this kind yet.

        Args:
            kind: first word of the patch as cards record it, e.g. ``early-stop``; empty: of one that leaves alone what
                it finds done.
        Raises:
            ModelFileError: it is no ONNX file, is damaged, has no card, or is patched already.
        """
        model, card = model_file.read(path), read_card(path)
        if done := [patch for patch in card.patches if patch.split()[0] == kind]:
            raise ModelFileError(f"{path}: is patched already: {'; '.join(done)}; take the file that it was made from")
        return cls(path, model, card)

    def patched_card(self, patch: str, **fields) -> ModelCard:
        """The card of the patched file: the source's, with the patch and what else changes."""
        tools = {"vslam_features": __version__, **{name: version(name) for name in ("onnx", "onnx-ir")}}
        patches = (*(p for p in self.card.patches if p != patch), patch)
        return replace(self.card, patches=patches, tools={**self.card.tools, **tools}, schema=1, **fields)


@contextlib.contextmanager
def placing(source: Source, model: ir.Model, card: ModelCard, target: Path) -> Iterator[Path]:
    """The patched file, written, proved and with its card inside; it becomes ``target`` when the block ends well.

    An older ``target`` that a patch made is replaced; a card beside it is set aside, since it would come before the one
    inside. A file of others is never replaced: releases have names such as ``matcher_early_stop.onnx`` as well.

    Raises:
        ConfigError: ``target`` is the source, no .onnx file, or a file that no patch made.
        ExportError: what was written is not valid. CacheError.
    """
    if target.suffix != ".onnx":
        raise ConfigError(f"--out {target}: expected a name that ends in .onnx")
    if target.exists() and target.samefile(source.path):
        raise ConfigError(f"--out {target}: is the file that is patched, which stays as it is; name another")
    if target.exists() and not _is_patched(target):
        raise ConfigError(f"{target} is there, and no patch made it: name another file with --out, or move it away")
    model.metadata_props.pop(METADATA_KEY, None)
    with staging(target.parent) as scratch:
        staged = scratch / target.name
        model_file.write(model, staged)
        model_file.add_card(staged, card)
        if read_card(staged) != card:
            raise ExportError(f"the card of {target.name} is not read back as it was written")
        yield staged
        if old := set_aside_sidecar(target):
            logger.warning("%s: has its own card; the one beside it is now %s", target, old.name)
        adopt(staged, target)


def _is_patched(path: Path) -> bool:
    """Whether a file is of a patch, by the card inside."""
    try:
        card = ModelCard.from_dict(json.loads(read_metadata(path)[METADATA_KEY]), str(path))
    except (ModelFileError, KeyError, ValueError):
        return False
    return bool(card.patches)
