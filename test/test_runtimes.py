"""Runtimes: what goes in and comes out, on which device, what is refused, and faults on demand."""

import hashlib
import os
import re
import subprocess
import sys
import threading
import time
import types
import weakref
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from vslam_features import registry
from vslam_features.errors import (
    BackendError,
    ConfigError,
    DataError,
    ModelFileError,
    NonFiniteError,
    RuntimeMissingError,
)
from vslam_features.options import check
from vslam_features.runtimes import hardware
from vslam_features.runtimes.base import LoadRequest, all_finite, reason
from vslam_features.runtimes.digest import input_digest
from vslam_features.runtimes.fake import Calls, Fake
from vslam_features.runtimes.ort import OnnxRuntime
from vslam_features.runtimes.ov import OpenVino, shared_core

ONE = LoadRequest(threads=1)
NEEDS_OPENVINO = pytest.mark.skipif(find_spec("openvino") is None, reason="needs openvino: its wheels are optional")
REAL = pytest.mark.parametrize(
    "runtime",
    [pytest.param(OnnxRuntime, id="onnxruntime"), pytest.param(OpenVino, id="openvino", marks=NEEDS_OPENVINO)],
)
F32, F16, I64, BOOL, U8 = (
    TensorProto.FLOAT,
    TensorProto.FLOAT16,
    TensorProto.INT64,
    TensorProto.BOOL,
    TensorProto.UINT8,
)


