"""A map made by an import: whole under its name, or not there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from ..maps.lock import WriterLock
from ..maps.placing import placed_file
from ..maps.writer import MapWriter
from ..types import MapModels


@contextlib.contextmanager
def new_map(target: Path, models: MapModels, *, overwrite: bool) -> Iterator[MapWriter]:
    """A writer for the map that becomes ``target`` when the block ends well.

    Raises MapError where the target is there (and not ``overwrite``), is written by somebody, or cannot be written.
    """
    target = Path(target)
    with contextlib.ExitStack() as stack:
        part = stack.enter_context(placed_file(target, replace=overwrite))
        if os.path.lexists(target):  # who writes to it would go on with a file that has no name any more
            stack.callback(WriterLock(target).release)
        with MapWriter(part, models, create=True) as writer:
            yield writer
