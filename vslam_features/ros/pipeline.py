"""The front-end on its two threads: frames through ``track``, keyframes through ``close_loops``.

Knows no messages: images and calibration pass through as they came, ``decode`` reads them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..errors import VslamFeaturesError
from ..frontend import FrontEnd
from ..types import Frame, Loops, Tracked
from .pairing import Input
from .slot import Slot
from .statistics import Statistics
from .workers import Worker

logger = logging.getLogger(__name__)

LOOP_QUEUE = 16
"""Keyframes that may wait for loop closure; beyond, the oldest is left out and counted."""

GRACE_S = 0.3
"""That loop closure gets to catch up before maps are exchanged."""


class Pipeline:
    """Runs a :class:`FrontEnd` on the newest input.

    Args:
        frontend: used by this pipeline's threads only, between ``start`` and ``stop``.
        decode: Input -> Frame; runs in the track thread and may raise.
        statistics: where latencies, faults and results are counted.
        on_tracked, on_loops: called in the two threads with each result.
        restart: called in the track thread when a session begins, with True where it was by a reset, False after a
            jump back in time. Exchanges the map of the front-end; True where ids count from the beginning again.
    """

    def __init__(
        self,
        frontend: FrontEnd,
        decode: Callable[[Input], Frame],
        statistics: Statistics,
        on_tracked: Callable[[Tracked], None],
        on_loops: Callable[[Loops], None],
        restart: Callable[[bool], bool],
    ):
        self.frontend, self.statistics = frontend, statistics
        self.frames, self.keyframes = Slot(), Slot(LOOP_QUEUE)
        self._decode, self._on_tracked, self._on_loops, self._restart = decode, on_tracked, on_loops, restart
        self._session = 0
        # Who waits for the second holds the first: the track thread, which comes back for it at once, lets him in.
        self._asked, self._in_use = threading.Lock(), threading.Lock()
        self._workers = [
            Worker("track", self.frames, self._track, lambda error: self._failed("track", error)),
            Worker("close_loops", self.keyframes, self._close_loops, lambda error: self._failed("close_loops", error)),
        ]

    def start(self) -> None:
        """Begin to process. Keyframes of an earlier run are still there."""
        for worker in reversed(self._workers):
            worker.start()

    def stop(self) -> None:
        """Finish what is at hand and end the threads. Safe to call twice."""
        for worker in self._workers:
            worker.slot.close()  # first both: the track thread may be waiting for the other's queue
        for worker in self._workers:
            worker.stop()

    def put(self, item: Input) -> None:
        """Let the newest input wait; an older one that still waits is dropped and counted."""
        self.frames.put(item, counted=item.image is not None)

    @contextmanager
    def between_frames(self) -> Iterator[None]:
        """In the block nobody else uses the front-end; images wait in their slot. Also where it is stopped.

        Keyframes that loop closure does not reach within a moment are left out and counted: somebody waits for the
        block. Not for the pipeline's own threads.
        """
        with self._asked, self._in_use:
            if not self.keyframes.wait_still(GRACE_S):
                self.keyframes.clear()
                self.keyframes.wait_still()
            yield

    def _track(self, item: Input) -> None:
        with self._asked:
            pass
        with self._in_use:
            self._process(item)

    def _process(self, item: Input) -> None:
        if item.session != self._session and not self._begin(item):
            return  # stopped meanwhile; the next image begins the session
        if item.image is None:
            return
        start = time.perf_counter()
        try:
            frame = self._decode(item)
        except VslamFeaturesError as error:
            self.statistics.fault("decode", str(error))
            logger.error("the image at %d ns is lost: %s", item.stamp_ns, error)
            return
        finally:
            self.statistics.latency("decode", (time.perf_counter() - start) * 1e3)
        tracked = self.frontend.track(frame)
        self.statistics.tracked(tracked)
        self._on_tracked(tracked)
        if tracked.keyframe is not None and self.frontend.config.loops.enabled:
            self.keyframes.put(tracked)

    def _close_loops(self, tracked: Tracked) -> None:
        loops = self.frontend.close_loops(tracked)
        self.statistics.loops(loops)
        self._on_loops(loops)

    def _begin(self, item: Input) -> bool:
        """Begin a session, once the loops of the old keyframes are searched for: the same input gives the same.

        False where the pipeline was stopped before that.
        """
        if not self.keyframes.wait_idle():
            return False
        anew = self._restart(item.reset > self._session)
        self._session = item.session
        if anew:
            self.statistics.reset()
        return True

    def _failed(self, stage: str, error: BaseException) -> None:
        self.statistics.fault(stage, f"{type(error).__name__}: {error}")
