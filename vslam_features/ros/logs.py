"""The core's Python log records through the node's logger, so that they reach the console and /rosout."""

from __future__ import annotations

import logging
import traceback


class RosHandler(logging.Handler):
    """Forwards records; a traceback goes to debug, its last line with the message."""

    def __init__(self, logger):
        super().__init__()
        self._logger = logger

    def emit(self, record: logging.LogRecord) -> None:
        """See ``logging.Handler``."""
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            text += f": {''.join(traceback.format_exception_only(*record.exc_info[:2])).strip()}"
            self._logger.debug("".join(traceback.format_exception(*record.exc_info)))
        # rclpy keeps the severity of a call site, so each level is a line of its own
        if record.levelno >= logging.ERROR:
            self._logger.error(text)
        elif record.levelno >= logging.WARNING:
            self._logger.warning(text)
        elif record.levelno >= logging.INFO:
            self._logger.info(text)
        else:
            self._logger.debug(text)
