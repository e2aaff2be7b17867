"""The one writer of a map."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from ..errors import MapError


class WriterLock:
    """Held from construction to ``release``, or to the end of the process, however that comes.

    A file of its own beside the map: closing any handle of the map itself would drop the locks that SQLite holds.
    """

    def __init__(self, path: Path):
        """``path``: of the map. Raises MapError where another holds it, or where its folder cannot be written."""
        self._path = lock_path(path)
        while True:
            try:
                self._file = open(self._path, "a+", encoding="ascii")
            except OSError as error:
                raise MapError(
                    f"{path} cannot be written: no lock file in its folder ({error.strerror}); choose another folder, "
                    "or open the map with mode: localization"
                ) from error
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._file.seek(0)
                holder = self._file.read(20).strip()
                self._file.close()
                raise MapError(
                    f"{path}: another process ({holder or 'unknown'}) writes to this map; end it, or only localise in "
                    "the map (mode: localization, --map-mode localize)"
                ) from None
            except OSError as error:
                self._file.close()
                raise MapError(f"{path} cannot be locked ({error.strerror}): put it on a local disk") from error
            if self._is_there():
                break
            self._file.close()  # removed by the one who had it between our open and our lock
        with contextlib.suppress(OSError):  # who holds it is for people; a full disk takes no word of it
            os.ftruncate(self._file.fileno(), 0)
            os.write(self._file.fileno(), f"pid {os.getpid()}".encode())

    def release(self) -> None:
        """Let others write. Safe to call twice."""
        if not self._file.closed:
            if self._is_there():  # else it was removed, and another may hold a new one
                with contextlib.suppress(OSError):
                    os.unlink(self._path)  # while it is held, so that nobody can hold a file that is gone
            self._file.close()

    def _is_there(self) -> bool:
        with contextlib.suppress(OSError):
            return os.path.samestat(os.fstat(self._file.fileno()), os.stat(self._path))
        return False


def lock_path(path: Path) -> Path:
    """One for all names that symbolic links give a map: SQLite follows them, too."""
    real = Path(os.path.realpath(path))
    return real.with_name(f".{real.name}.lock")


def is_written(path: Path) -> bool:
    """True where some process writes to a map now. Leaves no file behind."""
    try:
        handle = os.open(lock_path(path), os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False