def save(path: Path, nodes, inputs, outputs, constants=()) -> Path:
    """A model file; ``inputs`` and ``outputs``: name -> (type, shape), ``constants``: name -> array."""
    infos = [[helper.make_tensor_value_info(n, *ts) for n, ts in group.items()] for group in (inputs, outputs)]
    weights = [numpy_helper.from_array(np.asarray(v), n) for n, v in dict(constants).items()]
    graph = helper.make_graph([helper.make_node(*n[:3], **(n[3] if len(n) > 3 else {})) for n in nodes], "g", *infos)
    graph.initializer.extend(weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    onnx.checker.check_model(model)
    onnx.save(model, path)
    return path


@pytest.fixture
def openvino():
    """The library, which is optional."""
    return pytest.importorskip("openvino", reason="needs openvino: its wheels are optional")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def scale(folder):
    """``y = x * s`` with rows of any number, its rows counted, its elements compared, and all of it summed up."""
    return save(
        folder / "scale.onnx",
        [
            ("Mul", ["x", "s"], ["y"]),
            ("Shape", ["x"], ["size"]),
            ("Greater", ["y", "x"], ["larger"]),
            ("ReduceSum", ["y"], ["sum"], {"keepdims": 0}),
        ],
        {"x": (F32, ["N", 3]), "s": (F32, [])},
        {"y": (F32, ["N", 3]), "size": (I64, [2]), "larger": (BOOL, ["N", 3]), "sum": (F32, [])},
    )


@pytest.fixture(scope="module")
def divide(folder):
    """``y = x / x``: NaN where x is 0; and a copy of x, which stays finite."""
    return save(
        folder / "divide.onnx",
        [("Div", ["x", "x"], ["y"]), ("Neg", ["x"], ["negative"])],
        {"x": (F32, ["N"])},
        {"y": (F32, ["N"]), "negative": (F32, ["N"])},
    )


@pytest.fixture(scope="module")
def matcher(folder):
    """The best row of b for each row of a, and its score, as matchers give them."""
    return save(
        folder / "tiny_matcher.onnx",
        [
            ("Transpose", ["b"], ["bt"]),
            ("MatMul", ["a", "bt"], ["m"]),
            ("ArgMax", ["m"], ["matches0"], {"axis": 1, "keepdims": 0}),
            ("ReduceMax", ["m", "axis"], ["scores0"], {"keepdims": 0}),
        ],
        {"a": (F32, ["M", 4]), "b": (F32, ["N", 4])},
        {"matches0": (I64, ["M"]), "scores0": (F32, ["M"])},
        {"axis": np.array([1])},
    )


def attention(path: Path, dim: int = 64, layers: int = 2) -> Path:
    """Layers of attention from a to b, with fixed weights: what grows in a runtime with the number of keypoints."""
    rng = np.random.default_rng(0)
    nodes, weights, x = [], {"scale": np.float32(dim**-0.5)}, "a"
    for i in range(layers):
        for k in "qkvo":
            weights[f"{k}{i}"] = (rng.standard_normal((dim, dim)) / dim**0.5).astype(np.float32)
        nodes += [
            ("MatMul", [x, f"q{i}"], [f"Q{i}"]),
            ("MatMul", ["b", f"k{i}"], [f"K{i}"]),
            ("MatMul", ["b", f"v{i}"], [f"V{i}"]),
            ("Transpose", [f"K{i}"], [f"T{i}"], {"perm": [1, 0]}),
            ("MatMul", [f"Q{i}", f"T{i}"], [f"S{i}"]),
            ("Mul", [f"S{i}", "scale"], [f"Z{i}"]),
            ("Softmax", [f"Z{i}"], [f"P{i}"], {"axis": 1}),
            ("MatMul", [f"P{i}", f"V{i}"], [f"O{i}"]),
            ("MatMul", [f"O{i}", f"o{i}"], [f"R{i}"]),
            ("Add", [x, f"R{i}"], [f"x{i}"]),
        ]
        x = f"x{i}"
    nodes.append(("Identity", [x], ["out"]))
    io = {"a": (F32, ["M", dim]), "b": (F32, ["N", dim])}
    return save(path, nodes, io, {"out": (F32, ["M", dim])}, weights)


def scaled(n: int = 2, s: float = 2.0) -> dict:
    return {"x": np.arange(3 * n, dtype=np.float32).reshape(n, 3) + 1, "s": np.array(s, np.float32)}


# -- tensors ---------------------------------------------------------------------------------------


@REAL
@pytest.mark.parametrize("n", [1, 2, 57, 0])
def test_outputs_by_name_for_any_number_of_rows(runtime, scale, n):
    out = runtime().load(scale, ONE).run(scaled(n))
    x = scaled(n)["x"]
    assert set(out) == {"y", "size", "larger", "sum"}
    np.testing.assert_array_equal(out["y"], 2 * x)
    np.testing.assert_array_equal(out["size"], [n, 3])
    np.testing.assert_array_equal(out["larger"], np.ones((n, 3), bool))
    assert out["sum"].shape == () and out["sum"] == 2 * x.sum()
    assert {k: v.dtype for k, v in out.items()} == {
        "y": np.float32,
        "size": np.int64,
        "larger": np.bool_,
        "sum": np.float32,
    }


@REAL
def test_specs_name_types_and_dynamic_sizes(runtime, scale):
    session = runtime().load(scale, ONE)
    assert list(session.inputs) == ["x", "s"]
    assert session.inputs["x"].shape == (None, 3) and session.inputs["x"].dtype == np.float32
    assert session.inputs["s"].shape == ()
    assert list(session.outputs) == ["y", "size", "larger", "sum"]
    assert session.outputs["size"].shape == (2,) and session.outputs["larger"].dtype == np.bool_
    assert session.load_ms > 0


@REAL
@pytest.mark.parametrize(
    "change, words",
    [
        ({"x": None}, ["['s', 'x']", "['s']"]),
        ({"z": np.ones(1, np.float32)}, ["['s', 'x', 'z']"]),
        ({"x": np.ones((2, 3))}, ["'x'", "float32", "float64"]),
        ({"x": np.ones((2, 4), np.float32)}, ["'x'", "('?', 3)", "(2, 4)"]),
        ({"x": np.ones(3, np.float32)}, ["'x'", "(3,)"]),
        ({"s": np.ones(1, np.float32)}, ["'s'", "()", "(1,)"]),
        ({"x": np.array([[1, np.nan, np.inf]], np.float32)}, ["'x'", "2 values"]),
    ],
    ids=["missing", "unknown", "dtype", "columns", "rank", "scalar", "nan"],
)
def test_inputs_outside_the_contract_are_named(runtime, scale, change, words):
    inputs = {k: v for k, v in (scaled() | change).items() if v is not None}
    with pytest.raises(DataError) as error:
        runtime().load(scale, ONE).run(inputs)
    assert all(w in str(error.value) for w in words), error.value


@REAL
def test_inputs_in_any_memory_order(runtime, scale):
    x = np.asfortranarray(np.arange(12, dtype=np.float32).reshape(4, 3))[::-1]
    out = runtime().load(scale, ONE).run({"x": x, "s": np.float32(0.5)})
    np.testing.assert_array_equal(out["y"], x / 2)


@REAL
def test_float16_in_and_out(runtime, folder):
    path = save(
        folder / f"half_{runtime.__name__}.onnx",
        [("Add", ["h", "h"], ["h2"]), ("Cast", ["h"], ["f"], {"to": F32}), ("Identity", ["u"], ["v"])],
        {"h": (F16, ["N"]), "u": (U8, ["N"])},
        {"h2": (F16, ["N"]), "f": (F32, ["N"]), "v": (U8, ["N"])},
    )
    h = np.array([0.1, -3, 1024], np.float16)
    out = runtime().load(path, ONE).run({"h": h, "u": np.arange(3, dtype=np.uint8)})
    assert out["h2"].dtype == np.float16 and out["f"].dtype == np.float32 and out["v"].dtype == np.uint8
    np.testing.assert_array_equal(out["h2"], h + h)
    np.testing.assert_array_equal(out["f"], h.astype(np.float32))
    np.testing.assert_array_equal(out["v"], [0, 1, 2])


@REAL
def test_outputs_that_are_one_tensor_keep_their_names(runtime, folder):
    path = save(
        folder / f"twins_{runtime.__name__}.onnx",
        [("Neg", ["x"], ["t"]), ("Identity", ["t"], ["first"]), ("Identity", ["t"], ["second"])],
        {"x": (F32, ["N"])},
        {"first": (F32, ["N"]), "second": (F32, ["N"])},
    )
    out = runtime().load(path, ONE).run({"x": np.array([1, 2], np.float32)})
    assert {k: v.tolist() for k, v in out.items()} == {"first": [-1, -2], "second": [-1, -2]}


@REAL
def test_outputs_that_are_not_finite(runtime, divide):
    session = runtime().load(divide, ONE)
    with pytest.raises(NonFiniteError, match="1 of 3 in 'y'") as error:
        session.run({"x": np.array([1, 0, 2], np.float32)})
    assert "negative" not in str(error.value)
    np.testing.assert_array_equal(error.value.outputs["y"], [1, np.nan, 1])
    np.testing.assert_array_equal(error.value.outputs["negative"], [-1, 0, -2])


@REAL
def test_results_are_not_overwritten_by_the_next_run(runtime, scale):
    session = runtime().load(scale, ONE)
    first = session.run(scaled(4, 2.0))
    copy = first["y"].copy()
    second = session.run(scaled(4, 3.0))
    np.testing.assert_array_equal(first["y"], copy)
    assert not np.shares_memory(first["y"], second["y"]) and first["y"].flags.writeable


@REAL
@pytest.mark.parametrize("count", [1, 2])
def test_failures_of_the_library_are_typed_and_the_session_goes_on(runtime, count, folder, capfd):
    """Rows of a and b must be equally many, which no input specification tells. OpenVINO's synchronous call returns
    the last result instead of an error, where it has one thread."""
    path = save(
        folder / f"add_{runtime.__name__}.onnx",
        [("Add", ["a", "b"], ["y"])],
        {"a": (F32, ["M", 4]), "b": (F32, ["N", 4])},
        {"y": (F32, ["M", 4])},
    )
    session = runtime().load(path, LoadRequest(threads=count))
    session.run({"a": np.ones((2, 4), np.float32), "b": np.ones((2, 4), np.float32)})
    with pytest.raises(BackendError) as error:
        session.run({"a": np.ones((2, 4), np.float32), "b": np.ones((3, 4), np.float32)})
    assert str(error.value).startswith(str(session.active)) and "\n" not in str(error.value)
    assert "".join(capfd.readouterr()) == ""  # it is in the exception, not on stderr as well
    out = session.run({"a": np.ones((2, 4), np.float32), "b": np.ones((2, 4), np.float32)})
    assert (out["y"] == 2).all()


@REAL
def test_types_that_no_array_holds_are_refused(runtime, folder):
    path = save(
        folder / "text.onnx",
        [("Identity", ["t"], ["u"])],
        {"t": (TensorProto.STRING, ["N"])},
        {"u": (TensorProto.STRING, ["N"])},
    )
    with pytest.raises(ModelFileError, match="'t'|string"):
        runtime().load(path, ONE)


# -- devices ---------------------------------------------------------------------------------------


def test_what_a_session_runs_on(scale):
    active = OnnxRuntime().load(scale, ONE).active
    assert (active.runtime, active.version) == ("onnxruntime", onnxruntime.__version__)
    assert active.provider == "CPUExecutionProvider" and active.note == ""
    assert active.device == f"cpu {hardware.cpu_name()}"


def test_what_a_session_of_openvino_runs_on(openvino, scale):
    active = OpenVino().load(scale, ONE).active
    assert active.runtime == "openvino" and active.provider == "CPU f32" and active.note == ""
    assert openvino.__version__.startswith(active.version) and active.device == f"cpu {hardware.cpu_name()}"


no_gpu = pytest.mark.skipif(
    "CUDAExecutionProvider" in onnxruntime.get_available_providers(), reason="this onnxruntime has CUDA"
)


@no_gpu
@pytest.mark.parametrize("device", ["cuda", "cuda:1", "tensorrt", "coreml", "openvino"])
def test_a_device_that_is_not_there_is_refused_with_what_is(scale, device):
    with pytest.raises(RuntimeMissingError) as error:
        OnnxRuntime().load(scale, LoadRequest(device, threads=1))
    for word in (f"'{device}'", "CPUExecutionProvider", "install", "'cpu'"):
        assert word in str(error.value)


@no_gpu
def test_without_strict_the_cpu_runs_it_and_says_so(scale):
    session = OnnxRuntime().load(scale, LoadRequest("cuda", strict=False, threads=1))
    assert session.active.provider == "CPUExecutionProvider"
    assert "'cuda'" in session.active.note and "CUDAExecutionProvider" in session.active.note
    assert session.run(scaled())["sum"] == 42


@REAL
@pytest.mark.parametrize("device", ["gpuu", "", "cpu:1", "cuda:x", "cuda:", "cpu:"])
def test_devices_that_do_not_exist_are_errors_also_without_strict(runtime, scale, device):
    with pytest.raises(ConfigError, match="device"):
        runtime().load(scale, LoadRequest(device, strict=False))


def test_openvino_without_a_gpu(openvino, scale):
    if any(d.startswith("GPU") for d in shared_core().available_devices):
        pytest.skip("openvino has a GPU here")
    with pytest.raises(RuntimeMissingError, match="'gpu'.*this machine has CPU"):
        OpenVino().load(scale, LoadRequest("gpu", threads=1))
    session = OpenVino().load(scale, LoadRequest("gpu", strict=False, threads=1))
    assert session.active.provider == "CPU f32" and "'gpu'" in session.active.note
    assert session.run(scaled())["sum"] == 42
    automatic = OpenVino().load(scale, LoadRequest("auto", threads=1)).active
    assert automatic.provider == "CPU f32" and automatic.note == ""


def test_openvinos_precision_is_the_one_it_compiled_for(openvino, scale, monkeypatch):
    seen = []
    compile_model = openvino.Core.compile_model

    def spy(self, *args):
        seen.append(compile_model(self, *args))
        return seen[-1]

    monkeypatch.setattr(openvino.Core, "compile_model", spy)
    for hint in ("f32", "bf16", "auto"):
        active = OpenVino(OpenVino.Options(precision_hint=hint)).load(scale, LoadRequest(threads=2)).active
        compiled = seen[-1]
        actual = compiled.get_property("INFERENCE_PRECISION_HINT")
        assert active.provider == f"CPU {actual.get_type_name()}"
        assert compiled.get_property("INFERENCE_NUM_THREADS") == 2 and compiled.get_property("NUM_STREAMS") == 1
        assert compiled.get_property("ENABLE_CPU_PINNING") is False
        if hint == "f32":
            assert actual == openvino.Type.f32
        if hint == "bf16":
            assert ("computes in" in active.note) == (actual != openvino.Type.bf16)


@NEEDS_OPENVINO
def test_openvino_says_that_it_optimises_all_the_same(scale):
    session = OpenVino().load(scale, LoadRequest(threads=1, optimise=False))
    assert "optimisation" in session.active.note and session.run(scaled())["sum"] == 42


@NEEDS_OPENVINO
def test_openvino_computes_in_float32(folder):
    """2049 products with 1 + 2^-12, which bf16 (8 bits) and f16 (11) round to 1; exact in float32 by powers of two."""
    path = save(
        folder / "sum.onnx", [("MatMul", ["x", "w"], ["y"])], {"x": (F32, ["N", 64])}, {"y": (F32, ["N", 1])},
        {"w": np.ones((64, 1), np.float32)},
    )  # fmt: skip
    x = np.full((33, 64), 1 + 2.0**-12, np.float32)
    np.testing.assert_array_equal(OpenVino().load(path, ONE).run({"x": x})["y"], np.full((33, 1), 64 + 2.0**-6))


def test_settings_of_onnxruntime_are_applied(monkeypatch, scale):
    seen = []
    real = onnxruntime.InferenceSession

    def spy(*args, **kwargs):
        seen.append(real(*args, **kwargs))
        return seen[-1]

    monkeypatch.setattr(onnxruntime, "InferenceSession", spy)
    level = onnxruntime.GraphOptimizationLevel
    for options, request, threads, optimisation, spin in (
        ({}, LoadRequest(threads=1), 1, level.ORT_ENABLE_ALL, "0"),
        ({"spin": True}, LoadRequest(threads=3, optimise=False), 3, level.ORT_DISABLE_ALL, "1"),
        ({"cpu_arena": False}, LoadRequest(), len(os.sched_getaffinity(0)), level.ORT_ENABLE_ALL, "0"),
    ):
        OnnxRuntime(OnnxRuntime.Options(**options)).load(scale, request)
        got = seen[-1].get_session_options()
        assert (got.intra_op_num_threads, got.inter_op_num_threads) == (threads, 1)
        assert got.graph_optimization_level == optimisation
        assert got.get_session_config_entry("session.intra_op.allow_spinning") == spin
        assert got.enable_mem_pattern is False and got.enable_cpu_mem_arena == options.get("cpu_arena", True)


def test_options_are_documented_and_their_defaults_valid():
    for name in ("onnxruntime", "openvino", "fake"):
        options = registry.get("runtime", name).Options()
        assert check(options) == []
    assert "outside" in check(Fake.Options(delay_ms=-1.0))[0] and "not one of" in check(Fake.Options(inner="x"))[0]


@pytest.mark.parametrize("library, extra", [("onnxruntime", "cpu"), ("openvino", "openvino")])
def test_a_missing_library_is_named_with_its_extra(library, extra, scale):
    program = f"""
import sys
sys.modules[{library!r}] = None
from vslam_features import registry
from vslam_features.errors import RuntimeMissingError
from vslam_features.runtimes.base import LoadRequest
try:
    registry.get("runtime", {library!r})().load({str(scale)!r}, LoadRequest())
except RuntimeMissingError as error:
    print(error)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert f"pip install 'vslam_features[{extra}]'" in result.stdout, result.stderr


def test_names_of_processors():
    """The Arm text is the first core of /proc/cpuinfo as Linux prints it for a Cortex-A78AE (Jetson Orin)."""
    arm = "processor\t: 0\nBogoMIPS\t: 62.50\nCPU implementer\t: 0x41\nCPU architecture: 8\nCPU part\t: 0xd42\n"
    assert hardware.cpuinfo_name(arm) == "Arm implementer 0x41 part 0xd42"
    intel = "processor\t: 0\nmodel name\t: Intel(R) Core(TM) i7: 8700\n\nprocessor\t: 1\nmodel name\t: other\n"
    assert hardware.cpuinfo_name(intel) == "Intel(R) Core(TM) i7: 8700"
    assert hardware.cpuinfo_name("") == "" and hardware.cpu_name()


@pytest.mark.parametrize(
    "listing, expected",
    [("NVIDIA A100\nNVIDIA A100\n", "NVIDIA A100"), ("NVIDIA A100\nTesla T4\n", ""), (None, "")],
)
def test_names_of_gpus(monkeypatch, listing, expected, tmp_path):
    def run(*args, **kwargs):
        if listing is None:
            raise FileNotFoundError("nvidia-smi")
        return types.SimpleNamespace(stdout=listing)

    monkeypatch.setattr(hardware.subprocess, "run", run)
    monkeypatch.setattr(hardware, "_BOARD", tmp_path / "model")
    assert hardware.gpu_name.__wrapped__() == expected
    if listing is None:
        (tmp_path / "model").write_bytes(b"NVIDIA Jetson AGX Orin Developer Kit\0")
        assert hardware.gpu_name.__wrapped__() == "NVIDIA Jetson AGX Orin Developer Kit"


# -- files -----------------------------------------------------------------------------------------


@REAL
@pytest.mark.parametrize("content", [None, b"", b"hello" * 100, b"\x80\x02}q\x00.", "folder"])
def test_files_that_are_no_models(runtime, tmp_path, content):
    path = tmp_path / "x.onnx"
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(ModelFileError) as error:
        runtime().load(path, ONE)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


@REAL
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_files_end_in_a_typed_error_or_load(runtime, matcher, tmp_path, data):
    content = bytearray(matcher.read_bytes())
    if data.draw(st.booleans(), label="truncate"):
        content = content[: data.draw(st.integers(0, len(content) - 1), label="length")]
    else:
        for bit in data.draw(st.lists(st.integers(0, 8 * len(content) - 1), min_size=1, max_size=8), label="bits"):
            content[bit // 8] ^= 1 << bit % 8
    path = tmp_path / "damaged.onnx"
    path.write_bytes(content)
    try:
        session = runtime().load(path, ONE)
    except ModelFileError as error:
        assert "damaged.onnx" in str(error) and "\n" not in str(error)
    else:
        assert isinstance(session.inputs, dict)


@REAL
def test_names_that_are_no_text(runtime, matcher, tmp_path):
    (tmp_path / "damaged.onnx").write_bytes(matcher.read_bytes().replace(b"scores0", b"\xffcores0"))
    with pytest.raises(ModelFileError, match="damaged.onnx"):
        runtime().load(tmp_path / "damaged.onnx", ONE)


def test_a_librarys_message_in_one_line():
    assert reason(RuntimeError("a\n\n  b")) == "a b" and reason(KeyError()) == "KeyError"
    damaged = UnicodeDecodeError("utf-8", b"bad name \xff in graph", 9, 10, "invalid start byte")
    assert reason(damaged) == "bad name \ufffd in graph"


def test_openvino_needs_a_name_for_each_tensor(openvino, tmp_path):
    x = openvino.opset13.parameter([-1], np.float32, name="x")
    x.output(0).set_names({"x"})
    y = openvino.opset13.negative(x)
    y.output(0).set_names({"y"})
    twins = [openvino.op.Result(y.output(0)) for _ in range(2)]
    openvino.save_model(openvino.Model(twins, [x], "m"), str(tmp_path / "twins.xml"))
    with pytest.raises(ModelFileError, match="2 tensors have 1 names: \\['y'\\]"):
        OpenVino().load(tmp_path / "twins.xml", ONE)


def test_openvino_reads_its_own_format(openvino, scale, tmp_path):
    openvino.save_model(shared_core().read_model(str(scale)), str(tmp_path / "scale.xml"), compress_to_fp16=False)
    session = OpenVino().load(tmp_path / "scale.xml", ONE)
    assert list(session.outputs) == ["y", "size", "larger", "sum"] and session.run(scaled())["sum"] == 42


@REAL
def test_quiet(runtime, scale, tmp_path):
    """Nothing on stdout or stderr: not for a file that cannot be read, nor for a device that is not there."""
    (tmp_path / "noise.onnx").write_bytes(b"no model" * 50)
    program = f"""
from vslam_features.errors import ModelError
from vslam_features.runtimes.{runtime.__module__.split(".")[-1]} import {runtime.__name__} as runtime
from vslam_features.runtimes.base import LoadRequest
for path, device in (({str(tmp_path / "noise.onnx")!r}, "cpu"), ({str(scale)!r}, "cuda"), ({str(scale)!r}, "cpu")):
    try:
        runtime().load(path, LoadRequest(device if runtime.__name__ == "OnnxRuntime" or device == "cpu" else "npu"))
    except ModelError:
        pass
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    # At its import onnxruntime may warn of GPUs that it cannot list, before anything can be set.
    said = [line for line in result.stderr.splitlines() if "device_discovery" not in line]
    assert (result.returncode, result.stdout, said) == (0, "", [])


def test_onnxruntime_reports_nothing_to_anybody(scale, tmp_path):
    """Its telemetry keeps a database in the home folder, which tells whether it is on."""
    program = f"""
from pathlib import Path
from vslam_features.runtimes.base import LoadRequest
from vslam_features.runtimes.ort import OnnxRuntime
OnnxRuntime().load(Path({str(scale)!r}), LoadRequest())
"""
    home = tmp_path / "home"
    home.mkdir()
    env = {k: v for k, v in os.environ.items() if k not in ("ORT_DISABLE_TELEMETRY", "XDG_CACHE_HOME")}
    subprocess.run([sys.executable, "-c", program], env=env | {"HOME": str(home)}, check=True, timeout=60)
    assert not list(home.rglob("*onnxruntime*"))


# -- time, memory, threads -------------------------------------------------------------------------


@REAL
def test_two_sessions_in_two_threads(runtime, folder):
    path = attention(folder / f"threads_{runtime.__name__}.onnx")
    sessions = [runtime().load(path, ONE) for _ in range(2)]
    rng = np.random.default_rng(1)
    cases = [{k: rng.standard_normal((n, 64), np.float32) for k in "ab"} for n in rng.integers(1, 200, 20)]
    expected = [sessions[0].run(c)["out"] for c in cases]
    wrong, done = [], []

    def work(session):
        for case, out in zip(cases, expected):
            if not np.array_equal(session.run(case)["out"], out):
                wrong.append(case)
        done.append(session)

    threads = [threading.Thread(target=work, args=(s,)) for s in sessions]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert len(done) == 2 and not wrong


def rss() -> float:
    """Resident memory of this process, MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@REAL
def test_sessions_free_their_library_objects(runtime, folder):
    session = runtime().load(attention(folder / f"free_{runtime.__name__}.onnx"), ONE)
    library = session._session if runtime is OnnxRuntime else session._request
    alive = weakref.ref(library)
    del library, session  # without a garbage collection: no circle holds it
    assert alive() is None


SIGNAL = """
import signal
import numpy as np
from vslam_features import registry
from vslam_features.runtimes.base import LoadRequest
signal.signal(signal.SIGTERM, lambda *_: print("handled", flush=True))
sessions = [registry.get("runtime", {name!r})().load({path!r}, LoadRequest(threads=1)) for _ in range(3)]
while sessions:
    sessions.pop(0)  # the oldest first
signal.raise_signal(signal.SIGTERM)
print("alive", flush=True)
"""


@REAL
def test_signals_are_handled_after_sessions_ended_in_the_order_they_began(runtime, folder):
    """Of several cores OpenVINO's CPU plug-in leaves a thread with a signal stack whose memory is gone."""
    path = attention(folder / f"signal_{runtime.__name__}.onnx")
    program = SIGNAL.format(name="onnxruntime" if runtime is OnnxRuntime else "openvino", path=str(path))
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (0, "handled\nalive\n"), result.stderr


def test_there_is_one_place_that_makes_a_core():
    """Tests too: one core of their own leaves the process of all tests after it in the state above."""
    root = Path(__file__).parents[1]
    makes = re.compile(r"\bCore\(\)|\b(openvino|ov)\.compile_model\(")
    files = [p for folder in ("vslam_features", "test", "benchmarks", "tools") for p in (root / folder).rglob("*.py")]
    assert {p.name for p in files if makes.search(p.read_text(encoding="utf-8"))} == {"ov.py"}


MEMORY = """
import sys, time
import numpy as np
sys.path.insert(0, {test!r})
from test_runtimes import rss
from vslam_features import registry
from vslam_features.runtimes.base import LoadRequest
session = registry.get("runtime", {name!r})().load({path!r}, LoadRequest(threads=1))
rng = np.random.default_rng(0)
def call():
    sizes = rng.integers(20, 400, 2)
    a, b = (rng.standard_normal((n, 256), np.float32) for n in sizes)
    start = time.process_time()  # of all threads; not the wall clock, as others may use the machine
    session.run({{"a": a, "b": b}})
    return time.process_time() - start
for _ in range(100):
    call()
before = rss()
times = [call() for _ in range(300)]
print(rss() - before, max(times) / np.median(times))
"""


@pytest.mark.slow
@pytest.mark.endurance
@pytest.mark.parametrize("name", ["onnxruntime", pytest.param("openvino", marks=NEEDS_OPENVINO)])
def test_memory_is_flat_over_300_pairs_of_any_size(name, folder):
    """In a process of its own: no shape of an earlier call costs memory for good, none takes long at first."""
    path = attention(folder / f"memory_{name}.onnx", dim=256, layers=6)
    program = MEMORY.format(test=str(Path(__file__).parent), name=name, path=str(path))
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=110)
    assert result.returncode == 0, result.stderr
    growth, worst = map(float, result.stdout.split())
    print(f"{growth:.1f} MiB more after 300 runs, dearest call {worst:.1f} times the median")
    assert growth < 30, f"{growth:.0f} MiB more after 300 runs"
    assert worst < 5, f"a call cost {worst:.1f} times the median"


