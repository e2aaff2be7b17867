"""IExecutionContext."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager

from fake_gpu import device
from fake_gpu.faults import FAULTS, misuse
from fake_gpu.memory import MEMORY
from fake_gpu.streams import DEFAULT, STREAMS, Stream

from .allocator import IOutputAllocator, allocate, notify
from .dims import NUMPY, Dims, integer, text, volume
from .graph_facts import Tensor
from .logger import error, warn
from .objects import alive
from .prediction import K_LIMIT
from .run import Run


class IExecutionContext:
    """What runs an engine. One thread at a time may use it.

    ``managed``: whoever asked for it gives the memory of its activations, by ``set_device_memory``.
    """

    def __init__(self, engine, managed: bool):
        self._managed, self._memory, self._changes = managed, None, 0
        self.name, self._engine, self._profile = "", engine, 0
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._allocators: dict[str, IOutputAllocator] = {}
        self._user, self._flushed = None, None
        alive("contexts", self)

    engine = property(lambda self: self._engine)
    active_optimization_profile = property(lambda self: self._profile)
    all_binding_shapes_specified = property(lambda self: not self._unspecified())

    def set_optimization_profile_async(self, profile_index, stream_handle):
        with self._use("setOptimizationProfileAsync"):
            if not 0 <= integer(profile_index) < len(self._engine._profiles):
                raise RuntimeError("Error in set optimization profile async.")
            self._profile = profile_index
            self._shapes.clear()
            self._changes += 1
            return True

    def set_device_memory(self, memory, size):
        """Memory of the caller for the activations; where it is refused, only the log tells, as in the real one."""
        address, size = integer(memory), integer(size)
        with self._use("setDeviceMemoryV2"):
            small = size < self._engine.device_memory_size_v2
            if FAULTS.hit("set_device_memory") or not self._managed or address % 256 or small:
                error(f"IExecutionContext::setDeviceMemoryV2: Error Code 3: API Usage Error ({size} at {address:#x})")
                return
            self._changes += self._memory != (address, size)
            self._memory = (address, size)

    def update_device_memory_size_for_shapes(self):
        return self._engine.device_memory_size_v2

    def set_input_shape(self, name, shape):
        """False, with the reason in the log, for a shape outside of the profile."""
        if not isinstance(shape, (tuple, list, Dims)):
            raise TypeError("set_input_shape(): incompatible function arguments")
        shape = tuple(Dims(shape))
        with self._use("setInputShape"):
            found = self._tensor(text(name), self._engine._inputs)
            reason = "ordered fault" if FAULTS.hit("set_input_shape") else self._outside(found, name, shape)
            if reason:
                error(f"IExecutionContext::setInputShape: Error Code 3: API Usage Error ({reason})")
                return False
            self._changes += self._shapes.get(name) != shape
            self._shapes[name] = shape
            return True

    def get_tensor_shape(self, name):
        """-1 for sizes that are not known (yet)."""
        with self._use("getTensorShape"):
            found = self._tensor(text(name), [*self._engine._inputs, *self._engine._outputs])
            if found is None:
                error(f"IExecutionContext::getTensorShape: no tensor of the name {name}")
                return Dims()
            if found in self._engine._inputs:
                return Dims(self._shapes.get(name, found.shape))
            if self._unspecified():
                return Dims(found.shape)
            try:
                return Dims(self._engine._prediction.told(found, self._shapes, self._values()))
            except RuntimeError as failure:
                error(f"IExecutionContext::getTensorShape: Error Code 7: Internal Error ({failure})")
                return Dims()

    def infer_shapes(self):
        """Names of inputs that are not specified; RuntimeError where the shapes do not go together."""
        with self._use("inferShapes"):
            try:
                if FAULTS.hit("infer_shapes"):
                    raise RuntimeError("ordered fault")
                missing = self._unspecified()
                if not missing:
                    self._predicted()
                return missing
            except RuntimeError as failure:
                error(f"IExecutionContext::inferShapes: Error Code 7: Internal Error ({failure})")
                raise RuntimeError("infer_shapes error code: -1") from failure

    def set_tensor_address(self, name, memory):
        address = integer(memory)
        with self._use("setTensorAddress"):
            if FAULTS.hit("set_tensor_address") or not self._tensor(text(name), self._all()):
                error(f"IExecutionContext::setTensorAddress: Error Code 3: API Usage Error ({name})")
                return False
            if address % 256 and self._engine.get_tensor_location(name).name == "DEVICE":
                raise misuse(f"{name}: address {address:#x} is not aligned to 256 bytes")
            self._changes += self._addresses.get(name) != address
            self._addresses[name] = address
            return True

    def get_tensor_address(self, name):
        return self._addresses.get(text(name), 0)

    def set_output_allocator(self, name, output_allocator):
        with self._use("setOutputAllocator"):
            if not isinstance(output_allocator, (IOutputAllocator, type(None))):
                raise TypeError("set_output_allocator(): incompatible function arguments")
            if FAULTS.hit("set_output_allocator") or not self._tensor(text(name), self._engine._outputs):
                error(f"IExecutionContext::setOutputAllocator: Error Code 3: API Usage Error ({name})")
                return False
            self._allocators[name] = output_allocator
            return True

    def get_output_allocator(self, name):
        return self._allocators.get(text(name))

    def execute_async_v3(self, stream_handle):
        """Put the work on the stream; False where something is missing, with the reason in the log."""
        stream = self._stream(integer(stream_handle))
        with self._use("enqueueV3"):
            if stream is DEFAULT:
                warn("Using default stream in enqueueV3() may lead to performance issues.")
            time.sleep(0.0005 if threading.active_count() > 1 else 0)  # long enough to be met by another thread
            reason = "ordered fault" if FAULTS.hit("execute_async_v3") else self._not_ready(stream)
            if reason:
                if stream.capture:
                    stream.capture.broken = True
                error(f"IExecutionContext::enqueueV3: Error Code 3: API Usage Error ({reason})")
                return False
            return self._enqueue(stream)

    def _enqueue(self, stream: Stream) -> bool:
        run = Run(self)
        if any(each.data_dependent for each in self._engine._outputs):
            stream.drain()  # the library waits itself, for it has to know the sizes
            run.compute()
        for each in self._engine._outputs:
            allocator = self._allocators.get(each.name)
            if allocator is None:
                continue
            shape = run.shape(each)
            size = max(volume(shape) * NUMPY[each.dtype]().itemsize, 1)
            address = allocate(allocator, each.name, self._addresses.get(each.name, 0), size, stream.handle)
            if not address:
                error(f"IExecutionContext::enqueueV3: Error Code 2: OutOfMemory (no memory for output {each.name})")
                return False
            run.addresses[each.name] = address
            notify(allocator, each.name, shape)
        run.captured = stream.capture is not None
        stream.add(run)
        self._flushed = None if stream.capture else dict(self._shapes)
        return True

    def _not_ready(self, stream: Stream) -> str:
        missing = self._unspecified()
        if self._managed and not self._memory:
            return "no device memory was set, and none is the context's own"
        if missing:
            return f"inputs without a shape: {', '.join(missing)}"
        for each in self._all():
            if each.data_dependent and not self._allocators.get(each.name):
                return f"output {each.name} has a data-dependent shape and no output allocator"
            if not self._addresses.get(each.name) and not self._allocators.get(each.name):
                return f"the address of {each.name} is not set"
        for name, values in self._values().items():
            low, _, high = self._engine._profiles[self._profile]["values"][name]
            if any(not a <= value <= b for a, value, b in zip(low, values, high)):
                return f"values {values} of {name} are outside of the profile {low}..{high}"
        try:
            if self._engine._prediction.largest_k(self._shapes, self._values()) > K_LIMIT:
                return f"a TopK takes more than {K_LIMIT} elements"
        except RuntimeError as failure:
            return str(failure)
        if self._engine._device != device.current() or stream.device not in (device.current(), self._engine._device):
            return "the stream or the engine belongs to another GPU than the one that this thread uses"
        if stream.capture and self._flushed != self._shapes:
            return "this call updates shapes, which cannot be captured: enqueue once with them before the capture"
        if stream.capture and any(each.data_dependent for each in self._engine._outputs):
            return "data-dependent shapes cannot be captured"
        if stream.capture and self._engine._facts["has_if"]:
            return "an If cannot be captured"
        return ""

    def _outside(self, found: Tensor | None, name: str, shape: tuple[int, ...]) -> str:
        if found is None:
            return f"{name} is no input"
        if len(shape) != len(found.shape) or any(a not in (-1, b) for a, b in zip(found.shape, shape)):
            return f"static dimensions of {name} are {tuple(found.shape)}, got {shape}"
        given = self._engine._profiles[self._profile]["shapes"].get(name)
        if given and any(not a <= size <= b for a, size, b in zip(given[0], shape, given[2])):
            return f"{name} {shape} is outside of the profile {tuple(given[0])}..{tuple(given[2])}"
        return ""

    def _unspecified(self) -> list[str]:
        return [
            each.name
            for each in self._engine._inputs
            if (-1 in each.shape and each.name not in self._shapes)
            or (each.is_shape and not self._addresses.get(each.name))
        ]

    def _predicted(self) -> dict[str, tuple[int, ...]]:
        return self._engine._prediction.shapes(self._shapes, self._values())

    def _values(self) -> dict[str, list[int]]:
        return {each.name: self._host_values(each) for each in self._engine._inputs if each.is_shape}

    def _host_values(self, each: Tensor) -> list[int]:
        count, kind = volume(each.shape), NUMPY[each.dtype]
        return MEMORY.host_bytes(self._addresses[each.name], count * kind().itemsize, each.name).view(kind).tolist()

    def _all(self) -> list[Tensor]:
        return [*self._engine._inputs, *self._engine._outputs]

    def _tensor(self, name: str, among: list[Tensor]) -> Tensor | None:
        return next((each for each in among if each.name == name), None)

    def _stream(self, handle: int) -> Stream:
        if handle and handle not in STREAMS:
            raise misuse(f"enqueueV3: {handle:#x} is no stream (destroyed before?)")
        return STREAMS[handle] if handle else DEFAULT

    @contextmanager
    def _use(self, call: str):
        me = threading.get_ident()
        if self._user not in (None, me):
            raise misuse(f"IExecutionContext::{call} while another thread uses the same context")
        before, self._user = self._user, me
        try:
            yield
        finally:
            self._user = before
