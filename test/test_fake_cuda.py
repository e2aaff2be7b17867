"""The rules of CUDA that the fake keeps: lifetimes, order of work, capture, ordered faults."""

import numpy as np
import pytest
from fake_engines import at, passing


@pytest.fixture
def cuda(fake_tensorrt):
    return fake_tensorrt.cuda


def pinned(cuda, values) -> tuple[int, np.ndarray]:
    """Address and array of pinned memory with these floats."""
    address = passing(cuda.cudaMallocHost(4 * len(values)))
    array = at(address, (len(values),))
    array[:] = values
    return address, array


def copy(cuda, to, source, count, way, stream):
    return cuda.cudaMemcpyAsync(to, source, count, getattr(cuda.cudaMemcpyKind, f"cudaMemcpy{way}"), stream)


def test_fresh_memory_is_not_zero_and_ends_where_it_was_asked_to(cuda, fake_tensorrt):
    address, stream = passing(cuda.cudaMalloc(16)), passing(cuda.cudaStreamCreate())
    here, array = pinned(cuda, [0] * 4)
    passing(copy(cuda, here, address, 16, "DeviceToHost", stream))
    passing(cuda.cudaStreamSynchronize(stream))
    assert (array != 0).all() and address % 256 == 0
    with fake_tensorrt.misused("16 bytes at 4 of an allocation of 16 bytes"):
        copy(cuda, here, address + 4, 16, "DeviceToHost", stream)


def test_a_double_free_is_loud(cuda, fake_tensorrt):
    address = passing(cuda.cudaMalloc(16))
    passing(cuda.cudaFree(address))
    with fake_tensorrt.misused("double free of device memory"):
        cuda.cudaFree(address)


def test_a_use_after_free_is_loud(cuda, fake_tensorrt):
    address, stream = passing(cuda.cudaMalloc(16)), passing(cuda.cudaStreamCreate())
    passing(cuda.cudaFree(address))
    with fake_tensorrt.misused("use after free"):
        copy(cuda, address, np.zeros(4, np.float32), 16, "HostToDevice", stream)


@pytest.mark.parametrize("allocate, free", [("cudaMalloc", "cudaFreeHost"), ("cudaMallocHost", "cudaFree")])
def test_memory_goes_back_the_way_it_came(cuda, fake_tensorrt, allocate, free):
    address = passing(getattr(cuda, allocate)(16))
    with fake_tensorrt.misused("freed as"):
        getattr(cuda, free)(address)


def test_memory_of_the_device_is_none_of_the_host(cuda, fake_tensorrt):
    address, stream = passing(cuda.cudaMalloc(16)), passing(cuda.cudaStreamCreate())
    with fake_tensorrt.misused("memory of the device, and used as of the host"):
        copy(cuda, address, address, 16, "HostToDevice", stream)


def test_a_stream_that_was_destroyed_is_none(cuda, fake_tensorrt):
    stream = passing(cuda.cudaStreamCreate())
    passing(cuda.cudaStreamDestroy(stream))
    with fake_tensorrt.misused("is no stream"):
        cuda.cudaStreamSynchronize(stream)


def test_pinned_memory_is_read_when_the_stream_gets_there_and_pageable_at_once(cuda):
    stream, address = passing(cuda.cudaStreamCreateWithFlags(1)), passing(cuda.cudaMalloc(16))
    there, before = pinned(cuda, [1, 2, 3, 4])
    here, after = pinned(cuda, [0] * 4)
    passing(copy(cuda, address, there, 16, "HostToDevice", stream))
    before[:] = 9
    passing(copy(cuda, here, address, 16, "DeviceToHost", stream))
    assert after.tolist() == [0] * 4
    passing(cuda.cudaStreamSynchronize(stream))
    assert after.tolist() == [9] * 4

    pageable = np.array([1, 2, 3, 4], np.float32)
    passing(copy(cuda, address, pageable, 16, "HostToDevice", stream))
    pageable[:] = 9
    back = np.zeros(4, np.float32)
    passing(copy(cuda, back, address, 16, "DeviceToHost", stream))  # CUDA waits, where it cannot copy by itself
    assert back.tolist() == [1, 2, 3, 4]