# -- faults on demand ------------------------------------------------------------------------------


def fake(**options) -> Fake:
    return Fake(Fake.Options(**options))


def outcome(session, inputs) -> str:
    try:
        session.run(inputs)
    except NonFiniteError:
        return "nan"
    except BackendError:
        return "error"
    return "ok"


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 5)), max_size=5),
    st.sampled_from(["", " "]),
)
def test_plans_of_calls(ranges, space):
    text = f",{space}".join(f"{low}{space}-{space}{low + more}" if more else f"{low}" for low, more in ranges)
    expected = {i for low, more in ranges for i in range(low, low + more + 1)}
    assert {i for i in range(1, 60) if i in Calls(text)} == expected


@given(st.text(alphabet="0123456789-,al x²٣", max_size=8))
def test_a_plan_is_read_or_refused(text):
    part = r"\s*[0-9]+\s*(-\s*[0-9]+\s*)?"
    readable = text.strip() in ("", "all") or re.fullmatch(f"{part}(,{part})*", text, re.ASCII)
    try:
        1 in Calls(text, "nan_calls")  # noqa: B015
    except ConfigError as error:
        assert "nan_calls" in str(error)
    else:
        assert readable


@pytest.mark.parametrize("text", ["0", "7-5", "3,", "-2", "1.5", "x"])
def test_impossible_plans_are_refused_before_anything_is_loaded(text):
    with pytest.raises(ConfigError, match="error_calls"):
        fake(error_calls=text)


