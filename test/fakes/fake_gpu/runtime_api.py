"""The functions of ``cuda.bindings.runtime``: each gives a tuple (error, values...), None for values on an error."""

from __future__ import annotations

import functools
import threading

import numpy as np

from . import device, streams
from .faults import FAULTS, misuse
from .memory import MEMORY, OutOfMemory
from .runtime_types import (
    TEXTS,
    cudaDeviceAttr,
    cudaDeviceProp,
    cudaError_t,
    cudaEvent_t,
    cudaGraph_t,
    cudaGraphExec_t,
    cudaMemcpyKind,
    cudaStream_t,
    cudaStreamCaptureMode,
    cudaStreamCaptureStatus,
    cudaStreamNonBlocking,
)
from .streams import DEFAULT, EVENTS, GRAPHS, INSTANCES, STREAMS, Capture, Event, Graph, Invalid, Stream

__all__ = ["live"]
_last = threading.local()
_TO_HOST, _TO_DEVICE = ("HostToHost", "DeviceToHost"), ("HostToDevice", "DeviceToDevice")


class _Failed(Exception):
    def __init__(self, name: str):
        super().__init__(name)
        self.name = name


def _api(outputs: int = 0, fails_as: str = "cudaErrorUnknown", late: bool = False, gpu: bool = True, undo=None):
    """A function of CUDA.

    Args:
        outputs: how many values follow the error.
        fails_as: the error of an ordered fault that names none.
        late: it does its work even so: its error is that of earlier work, which CUDA says such functions may return.
        gpu: it needs one.
        undo: takes back what a ``late`` one made, where it fails.
    """

    def wrap(function):
        @functools.wraps(function)
        def call(*args, **kwargs):
            fault = FAULTS.hit(function.__name__, cuda="GetError" not in function.__name__)
            name = fault and fault.get("error", fails_as)
            if fault and fault.get("sticky"):
                FAULTS.sticky = name
            name, values = name or (FAULTS.sticky if gpu else None), ()
            if gpu and not device.gpus():
                name = "cudaErrorNoDevice" if device.has_driver() else "cudaErrorInsufficientDriver"
            elif name is None or late:
                try:
                    values = function(*args, **kwargs)
                    values = values if isinstance(values, tuple) else () if values is None else (values,)
                except (_Failed, Invalid) as error:
                    name = name or error.name
            if name:
                _last.error = name
                if undo and late and values:
                    undo(*values)
                return (cudaError_t[name], *[None] * outputs)
            return (cudaError_t.cudaSuccess, *values)

        __all__.append(function.__name__)
        return call

    return wrap


def live() -> dict[str, int]:
    """What is allocated now; of the fake only."""
    return {
        "device": MEMORY.count("device"),
        "pinned": MEMORY.count("pinned"),
        "device_bytes": MEMORY.total("device"),
        "pinned_bytes": MEMORY.total("pinned"),
        "streams": len(STREAMS),
        "events": len(EVENTS),
        "graphs": len(GRAPHS),
        "graph_instances": len(INSTANCES),
    }


# Devices


@_api(1, gpu=False)
def cudaGetErrorName(error):
    return (error.name.encode(),)


@_api(1, gpu=False)
def cudaGetErrorString(error):
    return (TEXTS[int(error)].encode(),)


@_api(gpu=False)
def cudaGetLastError():
    name, _last.error = getattr(_last, "error", None), None
    if name:
        raise _Failed(name)


@_api(1, gpu=False)
def cudaRuntimeGetVersion():
    return device.runtime_version()


@_api(1, gpu=False)
def cudaDriverGetVersion():
    return device.driver_version()


@_api(1, fails_as="cudaErrorInitializationError")
def cudaGetDeviceCount():
    return len(device.gpus())


@_api(fails_as="cudaErrorInvalidDevice")
def cudaSetDevice(device_index):
    _gpu(device_index)
    device.CURRENT.index = int(device_index)


@_api(1)
def cudaGetDevice():
    return device.current()


@_api(1, fails_as="cudaErrorInvalidDevice")
def cudaGetDeviceProperties(device_index):
    gpu, properties = _gpu(device_index), cudaDeviceProp()
    properties.name, (properties.major, properties.minor) = gpu.name.encode(), gpu.capability
    properties.totalGlobalMem, properties.integrated = gpu.memory_mb << 20, int("Orin" in gpu.name)
    properties.multiProcessorCount = 8
    return properties


