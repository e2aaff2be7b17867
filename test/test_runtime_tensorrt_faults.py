"""Whatever fails, of CUDA or of TensorRT: a typed error that says what, and nothing stays on the GPU."""

import gc
import importlib
import sys
import threading
import weakref
from collections import deque

import numpy as np
import pytest
import trt_helpers as t
from trt_helpers import assert_same, expected, open_session, place_engine, rows

from vslam_features import registry
from vslam_features.errors import (
    BackendError,
    ConfigError,
    ModelError,
    ModelFileError,
    PluginError,
    RuntimeMissingError,
    VslamFeaturesError,
)
from vslam_features.options import check
from vslam_features.runtimes import trt_library
from vslam_features.runtimes.cuda import Cuda
from vslam_features.runtimes.trt import TensorRt
from vslam_features.runtimes.trt_buffers import Buffer
from vslam_features.runtimes.trt_context import Context
from vslam_features.runtimes.trt_graphs import RECORD_AT
from vslam_features.runtimes.trt_library import Capabilities, words

BUILD = "run 'vslam-features models build tiny --runtime tensorrt'"
# Runs of these sizes allocate, record a graph, launch it, grow, and record again.
SIZES = [3] * (RECORD_AT + 1) + [20] * (RECORD_AT + 1)


@pytest.fixture
def matcher(tmp_path, fake_tensorrt):
    model = t.similarity()
    return place_engine(tmp_path / "tiny.engine", fake_tensorrt, model, t.SIMILARITY), model


def inputs_of(size: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(size)
    return {"a": rows(rng, size), "b": rows(rng, size)}


def live_for(path, model, inputs) -> list[VslamFeaturesError]:
    """Load, run all, close; runs that succeed are right. The errors on the way, without their tracebacks.

    In these are frames of the fake, where the real library has none.
    """
    errors: list[VslamFeaturesError] = []
    try:
        session = open_session(path)
    except VslamFeaturesError as error:
        return [type(error)(str(error))]
    try:
        for each in inputs:
            try:
                found = session.run(each)
            except VslamFeaturesError as error:
                errors.append(type(error)(str(error)))
            else:
                assert_same(found, expected(model, each))
    finally:
        session.close()
    return errors


def assert_released(machine) -> None:
    assert not any(machine.live().values()), machine.live()


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.endurance)])
def test_each_cuda_call_in_turn(matcher, fake_tensorrt, every):
    path, model = matcher
    inputs = [inputs_of(size) for size in SIZES]
    fake_tensorrt.set_faults()
    assert live_for(path, model, inputs) == []
    calls, failed = fake_tensorrt.calls(), 0
    assert calls > 80
    for call in range(1, calls + 1, every):
        fake_tensorrt.set_faults(cuda_call=call)
        errors = live_for(path, model, inputs)
        assert len(errors) <= 1, f"call {call}: a fault costs one run: {errors}"
        assert all(isinstance(e, (BackendError, RuntimeMissingError)) and "cuda" in str(e) for e in errors)
        failed += len(errors)
        assert_released(fake_tensorrt)
    # The others are of recording, which costs the graph, and of releasing, which goes on.
    assert (calls - 60) // every < failed < calls


@pytest.mark.parametrize("call", ["cudaMemcpyAsync", "cudaStreamSynchronize", "cudaGraphLaunch", "cudaMalloc"])
def test_a_gpu_that_is_lost(matcher, fake_tensorrt, call):
    path, model = matcher
    fake_tensorrt.set_faults()
    live_for(path, model, [inputs_of(s) for s in SIZES])
    middle = fake_tensorrt.calls(call) // 2 + 1
    fake_tensorrt.set_faults(**{call: {"at": middle, "error": "cudaErrorIllegalAddress", "sticky": True}})
    errors = live_for(path, model, [inputs_of(s) for s in SIZES])
    assert len(errors) >= 1 and all("cudaErrorIllegalAddress" in str(e) for e in errors)
    assert all(isinstance(e, BackendError) and "start it again" in str(e) for e in errors)
    assert_released(fake_tensorrt)


@pytest.mark.parametrize(
    "call", "set_input_shape set_tensor_address infer_shapes execute_async_v3 create_execution_context".split()
)
def test_each_call_of_tensorrt_in_turn(matcher, fake_tensorrt, call):
    path, model = matcher
    inputs = [inputs_of(size) for size in SIZES]
    fake_tensorrt.set_faults()
    assert live_for(path, model, inputs) == []
    count = fake_tensorrt.calls(call)
    assert count >= 2
    for number in range(1, count + 1):
        fake_tensorrt.set_faults(**{call: number})
        errors = live_for(path, model, inputs)
        assert len(errors) <= 1
        for error in errors:
            assert type(error) is BackendError and ("fault" in str(error) or "Error Code" in str(error))
            assert call in str(error) or "no execution context" in str(error)
        assert_released(fake_tensorrt)