def test_faults_come_in_the_calls_that_were_told(matcher):
    session = fake(nan_calls="2,5-6", error_calls="3", zero_calls="4").load(matcher, ONE)
    inputs = {"a": np.eye(4, dtype=np.float32), "b": np.eye(4, dtype=np.float32)[::-1].copy()}
    got = [outcome(session, inputs) for _ in range(7)]
    assert got == ["ok", "nan", "error", "ok", "nan", "nan", "ok"]
    assert session.active.runtime == "fake(onnxruntime)" and session.active.provider == "CPUExecutionProvider"
    np.testing.assert_array_equal(session.run(inputs)["matches0"], [3, 2, 1, 0])


def test_a_fault_of_finding_nothing(matcher):
    inputs = {"a": np.eye(4, dtype=np.float32), "b": np.eye(4, dtype=np.float32)}
    out = fake(zero_calls="all").load(matcher, ONE).run(inputs)
    np.testing.assert_array_equal(out["matches0"], [-1] * 4)
    np.testing.assert_array_equal(out["scores0"], [0] * 4)


@pytest.mark.parametrize("everywhere, count", [(False, 1), (True, 4)])
def test_nan_goes_through_the_check_of_every_session(matcher, everywhere, count):
    inputs = {"a": np.eye(4, dtype=np.float32), "b": np.eye(4, dtype=np.float32)}
    session = fake(nan_calls="1", nan_everywhere=everywhere).load(matcher, ONE)
    with pytest.raises(NonFiniteError, match=rf"fake\(onnxruntime\).*{count} of 4 in 'scores0'") as error:
        session.run(inputs)
    np.testing.assert_array_equal(error.value.outputs["matches0"], [0, 1, 2, 3])


