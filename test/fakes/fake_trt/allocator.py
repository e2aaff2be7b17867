"""IOutputAllocator, and how the library calls one."""

from __future__ import annotations

import sys

from .dims import Dims
from .logger import Checked

_ALIGNMENT = 256


class IOutputAllocator(metaclass=Checked):
    """To be derived from: ``reallocate_output_async`` or ``reallocate_output``, and ``notify_shape``."""

    def __init__(self):
        self._constructed = True


def allocate(allocator: IOutputAllocator, name: str, memory: int, size: int, stream: int) -> int:
    """An address; 0 where there is none, which includes what is no number and an exception: neither passes through."""
    try:
        if hasattr(allocator, "reallocate_output_async"):
            got = allocator.reallocate_output_async(name, memory, size, _ALIGNMENT, stream)
        else:
            got = allocator.reallocate_output(name, memory, size, _ALIGNMENT)
        return int(got)
    except Exception as failure:
        print(f"[ERROR] Exception caught in reallocateOutputAsync(): {failure}", file=sys.stderr)
        return 0


def notify(allocator: IOutputAllocator, name: str, shape: tuple[int, ...]) -> None:
    """Tell the shape; an exception does not pass through."""
    try:
        allocator.notify_shape(name, Dims(shape))
    except Exception as failure:
        print(f"[ERROR] Exception caught in notifyShape(): {failure}", file=sys.stderr)
