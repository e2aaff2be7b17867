"""Rows of a map that are far apart in its file, read by several readers: a disk serves them side by side."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from ..errors import MapError

if TYPE_CHECKING:
    from .reader import MapReader

T, R = TypeVar("T"), TypeVar("R")

READERS = 4
"""More gave nothing on a virtual disk; one takes twice as long."""


def in_order(reader: MapReader, read: Callable[[MapReader, T], R], batches: Sequence[T]) -> Iterator[R]:
    """What ``read`` gives for each batch, in order; a few are read ahead. Raises what ``read`` raises."""
    with contextlib.ExitStack() as opened:
        readers = [reader]
        with contextlib.suppress(MapError):  # no further one is to be had: there is the first
            for _ in range(min(READERS, len(batches)) - 1):
                readers.append(opened.enter_context(reader.twin()))
        pools = [opened.enter_context(ThreadPoolExecutor(1, thread_name_prefix="map reader")) for _ in readers]
        waiting = deque()
        for i, batch in enumerate(batches):
            waiting.append(pools[i % len(pools)].submit(read, readers[i % len(pools)], batch))
            if len(waiting) > len(pools):
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
