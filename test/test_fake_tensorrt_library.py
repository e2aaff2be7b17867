"""The rules of TensorRT that the fake keeps: engines from elsewhere, Python types, the logger; and ordered faults."""

import numpy as np
import pytest
import spox.opset.ai.onnx.v18 as op
from fake_engines import ROWS, Bench, build_engine, doubled, errors
from spox import Tensor, argument, build

VERSIONS = ("10.3.0", "10.13.3.9", "11.4.0.106")


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


def test_without_a_gpu_nothing_is_constructed(fake_tensorrt):
    fake_tensorrt.use(gpu="")
    trt = fake_tensorrt.trt
    for kind in (trt.Runtime, trt.Builder):
        with fake_tensorrt.misused("segmentation fault"):
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
