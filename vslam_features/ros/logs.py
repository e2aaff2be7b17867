"""The core's Python log records through the node's logger, so that they reach the console and /rosout."""

from __future__ import annotations

import logging
import time
import traceback

EVERY_S = 2.0
"""A line of code that logs at camera rate is heard once in this time, with the count of what was left out."""


class RosHandler(logging.Handler):
    """Forwards records; a traceback goes to debug, its last line with the message."""

    def __init__(self, logger, clock=time.monotonic):
        super().__init__()
        self._logger, self._clock = logger, clock
        self._heard: dict[tuple[str, int], float] = {}
        self._left_out: dict[tuple[str, int], int] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """See ``logging.Handler``."""
        try:
            self._emit(record)
        except Exception:  # what cannot be told must not end the thread that tells it
            self.handleError(record)

    def _emit(self, record: logging.LogRecord) -> None:
        place, now = (record.pathname, record.lineno), self._clock()
        if now < self._heard.get(place, float("-inf")) + EVERY_S:
            self._left_out[place] = self._left_out.get(place, 0) + 1
            return
        self._heard[place] = now
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            text += f": {''.join(traceback.format_exception_only(*record.exc_info[:2])).strip()}"
            self._logger.debug(encodable("".join(traceback.format_exception(*record.exc_info))))
        if count := self._left_out.pop(place, 0):
            text += f" ({count} more like this)"
        text = encodable(text)
        # rclpy keeps the severity of a call site, so each level is a line of its own
        if record.levelno >= logging.ERROR:
            self._logger.error(text)
        elif record.levelno >= logging.WARNING:
            self._logger.warning(text)
        elif record.levelno >= logging.INFO:
            self._logger.info(text)
        else:
            self._logger.debug(text)


def encodable(text: str) -> str:
    """The text with ``?`` for what ROS cannot send: lone surrogates, as of file names that are not UTF-8."""
    return text.encode("utf-8", errors="replace").decode("utf-8")
