"""A TensorRT engine at work on one GPU: one stream, buffers that stay, CUDA graphs where the engine allows them."""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from ..errors import BackendError
from .base import Active, Session
from .cuda import Cuda, release
from .trt_buffers import Buffer
from .trt_context import Allocator, Context
from .trt_graphs import Graphs, Shapes
from .trt_library import Library
from .trt_tensors import tensor_specs

logger = logging.getLogger(__name__)


class TensorRtSession(Session):
    """A model in TensorRT. Runs in whichever thread calls; calls wait for one another.

    ``close`` gives back what it holds on the GPU; so does its end, and the end of the process.
    """

    def __init__(self, execution: Execution, active: Active):
        self._execution, self._active = execution, active
        self._end = weakref.finalize(self, execution.close)
        self.inputs, self.outputs = execution.inputs, execution.outputs

    @property
    def active(self) -> Active:
        """What it runs on; the note tells where CUDA graphs were asked for and failed."""
        note = "; ".join(filter(None, (self._active.note, self._execution.note)))
        return replace(self._active, note=note)

    @active.setter
    def active(self, value: Active) -> None:
        self._active = value

    def close(self) -> None:
        """Give all back; a run after this is a BackendError."""
        self._end()

    def _run(self, inputs):
        try:
            return self._execution.run(inputs)
        except BackendError as error:
            raise BackendError(f"{self._active}: {error}") from error


