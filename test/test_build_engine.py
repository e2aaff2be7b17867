"""Builds on the fake TensorRT: what it is asked for, and that each failure has its error and leaves nothing behind."""

import errno
import os
import signal
import threading

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnx_ir")
pytest.importorskip("onnxruntime")
pytest.importorskip("spox")

import graph_helpers
from engine_helpers import DEFAULTS, SHAPES, attention_nodes, place, with_trtexec
from model_helpers import own_cache  # noqa: F401
from patch_helpers import saved

from vslam_features.artifacts.card import ModelCard, read_card
from vslam_features.artifacts.engine_source import order_engine
from vslam_features.artifacts.engine_store import engine_state
from vslam_features.artifacts.store import content_sha256, model_path
from vslam_features.engines import build as building
from vslam_features.engines import make as making
from vslam_features.engines.timing_cache import timing_cache_path
from vslam_features.errors import (
    BackendError,
    CacheError,
    ConfigError,
    ModelFileError,
    RuntimeMissingError,
)
from vslam_features.runtimes import cuda, engine_file, trt_library

VERSIONS = ("10.3.0", "10.13.3.9", "11.4.0.106")
BUILDERS = ("api", "trtexec")


@pytest.fixture
def machine(own_cache, fake_tensorrt, monkeypatch):  # noqa: F811
    """An Orin with small models in its cache."""
    fake_tensorrt.use(gpu="Orin;8.7;540.4.0")
    place("fp32", "fp16")
    with_trtexec(fake_tensorrt, monkeypatch)
    return fake_tensorrt


def make(model="small", precision="fp16", builder="api", lines=None, steps=None, out=None, **options):
    """Build; the order, the file and what TensorRT was asked for, by the engine itself."""
    library, device = trt_library.load(), cuda.load()
    gpu = device.device(0)
    order = order_engine(str(model), precision, {**DEFAULTS, "shapes": SHAPES, **options}, library.capabilities, gpu)
    target = out or order.path
    lines = [] if lines is None else lines
    making.make(order, target, making.Machine(library, device, gpu), builder, lines.append, steps or (lambda *_: None))
    return order, target, asked(target)


def asked(path) -> dict:
    from fake_trt.plan import unpack

    return unpack(engine_file.read_engine(path)[1])[0]


def nothing_left(machine, target=None):
    """No engine, no half file, and nothing alive on the GPU."""
    folder = model_path("small", "fp32").parents[1] / "engines"
    left = [p.name for p in folder.rglob("*")] if folder.is_dir() else []
    assert not [n for n in left if not n.endswith((".timing", ".lock"))], left
    assert not {name: n for name, n in machine.live().items() if n}, machine.live()


@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("typing", ["strong", "weak"])
@pytest.mark.parametrize("attention, core_type", [("bf16", "bf16"), ("auto", "fp32")])
def test_what_is_asked_for(machine, version, typing, builder, attention, core_type):
    machine.use(tensorrt=version)
    eleven = version.startswith("11")
    if eleven and typing == "weak":
        with pytest.raises(ConfigError, match="11.4.0.106 builds strongly typed engines only"):
            make(typing=typing, builder=builder)
        return
    options = {"attention": attention, "workspace_mb": 512, "optimisation_level": 2}
    order, path, got = make(typing=typing, builder=builder, **options)
    facts = engine_file.read_header(path).facts
    weak = typing == "weak"
    assert got["version"] == version and got["strongly_typed"] == (not weak)
    # TF32 is set by default: that it is not there proves that it was cleared.
    bf16 = {"BF16"} if core_type == "bf16" else set()
    assert set(got["flags"]) == ({"FP16", "OBEY_PRECISION_CONSTRAINTS"} | bf16 if weak else set())
    assert (got["optimization_level"], got["workspace"]) == (2, 512 << 20)
    (profile,) = got["profiles"]
    wanted = {f"{name}{i}": [[n, width] for n in (1, 256, 600)]
              for name, width in (("keypoints", 2), ("descriptors", 64)) for i in "01"}  # fmt: skip
    assert {n: [list(s) for s in shapes] for n, shapes in profile["shapes"].items()} == wanted == facts.profiles
    nodes = attention_nodes(order.source.path)
    assert len(nodes) == 24 and (nodes <= set(got["layer_precisions"])) == weak
    assert set(got["layer_precisions"].values()) == ({"BF16" if bf16 else "FLOAT"} if weak else set())
    assert got["layer_precisions"].keys() == facts.layer_precisions.keys()
    # What the header says.
    assert (facts.typing, facts.precision, facts.has_if) == (typing, "fp16", False)
    assert (facts.gpu, facts.capability, facts.tensorrt) == ("Orin", "8.7", version)
    assert facts.source_sha256 == content_sha256(model_path("small", "fp32" if weak else "fp16"))
    assert (facts.built_from_sha256 == facts.source_sha256) == weak, "without a patch it is the very file"
    card = read_card(path)
    assert card.precision == ("bf16" if bf16 else "fp16") and card.name == "small"
    (patch,) = card.patches
    assert patch.startswith(f"{core_type}-attention") and patch.endswith("by layer precisions") == weak
    assert engine_state(path, order.wish, order.source.card).fits
    assert not {name: n for name, n in machine.live().items() if n}


