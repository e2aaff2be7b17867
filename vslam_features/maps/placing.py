"""A file that appears under its name whole or not at all, also when the power fails."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path

from ..errors import MapError


@contextlib.contextmanager
def placed_file(target: Path, *, replace: bool) -> Iterator[Path]:
    """A path beside ``target`` for the block to write to, which becomes ``target`` when the block ends well.

    Beside, since only a rename within one file system is atomic. Its content is on the disk before the rename, and
    the rename before this returns: otherwise a power cut could leave an empty file under the name. Half-written files
    of processes that were killed are removed.

    Args:
        replace: an older target is replaced; else it is an error that one is there.
    Raises:
        MapError: the folder is missing or cannot be written, or there is a target. The block's own errors pass through.
    """
    target = Path(os.path.abspath(target.expanduser()))
    _check(target, replace)
    remove_leftovers(target)
    part = target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.part")
    try:
        yield part
        _check(target, replace)  # it may have come meanwhile
        with _named(target):
            sync(part)
            _remove_journals(target)
            os.replace(part, target)
            sync(target.parent)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(part)
        with contextlib.suppress(OSError):
            os.unlink(f"{part}-journal")


def remove_leftovers(target: Path) -> None:
    """Remove what processes that are no more left of files on their way to ``target``."""
    pattern = re.compile(rf"\.{re.escape(target.name)}\.(\d+)-[0-9a-f]{{8}}\.part(-journal)?")
    with contextlib.suppress(OSError):
        for entry in os.scandir(target.parent):
            match = pattern.fullmatch(entry.name)
            if match and not _alive(int(match[1])):
                os.unlink(entry.path)


def _remove_journals(target: Path) -> None:
    """Whatever lies beside the name belongs to an older file: SQLite would roll it back into the new one.

    Synced before the rename, as the disk may do the two in any order. Also where there is nothing now: it may have
    been removed just before.
    """
    for suffix in ("-journal", "-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{target}{suffix}")
    sync(target.parent)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OverflowError, PermissionError):
        return True
    return True


def _check(target: Path, replace: bool) -> None:
    if not target.parent.is_dir():
        raise MapError(f"{target}: the folder {target.parent} does not exist; create it, or choose another one")
    if os.path.lexists(target) and not replace:
        raise MapError(f"{target} is there already: choose another name, or remove it")
    if target.is_dir():
        raise MapError(f"{target} is a folder: give the name of a file in it")


def sync(path: Path) -> None:
    """Return once a file, or the names in a folder, are on the disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def _named(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise MapError(f"{target} cannot be written: {error.strerror or error}") from error
