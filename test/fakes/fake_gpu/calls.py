"""What all functions of ``cuda.bindings.runtime`` have in common: the tuple of error and values, and ordered faults."""

from __future__ import annotations

import functools
import threading

from . import device
from .faults import FAULTS
from .runtime_types import cudaError_t
from .streams import Invalid

LAST = threading.local()
_WITHOUT_DRIVER = ("cudaRuntimeGetVersion", "cudaGetLastError")  # what releases before 12.8 can do without one


class Failed(Exception):
    def __init__(self, name: str):
        super().__init__(name)
        self.name = name


def api(
    outputs: int = 0,
    fails_as: str = "cudaErrorUnknown",
    late: bool = False,
    gpu: bool = True,
    undo=None,
    tells: bool = False,
):
    """A function of CUDA.

    Args:
        outputs: how many values follow the error.
        fails_as: the error of an ordered fault that names none.
        late: it does its work even so: its error is that of earlier work, which CUDA says such functions may return.
        gpu: it needs one.
        tells: it only tells about errors, so it has none of its own.
        undo: takes back what a ``late`` one made, where it fails.
    """

    def wrap(function):
        @functools.wraps(function)
        def call(*args, **kwargs):
            if device.cuda_python() < (12, 8) and not device.has_driver() and function.__name__ not in _WITHOUT_DRIVER:
                raise RuntimeError("Failed to dlopen libcuda.so.1")
            fault = None if tells else FAULTS.hit(function.__name__, cuda=True)
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
                except (Failed, Invalid) as error:
                    name = name or error.name
            if name:
                LAST.error = None if tells else name
                if undo and late and values:
                    undo(*values)
                return (cudaError_t[name], *[None] * outputs)
            return (cudaError_t.cudaSuccess, *values)

        return call

    return wrap
