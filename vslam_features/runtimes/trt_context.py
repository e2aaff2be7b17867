"""TensorRT's execution contexts with every return value checked, and memory for outputs of unknown size."""

from __future__ import annotations

from collections.abc import Callable

from ..errors import BackendError
from .base import reason
from .trt_buffers import Buffer
from .trt_library import Library, words


class Context:
    """Shapes and addresses that one run of an engine uses.

    Its activations lie in memory that the caller gives: contexts that never run at the same time share it.

    Args:
        create: gives a new ``IExecutionContext`` without memory of its own.
        memory: (address, bytes) of at least ``engine.device_memory_size_v2`` on the GPU.
    Raises:
        BackendError, as every method does, with TensorRT's words.
    """

    def __init__(self, library: Library, create: Callable[[], object], memory: tuple[int, int]):
        self._library = library
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._allocating: set[str] = set()
        self._inferred = False
        with library.listening() as said:
            try:
                self._context = create()
            except Exception as error:  # its bindings raise RuntimeError and TypeError
                why = words(said) if said else reason(error)
                raise BackendError(f"TensorRT gives no execution context: {why}") from error
        if self._context is None:
            raise BackendError(f"TensorRT gives no execution context: {words(said)}")
        with library.listening() as said:
            self._call("set_device_memory", *memory)
        if said:  # it returns nothing
            raise BackendError(f"set_device_memory failed: {words(said)}")

    def set_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Shape of an input."""
        if self._shapes.get(name) != shape:
            self._shapes.pop(name, None)
            self._inferred = False
            self._try("set_input_shape", name, shape)
            self._shapes[name] = shape

    def bind(self, name: str, address: int, new_values: bool = False) -> None:
        """Where a tensor lies. ``new_values``: shapes depend on what lies there, and it may have changed."""
        if new_values or self._addresses.get(name) != address:
            self._inferred = self._inferred and not new_values
            self._try("set_tensor_address", name, address)
            self._addresses[name] = address

    def infer(self) -> None:
        """Work out the shapes of outputs; all inputs are set and bound."""
        if not self._inferred:
            missing = self._call("infer_shapes")
            if missing:
                raise BackendError(f"infer_shapes: TensorRT misses {', '.join(missing)}")
            self._inferred = True

    def shape(self, name: str) -> tuple[int, ...]:
        """Of an output; -1 where it depends on values."""
        return tuple(int(n) for n in self._call("get_tensor_shape", name))

    def allocate_by(self, name: str, allocator: Allocator) -> None:
        """Who gives memory to an output whose shape depends on values."""
        if name not in self._allocating:
            self._try("set_output_allocator", name, allocator.callbacks)
            self._allocating.add(name)

    def execute(self, stream) -> None:
        """Enqueue a run."""
        self._try("execute_async_v3", int(stream))

    def close(self) -> None:
        """Let TensorRT destroy it."""
        self._context = None

    def _try(self, name: str, *args) -> None:
        """A call that says whether it succeeded."""
        with self._library.listening() as said:
            done = self._call(name, *args)
        if not done:
            raise BackendError(f"{_shown(name, args)} failed: {words(said)}")

    def _call(self, name: str, *args):
        # By its name: a bound method would keep the context alive for as long as anybody keeps the error.
        with self._library.listening() as said:
            try:
                return getattr(self._context, name)(*args)
            except Exception as error:  # its bindings raise RuntimeError and TypeError
                why = words(said) if said else reason(error)
                raise BackendError(f"{_shown(name, args)}: {why}") from error


def _shown(name: str, args: tuple) -> str:
    """A call with the tensor that it is about, and its shape."""
    told = [repr(a) for a in args if isinstance(a, (str, tuple))]
    return f"{name}({', '.join(told)})" if told else name


class Allocator:
    """Gives memory to outputs whose shape depends on values, and is told their shapes, while a run is enqueued.

    Attributes:
        shapes: of the last run. error: why it could give none; TensorRT only hears that it got nothing.
        callbacks: the ``IOutputAllocator``.
    """

    def __init__(self, trt, buffers: dict[str, Buffer]):
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.error: BackendError | None = None
        self._buffers = buffers
        self.callbacks = _callbacks(trt, self._give, self._told)

    def begin(self) -> None:
        """Forget the last run."""
        self.shapes.clear()
        self.error = None

    def _give(self, name: str, size: int) -> int:
        try:
            self._buffers[name].fit(size)
        except BackendError as error:
            self.error = error.with_traceback(None)  # of frames that are TensorRT's caller's
            return 0
        return self._buffers[name].address

    def _told(self, name: str, shape) -> None:
        self.shapes[name] = tuple(int(n) for n in shape)


def _callbacks(trt, give: Callable[[str, int], int], told: Callable[[str, object], None]):
    class OutputAllocator(trt.IOutputAllocator):
        def __init__(self):
            trt.IOutputAllocator.__init__(self)  # its bindings need this call by name

        def reallocate_output(self, tensor_name, memory, size, alignment):
            return give(tensor_name, size)

        def reallocate_output_async(self, tensor_name, memory, size, alignment, stream):
            return give(tensor_name, size)

        def notify_shape(self, tensor_name, shape):
            told(tensor_name, shape)

    return OutputAllocator()