def test_memory_that_tensorrt_refuses(matcher, fake_tensorrt):
    fake_tensorrt.set_faults(set_device_memory=1)
    with pytest.raises(BackendError, match="tiny.engine: set_device_memory failed: .*API Usage Error"):
        open_session(matcher[0])
    assert_released(fake_tensorrt)


@pytest.mark.parametrize("fault", ["set_output_allocator", "cudaMalloc", "cudaMallocHost", "execute_async_v3"])
def test_outputs_of_unknown_size(tmp_path, fake_tensorrt, fault):
    model = t.kept()
    path = place_engine(tmp_path / "e.engine", fake_tensorrt, model, t.KEPT)
    inputs = [{"x": np.ones(n, np.float32)} for n in (5, 64, 64)]
    fake_tensorrt.set_faults()
    live_for(path, model, inputs)
    for number in range(1, fake_tensorrt.calls(fault) + 1):
        fake_tensorrt.set_faults(**{fault: number})
        errors = live_for(path, model, inputs)
        assert len(errors) == 1 and isinstance(errors[0], BackendError) and fault in str(errors[0])
        assert_released(fake_tensorrt)


def test_an_allocation_within_a_run_keeps_its_cause(tmp_path, fake_tensorrt):
    """TensorRT itself only says that it got no memory."""
    path = place_engine(tmp_path / "e.engine", fake_tensorrt, t.kept(), t.KEPT)
    session = open_session(path)
    session.run({"x": np.ones(1, np.float32)})
    fake_tensorrt.set_faults(cudaMalloc=1)  # of indices: the others fit into what the first run had
    with pytest.raises(BackendError, match="cudaMalloc: cudaErrorMemoryAllocation .*; free GPU memory"):
        session.run({"x": np.ones(64, np.float32)})
    assert session.run({"x": np.ones(64, np.float32)})["kept"].tolist() == [1] * 64


@pytest.mark.parametrize("fault", ["cudaStreamBeginCapture", "cudaStreamEndCapture", "cudaGraphInstantiate"])
def test_a_graph_that_cannot_be_recorded_costs_nothing_else(matcher, fake_tensorrt, fault, caplog):
    path, model = matcher
    session = open_session(path)
    fake_tensorrt.set_faults(**{fault: True})
    for _ in range(RECORD_AT + 3):
        assert_same(session.run(inputs_of(4)), expected(model, inputs_of(4)))
    assert (
        session.active.note.startswith("runs without CUDA graphs, which it was to use:")
        and fault in session.active.note
    )
    assert fake_tensorrt.calls(fault) == 1 and caplog.text.count("without CUDA graphs") == 1
    assert fake_tensorrt.live()["contexts"] == 1 and fake_tensorrt.live()["graphs"] == 0


def test_a_failed_launch_costs_one_run(matcher, fake_tensorrt):
    path, model = matcher
    session = open_session(path)
    for _ in range(RECORD_AT):
        session.run(inputs_of(4))
    fake_tensorrt.set_faults(cudaGraphLaunch=1)
    with pytest.raises(BackendError, match="^tensorrt .*: cudaGraphLaunch: cudaErrorLaunchFailure"):
        session.run(inputs_of(4))
    assert_same(session.run(inputs_of(4)), expected(model, inputs_of(4)))


def test_a_failed_run_leaves_no_work_behind(matcher, fake_tensorrt):
    """The next one changes addresses and memory that it would still use."""
    session = open_session(matcher[0])
    fake_tensorrt.set_faults(cudaMemcpyAsync=3)  # of the first output, when the run is enqueued
    with pytest.raises(BackendError, match="cudaMemcpyAsync"):
        session.run(inputs_of(4))
    assert [len(stream.queue) for stream in importlib.import_module("fake_gpu.streams").STREAMS.values()] == [0]


def test_an_error_that_somebody_keeps_holds_nothing(matcher, fake_tensorrt):
    """Its traceback has frames, whose variables would hold the engine."""
    fake_tensorrt.set_faults(create_execution_context=1)
    with pytest.raises(BackendError) as kept:
        open_session(matcher[0])
    assert_released(fake_tensorrt)
    fake_tensorrt.set_faults(deserialize=True)
    with pytest.raises(ModelFileError) as kept_too:
        open_session(matcher[0])
    assert_released(fake_tensorrt)
    fake_tensorrt.set_faults()
    session = open_session(matcher[0])
    fake_tensorrt.set_faults(execute_async_v3=1)
    with pytest.raises(BackendError) as kept_as_well:
        session.run(inputs_of(3))
    session.close()
    assert_released(fake_tensorrt)
    assert kept.value and kept_too.value and kept_as_well.value


