"""The rules of TensorRT that the fake keeps: what a run takes, and when its results are there."""

import ml_dtypes
import numpy as np
import pytest
import spox.opset.ai.onnx.v18 as op
from fake_engines import ROWS, A, Bench, at, build_engine, doubled, errors, ready, typed
from onnx import TensorProto, helper
from spox import Tensor, argument, build

VERSIONS = ("10.3.0", "10.13.3.9", "11.4.0.106")


@pytest.mark.parametrize("version", VERSIONS)
def test_results_come_when_the_stream_is_synchronised_and_not_before(fake_tensorrt, version):
    fake_tensorrt.use(tensorrt=version)
    made = build_engine(fake_tensorrt, doubled(), ROWS)
    context = made.engine.create_execution_context()
    bench, y = ready(fake_tensorrt, context)
    assert tuple(context.get_tensor_shape("y")) == (3, 4)
    assert context.execute_async_v3(int(bench.stream))
    result = bench.download(y, (3, 4))
    assert not (result == 2 * A).any()
    bench.wait()
    np.testing.assert_array_equal(result, 2 * A)
    bench.close()
    assert fake_tensorrt.live()["contexts"] == 1
    del context, made
    assert not any(fake_tensorrt.live().values()), fake_tensorrt.live()


def test_shapes_outside_of_the_profile_are_refused_with_the_reason_in_the_log(fake_tensorrt):
    made = build_engine(fake_tensorrt, doubled(), ROWS)
    context = made.engine.create_execution_context()
    assert context.infer_shapes() == ["a"]
    assert [tuple(each) for each in made.engine.get_tensor_profile_shape("a", 0)] == list(ROWS["a"])
    for shape in ((9, 4), (0, 4), (2, 5), (2,)):
        assert context.set_input_shape("a", shape) is False
        assert str(shape) in errors(made)
    assert context.set_input_shape("b", (2, 4)) is False
    assert tuple(context.get_tensor_shape("y")) == (-1, 4)
    with pytest.raises(TypeError):
        context.set_input_shape("a", np.array([2, 4]))


def test_a_run_lacks_nothing_or_is_refused(fake_tensorrt):
    made = build_engine(fake_tensorrt, doubled(), ROWS)
    context = made.engine.create_execution_context()
    bench = Bench(fake_tensorrt, context)
    assert context.execute_async_v3(bench.stream) is False and "inputs without a shape: a" in errors(made)
    context.set_input_shape("a", (3, 4))
    assert context.execute_async_v3(bench.stream) is False and "address of a is not set" in errors(made)
    context.set_tensor_address("a", bench.upload(A))
    assert context.execute_async_v3(bench.stream) is False and "address of y is not set" in errors(made)
    context.set_tensor_address("y", bench.device(A.nbytes))
    assert context.execute_async_v3(bench.stream) is True
    bench.close()


def test_bf16_is_rounded_as_in_another_library(fake_tensorrt):
    model = typed(
        helper.make_node("Cast", ["a"], ["a16"], to=TensorProto.BFLOAT16),
        helper.make_node("MatMul", ["a16", "a16"], ["y16"]),
        helper.make_node("Cast", ["y16"], ["y"], to=TensorProto.FLOAT),
        inputs={"a": (TensorProto.FLOAT, ("N", 4))},
        outputs={"y": (TensorProto.FLOAT, ("N", 4))},
    )
    fake_tensorrt.use(tensorrt="11.4.0.106")
    made = build_engine(fake_tensorrt, model, {"a": ((4, 4), (4, 4), (4, 4))})
    a = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
    context = made.engine.create_execution_context()
    bench, y = ready(fake_tensorrt, context, a)
    assert context.execute_async_v3(bench.stream)
    result = bench.download(y, (4, 4))
    bench.wait()
    rounded = a.astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(result, (rounded @ rounded).astype(ml_dtypes.bfloat16).astype(np.float32))
    assert np.abs(result - a @ a).max() > 1e-3
    bench.close()


