"""Download of one file over HTTP that can be cut at any byte and continued, now or in a later run.

What has come so far lies in ``part``, and beside it what the server said of the version it belongs to. A continuation
is asked for with ``If-Range`` (RFC 9110, section 13.1.5), so that a file which changed meanwhile starts again.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import time
import urllib.error
import urllib.request
from pathlib import Path

from ..errors import FetchError
from .cache import writing
from .file_kind import identify
from .progress import Progress

ATTEMPTS = 3
_BLOCK = 1 << 16
_PEEK = 1 << 13  # of a file that is not the one expected: enough to tell what it is


class _Interrupted(Exception):
    """A failure that another attempt may get over."""


def download(
    url: str, part: Path, size: int, progress: Progress, *, timeout_s: float = 20.0, pause_s: float = 1.0
) -> None:
    """Bring the ``size`` bytes of an http or https URL into ``part``, from where ``part`` ends if that is possible.

    Three attempts, with a pause of 1 s and then 2 s; ``timeout_s`` is for one answer of the server, not for the file.
    Proxies are taken from the environment. The content is not judged.

    Raises:
        FetchError: there is no such file, it has not ``size`` bytes (and is removed), or the connection kept failing
            (and what came is kept).
        CacheError: ``part`` cannot be written.
    """
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return _attempt(url, part, size, progress, timeout_s)
        except _Interrupted as interruption:
            if attempt == ATTEMPTS:
                raise FetchError(f"{interruption}, {ATTEMPTS} times; the next fetch continues") from interruption
            time.sleep(pause_s * attempt)


def discard(part: Path) -> None:
    """Remove a partial file and what is known of it."""
    with writing(part.parent):
        part.unlink(missing_ok=True)
        _notes(part).unlink(missing_ok=True)


def _attempt(url: str, part: Path, size: int, progress: Progress, timeout_s: float) -> None:
    have, version = _so_far(part, url, size)
    if have == size:
        return
    headers = {"User-Agent": "vslam-features", "Accept-Encoding": "identity"}
    if have:
        headers |= {"Range": f"bytes={have}-", "If-Range": version}
    try:
        with _opener().open(urllib.request.Request(url, headers=headers), timeout=timeout_s) as response:
            _receive(response, url, part, have, size, progress)
    except urllib.error.HTTPError as error:
        if error.code == 416:  # the file is shorter than what we have of it
            discard(part)
        elif error.code not in (408, 429) and error.code < 500:
            raise FetchError(f"HTTP {error.code} {error.reason}") from error
        raise _Interrupted(f"HTTP {error.code} {error.reason}") from error
    except urllib.error.URLError as error:
        if isinstance(error.reason, socket.gaierror):
            raise FetchError(f"the host is not known here ({error.reason.strerror}); is there a network?") from error
        raise _Interrupted(f"no connection ({error.reason})") from error
    except (http.client.HTTPException, OSError) as error:
        raise _Interrupted(f"the connection broke ({error or type(error).__name__})") from error


def _receive(response, url: str, part: Path, have: int, size: int, progress: Progress) -> None:
    start, total = _extent(response, have)
    if total not in (None, size):
        what = _kind_of(response, part)
        raise FetchError(f"it has {total} bytes, expected {size}{what}")
    with writing(part.parent):
        part.parent.mkdir(parents=True, exist_ok=True)
        if start == 0:
            _notes(part).write_text(json.dumps({"url": url, "version": _version(response)}), encoding="utf-8")
        file = open(part, "r+b" if start else "wb", buffering=0)
    with file:
        file.seek(start)
        done = start
        progress(done, size)
        while block := response.read(min(_BLOCK, size + 1 - done)):
            done += len(block)
            if done > size:
                break
            with writing(part.parent):
                rest = memoryview(block)
                while rest:
                    rest = rest[file.write(rest) :]
            progress(done, size)
    if done > size:
        discard(part)
        raise FetchError(f"it has more than the expected {size} bytes")
    if done < size and total is None:
        what = f"; it is {identify(part)}"
        discard(part)
        raise FetchError(f"it has {done} bytes, expected {size}{what}")
    if done < size:
        raise _Interrupted(f"the connection broke after {done} of {size} bytes")


def _so_far(part: Path, url: str, size: int) -> tuple[int, str]:
    """Bytes that can be continued, and the version that they are of."""
    try:
        notes = json.loads(_notes(part).read_text(encoding="utf-8"))
        have = os.path.getsize(part)
        if notes["url"] == url and notes["version"] and have <= size:
            return have, notes["version"]
    except (OSError, ValueError, KeyError, TypeError):
        pass  # nothing there, or nothing that is understood: start at the first byte
    return 0, ""


def _notes(part: Path) -> Path:
    return part.with_name(part.name + ".json")


def _version(response) -> str:
    """What ``If-Range`` takes: a strong ETag, else the date of the last change, else nothing."""
    etag = response.headers.get("ETag", "")
    return etag if etag.startswith('"') else response.headers.get("Last-Modified", "")


def _extent(response, have: int) -> tuple[int, int | None]:
    """First byte of the body, and size of the whole file where the server says it."""
    if response.status == 206:
        extent = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", ""))
        if not extent or int(extent[1]) != have:
            raise FetchError(f"the server answered with another range than asked for ({have}-)")
        return have, None if extent[2] == "*" else int(extent[2])
    length = response.headers.get("Content-Length", "")
    return 0, int(length) if length.isdigit() else None


def _kind_of(response, part: Path) -> str:
    """What a body that is not the file really is, from its beginning."""
    discard(part)
    with writing(part.parent):
        part.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(response.read(_PEEK))
    kind = identify(part)
    discard(part)
    return f"; it is {kind}"


def _opener() -> urllib.request.OpenerDirector:
    """HTTP and HTTPS only: a redirect leads to no other scheme."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler,
        urllib.request.UnknownHandler,
        urllib.request.HTTPHandler,
        urllib.request.HTTPSHandler,
        urllib.request.HTTPDefaultErrorHandler,
        urllib.request.HTTPRedirectHandler,
        urllib.request.HTTPErrorProcessor,
    ):
        opener.add_handler(handler())
    return opener
