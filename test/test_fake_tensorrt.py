"""The fake TensorRT against the real one's names, and against its rules."""

import ctypes

import numpy as np
import pytest
import spox.opset.ai.onnx.v18 as op
from spox import Tensor, argument, build

VERSIONS = ("10.3.0", "10.13.3.9", "11.4.0.106")


def double() -> bytes:
    """y = 2 a, of N rows of 4."""
    a = argument(Tensor(np.float32, ("N", 4)))
    return build({"a": a}, {"y": op.mul(a, op.const(np.float32(2)))}).SerializeToString()


def engine_of(fake, model: bytes, **shapes):
    """A context of an engine, by the calls that every program makes."""
    trt = fake.trt
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    assert trt.OnnxParser(network, logger).parse(model)
    config = builder.create_builder_config()
    profile = builder.create_optimization_profile()
    for name, (low, best, high) in shapes.items():
        profile.set_shape(name, low, best, high)
    config.add_optimization_profile(profile)
    plan = builder.build_serialized_network(network, config)
    return trt.Runtime(logger).deserialize_cuda_engine(plan).create_execution_context()


def done(result):
    """Values of a call that must succeed."""
    assert int(result[0]) == 0, result
    return result[1] if len(result) == 2 else result[1:]


def host(address: int, shape: tuple[int, ...]) -> np.ndarray:
    """Floats at an address of pinned memory."""
    size = int(np.prod(shape)) * 4
    return np.frombuffer((ctypes.c_ubyte * size).from_address(address), np.float32).reshape(shape)


@pytest.mark.parametrize("version", VERSIONS)
def test_results_come_when_the_stream_is_synchronised_and_not_before(fake_tensorrt, version):
    fake_tensorrt.use(tensorrt=version)
    context, cuda = engine_of(fake_tensorrt, double(), a=((1, 4), (2, 4), (8, 4))), fake_tensorrt.cuda
    kind, size = cuda.cudaMemcpyKind, 3 * 4 * 4
    stream = done(cuda.cudaStreamCreateWithFlags(cuda.cudaStreamNonBlocking))
    there, back = (done(cuda.cudaMallocHost(size)) for _ in range(2))
    a, y = (done(cuda.cudaMalloc(size)) for _ in range(2))
    host(there, (3, 4))[:] = np.arange(12).reshape(3, 4)
    assert context.set_input_shape("a", (3, 4)) and context.infer_shapes() == []
    assert tuple(context.get_tensor_shape("y")) == (3, 4)
    assert context.set_tensor_address("a", a) and context.set_tensor_address("y", y)
    done(cuda.cudaMemcpyAsync(a, there, size, kind.cudaMemcpyHostToDevice, stream))
    assert context.execute_async_v3(int(stream))
    done(cuda.cudaMemcpyAsync(back, y, size, kind.cudaMemcpyDeviceToHost, stream))
    expected = 2 * np.arange(12, dtype=np.float32).reshape(3, 4)
    assert not (host(back, (3, 4)) == expected).any()
    done(cuda.cudaStreamSynchronize(stream))
    np.testing.assert_array_equal(host(back, (3, 4)), expected)
    for address in (a, y):
        done(cuda.cudaFree(address))
    for address in (there, back):
        done(cuda.cudaFreeHost(address))
    done(cuda.cudaStreamDestroy(stream))
    assert fake_tensorrt.live()["contexts"] == 1
    del context
    assert not any(fake_tensorrt.live().values()), fake_tensorrt.live()
