"""Streams, events and graphs: work is queued, and done when somebody waits for it."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable

from .device import current

Work = Callable[[], None]
_handles = itertools.count(0x5EED0000, 0x100)
LOCK = threading.RLock()


class Invalid(Exception):
    """A call that CUDA refuses while a stream is captured; ``name`` of the error."""

    def __init__(self, name: str):
        super().__init__(name)
        self.name = name


class Stream:
    """A queue of work. ``blocking`` ones wait for the default stream, and it for them."""

    def __init__(self, blocking: bool = True):
        self.handle, self.device, self.blocking = next(_handles), current(), blocking
        self.queue: deque[Work] = deque()
        self.done = self.put = 0
        self.capture: Capture | None = None
        self._running = threading.RLock()

    def add(self, work: Work) -> int:
        """Queue work, or record it while capturing; its number in the queue."""
        with LOCK:
            if self.capture:
                self.capture.nodes.append(work)
                return self.put
            for other in _rivals(self):
                break_capture(other, "cudaErrorStreamCaptureImplicit")
                other.drain()
            self.queue.append(work)
            self.put += 1
            return self.put

    def drain(self, until: int | None = None) -> None:
        """Do what is queued, up to number ``until``."""
        with self._running:
            while self.queue and (until is None or self.done < until):
                self.done += 1
                self.queue.popleft()()


class Capture:
    """What a stream records between begin and end; ``mode`` is global, thread_local or relaxed."""

    def __init__(self, mode: str):
        self.mode, self.thread, self.nodes, self.broken = mode, threading.get_ident(), [], False


class Event:
    """A mark in a stream."""

    def __init__(self):
        self.handle, self.stream, self.number, self.time = next(_handles), None, 0, None

    def record(self, stream: Stream) -> None:
        """Put the mark; its time is taken when the stream gets there."""
        self.time, self.stream = None, stream
        self.number = stream.add(self._stamp)

    def wait(self) -> None:
        """Until the stream has got there."""
        if self.stream is not None:
            self.stream.drain(self.number)

    def _stamp(self) -> None:
        self.time = time.perf_counter()


class Graph:
    """Recorded work; an instance of it can be launched."""

    def __init__(self, nodes: list[Work]):
        self.handle, self.nodes = next(_handles), list(nodes)

    def launch(self) -> None:
        """Do all of it."""
        for node in self.nodes:
            node()


DEFAULT = Stream()
STREAMS: dict[int, Stream] = {}
EVENTS: dict[int, Event] = {}
GRAPHS: dict[int, Graph] = {}
INSTANCES: dict[int, Graph] = {}


def drain_all() -> None:
    """What ``cudaDeviceSynchronize`` and ``cudaFree`` wait for."""
    for stream in [DEFAULT, *STREAMS.values()]:
        stream.drain()


def forbid_while_capturing() -> None:
    """Raise Invalid, and break the capture, where one is going on that this call about the whole device would harm."""
    for stream in STREAMS.values():
        capture = stream.capture
        mine = capture is not None and capture.thread == threading.get_ident()
        if capture and (capture.mode == "global" or (capture.mode == "thread_local" and mine)):
            break_capture(stream)


def break_capture(stream: Stream, error: str = "cudaErrorStreamCaptureUnsupported") -> None:
    """A call that no captured stream can take; without effect on one that is not captured."""
    if stream.capture:
        stream.capture.broken = True
        raise Invalid(error)


def _rivals(stream: Stream) -> list[Stream]:
    if stream is DEFAULT:
        return [each for each in STREAMS.values() if each.blocking]
    return [DEFAULT] if stream.blocking else []