def filtered() -> bytes:
    """z: where a is not zero, so as many columns as the data say."""
    a = argument(Tensor(np.float32, ("N", 4)))
    return build({"a": a}, {"y": op.identity(a), "z": op.non_zero(a)}).SerializeToString()


def test_an_output_whose_shape_depends_on_data_takes_an_allocator(fake_tensorrt):
    trt = fake_tensorrt.trt
    made = build_engine(fake_tensorrt, filtered(), ROWS)
    context = made.engine.create_execution_context()
    bench, _ = ready(fake_tensorrt, context)
    assert tuple(context.get_tensor_shape("z")) == (2, -1)
    assert context.execute_async_v3(bench.stream) is False and "no output allocator" in errors(made)
    calls = []

    class Allocator(trt.IOutputAllocator):
        def __init__(self):
            trt.IOutputAllocator.__init__(self)

        def reallocate_output_async(self, tensor_name, memory, size, alignment, stream):
            calls.append((tensor_name, memory, size, stream))
            return bench.device(size)

        def notify_shape(self, tensor_name, shape):
            calls.append((tensor_name, tuple(shape)))

    assert context.set_output_allocator("z", Allocator())
    assert context.execute_async_v3(bench.stream)
    assert calls == [("z", 0, 2 * 11 * 8, int(bench.stream)), ("z", (2, 11))]  # all but the first of 0..11
    bench.close()


@pytest.mark.parametrize("answer", ["none", "exception"])
def test_an_allocator_without_memory_fails_the_run(fake_tensorrt, answer):
    trt = fake_tensorrt.trt
    made = build_engine(fake_tensorrt, filtered(), ROWS)
    context = made.engine.create_execution_context()
    bench, _ = ready(fake_tensorrt, context)

    class Allocator(trt.IOutputAllocator):
        def reallocate_output(self, tensor_name, memory, size, alignment):
            return None if answer == "none" else [][0]

        def notify_shape(self, tensor_name, shape): ...

    context.set_output_allocator("z", Allocator())
    assert context.execute_async_v3(bench.stream) is False and "no memory for output z" in errors(made)
    bench.close()


def top_k() -> bytes:
    """The k largest of a, k being an input."""
    a, k = argument(Tensor(np.float32, ("N", "M"))), argument(Tensor(np.int64, (1,)))
    values, _ = op.top_k(a, k)
    return build({"a": a, "k": k}, {"y": values}).SerializeToString()


def test_an_input_that_says_a_shape_lies_on_the_host_and_has_a_range_of_values(fake_tensorrt):
    shapes = {"a": ((1, 1), (1, 4000), (1, 5000))}
    made = build_engine(fake_tensorrt, top_k(), shapes)
    assert made.plan is None and "has no values in the optimization profile" in errors(made)
    fake_tensorrt.use()
    made = build_engine(fake_tensorrt, top_k(), shapes, {"k": ([1], [100], [4000])})
    engine, trt = made.engine, fake_tensorrt.trt
    assert engine.get_tensor_location("k") == trt.TensorLocation.HOST and engine.is_shape_inference_io("k")
    assert engine.get_tensor_location("a") == trt.TensorLocation.DEVICE and not engine.is_shape_inference_io("a")
    context = engine.create_execution_context()
    bench = Bench(fake_tensorrt, context)
    a = np.arange(4000, dtype=np.float32)[None]
    context.set_input_shape("a", a.shape)
    context.set_tensor_address("a", bench.upload(a))
    context.set_tensor_address("y", bench.device(4000 * 4))
    assert context.infer_shapes() == ["k"]
    k = at(bench.pinned(8), (1,), np.int64)
    context.set_tensor_address("k", k.ctypes.data)
    for value, shape, fine in ((3, (1, 3), True), (4000, (1, 4000), False), (0, (1, 0), False)):
        k[0] = value
        assert tuple(context.get_tensor_shape("y")) == shape
        assert context.execute_async_v3(bench.stream) is fine, errors(made)
    assert "a TopK takes more than 3840" in errors(made) and "outside of the profile" in errors(made)
    bench.close()