def test_a_session_that_is_forgotten_while_others_work(matcher, fake_tensorrt):
    """The collector may end it in the middle of another's call, in the same thread."""
    path, model = matcher
    other, session = open_session(path), open_session(path)
    session.run(inputs_of(3))
    session.cycle = session
    gone = weakref.ref(session)
    del session

    def log(severity, message, forward=other._execution._library.logger.log):
        gc.collect()
        forward(severity, message)

    other._execution._library.logger.log = log
    fake_tensorrt.set_faults(set_input_shape=1)
    thread = threading.Thread(target=lambda: pytest.raises(BackendError, other.run, inputs_of(3)))
    thread.start()
    thread.join(timeout=60)
    assert not thread.is_alive() and gone() is None
    assert_same(other.run(inputs_of(3)), expected(model, inputs_of(3)))
    other.close()
    assert_released(fake_tensorrt)


@pytest.mark.parametrize("fault", [False, True])
def test_nothing_is_collected_while_a_graph_is_recorded(matcher, fake_tensorrt, monkeypatch, fault):
    """CUDA refuses to free memory in a thread that records: that of a session that ends there would be lost."""
    session, collects, execute = open_session(matcher[0]), [], Context.execute

    def watched(context, stream):
        collects.append(gc.isenabled())
        execute(context, stream)

    monkeypatch.setattr(Context, "execute", watched)
    fake_tensorrt.set_faults(**({"execute_async_v3": RECORD_AT + 1} if fault else {}))
    for _ in range(RECORD_AT):
        session.run(inputs_of(3))
    assert collects == [True] * RECORD_AT + [False] and gc.isenabled()
    assert fake_tensorrt.calls("cudaGraphInstantiate") == (not fault)
    session.close()


def test_a_shape_that_tensorrt_does_not_tell(matcher, fake_tensorrt, monkeypatch):
    """Dims{-1, {}} is its invalid shape: taken for that of one number, memory would be overrun."""
    session = open_session(matcher[0])
    trt = fake_tensorrt.trt
    monkeypatch.setattr(trt.IExecutionContext, "get_tensor_shape", lambda context, name: trt.Dims(()))
    with pytest.raises(BackendError, match=r"TensorRT told no shape of output 'products', but \(\)"):
        session.run(inputs_of(3))
    monkeypatch.undo()
    session.close()
    assert_released(fake_tensorrt)


def test_arguments_that_older_bindings_do_not_take(matcher, fake_tensorrt, monkeypatch):
    """cudaGraphInstantiate of cuda-python 11 takes others: graphs go, what is computed stays."""
    path, model = matcher
    session, inputs = open_session(path), inputs_of(3)

    def instantiate(graph, log, size):
        raise AssertionError("not reached")

    monkeypatch.setattr(fake_tensorrt.cuda, "cudaGraphInstantiate", instantiate)
    for _ in range(RECORD_AT + 1):
        assert_same(session.run(inputs), expected(model, inputs))
    assert "runs without CUDA graphs" in session.active.note and "cudaGraphInstantiate" in session.active.note
    session.close()
    assert_released(fake_tensorrt)


def test_a_run_that_is_interrupted_is_waited_for(matcher, fake_tensorrt, monkeypatch):
    """The next run would write its inputs below what the GPU still reads."""
    path, model = matcher
    session, inputs = open_session(path), inputs_of(3)
    session.run(inputs)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Buffer, "fetch", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        before = fake_tensorrt.calls("cudaStreamSynchronize")
        try:
            session.run(inputs)
        finally:
            assert fake_tensorrt.calls("cudaStreamSynchronize") == before + 1
    assert_same(session.run(inputs), expected(model, inputs))
    session.close()
    assert_released(fake_tensorrt)


# -- engines that are none for this machine ------------------------------------------------------


