"""Work in another thread, or here where none is to be had."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

T = TypeVar("T")


def started(pool: Executor, work: Callable[[], T]) -> Callable[[], T]:
    """Waits for the work and gives what it made. While the interpreter ends no thread starts: then that does it."""
    try:
        return pool.submit(work).result
    except RuntimeError:
        return work
