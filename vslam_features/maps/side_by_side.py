"""Rows of a map that are far apart in its file, read by several readers: a disk serves them side by side."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from ..errors import MapError
from .threads import started

if TYPE_CHECKING:
    from .reader import MapReader

T, R = TypeVar("T"), TypeVar("R")

READERS = 3
"""More gave nothing with two cores and a virtual disk; one takes twice as long where the disk is read."""


def side_by_side(reader: MapReader, read: Callable[[MapReader, T], R], batches: Sequence[T]) -> Iterator[R]:
    """What ``read`` gives for each batch, in order. Raises what ``read`` raises.

    Nothing is read while the caller looks at what came: no thread and no lock is left where it goes away.
    """
    with contextlib.ExitStack() as opened:
        readers = [reader]
        with contextlib.suppress(MapError):  # no further one is to be had: there is the first
            for _ in range(min(READERS, len(batches)) - 1):
                readers.append(opened.enter_context(reader.twin()))
        for i in range(0, len(batches), len(readers)):
            yield from _at_once(readers, read, batches[i : i + len(readers)])


def _at_once(readers: Sequence[MapReader], read: Callable[[MapReader, T], R], batches: Sequence[T]) -> list[R]:
    own, *others = (partial(read, *pair) for pair in zip(readers, batches))
    with ThreadPoolExecutor(len(readers), thread_name_prefix="map reader") as pool:
        results = [started(pool, work) for work in others]
        return [own(), *(result() for result in results)]