@pytest.mark.parametrize(
    "here, said",
    [
        ({"gpu": "NVIDIA A100;8.0;12.6"}, "GPU NVIDIA A100, was NVIDIA Orin; compute capability 8.0, was 8.7"),
        ({"gpu": "NVIDIA Orin;8.7;12.4"}, "driver 12.4, was 12.6"),
        ({"tensorrt": "10.3.0"}, "TensorRT 10.3.0, was 10.13.3.9"),
        ({"tensorrt": "11.4.0.106"}, "TensorRT 11.4.0.106, was 10.13.3.9"),
    ],
)
def test_an_engine_of_another_machine(matcher, fake_tensorrt, here, said):
    path, _ = matcher
    fake_tensorrt.use(**here)
    with pytest.raises(ModelFileError) as caught:
        open_session(path)
    text = str(caught.value)
    assert said in text and BUILD in text and str(path) in text
    assert "was built for GPU NVIDIA Orin (8.7) by TensorRT 10.13.3.9" in text
    assert fake_tensorrt.live()["runtimes"] == 0


def test_an_engine_that_tensorrt_refuses(tmp_path, fake_tensorrt):
    """Its header lies: then TensorRT's own words are told."""
    path = place_engine(tmp_path / "e.engine", fake_tensorrt, t.similarity(), t.SIMILARITY, tensorrt="10.3.0")
    fake_tensorrt.use(tensorrt="10.3.0")
    with pytest.raises(ModelFileError, match="Version tag does not match") as caught:
        open_session(path)
    assert "TensorRT 10.3.0 cannot load the engine" in str(caught.value) and BUILD in str(caught.value)
    assert_released(fake_tensorrt)


def test_cut_and_foreign_files(matcher, fake_tensorrt, tmp_path):
    path, model = matcher
    content = path.read_bytes()
    path.write_bytes(content[:-5])
    with pytest.raises(ModelFileError, match="cut short") as caught:
        open_session(path)
    assert BUILD in str(caught.value)
    path.write_bytes(content[:-5] + b"nonce")
    with pytest.raises(ModelFileError, match="is damaged"):
        open_session(path)
    onnx = tmp_path / "tiny.onnx"
    onnx.write_bytes(model.SerializeToString())
    with pytest.raises(ModelFileError, match="tensorrt runs .engine files; 'vslam-features models build .*tiny.onnx"):
        open_session(onnx)
    with pytest.raises(ModelFileError, match="no such model file"):
        open_session(tmp_path / "none.engine")
    assert_released(fake_tensorrt)


def test_a_tensor_that_no_array_holds(tmp_path, fake_tensorrt):
    path = place_engine(tmp_path / "e.engine", fake_tensorrt, t.in_bf16(), {})
    with pytest.raises(ModelFileError, match="tensor 'y' is of TensorRT's type BF16, which no array holds") as caught:
        open_session(path)
    assert_released(fake_tensorrt)
    assert "float32 or float16" in str(caught.value)


def test_an_engine_that_is_replaced_while_it_is_loaded(matcher, fake_tensorrt, monkeypatch):
    path, _ = matcher
    place_engine(path.with_name("other.engine"), fake_tensorrt, t.similarity(), t.SIMILARITY, has_if=True)
    device = Cuda.device

    def replacing(self, index):
        path.with_name("other.engine").replace(path)
        return device(self, index)

    monkeypatch.setattr(Cuda, "device", replacing)
    with pytest.raises(ModelFileError, match="tiny.engine was replaced by another engine while it was loaded: open"):
        open_session(path)
    assert_released(fake_tensorrt)


# -- machines without ----------------------------------------------------------------------------


@pytest.mark.parametrize("gpu", ["", "no driver"])
def test_without_a_gpu_nothing_of_tensorrt_is_constructed(matcher, fake_tensorrt, gpu):
    """The real one would end the process; the fake fails this test at its end."""
    fake_tensorrt.use(gpu=gpu)
    with pytest.raises(RuntimeMissingError, match="no GPU that CUDA can use: .*install NVIDIA's driver"):
        open_session(matcher[0])
    assert fake_tensorrt.live()["runtimes"] == 0 and fake_tensorrt.misuses() == []


