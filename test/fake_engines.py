"""Small graphs, and engines of them by the calls that every program of TensorRT makes."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import numpy as np
import onnx
import spox.opset.ai.onnx.v18 as op
from onnx import helper
from spox import Tensor, argument, build

ROWS = {"a": ((1, 4), (2, 4), (8, 4))}  # of ``doubled``
A = np.arange(12, dtype=np.float32).reshape(3, 4)


def doubled(name: str = "y") -> bytes:
    """y = 2 a, of N rows of 4."""
    a = argument(Tensor(np.float32, ("N", 4)))
    return build({"a": a}, {name: op.mul(a, op.const(np.float32(2)))}).SerializeToString()


def branches(other_rows: int) -> bytes:
    """An If whose branches give 3 rows and ``other_rows``."""
    flag = argument(Tensor(np.bool_, ()))
    rows = [op.const(np.zeros((n, 4), np.float32)) for n in (3, other_rows)]
    y = op.if_(flag, then_branch=lambda: [rows[0]], else_branch=lambda: [rows[1]])[0]
    return build({"flag": flag}, {"y": y}).SerializeToString()


def typed(*nodes: onnx.NodeProto, inputs: dict, outputs: dict, constants=()) -> bytes:
    """A model from nodes: name -> (element type, shape)."""
    ends = [[helper.make_tensor_value_info(n, *spec) for n, spec in each.items()] for each in (inputs, outputs)]
    graph = helper.make_graph(list(nodes), "g", *ends, list(constants))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9).SerializeToString()


def build_engine(fake, model: bytes, shapes: dict | None = None, values: dict | None = None, flags=(), network_flags=0):
    """All that a build takes, and what came of it.

    Args:
        shapes, values: min, opt and max by the name of an input, of its shape or, for a shape tensor, its values.
        flags: names of ``BuilderFlag``.
    Returns:
        builder, network, parser, config, profile, plan (None where the build fails), runtime, engine, ``said``: the
        messages as (severity, text).
    """
    trt, said = fake.trt, []

    class Log(trt.ILogger):
        def __init__(self):
            trt.ILogger.__init__(self)

        def log(self, severity, msg):
            said.append((severity.name, msg))

    logger = Log()
    made = SimpleNamespace(said=said, logger=logger, builder=trt.Builder(logger), plan=None, engine=None)
    made.network = made.builder.create_network(network_flags)
    made.parser = trt.OnnxParser(made.network, logger)
    made.parsed = made.parser.parse(model)
    made.config = made.builder.create_builder_config()
    for flag in flags:
        made.config.set_flag(getattr(trt.BuilderFlag, flag))
    made.profile = made.builder.create_optimization_profile()
    for name, three in (shapes or {}).items():
        made.profile.set_shape(name, *three)
    for name, three in (values or {}).items():
        made.profile.set_shape_input(name, *three)
    if shapes or values:
        assert made.config.add_optimization_profile(made.profile) == 0
    made.runtime = trt.Runtime(logger)
    made.build = lambda: made.builder.build_serialized_network(made.network, made.config)
    if made.parsed:
        made.plan = made.build()
    if made.plan is not None:
        made.engine = made.runtime.deserialize_cuda_engine(made.plan)
    return made


def errors(made) -> str:
    """All that was logged as an error."""
    return "\n".join(text for severity, text in made.said if severity == "ERROR")


def passing(result: tuple):
    """What a call of CUDA gives, which must succeed."""
    assert int(result[0]) == 0, result
    return result[1] if len(result) == 2 else result[1:]


def at(address: int, shape: tuple[int, ...], dtype=np.float32) -> np.ndarray:
    """An array in memory of the host."""
    size = max(int(np.prod(shape)) * np.dtype(dtype).itemsize, 1)
    return np.frombuffer((ctypes.c_ubyte * size).from_address(address), dtype, int(np.prod(shape))).reshape(shape)


class Bench:
    """A stream, and memory for runs of one context; ``close`` gives all back."""

    def __init__(self, fake, context):
        self.cuda, self.context = fake.cuda, context
        self.stream = passing(self.cuda.cudaStreamCreateWithFlags(self.cuda.cudaStreamNonBlocking))
        self._device, self._pinned = [], []

    def device(self, size: int) -> int:
        """Address of memory of the GPU."""
        self._device.append(passing(self.cuda.cudaMalloc(size)))
        return self._device[-1]

    def pinned(self, size: int) -> int:
        """Address of pinned memory."""
        self._pinned.append(passing(self.cuda.cudaMallocHost(size)))
        return self._pinned[-1]

    def upload(self, value: np.ndarray) -> int:
        """Address of a copy on the GPU, which is there once the stream gets to it."""
        there = self.pinned(value.nbytes)
        at(there, value.shape, value.dtype)[...] = value
        address = self.device(value.nbytes)
        kind = self.cuda.cudaMemcpyKind.cudaMemcpyHostToDevice
        passing(self.cuda.cudaMemcpyAsync(address, there, value.nbytes, kind, self.stream))
        return address

    def download(self, address: int, shape: tuple[int, ...], dtype=np.float32) -> np.ndarray:
        """An array that is filled once the stream gets to it."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        here = self.pinned(size)
        kind = self.cuda.cudaMemcpyKind.cudaMemcpyDeviceToHost
        passing(self.cuda.cudaMemcpyAsync(here, address, size, kind, self.stream))
        return at(here, shape, dtype)

    def wait(self) -> None:
        passing(self.cuda.cudaStreamSynchronize(self.stream))

    def close(self) -> None:
        self.wait()
        for address in self._device:
            passing(self.cuda.cudaFree(address))
        for address in self._pinned:
            passing(self.cuda.cudaFreeHost(address))
        passing(self.cuda.cudaStreamDestroy(self.stream))
        self.context = None


def ready(fake, context, a: np.ndarray = A) -> tuple[Bench, int]:
    """A bench with the input bound, and the address of the output."""
    bench = Bench(fake, context)
    assert context.set_input_shape("a", a.shape) and context.infer_shapes() == []
    assert context.set_tensor_address("a", bench.upload(a))
    y = bench.device(a.nbytes)
    assert context.set_tensor_address("y", y)
    return bench, y
