"""The rules of TensorRT that the fake keeps: what a build takes, what an engine refuses, when results are there."""

import threading

import ml_dtypes
import numpy as np
import onnx
import pytest
import spox.opset.ai.onnx.v18 as op
from fake_engines import Bench, at, build_engine, doubled, errors, passing
from onnx import TensorProto, helper
from spox import Tensor, argument, build

VERSIONS = ("10.3.0", "10.13.3.9", "11.4.0.106")
ROWS = {"a": ((1, 4), (2, 4), (8, 4))}
A = np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.fixture
def misuse(fake_tensorrt):
    """The kind of exception; the test that expects one takes it off the list of those that fail it."""

    def kind():
        from fake_gpu.faults import Misuse

        return Misuse

    yield kind
    assert fake_tensorrt.misuses()


def strong(trt) -> int:
    """Flags of a strongly typed network: bit 1 in 10, bit 0 in 11."""
    return 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)


def ready(fake, context, a: np.ndarray = A) -> tuple[Bench, int]:
    """A bench with the input bound, and the address of the output."""
    bench = Bench(fake, context)
    assert context.set_input_shape("a", a.shape) and context.infer_shapes() == []
    assert context.set_tensor_address("a", bench.upload(a))
    y = bench.device(a.nbytes)
    assert context.set_tensor_address("y", y)
    return bench, y


def typed(*nodes: onnx.NodeProto, inputs: dict, outputs: dict, constants=()) -> bytes:
    """A model from nodes: name -> (element type, shape)."""
    ends = [[helper.make_tensor_value_info(n, *spec) for n, spec in each.items()] for each in (inputs, outputs)]
    graph = helper.make_graph(list(nodes), "g", *ends, list(constants))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9).SerializeToString()


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


@pytest.mark.parametrize(
    "three",
    [((2, 4), (1, 4), (8, 4)), ((1, 4), (9, 4), (8, 4)), ((1, 4), (2, 4, 1), (8, 4)), ((-1, 4), (2, 4), (8, 4))],
)
def test_a_profile_that_is_out_of_order_is_a_runtime_error(fake_tensorrt, three):
    profile = fake_tensorrt.trt.Builder(fake_tensorrt.trt.Logger()).create_optimization_profile()
    with pytest.raises(RuntimeError, match="inconsistent with other"):
        profile.set_shape("a", *three)
    assert profile.get_shape("a") == []


@pytest.mark.parametrize(
    "shapes, said",
    [
        ({}, "no optimization profile has been defined"),
        ({"b": ROWS["a"]}, "no input of the network: b"),
        ({"a": ((1, 5), (2, 5), (8, 5))}, "do not fit"),
    ],
)
def test_no_engine_comes_of_a_profile_that_does_not_fit(fake_tensorrt, shapes, said):
    made = build_engine(fake_tensorrt, doubled(), shapes)
    assert made.parsed and made.plan is None and said in errors(made)


def test_files_that_are_no_models_are_listed_as_errors(fake_tensorrt, tmp_path):
    made = build_engine(fake_tensorrt, b"<html>")
    assert not made.parsed and made.parser.num_errors == 1 and "Failed to parse" in made.parser.get_error(0).desc()
    assert made.parser.parse_from_file(str(tmp_path / "none.onnx")) is False
    assert "Failed to open" in made.parser.get_error(1).desc() and made.parser.get_error(2) is None
    det = typed(
        helper.make_node("Det", ["a"], ["y"], name="/d/Det"),
        inputs={"a": (TensorProto.FLOAT, (4, 4))},
        outputs={"y": (TensorProto.FLOAT, ())},
    )
    wrong = build_engine(fake_tensorrt, det).parser.get_error(0)
    assert (wrong.node_name(), wrong.node_operator(), wrong.code().name) == ("/d/Det", "Det", "UNSUPPORTED_NODE")


def mixed() -> bytes:
    """A MatMul of float and BF16: an error in a strongly typed network, cast in a weakly typed one."""
    return typed(
        helper.make_node("Cast", ["a"], ["b"], "to_bf16", to=TensorProto.BFLOAT16),
        helper.make_node("MatMul", ["a", "b"], ["y"], "mixed"),
        inputs={"a": (TensorProto.FLOAT, (4, 4))},
        outputs={"y": (TensorProto.FLOAT, (4, 4))},
    )


@pytest.mark.parametrize("version", VERSIONS)
def test_types_that_do_not_agree_are_refused_where_the_network_is_strongly_typed(fake_tensorrt, version):
    fake_tensorrt.use(tensorrt=version)
    made = build_engine(fake_tensorrt, mixed(), network_flags=strong(fake_tensorrt.trt))
    assert not made.parsed and "MatMul" in errors(made)
    weak = build_engine(fake_tensorrt, mixed())
    assert weak.parsed is not version.startswith("11.")  # where every network is strongly typed


