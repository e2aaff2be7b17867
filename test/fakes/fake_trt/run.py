"""One piece of work that an execution context puts on a stream."""

from __future__ import annotations

import weakref

import numpy as np
from fake_gpu.faults import misuse
from fake_gpu.memory import MEMORY

from .dims import NUMPY, volume
from .graph_facts import Tensor
from .spoil import spoil

_SCRATCH = 0xAB


class Run:
    """One piece of work: the addresses and shapes are those of the moment at which it was put on the stream."""

    def __init__(self, context):
        self._context, self._engine = weakref.ref(context), context._engine
        self.addresses = dict(context._addresses)
        self._shapes = {e.name: context._shapes.get(e.name, tuple(e.shape)) for e in self._engine._inputs}
        self._predicted, self._values = context._predicted(), context._values()
        self._results: dict[str, np.ndarray] | None = None
        self._memory, self._changes, self.captured = context._memory, context._changes, False

    def compute(self) -> None:
        """Results of the inputs that are in memory now."""
        feed = {}
        for each in self._engine._inputs:
            kind, shape = NUMPY[each.dtype], self._shapes[each.name]
            if each.is_shape:
                feed[each.name] = np.array(self._values[each.name], kind).reshape(shape)
                continue
            size = volume(shape) * kind().itemsize
            raw = self._bytes(self.addresses[each.name], size, f"input {each.name}") if size else b""
            feed[each.name] = np.frombuffer(bytes(raw), kind).reshape(shape)
        names = [each.name for each in self._engine._outputs]
        results = dict(zip(names, self._engine._session.run(names, feed)))
        self._results = spoil(self._engine._key, feed, results)

    def shape(self, output: Tensor) -> tuple[int, ...]:
        """Of a result; for one that depends on no data, without computing it."""
        return self._predicted[output.name] if self._results is None else self._results[output.name].shape

    def _bytes(self, address: int, size: int, what: str) -> np.ndarray:
        return MEMORY.device_bytes(address, size, what, self._engine._device)

    def __call__(self) -> None:
        context = self._context()
        if context is None:
            raise misuse("work of an execution context that was destroyed before the work was done")
        if self.captured and context._changes != self._changes:
            raise misuse("a graph whose context was changed after the capture: what it does is undefined")
        if self._memory:
            self._bytes(*self._memory, "memory of the context")[:] = _SCRATCH
        if self._results is None:
            self.compute()
        for each in self._engine._outputs:
            result = self._results[each.name]
            if not each.data_dependent and result.shape != self._predicted[each.name]:
                raise misuse(f"output {each.name}: shape {result.shape}, expected {self._predicted[each.name]}")
            if result.nbytes:
                at = self._bytes(self.addresses[each.name], result.nbytes, f"output {each.name}")
                at[:] = np.frombuffer(result.tobytes(), np.uint8)
        self._results = None
