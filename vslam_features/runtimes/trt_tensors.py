"""The inputs and outputs of an engine, by TensorRT's word."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..errors import ModelFileError
from .base import TensorSpec

_DTYPES = {
    "FLOAT": np.float32,
    "HALF": np.float16,
    "INT8": np.int8,
    "UINT8": np.uint8,
    "INT32": np.int32,
    "INT64": np.int64,
    "BOOL": np.bool_,
}


def tensor_specs(trt, engine: Callable[[], object]) -> tuple[dict[str, TensorSpec], dict[str, TensorSpec]]:
    """Inputs and outputs by name, in the engine's order.

    Args:
        trt: the module. engine: gives the ``ICudaEngine``; a name for it would keep it alive with the error below.
    Raises:
        ModelFileError: one is of a type that no array holds.
    """
    specs: tuple[dict[str, TensorSpec], dict[str, TensorSpec]] = ({}, {})
    known = {getattr(trt.DataType, n): np.dtype(d) for n, d in _DTYPES.items() if hasattr(trt.DataType, n)}
    for index in range(engine().num_io_tensors):
        name = engine().get_tensor_name(index)
        kind = engine().get_tensor_dtype(name)
        if kind not in known:
            raise ModelFileError(
                f"tensor '{name}' is of TensorRT's type {getattr(kind, 'name', kind)}, which no array holds: build the "
                "engine from a model whose inputs and outputs are float32 or float16"
            )
        shape = tuple(None if n < 0 else int(n) for n in engine().get_tensor_shape(name))
        out = engine().get_tensor_mode(name) == trt.TensorIOMode.OUTPUT
        specs[out][name] = TensorSpec(known[kind], shape)
    return specs