@pytest.mark.parametrize("flag", ["FP16", "BF16", "OBEY_PRECISION_CONSTRAINTS"])
def test_a_strongly_typed_network_takes_no_flag_of_precision(fake_tensorrt, flag):
    made = build_engine(fake_tensorrt, doubled(), ROWS, flags=[flag], network_flags=strong(fake_tensorrt.trt))
    assert made.parsed and made.plan is None and f"{flag} is not allowed in a strongly typed network" in errors(made)
    assert build_engine(fake_tensorrt, doubled(), ROWS, flags=[flag]).plan is not None


def test_precisions_of_layers_need_their_flag_and_one_that_obeys(fake_tensorrt):
    from fake_trt.plan import unpack

    trt = fake_tensorrt.trt
    made = build_engine(fake_tensorrt, doubled(), ROWS)
    layer = next(each for each in made.network if each.type == trt.LayerType.ELEMENTWISE)
    assert layer.name == "Mul_0" and not layer.precision_is_set and layer.precision == trt.float32
    layer.precision = trt.bfloat16
    assert made.build() is None and "the flag BF16 is not set" in errors(made)
    made.config.set_flag(trt.BuilderFlag.BF16)
    assert unpack(bytes(made.build()))[0]["layer_precisions"] == {}
    made.config.set_flag(trt.BuilderFlag.OBEY_PRECISION_CONSTRAINTS)
    assert unpack(bytes(made.build()))[0]["layer_precisions"] == {"Mul_0": "BF16"}
    typed_network = build_engine(fake_tensorrt, doubled(), ROWS, network_flags=strong(trt))
    typed_network.network.get_layer(1).precision = trt.bfloat16
    assert not typed_network.network.get_layer(1).precision_is_set and "strongly typed" in errors(made)


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


def test_bf16_needs_a_gpu_that_has_it(fake_tensorrt):
    fake_tensorrt.use(gpu="Tesla T4;7.5;12.6")
    made = build_engine(fake_tensorrt, doubled(), ROWS, flags=["BF16"])
    assert made.plan is None and "BF16 is not supported" in errors(made)
    assert build_engine(fake_tensorrt, doubled(), ROWS, flags=["FP16"]).plan is not None


@pytest.mark.parametrize(
    "there, said",
    [
        ({"tensorrt": "10.3.0"}, "Current Version: 10.3.0, Serialized Engine Version: 10.13.3.9"),
        ({"gpu": "NVIDIA RTX 3060;8.6;12.8"}, "expecting compute 8.6 got compute 8.7, please rebuild"),
    ],
)
def test_engines_of_other_versions_and_gpus_are_none(fake_tensorrt, there, said):
    plan = bytes(build_engine(fake_tensorrt, doubled(), ROWS).plan)
    fake_tensorrt.use(**there)
    made = build_engine(fake_tensorrt, doubled(), ROWS)
    assert made.runtime.deserialize_cuda_engine(plan) is None and said in errors(made)


def test_an_engine_of_a_gpu_of_the_same_kind_is_warned_of(fake_tensorrt):
    plan = bytes(build_engine(fake_tensorrt, doubled(), ROWS).plan)
    fake_tensorrt.use(gpu="NVIDIA Orin Nano;8.7;12.6")
    made = build_engine(fake_tensorrt, doubled(), ROWS)
    assert made.runtime.deserialize_cuda_engine(plan) is not None and not errors(made)
    assert any("different models of devices" in text for severity, text in made.said if severity == "WARNING")


@pytest.mark.parametrize(
    "damage", [lambda p: p[:-1], lambda p: p[:20], lambda p: b"onnx" + p, lambda p: p[:-9] + b"x" * 9]
)
def test_damaged_engines_are_none(fake_tensorrt, damage):
    made = build_engine(fake_tensorrt, doubled(), ROWS)
    assert made.runtime.deserialize_cuda_engine(damage(bytes(made.plan))) is None
    assert "Serialization" in errors(made)
    with pytest.raises(TypeError):
        made.runtime.deserialize_cuda_engine("an engine")


def test_host_memory_has_the_buffer_protocol_and_no_length(fake_tensorrt):
    plan = build_engine(fake_tensorrt, doubled(), ROWS).plan
    assert memoryview(plan).nbytes == plan.nbytes == len(bytes(plan)) > 100
    with pytest.raises(TypeError, match="no len"):
        len(plan)


