"""Where the map of a run is when nobody named a file: one file a run, the newest few are kept."""

from __future__ import annotations

import contextlib
import logging
import os
from datetime import datetime, timezone
from pathlib import Path

from .errors import MapError
from .maps.lock import WriterLock

logger = logging.getLogger(__name__)


def state_folder() -> Path:
    """``$VSLAM_FEATURES_STATE``, else ``vslam_features`` in the user's folder for state."""
    if own := os.environ.get("VSLAM_FEATURES_STATE"):
        return Path(own).expanduser().absolute()
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser().absolute() / "vslam_features"


class SessionFiles:
    """The folder ``sessions`` in the state folder.

    Args:
        keep: files of earlier runs that stay.
    """

    def __init__(self, keep: int):
        self.folder, self._keep = state_folder() / "sessions", keep

    def new(self) -> Path:
        """A name that is not taken, in time order. Raises OSError where the folder cannot be made."""
        self.folder.mkdir(parents=True, exist_ok=True)
        now = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%S.%fZ")
        return self.folder / f"{now}-{os.getpid()}.vmap"

    def remove_old(self, running: Path) -> None:
        """Remove the oldest beside ``running``, but none that is written to now."""
        others = sorted((p for p in self.folder.glob("*.vmap") if p != running), reverse=True)
        for path in others[self._keep :]:
            with contextlib.suppress(MapError, OSError):
                lock = WriterLock(path)
                try:
                    path.unlink()
                    path.with_name(f"{path.name}-journal").unlink(missing_ok=True)
                    logger.info("%s is removed: the %d newest are kept (map.keep_sessions)", path, self._keep)
                finally:
                    lock.release()