class Execution:
    """All that a session holds on the GPU, and how a run goes.

    It does not know the session, so that the session's end is its end.

    Args:
        device: CUDA's number of the GPU.
        engine: bytes of the engine.
        graphs: whether CUDA graphs may be recorded.
        limits: what to say of an input, by its name and its shape (of a shape tensor by its values), where it is
            outside what the engine was built for; empty: it is not.
    Attributes:
        inputs, outputs: as of a session. note: why CUDA graphs failed; else empty.
    Raises:
        ModelFileError: TensorRT cannot load the engine, or a tensor of it is of a type that no array holds.
        BackendError: CUDA or TensorRT failed. Nothing is held then.
    """

    def __init__(
        self,
        library: Library,
        cuda: Cuda,
        device: int,
        engine: bytes,
        graphs: bool,
        limits: Callable[[str, tuple[int, ...]], str],
    ):
        self._library, self._cuda, self._device, self._limits = library, cuda, device, limits
        self._lock = threading.Lock()
        self._closed, self.note = False, ""
        self._engine = self._stream = self._main = self._graphs = None
        self._memory = (0, 0)
        self._buffers: dict[str, Buffer] = {}
        try:
            cuda.use(device)
            self._engine = library.deserialise(cuda, device, engine)
            self.inputs, self.outputs = tensor_specs(library.module, lambda: self._engine)
            on_host = library.module.TensorLocation.HOST
            names = [*self.inputs, *self.outputs]
            self._on_host = {n for n in names if self._engine.get_tensor_location(n) == on_host}
            self._buffers = {n: Buffer(cuda, n not in self._on_host) for n in names}
            self._allocator = Allocator(library.module, self._buffers)
            self._stream = cuda.create_stream()
            size = max(1, self._engine.device_memory_size_v2)
            self._memory = (cuda.malloc(size), size)
            self._main = self._context()
            # What TensorRT writes on the host it writes while a run is enqueued, which a graph does not repeat.
            graphs = graphs and self._on_host.isdisjoint(self.outputs)
            self._graphs = Graphs(cuda, self._stream, self._context) if graphs else None
        except BaseException:
            self.close()
            raise

    def run(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Outputs for checked, contiguous inputs. Raises BackendError."""
        with self._lock:
            if self._closed:
                raise BackendError("the session is closed")
            try:
                self._cuda.use(self._device)  # of this thread, which may be new
                return self._run(inputs)
            except BaseException:  # of Ctrl-C, too
                release(partial(self._cuda.synchronise, self._stream))  # before anybody touches the buffers again
                raise

    def close(self) -> None:
        """Give all back, in an order that no error disturbs."""
        with self._lock, contextlib.ExitStack() as stack:
            if self._closed:
                return
            self._closed = True
            # A collected session ends in whichever thread the collector runs, which may be using another GPU.
            release(lambda: stack.enter_context(self._cuda.on(self._device)))
            if self._stream is not None:
                release(partial(self._cuda.synchronise, self._stream))
            if self._graphs is not None:
                self._graphs.close()
            if self._main is not None:
                self._main.close()
            self._engine = None
            for buffer in self._buffers.values():
                buffer.close()
            if self._memory[0]:
                release(partial(self._cuda.free, self._memory[0]))
            if self._stream is not None:
                release(partial(self._cuda.destroy_stream, self._stream))
            self._graphs = self._main = self._stream = None
            self._memory = (0, 0)

    def _run(self, inputs):
        for name, value in inputs.items():
            self._buffers[name].upload(value, self._stream)
        # A graph holds for the shapes, and for the values that shapes depend on.
        key = tuple((v.shape, v.tobytes() if n in self._on_host else b"") for n, v in sorted(inputs.items()))
        shapes = self._graphs.launch(key, self._moves()) if self._graphs is not None else None
        if shapes is None:
            shapes = self._without_graph(key, inputs)
        for name, spec in self.outputs.items():
            size = int(np.prod(shapes[name], dtype=np.int64)) * spec.dtype.itemsize
            self._buffers[name].fetch(size, self._stream)
        self._cuda.synchronise(self._stream)
        return {n: self._buffers[n].array(spec.dtype, shapes[n]) for n, spec in self.outputs.items()}

    def _without_graph(self, key, inputs) -> Shapes:
        """Enqueue a run, and record it where it comes often enough."""
        if self._graphs is None or not self._graphs.due(key):
            return self._enqueue(self._main, inputs)
        try:
            context = self._graphs.context()
        except BackendError as error:
            self._give_up_graphs(error)
            return self._enqueue(self._main, inputs)
        try:
            shapes = self._enqueue(context, inputs)
        except BackendError:
            self._graphs.give_back(context)
            raise
        try:
            self._graphs.record(key, context, self._moves(), shapes)
        except BackendError as error:
            self._graphs.give_back(context)
            self._give_up_graphs(error)
        return shapes

    def _give_up_graphs(self, error: BackendError) -> None:
        """Go on without: the run itself is as good as ever."""
        self.note = f"runs without CUDA graphs, which it was to use: {error}"
        logger.warning("%s", self.note)
        release(partial(self._cuda.synchronise, self._stream))  # a context that is at work cannot go
        self._graphs.close()
        self._graphs = None

    def _enqueue(self, context: Context, inputs) -> Shapes:
        """Shapes of the outputs of a run that was enqueued."""
        for name, value in inputs.items():
            self._set_shape(context, name, value.shape)
            context.bind(name, self._buffers[name].address, new_values=name in self._on_host)
        try:
            return self._inferred(context)
        except BackendError as error:
            given = {n: tuple(v.ravel().tolist()) for n, v in inputs.items() if n in self._on_host}
            outside = [text for n, values in given.items() if (text := self._limits(n, values))]
            raise BackendError("; ".join([str(error), *outside])) from error

    def _inferred(self, context: Context) -> Shapes:
        """Shapes of the outputs of a run that was enqueued; its inputs are set."""
        context.infer()
        shapes = {name: context.shape(name) for name in self.outputs}
        for name, shape in shapes.items():
            if len(shape) != len(self.outputs[name].shape):  # what it calls invalid has no axes: of one number
                raise BackendError(f"TensorRT told no shape of output '{name}', but {shape}")
        unknown = [name for name, shape in shapes.items() if min(shape, default=0) < 0]
        if unknown and self._graphs is not None:  # their sizes come back while the run is enqueued
            logger.info("no CUDA graphs: the shapes of %s depend on values", ", ".join(unknown))
            self._graphs.close()
            self._graphs = None
        for name, shape in shapes.items():
            if name in unknown:
                context.allocate_by(name, self._allocator)
            else:
                self._buffers[name].fit(int(np.prod(shape, dtype=np.int64)) * self.outputs[name].dtype.itemsize)
                context.bind(name, self._buffers[name].address)
        self._allocator.begin()
        try:
            context.execute(self._stream)
        except BackendError as error:
            raise self._allocator.error or error from error
        for name in unknown:
            if name not in self._allocator.shapes:
                raise BackendError(f"TensorRT told no shape of output '{name}'")
        return {**shapes, **{name: self._allocator.shapes[name] for name in unknown}}

    def _set_shape(self, context: Context, name: str, shape: tuple[int, ...]) -> None:
        try:
            context.set_shape(name, shape)
        except BackendError as error:
            raise BackendError("; ".join(filter(None, (str(error), self._limits(name, shape))))) from error

    def _context(self) -> Context:
        strategy = self._library.module.ExecutionContextAllocationStrategy.USER_MANAGED
        return Context(self._library, lambda: self._engine.create_execution_context(strategy), self._memory)

    def _moves(self) -> int:
        return sum(buffer.moves for buffer in self._buffers.values())
