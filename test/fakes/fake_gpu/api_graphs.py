"""Functions about capture and graphs."""

from __future__ import annotations

import threading

from .api_streams import stream_of
from .calls import Failed, api
from .faults import misuse
from .runtime_types import cudaGraph_t, cudaGraphExec_t, cudaStreamCaptureMode, cudaStreamCaptureStatus
from .streams import DEFAULT, GRAPHS, INSTANCES, Capture, Graph, drain_all

__all__ = [
    "cudaStreamBeginCapture",
    "cudaStreamEndCapture",
    "cudaStreamIsCapturing",
    "cudaGraphInstantiate",
    "cudaGraphLaunch",
    "cudaGraphDestroy",
    "cudaGraphExecDestroy",
]


@api()
def cudaStreamBeginCapture(stream, mode):
    captured = stream_of(stream)
    if captured is DEFAULT or captured.capture:
        raise Failed("cudaErrorStreamCaptureUnsupported" if captured is DEFAULT else "cudaErrorInvalidValue")
    name = cudaStreamCaptureMode(mode).name.removeprefix("cudaStreamCaptureMode")
    captured.capture = Capture({"Global": "global", "ThreadLocal": "thread_local", "Relaxed": "relaxed"}[name])


@api(1, fails_as="cudaErrorStreamCaptureInvalidated", late=True, undo=lambda graph: GRAPHS.pop(int(graph)))
def cudaStreamEndCapture(stream):
    captured = stream_of(stream)
    capture, captured.capture = captured.capture, None
    if capture is None:
        raise Failed("cudaErrorInvalidValue")
    if capture.broken:
        raise Failed("cudaErrorStreamCaptureInvalidated")
    if capture.mode != "relaxed" and capture.thread != threading.get_ident():
        raise Failed("cudaErrorStreamCaptureWrongThread")
    graph = Graph(capture.nodes)
    GRAPHS[graph.handle] = graph
    return cudaGraph_t(graph.handle)


@api(1)
def cudaStreamIsCapturing(stream):
    capture = stream_of(stream).capture
    status = "None" if capture is None else "Invalidated" if capture.broken else "Active"
    return cudaStreamCaptureStatus[f"cudaStreamCaptureStatus{status}"]


@api(1, fails_as="cudaErrorMemoryAllocation")
def cudaGraphInstantiate(graph, flags):
    instance = Graph(_graph(GRAPHS, graph).nodes)
    INSTANCES[instance.handle] = instance
    return cudaGraphExec_t(instance.handle)


@api(fails_as="cudaErrorLaunchFailure")
def cudaGraphLaunch(graphExec, stream):
    stream_of(stream).add(_graph(INSTANCES, graphExec).launch)


@api(late=True)
def cudaGraphDestroy(graph):
    _graph(GRAPHS, graph)
    del GRAPHS[int(graph)]


@api(late=True)
def cudaGraphExecDestroy(graphExec):
    _graph(INSTANCES, graphExec)
    drain_all()
    del INSTANCES[int(graphExec)]


def _graph(known: dict[int, Graph], graph) -> Graph:
    if int(graph) not in known:
        raise misuse(f"{int(graph):#x} is no graph of that kind (destroyed before?)")
    return known[int(graph)]