def test_an_event_orders_two_streams(cuda):
    first, second = (passing(cuda.cudaStreamCreateWithFlags(1)) for _ in range(2))
    event, address = passing(cuda.cudaEventCreate()), passing(cuda.cudaMalloc(16))
    there, _ = pinned(cuda, [1, 2, 3, 4])
    here, array = pinned(cuda, [0] * 4)
    passing(copy(cuda, address, there, 16, "HostToDevice", first))
    passing(cuda.cudaEventRecord(event, first))
    passing(cuda.cudaStreamWaitEvent(second, event, 0))
    passing(copy(cuda, here, address, 16, "DeviceToHost", second))
    passing(cuda.cudaStreamSynchronize(second))
    assert array.tolist() == [1, 2, 3, 4]


def test_a_graph_does_again_what_was_recorded_at_the_same_addresses(cuda):
    stream, address = passing(cuda.cudaStreamCreateWithFlags(1)), passing(cuda.cudaMalloc(16))
    there, values = pinned(cuda, [1, 2, 3, 4])
    here, array = pinned(cuda, [0] * 4)
    passing(cuda.cudaStreamBeginCapture(stream, cuda.cudaStreamCaptureMode.cudaStreamCaptureModeGlobal))
    status = passing(cuda.cudaStreamIsCapturing(stream))
    assert status == cuda.cudaStreamCaptureStatus.cudaStreamCaptureStatusActive
    passing(copy(cuda, address, there, 16, "HostToDevice", stream))
    passing(copy(cuda, here, address, 16, "DeviceToHost", stream))
    graph = passing(cuda.cudaStreamEndCapture(stream))
    passing(cuda.cudaStreamSynchronize(stream))
    assert array.tolist() == [0] * 4  # what is captured is not run
    instance = passing(cuda.cudaGraphInstantiate(graph, 0))
    passing(cuda.cudaGraphDestroy(graph))
    for start in (1, 5):
        values[:] = np.arange(start, start + 4)
        passing(cuda.cudaGraphLaunch(instance, stream))
        passing(cuda.cudaStreamSynchronize(stream))
        assert array.tolist() == list(range(start, start + 4))
    passing(cuda.cudaGraphExecDestroy(instance))
    live = cuda.live()
    assert live["graphs"] == live["graph_instances"] == 0


@pytest.mark.parametrize("call", ["cudaMalloc", "cudaStreamSynchronize", "cudaMemcpy", "cudaDeviceSynchronize"])
def test_what_waits_or_allocates_breaks_a_capture(cuda, call):
    stream, address = passing(cuda.cudaStreamCreateWithFlags(1)), passing(cuda.cudaMalloc(16))
    values = np.zeros(4, np.float32)
    kind = cuda.cudaMemcpyKind.cudaMemcpyHostToDevice
    arguments = {"cudaMalloc": (16,), "cudaStreamSynchronize": (stream,), "cudaMemcpy": (address, values, 16, kind)}
    passing(cuda.cudaStreamBeginCapture(stream, cuda.cudaStreamCaptureMode.cudaStreamCaptureModeGlobal))
    failed = getattr(cuda, call)(*arguments.get(call, ()))
    assert failed[0] == cuda.cudaError_t.cudaErrorStreamCaptureUnsupported
    ended = cuda.cudaStreamEndCapture(stream)
    assert ended == (cuda.cudaError_t.cudaErrorStreamCaptureInvalidated, None)
    assert cuda.live()["graphs"] == 0
    passing(cuda.cudaStreamSynchronize(stream))  # and the stream is as before


def test_work_on_the_default_stream_breaks_the_capture_of_one_that_waits_for_it(cuda):
    address = passing(cuda.cudaMalloc(16))
    for flags, code in ((cuda.cudaStreamDefault, 906), (cuda.cudaStreamNonBlocking, 0)):
        stream = passing(cuda.cudaStreamCreateWithFlags(flags))
        passing(cuda.cudaStreamBeginCapture(stream, cuda.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed))
        assert int(cuda.cudaMemsetAsync(address, 0, 16, 0)[0]) == code
        error, graph = cuda.cudaStreamEndCapture(stream)
        assert (int(error) == 0) is (code == 0)
    passing(cuda.cudaGraphDestroy(graph))


def test_more_memory_than_the_gpu_has_is_refused(fake_tensorrt):
    fake_tensorrt.use(gpu="NVIDIA Orin;8.7;12.6;64")
    cuda = fake_tensorrt.cuda
    assert passing(cuda.cudaMemGetInfo()) == (64 << 20, 64 << 20)
    address = passing(cuda.cudaMalloc(60 << 20))
    assert cuda.cudaMalloc(5 << 20) == (cuda.cudaError_t.cudaErrorMemoryAllocation, None)
    assert passing(cuda.cudaMemGetInfo())[0] == 4 << 20
    passing(cuda.cudaFree(address))
    passing(cuda.cudaFree(passing(cuda.cudaMalloc(5 << 20))))