def test_enums_are_those_of_pybind11(fake_tensorrt):
    trt = fake_tensorrt.trt
    with pytest.raises(TypeError):
        1 << trt.BuilderFlag.TF32
    assert 1 << int(trt.BuilderFlag.TF32) == 64 and trt.DataType.FLOAT != 0
    assert trt.DataType.FLOAT != trt.TensorLocation.DEVICE and str(trt.float16) == "DataType.HALF"
    assert trt.nptype(trt.int64) is np.int64 and trt.bfloat16.itemsize == 2
    with pytest.raises(TypeError):
        trt.nptype(trt.bfloat16)


def test_classes_to_be_derived_from_need_their_own_constructor(fake_tensorrt):
    class Silent(fake_tensorrt.trt.ILogger):
        def __init__(self):
            pass

    with pytest.raises(TypeError, match="must be called when overriding __init__"):
        Silent()


def test_without_a_gpu_nothing_is_constructed(fake_tensorrt, misuse):
    fake_tensorrt.use(gpu="")
    trt = fake_tensorrt.trt
    for kind in (trt.Runtime, trt.Builder):
        with pytest.raises(misuse(), match="segmentation fault"):
            kind(trt.Logger())


def test_the_first_logger_is_the_one_until_the_last_user_is_gone(fake_tensorrt):
    trt, heard = fake_tensorrt.trt, []

    class Log(trt.ILogger):
        def __init__(self, name):
            trt.ILogger.__init__(self)
            self.name = name

        def log(self, severity, msg):
            heard.append((self.name, severity.name))

    first = trt.Runtime(Log("first"))
    second = trt.Runtime(Log("second"))
    assert heard == [("first", "WARNING")]  # about the second
    assert second.deserialize_cuda_engine(b"none") is None and heard[-1] == ("first", "ERROR")
    del first, second
    third = trt.Runtime(Log("third"))
    assert third.deserialize_cuda_engine(b"none") is None and heard[-1] == ("third", "ERROR")


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


def branches(other_rows: int) -> bytes:
    """An If whose branches give 3 rows and ``other_rows``."""
    flag = argument(Tensor(np.bool_, ()))
    rows = [op.const(np.zeros((n, 4), np.float32)) for n in (3, other_rows)]
    y = op.if_(flag, then_branch=lambda: [rows[0]], else_branch=lambda: [rows[1]])[0]
    return build({"flag": flag}, {"y": y}).SerializeToString()


@pytest.mark.parametrize("version, rows, fine", [("10.3.0", 3, True), ("10.3.0", 2, False), ("10.13.3.9", 2, True)])
def test_branches_of_other_shapes_are_refused_before_10_11(fake_tensorrt, version, rows, fine):
    fake_tensorrt.use(tensorrt=version)
    made = build_engine(fake_tensorrt, branches(rows))
    assert made.parsed is fine
    if not fine:
        assert "IIfConditionalOutputLayer inputs must have the same shape" in made.parser.get_error(0).desc()


def capture(bench, context) -> bool:
    """Whether a run could be recorded; leaves the stream as it was."""
    mode = bench.cuda.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
    passing(bench.cuda.cudaStreamBeginCapture(bench.stream, mode))
    done = context.execute_async_v3(bench.stream)
    error, graph = bench.cuda.cudaStreamEndCapture(bench.stream)
    assert (int(error) == 0) is done
    bench.graph = graph
    return done


def test_a_run_is_recorded_after_one_with_the_same_shapes(fake_tensorrt, misuse):
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
    with pytest.raises(misuse(), match="changed after the capture"):
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


def test_two_threads_in_one_context_are_loud(fake_tensorrt, misuse):
    made = build_engine(fake_tensorrt, doubled(), ROWS)
    context = made.engine.create_execution_context()
    bench, _ = ready(fake_tensorrt, context)
    caught, start = [], threading.Barrier(2)

    def work():
        start.wait()
        try:
            for _ in range(50):
                context.execute_async_v3(bench.stream)
        except misuse() as failure:
            caught.append(str(failure))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert caught and "while another thread uses the same context" in caught[0]
    bench.close()


def test_a_context_that_goes_before_its_work_is_done_is_loud(fake_tensorrt, misuse):
    made = build_engine(fake_tensorrt, doubled(), ROWS)
    context = made.engine.create_execution_context()
    bench, _ = ready(fake_tensorrt, context)
    assert context.execute_async_v3(bench.stream)
    bench.context = context = None
    with pytest.raises(misuse(), match="destroyed before the work was done"):
        bench.wait()
    bench.close()


def test_a_gpu_does_not_use_the_memory_of_another(fake_tensorrt, misuse):
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
    with pytest.raises(misuse(), match="memory of GPU 1, used on GPU 0"):
        bench.wait()
    bench.close()