@_api(1, fails_as="cudaErrorInvalidDevice")
def cudaDeviceGetAttribute(attr, device_index):
    gpu = _gpu(device_index)
    values = {"ComputeCapabilityMajor": gpu.capability[0], "ComputeCapabilityMinor": gpu.capability[1]}
    values |= {"MultiProcessorCount": 8, "Integrated": int("Orin" in gpu.name), "UnifiedAddressing": 1}
    return values[cudaDeviceAttr(attr).name.replace("cudaDevAttr", "")]


@_api(2)
def cudaMemGetInfo():
    total = _gpu(device.current()).memory_mb << 20
    return total - MEMORY.total("device"), total


@_api(fails_as="cudaErrorLaunchFailure")
def cudaDeviceSynchronize():
    streams.forbid_while_capturing()
    streams.drain_all()


# Memory


@_api(1, fails_as="cudaErrorMemoryAllocation")
def cudaMalloc(size):
    return _allocate(size, "device")


@_api(1, fails_as="cudaErrorMemoryAllocation")
def cudaMallocHost(size):
    return _allocate(size, "pinned")


@_api(1, fails_as="cudaErrorMemoryAllocation")
def cudaHostAlloc(size, flags):
    return _allocate(size, "pinned")


@_api(fails_as="cudaErrorLaunchFailure", late=True)
def cudaFree(devPtr):
    _free(devPtr, "device")


@_api(fails_as="cudaErrorLaunchFailure", late=True)
def cudaFreeHost(ptr):
    _free(ptr, "pinned")


@_api(fails_as="cudaErrorLaunchFailure")
def cudaMemcpyAsync(dst, src, count, kind, stream):
    _copy(dst, src, int(count), kind, _stream(stream))


@_api(fails_as="cudaErrorLaunchFailure")
def cudaMemcpy(dst, src, count, kind):
    streams.forbid_while_capturing()
    _copy(dst, src, int(count), kind, DEFAULT)
    DEFAULT.drain()


@_api(fails_as="cudaErrorLaunchFailure")
def cudaMemsetAsync(devPtr, value, count, stream):
    address, count = int(devPtr), int(count)

    def fill():
        MEMORY.device_bytes(address, count, "cudaMemsetAsync")[:] = value

    _stream(stream).add(fill)


# Streams and events


@_api(1, fails_as="cudaErrorMemoryAllocation")
def cudaStreamCreate():
    return _new_stream(blocking=True)


@_api(1, fails_as="cudaErrorMemoryAllocation")
def cudaStreamCreateWithFlags(flags):
    return _new_stream(blocking=not flags & cudaStreamNonBlocking)


@_api(fails_as="cudaErrorLaunchFailure", late=True)
def cudaStreamDestroy(stream):
    if int(stream) not in STREAMS:
        raise misuse(f"cudaStreamDestroy of {int(stream):#x}, which is no stream (destroyed before?)")
    STREAMS[int(stream)].drain()
    del STREAMS[int(stream)]


@_api(fails_as="cudaErrorLaunchFailure")
def cudaStreamSynchronize(stream):
    streams.break_capture(_stream(stream))
    _stream(stream).drain()


@_api()
def cudaStreamQuery(stream):
    streams.break_capture(_stream(stream))
    if _stream(stream).queue:
        _stream(stream).drain()  # it is a fake: time passes while one asks
        raise _Failed("cudaErrorNotReady")


@_api()
def cudaStreamWaitEvent(stream, event, flags):
    waited = _event(event)
    _stream(stream).add(waited.wait)


@_api(1)
def cudaEventCreate():
    return _new_event()


@_api(1)
def cudaEventCreateWithFlags(flags):
    return _new_event()


@_api()
def cudaEventRecord(event, stream):
    _event(event).record(_stream(stream))


@_api(fails_as="cudaErrorLaunchFailure")
def cudaEventSynchronize(event):
    streams.forbid_while_capturing()
    _event(event).wait()


@_api(1)
def cudaEventElapsedTime(start, end):
    times = [_event(each).time for each in (start, end)]
    if None in times:
        raise _Failed("cudaErrorNotReady")
    return (times[1] - times[0]) * 1e3


@_api(late=True)
def cudaEventDestroy(event):
    _event(event)
    del EVENTS[int(event)]


# Graphs


@_api()
def cudaStreamBeginCapture(stream, mode):
    captured = _stream(stream)
    if captured is DEFAULT or captured.capture:
        raise _Failed("cudaErrorStreamCaptureUnsupported" if captured is DEFAULT else "cudaErrorInvalidValue")
    name = cudaStreamCaptureMode(mode).name.removeprefix("cudaStreamCaptureMode")
    captured.capture = Capture({"Global": "global", "ThreadLocal": "thread_local", "Relaxed": "relaxed"}[name])


