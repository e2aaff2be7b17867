"""Where the map of a run is when nobody named a file: one file a run, the newest few are kept."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from datetime import datetime, timedelta, timezone
from pathlib import Path

from .errors import MapError
from .maps.lock import WriterLock

logger = logging.getLogger(__name__)

_STAMP, _NAME = "%Y%m%dT%H%M%S.%fZ", re.compile(r"(\d{8}T\d{6}\.\d{6}Z)-\d+\.vmap")


def state_folder() -> Path:
    """``$VSLAM_FEATURES_STATE``, else ``vslam_features`` in the user's folder for state.

    Raises MapError where the user has no home folder.
    """
    try:
        if own := os.environ.get("VSLAM_FEATURES_STATE"):
            return Path(own).expanduser().absolute()
        base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
        return Path(base).expanduser().absolute() / "vslam_features"
    except RuntimeError as error:  # as in a container with a user id of its own
        raise MapError(f"no folder for the maps of runs: {str(error).rstrip('.')}") from error


def in_use(path: Path) -> WriterLock:
    """Marks a file that is only read, so that no other run removes it; to be released. Raises MapError."""
    return WriterLock(path.with_name(f"{path.name}.read"))


class SessionFiles:
    """The folder ``sessions`` in the state folder.

    Args:
        keep: files of earlier runs that stay.
    """

    def __init__(self, keep: int):
        self._keep = keep

    def new(self) -> Path:
        """A name that is not taken, in the order of runs also where the clock was set back.

        Raises OSError where the folder cannot be made, MapError where there is no place for it.
        """
        folder = state_folder() / "sessions"
        folder.mkdir(parents=True, exist_ok=True)
        stamp, taken = datetime.now(timezone.utc).strftime(_STAMP), _newest(folder)
        if stamp <= taken:
            stamp = (datetime.strptime(taken, _STAMP) + timedelta(microseconds=1)).strftime(_STAMP)
        return folder / f"{stamp}-{os.getpid()}.vmap"

    def remove_old(self, running: Path) -> None:
        """Remove the oldest beside ``running``, but none that is used now."""
        others = sorted((p for p in running.parent.glob("*.vmap") if p != running), reverse=True)
        for path in others[self._keep :]:
            with contextlib.suppress(MapError, OSError), contextlib.ExitStack() as held:
                for lock in (WriterLock, in_use):
                    held.callback(lock(path).release)
                path.unlink()
                path.with_name(f"{path.name}-journal").unlink(missing_ok=True)
                logger.info("%s is removed: the %d newest are kept (map.keep_sessions)", path, self._keep)


def _newest(folder: Path) -> str:
    names = (_NAME.fullmatch(path.name) for path in folder.glob("*.vmap"))
    return max((name[1] for name in names if name), default="")
