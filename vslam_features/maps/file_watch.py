"""What other programs do to a map file while it is open."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import MapError


class FileWatch:
    """Tells when a file is no longer the one of its name, or not whole.

    SQLite itself would write on into a file that has no name any more. Raises MapError where there is no file.
    """

    def __init__(self, path: Path, read_only: bool):
        self._path, self._read_only, self.cut = path, read_only, ""
        try:
            self._file = os.stat(path)
        except OSError as error:
            raise MapError(f"{path}: {error.strerror or error}") from error
        self._size = 0 if read_only else self._file.st_size  # to a reader a rollback of the writer looks like a cut

    @property
    def astray(self) -> str:
        """What happened to the file, in words; empty where all is well. ``cut``: that it was cut short."""
        size = self._size  # before the look at the file, which grows meanwhile
        try:
            now = os.stat(self._path)
        except FileNotFoundError:
            return f"{self._path} was removed or renamed by another program: {self._advice}"
        except OSError as error:
            return f"{self._path}: {error.strerror or error}"
        if not os.path.samestat(now, self._file):
            return f"another file has taken the place of {self._path}: {self._advice}"
        if now.st_size < size:  # for good: the next keyframe would make it as long again, with a hole
            self.cut = f"{self._path} was cut short by another program: 'map recover' saves what is intact of it"
        return self.cut

    def grown(self, size: int) -> None:
        """It is so many bytes long by what its writer did."""
        self._size = max(self._size, size)

    @property
    def _advice(self) -> str:
        if self._read_only:
            return "places are recognised in the one that was opened, until it is left"
        return "what is mapped is lost when it is left; save the running map to another file"