@pytest.mark.parametrize("library, said", [("tensorrt", "python3-libnvinfer"), ("cuda", r"vslam_features\[tensorrt\]")])
def test_without_a_library(matcher, monkeypatch, library, said):
    for name in [n for n in sys.modules if n.split(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(RuntimeMissingError, match=f"{library}.* cannot be imported .*{said}"):
        open_session(matcher[0])


def test_a_runtime_that_cannot_be_made(matcher, fake_tensorrt, monkeypatch):
    def nothing(logger):
        raise TypeError("pybind11::init(): factory function returned nullptr")

    monkeypatch.setattr(fake_tensorrt.trt, "Runtime", nothing)
    with pytest.raises(BackendError, match="gives no Runtime: pybind11::init"):
        open_session(matcher[0])


@pytest.mark.parametrize("device", ["cpu", "cuda:", "cuda:x", "tensorrt", "cuda:-1", "gpu:1.5"])
def test_devices_that_are_none(matcher, device):
    with pytest.raises(ConfigError, match=f"set runtime.device to 'cuda' or 'cuda:1', got '{device}'"):
        open_session(matcher[0], t.LoadRequest(device))


def test_a_gpu_that_is_not_there(matcher):
    with pytest.raises(ConfigError, match="'cuda:3': there is no such GPU; this machine has cuda:0"):
        open_session(matcher[0], t.LoadRequest("cuda:3"))


# -- the library ---------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["10.3.0", "10.13.3.9", "11.4.0.106"])
def test_capabilities_by_what_the_module_has_are_those_that_are_assumed(fake_tensorrt, version):
    fake_tensorrt.use(tensorrt=version)
    found = trt_library.load().capabilities
    assert found == Capabilities.assumed(version)
    ten = version.startswith("10")
    assert (found.weakly_typed, found.layer_precisions, found.bf16) == (ten, ten, True)
    assert found.unequal_branches == (version != "10.3.0")


def test_a_lean_library_has_no_builder(fake_tensorrt, monkeypatch):
    monkeypatch.delattr(fake_tensorrt.trt, "Builder")
    library = trt_library.load()
    assert not library.capabilities.builds
    from vslam_features.runtimes import cuda

    with pytest.raises(RuntimeMissingError, match="lean library, which has no builder"):
        library.builder(cuda.load(), 0)


def test_a_message_within_a_message(fake_tensorrt):
    """Memory that a message takes may let the collector end a session, of which TensorRT logs in the same thread."""
    library = trt_library.load()
    error = fake_tensorrt.trt.ILogger.Severity.ERROR

    class Collecting(deque):
        def append(self, text):
            super().append(text)
            if text == "outer":
                library.logger.log(error, "inner")

    heard = Collecting()
    library._listeners.append((threading.get_ident(), heard))
    thread = threading.Thread(target=library.logger.log, args=(error, "outer"), daemon=True)
    thread.start()
    thread.join(timeout=60)
    assert not thread.is_alive() and list(heard) == ["outer", "inner"]


def test_what_is_said_of_another_session_is_not_heard(fake_tensorrt):
    """A context would be taken for failed because of an error in another thread."""
    library, error = trt_library.load(), fake_tensorrt.trt.ILogger.Severity.ERROR
    theirs = []

    def other():
        with library.listening() as said:
            library.logger.log(error, "theirs")
            theirs.append(words(said))

    with library.listening() as ours:
        for target, args in ((other, ()), (library.logger.log, (error, "of a thread in which nobody listens"))):
            thread = threading.Thread(target=target, args=args)
            thread.start()
            thread.join()
    assert (theirs, words(ours)) == (["theirs"], "of a thread in which nobody listens")


@pytest.mark.parametrize("version", ["8.6.1", "10.0.1"])
def test_a_library_that_is_too_old(fake_tensorrt, monkeypatch, version):
    monkeypatch.setattr(fake_tensorrt.trt, "__version__", version)
    with pytest.raises(
        RuntimeMissingError, match=f"tensorrt {version} is too old, 10.1 or newer is needed; .*JetPack 6"
    ):
        trt_library.load()


def test_the_logger_is_one_and_its_last_errors_are_quoted(fake_tensorrt, caplog):
    library = trt_library.load()
    assert trt_library.load() is library
    levels = fake_tensorrt.trt.ILogger.Severity
    with library.listening() as outer, library.listening() as inner:
        for i in range(20):
            library.logger.log(levels.ERROR, f"error  {i}\nof many")
        library.logger.log(levels.WARNING, "beware")
    library.logger.log(levels.INTERNAL_ERROR, "nobody listens")
    assert words(inner) == words(outer) and words(inner).startswith("error 12 of many | error 13")
    assert "nobody" not in words(outer) and "beware" not in words(outer)
    assert [r.message for r in caplog.records if r.levelname == "ERROR"] == ["TensorRT: nobody listens"]
    fake_tensorrt.use(tensorrt="10.3.0")
    assert trt_library.load() is not library


# -- the plug-in ---------------------------------------------------------------------------------


def test_the_plugin_and_its_options():
    assert registry.get("runtime", "tensorrt") is TensorRt
    assert check(TensorRt.Options()) == []
    with pytest.raises(PluginError):
        registry.get("runtime", "tensorrt11")
    problems = check(TensorRt.Options(typing="both", optimisation_level=6, workspace_mb=-1, build="always"))
    assert len(problems) == 4
    assert issubclass(ModelFileError, ModelError)
