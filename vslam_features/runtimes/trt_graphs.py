"""CUDA graphs of a session: a run that was recorded is launched at once, instead of kernel by kernel.

A graph holds for the input shapes, the addresses and the state of the context that it was recorded from: TensorRT's
guide calls it undefined what a graph does after its context was changed (Best Practices, CUDA Graphs). So each has a
context of its own, which nothing else uses, and ends when a buffer moves.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import partial

from ..errors import BackendError
from .cuda import Cuda, release
from .trt_context import Context

Shapes = dict[str, tuple[int, ...]]

GRAPHS = 4  # kept at most; each has a context, whose own memory is small beside the shared activations
RECORD_AT = 3  # the use of a set of shapes that records it: numbers of keypoints may hardly ever come again
_REMEMBERED = 64  # sets of shapes whose uses are counted


_recording = threading.Lock()


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Without the collector of garbage, one thread at a time.

    It may end a forgotten session in this very thread. CUDA refuses to free memory in a thread that records: the
    session's would be lost, and the recording with it.
    """
    with _recording:
        enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if enabled:
                gc.enable()


@dataclass
class Graph:
    """A recorded run: ``moves`` of the buffers when it was recorded, ``shapes`` of the outputs."""

    context: Context
    executable: object
    moves: int
    shapes: Shapes


class Graphs:
    """The graphs of a session, by what they were recorded for; the one that was not used for longest goes first.

    Args:
        new_context: makes a context.
    Attributes:
        counts: how often ``recorded``, and ``launched``.
    """

    def __init__(self, cuda: Cuda, stream, new_context: Callable[[], Context]):
        self._cuda, self._stream, self._new_context = cuda, stream, new_context
        self._graphs: OrderedDict[Hashable, Graph] = OrderedDict()
        self._idle: list[Context] = []
        self._uses: OrderedDict[Hashable, int] = OrderedDict()
        self.counts = Counter()

    def launch(self, key: Hashable, moves: int) -> Shapes | None:
        """Run the graph of ``key``; the shapes of its outputs, or None where there is none. Raises BackendError."""
        graph = self._graphs.get(key)
        if graph is not None and graph.moves != moves:
            self._drop(key)
            graph = None
        if graph is None:
            return None
        self._graphs.move_to_end(key)
        self._cuda.launch(graph.executable, self._stream)
        self.counts["launched"] += 1
        return graph.shapes

    def due(self, key: Hashable) -> bool:
        """Count a use of ``key`` without a graph; whether this one should be recorded."""
        uses = self._uses.pop(key, 0) + 1
        self._uses[key] = uses
        if len(self._uses) > _REMEMBERED:
            self._uses.popitem(last=False)
        return uses >= RECORD_AT

    def context(self) -> Context:
        """One to record from. Raises BackendError."""
        if not self._idle and len(self._graphs) >= GRAPHS:
            self._drop(next(iter(self._graphs)))
        return self._idle.pop() if self._idle else self._new_context()

    def give_back(self, context: Context) -> None:
        """One that no graph was recorded from."""
        self._idle.append(context)

    def record(self, key: Hashable, context: Context, moves: int, shapes: Shapes) -> None:
        """Record the run that the context has just enqueued, with the same shapes and addresses. Raises BackendError.

        It has: the first run after a change of shapes does more, which is not to be in a graph.
        """
        with _uncollected():
            self._cuda.begin_capture(self._stream)
            try:
                context.execute(self._stream)
            except BaseException:
                with contextlib.suppress(BackendError):  # as CUDA calls it where what was recorded is invalid
                    self._cuda.destroy_graph(self._cuda.end_capture(self._stream))
                raise
            graph = self._cuda.end_capture(self._stream)
        try:
            executable = self._cuda.instantiate(graph)
        finally:
            release(partial(self._cuda.destroy_graph, graph))
        self._graphs[key] = Graph(context, executable, moves, shapes)
        self.counts["recorded"] += 1

    def close(self) -> None:
        """Give all back."""
        for key in list(self._graphs):
            self._drop(key)
        while self._idle:
            self._idle.pop().close()

    def _drop(self, key: Hashable) -> None:
        graph = self._graphs.pop(key)
        release(partial(self._cuda.destroy_executable, graph.executable))
        self._idle.append(graph.context)