def test_a_fault_that_depends_on_the_input_can_be_replayed(scale):
    good, bad = scaled(2, 2.0), scaled(2, 3.0)
    session = fake(nan_inputs=f"{'0' * 12}, {input_digest(bad)[:12]}").load(scale, ONE)
    assert [outcome(session, i) for i in (good, bad, good, bad)] == ["ok", "nan", "ok", "nan"]


def test_faults_of_one_model_only(scale, matcher):
    runtime = fake(error_calls="all", only="tiny_match")
    assert outcome(runtime.load(scale, ONE), scaled()) == "ok"
    inputs = {"a": np.ones((1, 4), np.float32), "b": np.ones((1, 4), np.float32)}
    assert outcome(runtime.load(matcher, ONE), inputs) == "error"
    runtime = fake(fail_load=True, only="tiny_match")
    with pytest.raises(ModelFileError, match="injected.*tiny_matcher"):
        runtime.load(matcher, ONE)
    assert outcome(runtime.load(scale, ONE), scaled()) == "ok"


@NEEDS_OPENVINO
def test_fakes_of_other_runtimes_check_inputs_as_well(scale):
    session = fake(inner="openvino", delay_ms=30.0).load(scale, ONE)
    assert session.active.runtime == "fake(openvino)"
    start = time.perf_counter()
    session.run(scaled())
    assert time.perf_counter() - start >= 0.03
    with pytest.raises(DataError, match="'x'"):
        session.run(scaled() | {"x": np.ones((2, 3))})
    assert session.calls == 1  # what is refused reaches no runtime


