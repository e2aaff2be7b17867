"""Progress of bytes: what work reports, and the bar that shows it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from tqdm import tqdm

Progress = Callable[[int, int], None]
"""Called with bytes done so far and bytes in all (0 where unknown)."""

Bar = Callable[[str], AbstractContextManager[Progress]]
"""Opens the progress of one piece of work, by its label."""


@contextlib.contextmanager
def bar(label: str) -> Iterator[Progress]:
    """A bar on stderr; nothing where that is no terminal."""
    with tqdm(desc=label, unit="B", unit_scale=True, unit_divisor=1024, disable=None, leave=False) as shown:

        def update(done: int, total: int) -> None:
            shown.total = total or None
            shown.update(done - shown.n)

        yield update


@contextlib.contextmanager
def silent(label: str) -> Iterator[Progress]:
    """No progress."""
    yield lambda done, total: None