@pytest.mark.parametrize("builder", BUILDERS)
def test_fp32(machine, builder):
    _, path, got = make(precision="fp32", builder=builder)
    assert got["flags"] == [] and got["strongly_typed"] and read_card(path).precision == "fp32"
    assert engine_file.read_header(path).facts.built_from_sha256 == content_sha256(model_path("small", "fp32"))


def test_an_input_that_sets_a_shape(machine, tmp_path):
    """``max_keypoints`` is K of TopK: TensorRT wants a range of its values, not of its shape."""
    text = """(float[1,5000] image, int64[1] max_keypoints) => (float[1,k] scores, int64[1,k] keypoints)
        { scores, keypoints = TopK(image, max_keypoints) }"""
    path = saved(graph_helpers.graph(text), tmp_path / "top.onnx", ModelCard("features", "top", "CC0-1.0"))
    _, _, got = make(path, precision="fp32", shapes="")
    (profile,) = got["profiles"]
    assert [list(v) for v in profile["values"]["max_keypoints"]] == [[1], [1024], [3840]] and not profile["shapes"]


def test_progress_and_timings(machine):
    steps = []
    order, _, _ = make(steps=lambda *step: steps.append(step))
    assert all(0 < done <= total for _, done, total in steps) and len({name for name, _, _ in steps}) > 1
    timings = timing_cache_path("Orin", "8.7", "10.13.3.9")
    first = timings.read_bytes()
    assert first
    make(precision="fp32")
    assert len(timings.read_bytes()) > len(first), "a later build adds to what was there"
    timings.write_bytes(b"rubbish")
    make()
    assert timings.read_bytes() != b"rubbish"


def test_timings_of_a_file_that_cannot_be_written_cost_nothing(machine, monkeypatch, caplog):
    from vslam_features.engines import timing_cache

    monkeypatch.setattr(timing_cache, "place", _raises(CacheError, "no room"))
    assert make()[1].is_file() and "timings of the build are not kept: no room" in caplog.text


def _raises(error, text):
    def call(*_, **__):
        raise error(text)  # anew, for its traceback holds what was alive

    return call


