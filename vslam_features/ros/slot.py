"""Where the newest item waits for a worker; older ones are dropped and counted."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True)
class Counts:
    """What went through a slot: received = processed + dropped + waiting, at any moment."""

    received: int
    processed: int
    dropped: int
    waiting: int


class Slot:
    """A queue between threads that keeps the newest ``capacity`` items; ``put`` never blocks.

    With capacity 1 it is the slot of the newest frame. The item a worker took
    counts as waiting until ``done``. Items put with ``counted=False`` are
    commands (such as a reset) and appear in no count.
    """

    def __init__(self, capacity: int = 1):
        self._items: deque[tuple[object, bool]] = deque()
        self._capacity = capacity
        self._changed = threading.Condition()  # reentrant
        self._received = self._processed = self._dropped = 0
        self._in_work: bool | None = None
        self._closed = False

    def put(self, item, counted: bool = True) -> None:
        """Add an item, dropping the oldest where the slot is full. A closed slot drops it."""
        with self._changed:
            self._received += counted
            if self._closed:
                self._dropped += counted
                return
            if len(self._items) == self._capacity:
                self._dropped += self._items.popleft()[1]
            self._items.append((item, counted))
            self._changed.notify_all()

    def take(self):
        """The oldest waiting item, waited for; None once the slot is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._closed)
            if self._closed:
                return None
            item, self._in_work = self._items.popleft()
            return item

    def done(self) -> None:
        """The item taken last is processed."""
        with self._changed:
            self._processed += bool(self._in_work)
            self._in_work = None
            self._changed.notify_all()

    def wait_idle(self) -> bool:
        """Wait until all items are processed; False where the slot was closed first."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not (self._items or self._in_work is not None))
            return not self._closed

    def wait_still(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing waits and nothing is at work, also in a closed slot; False where time ran out."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._items and self._in_work is None, timeout_s)

    def clear(self) -> None:
        """Drop what waits (counted)."""
        with self._changed:
            self._dropped += sum(counted for _, counted in self._items)
            self._items.clear()
            self._changed.notify_all()

    def close(self) -> None:
        """Drop what waits (counted) and let ``take`` return None."""
        with self._changed:
            self._closed = True
            self.clear()

    def open(self) -> None:
        """Accept items again after ``close``; counts go on."""
        with self._changed:
            self._closed = False

    @property
    def counts(self) -> Counts:
        """A consistent snapshot."""
        with self._changed:
            waiting = sum(counted for _, counted in self._items) + bool(self._in_work)
            return Counts(self._received, self._processed, self._dropped, waiting)