def test_a_timing_cache_is_of_one_version_and_one_gpu(fake_tensorrt):
    made = build_engine(fake_tensorrt, doubled(), ROWS)
    assert made.config.get_timing_cache() is None
    cache = made.config.create_timing_cache(b"")
    empty = bytes(cache.serialize())
    assert made.config.set_timing_cache(cache, False) and made.build() is not None
    content = bytes(made.config.get_timing_cache().serialize())
    assert len(content) > len(empty)
    assert made.config.create_timing_cache(content[:-3]) is None and "damaged" in errors(made)
    fake_tensorrt.use(gpu="NVIDIA RTX 3060;8.6;12.8")
    config = build_engine(fake_tensorrt, doubled(), ROWS).config
    foreign = config.create_timing_cache(content)
    assert config.set_timing_cache(foreign, False) is False and config.set_timing_cache(foreign, True)
    fake_tensorrt.use(tensorrt="11.4.0.106")
    assert build_engine(fake_tensorrt, doubled(), ROWS).config.create_timing_cache(content) is None


@pytest.mark.parametrize("ends", ["never", "says so", "exception"])
def test_a_monitor_hears_of_the_phases_and_can_end_the_build(fake_tensorrt, ends):
    trt, heard = fake_tensorrt.trt, []

    class Monitor(trt.IProgressMonitor):
        def phase_start(self, phase_name, parent_phase, num_steps):
            heard.append((phase_name, parent_phase))

        def step_complete(self, phase_name, step):
            if ends == "exception":
                raise ValueError("in the monitor")
            return ends == "never"

        def phase_finish(self, phase_name):
            heard.append((phase_name,))

    made = build_engine(fake_tensorrt, doubled(), ROWS)
    made.config.progress_monitor = Monitor()
    assert (made.build() is not None) is (ends == "never")
    root = heard[0][0]
    assert heard[0] == (root, None) and heard[1][1] == root and heard[-1] == (root,)
    assert ("cancelled" in errors(made)) is (ends != "never")


@pytest.mark.parametrize(
    "fault, happens",
    [
        ("parse", lambda m: m.parser.parse(doubled()) is False),
        ("build", lambda m: m.build() is None),
        ("deserialize", lambda m: m.runtime.deserialize_cuda_engine(m.plan) is None),
        ("create_execution_context", lambda m: m.engine.create_execution_context() is None),
        ("create_network", lambda m: m.builder.create_network() is None),
        ("add_optimization_profile", lambda m: m.config.add_optimization_profile(m.profile) == -1),
        ("set_input_shape", lambda m: m.context.set_input_shape("a", (2, 4)) is False),
        ("set_tensor_address", lambda m: m.context.set_tensor_address("a", 512) is False),
        ("execute_async_v3", lambda m: m.context.execute_async_v3(0) is False),
    ],
)
def test_a_fault_is_answered_as_the_real_one_would(fake_tensorrt, fault, happens):
    made = build_engine(fake_tensorrt, doubled(), ROWS)
    made.context = made.engine.create_execution_context()
    before = errors(made)
    fake_tensorrt.set_faults(**{fault: 1})
    assert happens(made) and errors(made) != before


def matcher() -> bytes:
    """matches0: the index itself; mscores0: a."""
    a = argument(Tensor(np.float32, ("N",)))
    count = op.gather(op.shape(a), op.const(0))
    matches = op.range(op.const(np.int64(0)), count, op.const(np.int64(1)))
    return build({"a": a}, {"matches0": matches, "mscores0": op.identity(a)}).SerializeToString()


def test_engines_can_be_made_wrong_in_the_ways_of_the_document(fake_tensorrt):
    made = build_engine(fake_tensorrt, matcher(), {"a": ((1,), (10,), (20,))})
    context = made.engine.create_execution_context()
    fake_tensorrt.set_faults(nan_inputs=[2], zero_inputs=[3], drop_matches=0.3)
    bench, found = Bench(fake_tensorrt, context), []
    for n in (10, 11, 12, 10):  # the last are the first inputs again
        a = np.ones(n, np.float32)
        context.set_input_shape("a", (n,))
        context.set_tensor_address("a", bench.upload(a))
        to = {"matches0": (bench.device(8 * n), np.int64), "mscores0": (bench.device(4 * n), np.float32)}
        for name, (address, _) in to.items():
            context.set_tensor_address(name, address)
        assert context.execute_async_v3(bench.stream)
        found.append([bench.download(address, (n,), kind) for address, kind in to.values()])
        bench.wait()
    assert [int((matches >= 0).sum()) for matches, _ in found] == [7, 11, 0, 7]
    assert [int(np.isnan(scores).sum()) for _, scores in found] == [0, 11, 0, 0]
    assert [int((scores > 0).sum()) for _, scores in found] == [7, 0, 0, 7]
    bench.close()
