"""The folder of fetched weights, built models, parity records and incidents, and how files get into it.

``$VSLAM_FEATURES_CACHE``, else ``$XDG_CACHE_HOME/vslam_features``, else ``~/.cache/vslam_features``. A file is there
whole or not at all, and copying the folder to another machine copies what was fetched.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from ..errors import CacheError
from .progress import Progress

VARIABLE = "VSLAM_FEATURES_CACHE"
FOLDERS = ("weights", "models", "engines", "records", "incidents")
_BLOCK = 1 << 20
_STAGING = ".staging-"


def cache_root() -> Path:
    """The folder; it need not exist. An XDG path that is not absolute is ignored, as that standard asks."""
    if own := os.environ.get(VARIABLE):
        return Path(own).expanduser().absolute()
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(xdg):
        return Path(xdg) / "vslam_features"
    try:
        return Path.home() / ".cache" / "vslam_features"
    except RuntimeError as error:
        raise CacheError(f"there is no home folder for a cache ({error}): set {VARIABLE} to a folder") from error


def cache_folder(name: str) -> Path:
    """One of ``FOLDERS`` below the root; made by what writes to it, not by this."""
    if name not in FOLDERS:
        raise ValueError(f"cache folder {name!r}, expected one of {', '.join(FOLDERS)}")
    return cache_root() / name


def sha256_of(path: str | Path, progress: Progress | None = None) -> str:
    """SHA-256 of a file, 64 hexadecimal digits. Raises CacheError where it cannot be read."""
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            while block := file.read(_BLOCK):
                digest.update(block)
                if progress:
                    progress(file.tell(), size)
    except OSError as error:
        raise CacheError(f"{path} cannot be read: {error.strerror or error}") from error
    return digest.hexdigest()


def place(target: str | Path, content: bytes) -> Path:
    """Write a file whole or not at all; folders are made, an older file is replaced. Raises CacheError."""
    target = Path(target)
    with placing(target) as file, writing(target.parent):
        file.write(content)
    return target


@contextlib.contextmanager
def placing(target: str | Path) -> Iterator[BinaryIO]:
    """A file to write that becomes ``target`` when the block ends well, and vanishes when it does not.

    It lies beside ``target`` under a name of its own, since only a rename within one file system is atomic and another
    process may place the same file. Raises CacheError for what goes wrong here; what the block raises passes through.
    """
    target = Path(target)
    with writing(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}")
        file = open(part, "xb")
    placed = False
    try:
        yield file
        with writing(target.parent):
            file.flush()
            os.fsync(file.fileno())
            file.close()
            os.replace(part, target)
        placed = True
    finally:
        if not placed:
            file.raw.close()  # closing the file itself would flush again, fail again, and hide the reason
            with contextlib.suppress(OSError):
                os.unlink(part)


@contextlib.contextmanager
def staging(folder: str | Path) -> Iterator[Path]:
    """A hidden folder inside ``folder`` for files that are checked before they count; it vanishes with what is left.

    One of a process that was killed vanishes at the next call: a lock, which ends with its process, tells them apart.
    Raises CacheError where it cannot be made.
    """
    folder = Path(folder)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob(f"{_STAGING}*"):
            _remove_unless_held(old)
        scratch = Path(tempfile.mkdtemp(prefix=_STAGING, dir=folder))
        held = os.open(scratch, os.O_RDONLY)
    try:
        _try_lock(held, scratch)
        yield scratch
    finally:
        os.close(held)
        shutil.rmtree(scratch, ignore_errors=True)


def _remove_unless_held(scratch: Path) -> None:
    with contextlib.suppress(FileNotFoundError):  # another process was faster
        file = os.open(scratch, os.O_RDONLY)
        try:
            if _try_lock(file, scratch):
                shutil.rmtree(scratch, ignore_errors=True)
        finally:
            os.close(file)


def adopt(file: str | Path, target: str | Path) -> Path:
    """Rename a finished file of the same disk to ``target``, durably; an older one is replaced. Raises CacheError."""
    target = Path(target)
    with writing(target.parent):
        with open(file, "rb") as stream:
            os.fsync(stream.fileno())
        os.replace(file, target)
    return target


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turns an OSError of the block into the CacheError that names the folder and what can be done.

    The cache's variable is of no help for a folder that the user named.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            there = f", {_free_mb(folder)} MB free" if error.errno == errno.ENOSPC else ""
            remedy, other = "make room there, or ", "on another disk"
        else:
            there, remedy, other = "", "", "that you may write to"
        remedy += f"set {VARIABLE} to" if _in_cache(folder) else "name"
        raise CacheError(f"cannot write to {folder} ({reason}{there}): {remedy} a folder {other}") from error


@contextlib.contextmanager
def locked(target: Path, waiting: Callable[[], None] | None = None) -> Iterator[None]:
    """Holds the lock file of ``target`` against other processes; ``waiting`` is called once where one has it.

    The lock ends with the process, however it ends; the empty file stays. Raises CacheError.
    """
    path = target.with_name(f".{target.name}.lock")
    with writing(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "wb")
    with file:
        while not _try_lock(file, path):
            if waiting:
                waiting()
                waiting = None
            time.sleep(0.1)
        yield


def _try_lock(file: BinaryIO | int, path: Path) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise CacheError(
            f"{path} cannot be locked ({error.strerror}): set {VARIABLE} to a folder on a local disk"
        ) from error
    return True


def _in_cache(folder: Path) -> bool:
    try:
        return cache_root() in (folder, *folder.absolute().parents)
    except CacheError:
        return False


def _free_mb(folder: Path) -> int:
    try:
        return shutil.disk_usage(folder).free >> 20
    except OSError:
        return 0
