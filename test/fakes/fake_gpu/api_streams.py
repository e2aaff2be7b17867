"""Functions about streams and events."""

from __future__ import annotations

from .calls import Failed, api
from .faults import misuse
from .runtime_types import cudaEvent_t, cudaStream_t, cudaStreamNonBlocking
from .streams import DEFAULT, EVENTS, STREAMS, Event, Stream, break_capture, forbid_while_capturing

__all__ = [
    "cudaStreamCreate",
    "cudaStreamCreateWithFlags",
    "cudaStreamDestroy",
    "cudaStreamSynchronize",
    "cudaStreamQuery",
    "cudaStreamWaitEvent",
    "cudaEventCreate",
    "cudaEventCreateWithFlags",
    "cudaEventRecord",
    "cudaEventSynchronize",
    "cudaEventElapsedTime",
    "cudaEventDestroy",
]


@api(1, fails_as="cudaErrorMemoryAllocation")
def cudaStreamCreate():
    return _new_stream(blocking=True)


@api(1, fails_as="cudaErrorMemoryAllocation")
def cudaStreamCreateWithFlags(flags):
    return _new_stream(blocking=not flags & cudaStreamNonBlocking)


@api(fails_as="cudaErrorLaunchFailure", late=True)
def cudaStreamDestroy(stream):
    if int(stream) not in STREAMS:
        raise misuse(f"cudaStreamDestroy of {int(stream):#x}, which is no stream (destroyed before?)")
    STREAMS[int(stream)].drain()
    del STREAMS[int(stream)]


@api(fails_as="cudaErrorLaunchFailure")
def cudaStreamSynchronize(stream):
    break_capture(stream_of(stream))
    stream_of(stream).drain()


@api()
def cudaStreamQuery(stream):
    break_capture(stream_of(stream))
    if stream_of(stream).queue:
        stream_of(stream).drain()  # it is a fake: time passes while one asks
        raise Failed("cudaErrorNotReady")


@api()
def cudaStreamWaitEvent(stream, event, flags):
    waited = _event(event)
    stream_of(stream).add(waited.wait)


@api(1)
def cudaEventCreate():
    return _new_event()


@api(1)
def cudaEventCreateWithFlags(flags):
    return _new_event()


@api()
def cudaEventRecord(event, stream):
    _event(event).record(stream_of(stream))


@api(fails_as="cudaErrorLaunchFailure")
def cudaEventSynchronize(event):
    forbid_while_capturing()
    _event(event).wait()


@api(1)
def cudaEventElapsedTime(start, end):
    times = [_event(each).time for each in (start, end)]
    if None in times:
        raise Failed("cudaErrorNotReady")
    return (times[1] - times[0]) * 1e3


@api(late=True)
def cudaEventDestroy(event):
    _event(event)
    del EVENTS[int(event)]


def stream_of(stream) -> Stream:
    """By its handle, which is an int or an object; 0 is the default one. Raises Misuse for one that is none."""
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