def test_the_digest_of_inputs():
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    # By hand from the documented layout.
    expected = hashlib.sha256(b"a\0<f4\x00(2, 3)\0" + x.tobytes() + b"b\0|u1\0()\0\x07").hexdigest()
    assert input_digest({"b": np.array(7, np.uint8), "a": x}) == expected
    assert input_digest({"a": np.asfortranarray(x), "b": np.uint8(7)}) == expected
    assert input_digest({"a": x.astype(">f4"), "b": np.uint8(7)}) == expected
    others = [{"a": x.reshape(3, 2)}, {"a": x.astype(np.float64)}, {"b": x}, {"a": x + 1}, {"a": x.view(np.int32)}]
    assert len({input_digest(o) for o in [{"a": x}, *others]}) == 6


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_finiteness_of_any_array(dtype, bad):
    top = np.finfo(dtype).max
    for good in (np.zeros(0, dtype), np.full((3, 4), top, dtype), np.array([top, -top], dtype), np.ones((), dtype)):
        assert all_finite(good)
        if good.size:
            wrong = good.copy()
            wrong.flat[-1] = bad
            assert not all_finite(wrong)
    assert not all_finite(np.array([np.inf, -np.inf, 0], dtype))


@pytest.mark.parametrize(
    "text, version",
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15\nGCC version: 11.4.0",
            "550.54.15",
        ),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  540.4.0  Release Build  (buildbrain@x)\n",
            "540.4.0",
        ),
        ("GCC version: 11.4.0\n", ""),
        ("", ""),
        (None, ""),
    ],
)
def test_the_drivers_own_version(text, version, tmp_path, monkeypatch):
    """A driver of the same CUDA version is another driver all the same."""
    monkeypatch.setattr(hardware, "_DRIVER", tmp_path / "version")
    if text is not None:
        (tmp_path / "version").write_text(text)
    assert hardware.nvidia_driver() == version
