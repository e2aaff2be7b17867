"""Functions about memory and copies."""

from __future__ import annotations

import numpy as np

from .api_devices import this_gpu
from .api_streams import stream_of
from .calls import Failed, api
from .device import current
from .memory import MEMORY, OutOfMemory
from .runtime_types import cudaMemcpyKind
from .streams import DEFAULT, Stream, break_capture, drain_all, forbid_while_capturing

__all__ = [
    "cudaMalloc",
    "cudaMallocHost",
    "cudaHostAlloc",
    "cudaFree",
    "cudaFreeHost",
    "cudaMemcpyAsync",
    "cudaMemcpy",
    "cudaMemsetAsync",
]

_TO_HOST = ("HostToHost", "DeviceToHost")


@api(1, fails_as="cudaErrorMemoryAllocation")
def cudaMalloc(size):
    return _allocate(size, "device")


@api(1, fails_as="cudaErrorMemoryAllocation")
def cudaMallocHost(size):
    return _allocate(size, "pinned")


@api(1, fails_as="cudaErrorMemoryAllocation")
def cudaHostAlloc(size, flags):
    return _allocate(size, "pinned")


@api(fails_as="cudaErrorLaunchFailure", late=True)
def cudaFree(devPtr):
    _free(devPtr, "device")


@api(fails_as="cudaErrorLaunchFailure", late=True)
def cudaFreeHost(ptr):
    _free(ptr, "pinned")


@api(fails_as="cudaErrorLaunchFailure")
def cudaMemcpyAsync(dst, src, count, kind, stream):
    _copy(dst, src, int(count), kind, stream_of(stream))


@api(fails_as="cudaErrorLaunchFailure")
def cudaMemcpy(dst, src, count, kind):
    forbid_while_capturing()
    _copy(dst, src, int(count), kind, DEFAULT)
    DEFAULT.drain()


@api(fails_as="cudaErrorLaunchFailure")
def cudaMemsetAsync(devPtr, value, count, stream):
    address, count = int(devPtr), int(count)

    def fill():
        MEMORY.device_bytes(address, count, "cudaMemsetAsync")[:] = value

    stream_of(stream).add(fill)


def _allocate(size, kind: str) -> int:
    forbid_while_capturing()
    if int(size) < 0:
        raise OverflowError("can't convert negative value to size_t")
    if int(size) == 0:
        return 0
    try:
        return MEMORY.allocate(int(size), kind, this_gpu(current()).memory_mb << 20)
    except OutOfMemory as error:
        raise Failed("cudaErrorMemoryAllocation") from error


def _free(pointer, kind: str) -> None:
    forbid_while_capturing()
    drain_all()
    if int(pointer):
        MEMORY.free(int(pointer), kind)


def _copy(dst, src, count: int, kind, stream: Stream) -> None:
    if not isinstance(kind, cudaMemcpyKind):
        raise TypeError(f"Argument 'kind' has incorrect type (expected cudaMemcpyKind, got {type(kind).__name__})")
    to, source, way = _address(dst), _address(src), kind.name.removeprefix("cudaMemcpy")
    on_host = [MEMORY.find(each) is None for each in (to, source)]  # pageable memory of the host
    if any(on_host):
        break_capture(stream)
    if way == "Default":
        ends = [block is not None and block.kind == "device" for block in (MEMORY.find(source), MEMORY.find(to))]
        way = f"{'Device' if ends[0] else 'Host'}To{'Device' if ends[1] else 'Host'}"
    read = MEMORY.host_bytes if way in ("HostToHost", "HostToDevice") else MEMORY.device_bytes
    write = MEMORY.host_bytes if way in _TO_HOST else MEMORY.device_bytes
    if not count:
        return
    early = read(source, count, "copy").copy() if on_host[1] else None  # CUDA takes pageable memory before it returns

    def copy():
        write(to, count, "copy")[:] = read(source, count, "copy") if early is None else early

    write(to, count, "copy")  # bounds of both ends are checked at once
    read(source, count, "copy")
    stream.add(copy)
    if on_host[0]:
        stream.drain()


def _address(value) -> int:
    """Of an int, or of an object with the buffer protocol."""
    try:
        return np.frombuffer(value, np.uint8).ctypes.data
    except (TypeError, ValueError):
        return int(value)