@_api(1, fails_as="cudaErrorStreamCaptureInvalidated", late=True, undo=lambda graph: GRAPHS.pop(int(graph)))
def cudaStreamEndCapture(stream):
    captured = _stream(stream)
    capture, captured.capture = captured.capture, None
    if capture is None:
        raise _Failed("cudaErrorInvalidValue")
    if capture.broken:
        raise _Failed("cudaErrorStreamCaptureInvalidated")
    if capture.mode != "relaxed" and capture.thread != threading.get_ident():
        raise _Failed("cudaErrorStreamCaptureWrongThread")
    graph = Graph(capture.nodes)
    GRAPHS[graph.handle] = graph
    return cudaGraph_t(graph.handle)


@_api(1)
def cudaStreamIsCapturing(stream):
    capture = _stream(stream).capture
    status = "None" if capture is None else "Invalidated" if capture.broken else "Active"
    return cudaStreamCaptureStatus[f"cudaStreamCaptureStatus{status}"]


@_api(1, fails_as="cudaErrorMemoryAllocation")
def cudaGraphInstantiate(graph, flags):
    instance = Graph(_graph(GRAPHS, graph).nodes)
    INSTANCES[instance.handle] = instance
    return cudaGraphExec_t(instance.handle)


@_api(fails_as="cudaErrorLaunchFailure")
def cudaGraphLaunch(graphExec, stream):
    _stream(stream).add(_graph(INSTANCES, graphExec).launch)


@_api(late=True)
def cudaGraphDestroy(graph):
    _graph(GRAPHS, graph)
    del GRAPHS[int(graph)]


@_api(late=True)
def cudaGraphExecDestroy(graphExec):
    _graph(INSTANCES, graphExec)
    streams.drain_all()
    del INSTANCES[int(graphExec)]


def _gpu(index) -> device.Gpu:
    found = device.gpus()
    if not 0 <= int(index) < len(found):
        raise _Failed("cudaErrorInvalidDevice")
    return found[int(index)]


def _allocate(size, kind: str) -> int:
    streams.forbid_while_capturing()
    if int(size) < 0:
        raise OverflowError("can't convert negative value to size_t")
    if int(size) == 0:
        return 0
    try:
        return MEMORY.allocate(int(size), kind, _gpu(device.current()).memory_mb << 20)
    except OutOfMemory as error:
        raise _Failed("cudaErrorMemoryAllocation") from error


def _free(pointer, kind: str) -> None:
    streams.forbid_while_capturing()
    streams.drain_all()
    if int(pointer):
        MEMORY.free(int(pointer), kind)


def _copy(dst, src, count: int, kind, stream: Stream) -> None:
    if not isinstance(kind, cudaMemcpyKind):
        raise TypeError(f"Argument 'kind' has incorrect type (expected cudaMemcpyKind, got {type(kind).__name__})")
    to, source, way = _address(dst), _address(src), kind.name.removeprefix("cudaMemcpy")
    on_host = [MEMORY.find(each) is None for each in (to, source)]  # pageable memory of the host
    if any(on_host):
        streams.break_capture(stream)
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
    if hasattr(value, "__index__") or hasattr(value, "__int__") and not isinstance(value, np.ndarray):
        return int(value)
    return np.frombuffer(value, np.uint8).ctypes.data


def _stream(stream) -> Stream:
    handle = int(stream) if stream is not None else 0
    if handle == 0:
        return DEFAULT
    if handle not in STREAMS:
        raise misuse(f"{handle:#x} is no stream (destroyed before?)")
    return STREAMS[handle]


def _new_stream(blocking: bool) -> cudaStream_t:
    stream = Stream(blocking)
    STREAMS[stream.handle] = stream
    return cudaStream_t(stream.handle)


def _new_event() -> cudaEvent_t:
    event = Event()
    EVENTS[event.handle] = event
    return cudaEvent_t(event.handle)


def _event(event) -> Event:
    if int(event) not in EVENTS:
        raise misuse(f"{int(event):#x} is no event (destroyed before?)")
    return EVENTS[int(event)]


def _graph(known: dict[int, Graph], graph) -> Graph:
    if int(graph) not in known:
        raise misuse(f"{int(graph):#x} is no graph of that kind (destroyed before?)")
    return known[int(graph)]
