"""The rules of TensorRT that the fake keeps: recorded runs, memory of the caller, threads and lifetimes."""

import threading

import numpy as np
from fake_engines import ROWS, A, Bench, branches, build_engine, doubled, errors, passing, ready

VERSIONS = ("10.3.0", "10.13.3.9", "11.4.0.106")


def capture(bench, context) -> bool:
    """Whether a run could be recorded; leaves the stream as it was."""
    mode = bench.cuda.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
    passing(bench.cuda.cudaStreamBeginCapture(bench.stream, mode))
    done = context.execute_async_v3(bench.stream)
    error, graph = bench.cuda.cudaStreamEndCapture(bench.stream)
    assert (int(error) == 0) is done
    bench.graph = graph
    return done


def test_a_run_is_recorded_after_one_with_the_same_shapes(fake_tensorrt):
    made = build_engine(fake_tensorrt, doubled(), ROWS)
    context = made.engine.create_execution_context()
    bench, y = ready(fake_tensorrt, context)
    assert not capture(bench, context) and "updates shapes" in errors(made)
    assert context.execute_async_v3(bench.stream) and capture(bench, context)
    instance = passing(bench.cuda.cudaGraphInstantiate(bench.graph, 0))
    passing(bench.cuda.cudaMemsetAsync(context.get_tensor_address("a"), 0, A.nbytes, bench.stream))
    passing(bench.cuda.cudaGraphLaunch(instance, bench.stream))
    result = bench.download(y, A.shape)
    bench.wait()
    assert not result.any()  # it read its input anew
    context.set_input_shape("a", (2, 4))
    passing(bench.cuda.cudaGraphLaunch(instance, bench.stream))
    with fake_tensorrt.misused("changed after the capture"):
        bench.wait()
    for destroy, thing in (("cudaGraphDestroy", bench.graph), ("cudaGraphExecDestroy", instance)):
        passing(getattr(bench.cuda, destroy)(thing))
    bench.close()


def test_branches_and_unknown_shapes_are_not_recorded(fake_tensorrt):
    made = build_engine(fake_tensorrt, branches(3))
    context = made.engine.create_execution_context()
    bench = Bench(fake_tensorrt, context)
    context.set_tensor_address("flag", bench.device(1))
    context.set_tensor_address("y", bench.device(48))
    assert context.execute_async_v3(bench.stream) and not capture(bench, context)
    assert "an If cannot be captured" in errors(made)
    bench.close()


def test_memory_of_the_caller_is_large_enough_or_refused(fake_tensorrt):
    trt = fake_tensorrt.trt
    made = build_engine(fake_tensorrt, doubled(), ROWS)
    context = made.engine.create_execution_context(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
    bench, y = ready(fake_tensorrt, context)
    assert context.execute_async_v3(bench.stream) is False and "no device memory was set" in errors(made)
    size = made.engine.device_memory_size_v2
    context.set_device_memory(bench.device(size), size - 1)
    assert f"setDeviceMemoryV2: Error Code 3: API Usage Error ({size - 1} at" in errors(made)
    context.set_device_memory(bench.device(size), size)
    assert context.execute_async_v3(bench.stream)
    result = bench.download(y, A.shape)
    bench.wait()
    np.testing.assert_array_equal(result, 2 * A)
    bench.close()


def test_two_threads_in_one_context_are_loud(fake_tensorrt):
    made = build_engine(fake_tensorrt, doubled(), ROWS)
    context = made.engine.create_execution_context()
    bench, _ = ready(fake_tensorrt, context)
    caught, start = [], threading.Barrier(2)

    def work():
        start.wait()
        try:
            for _ in range(50):
                context.execute_async_v3(bench.stream)
        except BaseException as failure:
            caught.append(str(failure))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert caught and "while another thread uses the same context" in caught[0]
    assert fake_tensorrt.misuses()
    bench.close()


def test_a_context_that_goes_before_its_work_is_done_is_loud(fake_tensorrt):
    made = build_engine(fake_tensorrt, doubled(), ROWS)
    context = made.engine.create_execution_context()
    bench, _ = ready(fake_tensorrt, context)
    assert context.execute_async_v3(bench.stream)
    bench.context = context = None
    with fake_tensorrt.misused("destroyed before the work was done"):
        bench.wait()
    bench.close()


def test_a_gpu_does_not_use_the_memory_of_another(fake_tensorrt):
    fake_tensorrt.use(gpu="NVIDIA A100;8.0;12.8|NVIDIA A100;8.0;12.8")
    cuda = fake_tensorrt.cuda
    made = build_engine(fake_tensorrt, doubled(), ROWS)
    context = made.engine.create_execution_context()
    bench, _ = ready(fake_tensorrt, context)
    passing(cuda.cudaSetDevice(1))
    assert context.execute_async_v3(bench.stream) is False and "belongs to another GPU" in errors(made)
    elsewhere = bench.device(A.nbytes)
    passing(cuda.cudaSetDevice(0))
    context.set_tensor_address("y", elsewhere)
    assert context.execute_async_v3(bench.stream)
    with fake_tensorrt.misused("memory of GPU 1, used on GPU 0"):
        bench.wait()
    bench.close()
