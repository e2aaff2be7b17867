"""IHostMemory: bytes by the buffer protocol, and by nothing else."""

from __future__ import annotations

import ctypes

from .enums import DataType


class IHostMemory:
    """Take its bytes with ``memoryview`` or ``bytes``; it has no ``len``."""

    dtype = property(lambda self: DataType.INT8)
    nbytes = property(lambda self: memoryview(self).nbytes)

    def __len__(self):
        raise TypeError("object of type 'IHostMemory' has no len()")

    def __getitem__(self, index):
        raise TypeError("'IHostMemory' object is not subscriptable")

    def __iter__(self):
        raise TypeError("'IHostMemory' object is not iterable")


def host_memory(content: bytes) -> IHostMemory:
    """A copy of ``content``."""
    kind = type("IHostMemory", (IHostMemory, ctypes.c_ubyte * len(content)), {})
    made = kind()
    ctypes.memmove(ctypes.addressof(made), content, len(content))
    return made
