"""Memory of the device and pinned memory of the host, by address, with bounds and lifetimes watched."""

from __future__ import annotations

import bisect
import ctypes
import threading
from dataclasses import dataclass, field

import numpy as np

from .device import current
from .faults import misuse

_ALIGNMENT = 512  # cudaMalloc gives at least 256
_QUARANTINE = 256 << 20  # bytes of freed memory that is kept, so that no new allocation hides a use after free
_NEW, _FREED = 0xCD, 0xDD  # neither is zero: nobody shall count on fresh memory


class OutOfMemory(Exception):
    """More than the GPU has."""


@dataclass
class Block:
    """An allocation; ``kind`` is ``device`` or ``pinned``."""

    address: int
    size: int
    kind: str
    device: int
    bytes: np.ndarray = field(repr=False)
    freed: bool = False


class Memory:
    """All allocations of the process."""

    def __init__(self):
        self._lock = threading.RLock()
        self._addresses: list[int] = []
        self._blocks: dict[int, Block] = {}
        self._graves: list[Block] = []

    def allocate(self, size: int, kind: str, limit: int) -> int:
        """Address of ``size`` bytes, not zeroed. Raises OutOfMemory above ``limit`` bytes of the device in all."""
        if kind == "device" and self.total("device") + size > limit:
            raise OutOfMemory
        raw = np.full(size + _ALIGNMENT, _NEW, np.uint8)
        start = -raw.ctypes.data % _ALIGNMENT
        block = Block(raw.ctypes.data + start, size, kind, current(), raw[start : start + size])
        with self._lock:
            bisect.insort(self._addresses, block.address)
            self._blocks[block.address] = block
        return block.address

    def free(self, address: int, kind: str) -> None:
        """Raises Misuse for what was freed before, is no start of an allocation, or is of the other kind."""
        with self._lock:
            block = self._blocks.get(address)
            if block is None:
                raise misuse(f"free of {address:#x}, which is no start of an allocation")
            if block.freed:
                raise misuse(f"double free of {kind} memory {address:#x} ({block.size} bytes)")
            if block.kind != kind:
                raise misuse(f"{block.kind} memory {address:#x} freed as {kind} memory")
            block.freed = True
            block.bytes[:] = _FREED
            self._graves.append(block)
            while sum(b.size for b in self._graves) > _QUARANTINE:
                old = self._graves.pop(0)
                self._addresses.remove(old.address)
                del self._blocks[old.address]

    def find(self, address: int) -> Block | None:
        """The allocation that the address lies in, freed ones included."""
        with self._lock:
            at = bisect.bisect_right(self._addresses, address) - 1
            block = self._blocks[self._addresses[at]] if at >= 0 else None
            if block is None or address >= block.address + max(block.size, 1):
                return None
            return block

    def device_bytes(self, address: int, size: int, what: str, device: int | None = None) -> np.ndarray:
        """Bytes that a GPU may touch: its own, where ``device`` says which one it is, or pinned ones of the host."""
        block = self.find(address)
        if block is None:
            raise misuse(f"{what}: the GPU cannot reach {address:#x}: not of cudaMalloc, nor pinned")
        if device is not None and block.kind == "device" and block.device != device:
            raise misuse(f"{what}: {address:#x} is memory of GPU {block.device}, used on GPU {device}")
        return self._part(block, address, size, what)

    def host_bytes(self, address: int, size: int, what: str) -> np.ndarray:
        """Bytes of the host: pinned, or pageable ones of anybody."""
        block = self.find(address)
        if block is None:
            return np.frombuffer((ctypes.c_ubyte * size).from_address(address), np.uint8)
        if block.kind == "device":
            raise misuse(f"{what}: {address:#x} is memory of the device, and used as of the host")
        return self._part(block, address, size, what)

    def total(self, kind: str) -> int:
        """Bytes allocated."""
        with self._lock:
            return sum(b.size for b in self._blocks.values() if b.kind == kind and not b.freed)

    def count(self, kind: str) -> int:
        """Allocations alive."""
        with self._lock:
            return sum(b.kind == kind and not b.freed for b in self._blocks.values())

    def _part(self, block: Block, address: int, size: int, what: str) -> np.ndarray:
        if block.freed:
            raise misuse(f"{what}: use after free of {block.kind} memory {address:#x} ({block.size} bytes)")
        start = address - block.address
        if start + size > block.size:
            raise misuse(f"{what}: {size} bytes at {start} of an allocation of {block.size} bytes")
        return block.bytes[start : start + size]


MEMORY = Memory()
