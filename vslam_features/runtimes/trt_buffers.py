"""Memory of a session's tensors, on the GPU and pinned on the host: it grows to the largest that was met, and stays."""

from __future__ import annotations

import ctypes
from functools import partial

import numpy as np

from .cuda import Cuda, release

_LEAST = 256  # bytes; an empty tensor needs an address too
_GROWTH = 1.5  # so that slowly growing inputs do not allocate each time


class Buffer:
    """Memory of one tensor.

    Args:
        on_device: False for tensors that TensorRT reads or writes on the host, as shape tensors.
    Attributes:
        moves: how often its memory was given back or came anew: what holds an address is stale after that.
    """

    def __init__(self, cuda: Cuda, on_device: bool = True):
        self._cuda, self._on_device = cuda, on_device
        self._host = self._device = self.capacity = self.moves = 0

    @property
    def address(self) -> int:
        """What TensorRT gets."""
        return self._device if self._on_device else self._host

    def fit(self, size: int) -> None:
        """Make room for ``size`` bytes; what was there is lost where it had too little. Raises BackendError."""
        if 0 < self.capacity >= size:
            return
        wanted = max(size, _LEAST, int(self.capacity * _GROWTH))
        self.close()  # first: there may be no room for both
        self._host = self._cuda.malloc_host(wanted)
        if self._on_device:
            self._device = self._cuda.malloc(wanted)
        self.capacity = wanted  # last: a buffer without one of its two parts has no room

    def upload(self, value: np.ndarray, stream) -> None:
        """Take a contiguous array, and send it to the GPU."""
        self.fit(value.nbytes)
        if value.nbytes:
            self._view(value.nbytes)[:] = value.reshape(-1).view(np.uint8)
            if self._on_device:
                self._cuda.copy_to_device(self._device, self._host, value.nbytes, stream)

    def fetch(self, size: int, stream) -> None:
        """Bring what the GPU wrote; it is there when the stream is done."""
        if size and self._on_device:
            self._cuda.copy_to_host(self._host, self._device, size, stream)

    def array(self, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        """A copy of what was fetched."""
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        return self._view(size).view(dtype).reshape(shape).copy() if size else np.empty(shape, dtype)

    def close(self) -> None:
        """Give all back."""
        host, device = self._host, self._device
        self._host = self._device = self.capacity = 0
        self.moves += 1
        release(
            *([partial(self._cuda.free, device)] if device else []),
            *([partial(self._cuda.free_host, host)] if host else []),
        )

    def _view(self, size: int) -> np.ndarray:
        """The first bytes of the pinned memory."""
        return np.frombuffer((ctypes.c_uint8 * size).from_address(self._host), np.uint8)
