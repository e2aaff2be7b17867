"""Entry points of the node executables: a signal during the imports (a second or more) ends them cleanly, too."""

from __future__ import annotations

import importlib
import os
import signal


def frontend() -> int:
    """``frontend_node``."""
    return _main("frontend_node")


def player() -> int:
    """``player_node``."""
    return _main("player_node")


def recorder() -> int:
    """``recorder_node``."""
    return _main("recorder_node")


def _main(module: str) -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)
    return importlib.import_module(f"{__package__}.{module}").main()


def _leave(*_) -> None:
    os._exit(0)  # an exception may be swallowed, or turned into another, within an import
