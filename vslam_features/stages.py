"""Stages of the pipeline with their latency and their faults."""

from __future__ import annotations

import logging
import time

logger = logging.getLogger(__name__)


class Stages:
    """Runs the stages of one frame; a fault costs the stage's result, is logged and recorded.

    Attributes:
        latency_ms: stage -> wall time in milliseconds, summed over its runs.
        faults: stage -> text of its last fault.
    """

    def __init__(self):
        self.latency_ms: dict[str, float] = {}
        self.faults: dict[str, str] = {}

    def run(self, stage: str, function, *args):
        """The function's result, or None after a fault."""
        start = time.perf_counter()
        try:
            return function(*args)
        except Exception as error:  # any plug-in may fail in any way; the robot goes on
            self.faults[stage] = f"{type(error).__name__}: {error}"
            logger.exception("stage '%s' failed; its result for this frame is lost", stage)
            return None
        finally:
            self.latency_ms[stage] = self.latency_ms.get(stage, 0.0) + (time.perf_counter() - start) * 1e3