def test_gpus_and_versions_are_those_of_the_environment(fake_tensorrt):
    fake_tensorrt.use(gpu="NVIDIA RTX 3060;8.6;570.1|NVIDIA A100;8.0;12.8;40000", cuda="12.4")
    cuda = fake_tensorrt.cuda
    assert passing(cuda.cudaGetDeviceCount()) == 2
    assert passing(cuda.cudaDriverGetVersion()) == 12080 and passing(cuda.cudaRuntimeGetVersion()) == 12040
    second = passing(cuda.cudaGetDeviceProperties(1))
    assert (second.name, second.major, second.minor, second.totalGlobalMem) == (b"NVIDIA A100", 8, 0, 40000 << 20)
    assert cuda.cudaSetDevice(2) == (cuda.cudaError_t.cudaErrorInvalidDevice,)
    fake_tensorrt.use(gpu="")
    cuda = fake_tensorrt.cuda
    assert cuda.cudaGetDeviceCount() == (cuda.cudaError_t.cudaErrorNoDevice, None)
    assert passing(cuda.cudaDriverGetVersion()) > 12000


def test_a_fault_comes_at_the_call_that_was_ordered(fake_tensorrt):
    cuda = fake_tensorrt.cuda
    fake_tensorrt.set_faults(cudaMalloc=2)
    codes = [int(cuda.cudaMalloc(16)[0]) for _ in range(3)]
    assert codes == [0, 2, 0] and fake_tensorrt.calls("cudaMalloc") == 3
    assert cuda.cudaGetLastError() == (cuda.cudaError_t.cudaErrorMemoryAllocation,)
    assert cuda.cudaGetLastError() == (cuda.cudaError_t.cudaSuccess,)
    fake_tensorrt.set_faults(cuda_call=2)
    assert [int(cuda.cudaGetDeviceCount()[0]) for _ in range(3)] == [0, 3, 0]
    fake_tensorrt.set_faults(cudaStreamCreate={"error": "cudaErrorIllegalAddress", "sticky": True})
    assert int(cuda.cudaStreamCreate()[0]) == 700
    fake_tensorrt.set_faults()
    assert int(cuda.cudaStreamCreate()[0]) == 0


def test_a_lost_context_fails_all_that_follows(fake_tensorrt):
    cuda = fake_tensorrt.cuda
    address = passing(cuda.cudaMalloc(16))
    fake_tensorrt.set_faults(cudaDeviceSynchronize={"at": 1, "error": "cudaErrorIllegalAddress", "sticky": True})
    assert int(cuda.cudaDeviceSynchronize()[0]) == 700
    assert cuda.cudaMalloc(16) == (cuda.cudaError_t.cudaErrorIllegalAddress, None)
    assert int(cuda.cudaFree(address)[0]) == 700 and cuda.live()["device"] == 0


def test_what_gives_back_does_so_even_where_it_reports_an_earlier_error(fake_tensorrt):
    cuda = fake_tensorrt.cuda
    device, host = passing(cuda.cudaMalloc(16)), passing(cuda.cudaMallocHost(16))
    stream = passing(cuda.cudaStreamCreate())
    fake_tensorrt.set_faults(cudaFree=True, cudaFreeHost=True, cudaStreamDestroy=True)
    codes = [int(call[0]) for call in (cuda.cudaFree(device), cuda.cudaFreeHost(host), cuda.cudaStreamDestroy(stream))]
    assert 0 not in codes and not any(cuda.live().values())


def test_each_thread_starts_on_the_first_gpu(fake_tensorrt):
    from concurrent.futures import ThreadPoolExecutor

    fake_tensorrt.use(gpu="NVIDIA A100;8.0;12.8|NVIDIA A100;8.0;12.8")
    cuda = fake_tensorrt.cuda
    passing(cuda.cudaSetDevice(1))
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: passing(cuda.cudaGetDevice())).result() == 0
    assert passing(cuda.cudaGetDevice()) == 1


def test_children_have_the_same_machine(fake_tensorrt):
    import subprocess
    import sys

    fake_tensorrt.use(tensorrt="11.4.0.106", gpu="NVIDIA Thor;11.0;13.0")
    code = (
        "import tensorrt; from cuda.bindings import runtime as r; p = r.cudaGetDeviceProperties(0)[1]; "
        "print(tensorrt.__version__, p.name.decode(), hasattr(tensorrt.BuilderFlag, 'FP16'))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert told.split() == ["11.4.0.106", "NVIDIA", "Thor", "False"]
