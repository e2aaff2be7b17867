"""A web server on 127.0.0.1 for the tests of downloads: byte ranges, and faults on demand."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Site:
    """One file at ``/file`` and how it is served; ``asked`` has (Range, If-Range, status) of each request.

    Args:
        cuts: the n-th answer ends after so many bytes of body (None: whole).
        statuses: the n-th answer is this error (None: none).
        replacements: content that takes the place of the file, with a new tag, before the n-th answer.
        chunk_s: pause between blocks of 1000 bytes.
    """

    content: bytes
    etag: str = '"1"'
    last_modified: str = ""
    ranges: bool = True
    length: bool = True
    cuts: list = field(default_factory=list)
    statuses: list = field(default_factory=list)
    replacements: list = field(default_factory=list)
    redirect: str = ""
    chunk_s: float = 0.0
    asked: list = field(default_factory=list)
    url: str = ""


@contextlib.contextmanager
def serve(content: bytes, **how):
    """A :class:`Site` that is served while the block runs."""
    site = Site(content, **how)

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args):
            pass

        def do_GET(self):
            if self.path == "/moved":
                self.send_response(302)
                self.send_header("Location", site.redirect or "/file")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            _answer(self, site)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    site.url = f"http://127.0.0.1:{server.server_port}/file"
    try:
        yield site
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _answer(request: BaseHTTPRequestHandler, site: Site) -> None:
    if replacement := _next(site.replacements):
        site.content, site.etag = replacement, f'"{hash(replacement)}"'
    wanted, unless = request.headers.get("Range"), request.headers.get("If-Range")
    status, start = _next(site.statuses) or 200, 0
    if status == 200 and wanted and site.ranges and unless in (site.etag, site.last_modified):
        start = int(re.fullmatch(r"bytes=(\d+)-", wanted)[1])
        status = 206 if start < len(site.content) else 416
    site.asked.append((wanted, unless, status))
    body = site.content[start:] if status < 400 else b"<html><title>Not here</title></html>"
    request.send_response(status)
    if site.length:
        request.send_header("Content-Length", str(len(body)))
    if status == 206:
        request.send_header("Content-Range", f"bytes {start}-{len(site.content) - 1}/{len(site.content)}")
    if site.etag:
        request.send_header("ETag", site.etag)
    if site.last_modified:
        request.send_header("Last-Modified", site.last_modified)
    request.end_headers()
    cut = _next(site.cuts) if status < 400 else None
    try:
        for at in range(0, len(body[:cut]), 1000):
            request.wfile.write(body[:cut][at : at + 1000])
            time.sleep(site.chunk_s)
    except (BrokenPipeError, ConnectionResetError):
        pass  # the client gave up, as some tests want


def _next(script: list):
    return script.pop(0) if script else None