def test_an_interrupted_build_stops(machine):
    def stop(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(steps=stop)
    nothing_left(machine)


# -- failures ------------------------------------------------------------------------------------

FAILURES = {
    "parse": (ModelFileError, "cannot parse small.fp16.patched.onnx"),
    "build": (BackendError, "built no engine.*Could not find any implementation"),
    "create_network": (BackendError, "create_network gave nothing: .*OutOfMemory"),
    "create_builder_config": (BackendError, "create_builder_config gave nothing"),
    "create_optimization_profile": (BackendError, "create_optimization_profile gave nothing"),
    "add_optimization_profile": (ConfigError, "does not take these shapes: .*keypoints0: 1x2,256x2,600x2"),
    "cudaSetDevice": (BackendError, "cudaSetDevice"),
}


@pytest.mark.parametrize("fault", FAILURES)
def test_each_failure_has_its_error(machine, fault):
    error, text = FAILURES[fault]
    machine.set_faults(**{fault: True})
    with pytest.raises(error, match=text):
        make()
    machine.set_faults()
    nothing_left(machine)
    assert make()[1].is_file(), "and the next build is none the worse"


def test_each_call_of_cuda_may_fail(machine):
    """Whichever it is: a typed error, and nothing left. The first build that is whole has made all calls."""
    for n in range(1, 30):
        machine.set_faults(cuda_call=n)
        try:
            make()
        except (BackendError, RuntimeMissingError) as error:
            assert "cuda" in str(error)
            nothing_left(machine)
        else:
            break
    assert 3 < n < 29, "calls of a build"


@pytest.mark.parametrize("fault", ["parse", "build", "add_optimization_profile"])
def test_trtexec_fails(machine, fault):
    machine.use(faults=f'{{"{fault}": true}}')
    with pytest.raises(BackendError, match=r"trtexec ended with exit code 1: .*\[E\]"):
        make(builder="trtexec")
    machine.use(faults="{}")
    nothing_left(machine)


def test_trtexec_is_killed(machine, monkeypatch):
    monkeypatch.setenv("VSLAM_FAKE_TRTEXEC", "kill")
    with pytest.raises(BackendError, match="trtexec was killed by SIGKILL, as happens where memory runs out"):
        make(builder="trtexec")
    nothing_left(machine)


def test_trtexec_that_writes_nothing(machine, monkeypatch):
    monkeypatch.setenv("VSLAM_FAKE_TRTEXEC", "silent")
    with pytest.raises(BackendError, match="ended well, but wrote no engine"):
        make(builder="trtexec")
    nothing_left(machine)


def test_trtexec_is_not_here(machine, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(RuntimeMissingError, match="libnvinfer-bin.*builder to api"):
        make(builder="trtexec")
    nothing_left(machine)


def test_trtexec_of_eleven_refuses_the_words_of_ten(machine, tmp_path):
    """The stand-in is strict, or the tests above would prove nothing."""
    import subprocess

    machine.use(tensorrt="11.4.0.106")
    for word in ("--fp16", "--bf16", "--precisionConstraints=obey", "--layerPrecisions=a:bf16", "--nonsense"):
        done = subprocess.run(["trtexec", word], capture_output=True, text=True)
        assert done.returncode == 1 and f"Unknown option: {word}" in done.stdout


@pytest.mark.parametrize("builder", BUILDERS)
def test_a_node_that_tensorrt_does_not_know(machine, tmp_path, builder):
    text = "(float[1,4] image) => (float[1,4] descriptor) { r = Relu(image) descriptor = Hardmax(r) }"
    path = saved(graph_helpers.graph(text), tmp_path / "odd.onnx", ModelCard("global", "odd", "CC0-1.0"))
    with pytest.raises((ModelFileError, BackendError), match="No importer registered for op: Hardmax"):
        make(path, precision="fp32", shapes="", builder=builder)
    nothing_left(machine)


def test_a_layer_that_is_not_found_is_no_silent_half_precision(machine, monkeypatch):
    from fake_trt import network

    class Renamed(network.ILayer):
        def __init__(self, *args):
            super().__init__(*args)
            self.name = self.name.replace("Softmax", "Sm")

    monkeypatch.setattr(network, "ILayer", Renamed)
    with pytest.raises(ModelFileError, match="no layer for .* of .* nodes of attention.*half precision.*overflow"):
        make(typing="weak")
    nothing_left(machine)


@pytest.mark.parametrize("what", ["disk full", "no permission"])
def test_a_disk_that_takes_no_engine(machine, monkeypatch, what):
    code = {"disk full": errno.ENOSPC, "no permission": errno.EACCES}[what]

    def write(file, header, engine):
        file.write(engine[: len(engine) // 2])
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(engine_file, "write", write)
    with pytest.raises(CacheError, match=f"cannot write to .*engines.*{os.strerror(code)}"):
        make()
    nothing_left(machine)


def test_a_failed_build_leaves_the_older_engine(machine):
    _, path, _ = make()
    before = path.read_bytes()
    machine.set_faults(build=True)
    with pytest.raises(BackendError):
        make(workspace_mb=100)
    assert path.read_bytes() == before


def test_what_the_bindings_raise(machine, monkeypatch):
    from fake_trt import builder

    monkeypatch.setattr(builder.Builder, "build_serialized_network", _raises(RuntimeError, "the bindings say so"))
    with pytest.raises(BackendError, match="RuntimeError: the bindings say so"):
        make()
    nothing_left(machine)


def test_no_gpu_constructs_nothing(machine):
    machine.use(gpu="")
    with pytest.raises(RuntimeMissingError, match="no GPU that CUDA can use"):
        make()
    nothing_left(machine)


def test_trtexec_is_ended_with_its_caller(machine, tmp_path, monkeypatch):
    """An interrupt while it runs must leave no builder behind, which would hold the GPU's memory."""
    from vslam_features.engines import trtexec

    program = tmp_path / "trtexec"
    program.write_text("#!/bin/sh\necho $$\nexec sleep 600\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    pids = []

    def interrupt(line):
        pids.append(int(line))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trtexec.build(["trtexec"], tmp_path / "none.engine", interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], signal.SIGTERM)


def test_phases_from_other_threads(machine):
    """TensorRT calls the monitor from its own threads."""
    told = []
    monitor = building._monitor(machine.trt, lambda *step: told.append(step))
    monitor.phase_start("Building", None, 3)
    threads = [threading.Thread(target=monitor.step_complete, args=("Building", i)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(told) == [("Building", i, 3) for i in (1, 2, 3)]
