"""CUDA's calls: each return value is checked, and what is missing is told apart."""

import sys

import pytest

from vslam_features.errors import BackendError, ConfigError, RuntimeMissingError
from vslam_features.runtimes import cuda
from vslam_features.runtimes.cuda import Gpu, release


@pytest.mark.parametrize("bindings", ["new", "old"])
def test_a_gpu_is_described_by_either_binding(fake_tensorrt, monkeypatch, bindings):
    fake_tensorrt.use(gpu="NVIDIA Orin;8.7;12.6;7620|NVIDIA A100;8.0;12.6;40000", cuda="12.9")
    if bindings == "old":  # cuda-python before 12.8 on some machines has cuda.cudart alone
        monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    api = cuda.load()
    assert api.device_count() == 2
    assert api.device(0) == Gpu(0, "NVIDIA Orin", "8.7", "12.6", "12.9", 7620)
    assert api.device(1) == Gpu(1, "NVIDIA A100", "8.0", "12.6", "12.9", 40000)
    with pytest.raises(ConfigError, match="'cuda:2': there is no such GPU; this machine has cuda:0, cuda:1"):
        api.device(2)


@pytest.mark.parametrize(
    "gpu, said", [("", "cudaErrorNoDevice"), ("no driver", "cudaErrorInsufficientDriver"), ("none", "finds none")]
)
def test_without_gpu_or_driver(fake_tensorrt, monkeypatch, gpu, said):
    fake_tensorrt.use(gpu="" if gpu == "none" else gpu)
    if gpu == "none":  # which no version of CUDA does so far
        monkeypatch.setattr(fake_tensorrt.cuda, "cudaGetDeviceCount", lambda: (0, 0))
    with pytest.raises(RuntimeMissingError, match=said) as caught:
        cuda.load()
    assert "install NVIDIA's driver" in str(caught.value) and "--gpus all" in str(caught.value)


def test_without_libcuda_the_bindings_raise(fake_tensorrt, monkeypatch):
    """As those of cuda-python 12.6 do: seen on a machine without a driver."""

    def no_library():
        raise RuntimeError("Failed to dlopen libcuda.so.1")

    monkeypatch.setattr(fake_tensorrt.cuda, "cudaGetDeviceCount", no_library)
    with pytest.raises(RuntimeMissingError, match="Failed to dlopen libcuda.so.1; install NVIDIA's driver"):
        cuda.load()


def test_without_the_bindings(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda", None)
    with pytest.raises(RuntimeMissingError, match=r"cuda-python cannot be imported .*; pip install 'cuda-python=="):
        cuda.load()


def test_errors_name_call_error_text_and_next_step(fake_tensorrt):
    api = cuda.load()
    fake_tensorrt.set_faults(cudaMalloc=True, cudaStreamCreateWithFlags={"error": "cudaErrorIllegalAddress"})
    with pytest.raises(BackendError, match=r"^cudaMalloc: cudaErrorMemoryAllocation \(.+\); free GPU memory, or build"):
        api.malloc(100)
    with pytest.raises(BackendError, match="^cudaStreamCreateWithFlags: cudaErrorIllegalAddress .*: start it again"):
        api.create_stream()
    # The error is taken back, or TensorRT, which asks for the last one after its launches, would find it.
    assert int(fake_tensorrt.cuda.cudaGetLastError()[0]) == 0


def test_an_error_that_the_bindings_cannot_name(fake_tensorrt, monkeypatch):
    def not_found(error):
        raise RuntimeError('Function "cuGetErrorString" not found')

    api = cuda.load()
    monkeypatch.setattr(fake_tensorrt.cuda, "cudaGetErrorString", not_found)
    fake_tensorrt.set_faults(cudaMallocHost={"error": "cudaErrorInvalidValue"})
    with pytest.raises(BackendError, match="^cudaMallocHost: cudaErrorInvalidValue$"):
        api.malloc_host(8)


def test_memory_streams_copies_and_graphs(fake_tensorrt):
    api = cuda.load()
    stream, host, back, device = api.create_stream(), api.malloc_host(64), api.malloc_host(64), api.malloc(64)
    free, total = api.memory_info()
    assert total == 7620 << 20 and 0 < free <= total - 64
    from vslam_features.runtimes.trt_buffers import Buffer  # what looks into pinned memory

    there, here = Buffer(api), Buffer(api)
    there._host, here._host = host, back
    there._view(64)[:] = range(64)
    api.copy_to_device(device, host, 64, stream)
    api.begin_capture(stream)
    api.copy_to_host(back, device, 64, stream)
    graph = api.end_capture(stream)
    executable = api.instantiate(graph)
    api.destroy_graph(graph)
    here._view(64)[:] = 0
    for _ in range(2):
        api.launch(executable, stream)
    api.synchronise(stream)
    assert here._view(64).tolist() == list(range(64))
    api.destroy_executable(executable)
    api.free(device)
    api.free_host(host)
    api.free_host(back)
    api.destroy_stream(stream)
    assert not any(fake_tensorrt.live().values())


def test_the_gpu_of_a_thread_comes_back(fake_tensorrt):
    fake_tensorrt.use(gpu="NVIDIA A100;8.0;12.8|NVIDIA A100;8.0;12.8")
    api = cuda.load()
    with pytest.raises(BackendError, match="cudaMalloc"), api.on(1):
        assert fake_tensorrt.cuda.cudaGetDevice()[1] == 1
        fake_tensorrt.set_faults(cudaMalloc=True)
        api.malloc(8)
    assert fake_tensorrt.cuda.cudaGetDevice()[1] == 0


def test_releasing_goes_on_after_an_error(caplog):
    done = []

    def fails():
        raise BackendError("cudaFree: cudaErrorLaunchFailure")

    release(lambda: done.append(1), fails, lambda: done.append(2))
    assert done == [1, 2] and "while releasing: cudaFree: cudaErrorLaunchFailure" in caplog.text
