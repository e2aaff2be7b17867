"""Threads that work on what waits in slots."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

from .slot import Slot

logger = logging.getLogger(__name__)


class Worker:
    """A thread that calls ``work(item)`` for what comes into its slot, between ``start`` and ``stop``.

    Args:
        name: of the thread, for people.
        slot: where items come from.
        work: must not block for ever. An exception, SystemExit included, costs one
            item: it is given to ``failed(error)``, logged, and the thread goes on.
        niceness: 0 to 19; a higher one leaves the CPU to others (Linux).
    """

    def __init__(
        self,
        name: str,
        slot: Slot,
        work: Callable,
        failed: Callable[[BaseException], None],
        niceness: int = 0,
    ):
        self.name, self.slot = name, slot
        self._work, self._failed, self._niceness = work, failed, niceness
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to work."""
        self.slot.open()
        self._thread = threading.Thread(target=self._loop, name=self.name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Finish the item at hand, drop the others (counted), join the thread. Safe to call twice."""
        self.slot.close()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _loop(self) -> None:
        if self._niceness and hasattr(os, "setpriority"):
            # On Linux a niceness is per thread when it is given the thread's own id.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._niceness)
        while (item := self.slot.take()) is not None:
            try:
                self._work(item)
            except BaseException as error:  # the robot goes on; the loss is counted and shown
                self._failed(error)
                logger.exception("%s: an item is lost", self.name)
            finally:
                self.slot.done()
