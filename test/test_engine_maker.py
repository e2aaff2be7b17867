"""Opening a model on TensorRT: its engine is found, or built by a child; one of another machine is not loaded."""

import dataclasses
import os
import re
import shlex
import shutil
import signal

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnx_ir")
pytest.importorskip("onnxruntime")
pytest.importorskip("spox")

from engine_helpers import CARD, SHAPES, graph, place, with_trtexec  # noqa: E402
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from model_helpers import USERS_CACHE, clear_environment, command, own_cache  # noqa: E402, F401
from patch_helpers import saved  # noqa: E402

from vslam_features import classical  # noqa: E402
from vslam_features.artifacts import engine_maker  # noqa: E402
from vslam_features.artifacts.cases import shipped_cases  # noqa: E402
from vslam_features.artifacts.engine_maker import build_words, ensure_engine  # noqa: E402
from vslam_features.artifacts.store import content_sha256, model_path  # noqa: E402
from vslam_features.cli import model_build  # noqa: E402
from vslam_features.cli.main import build_parser  # noqa: E402
from vslam_features.config import Config  # noqa: E402
from vslam_features.errors import (  # noqa: E402
    BackendError,
    ConfigError,
    ModelFileError,
    ModelMissingError,
    ParityError,
    RuntimeMissingError,
)
from vslam_features.models import Models  # noqa: E402
from vslam_features.reference import ModelFile, Reference  # noqa: E402
from vslam_features.runtimes import engine_file  # noqa: E402


def config(**options) -> Config:
    """A robot's: half precision on TensorRT."""
    values = {f"runtime.options.{name}": value for name, value in {"shapes": SHAPES, **options}.items()}
    base = {"runtime.name": "tensorrt", "runtime.device": "cuda", "runtime.precision": "fp16", "runtime.threads": 1}
    return Config.from_flat({**base, **values})


@pytest.fixture
def machine(own_cache, fake_tensorrt, monkeypatch):  # noqa: F811
    clear_environment(monkeypatch)
    fake_tensorrt.use(gpu="Orin;8.7;540.4.0")
    place("fp32", "fp16")
    return fake_tensorrt


def engine():
    return model_path("small", "fp32").parents[1] / "engines" / "small.fp16.orin.engine"


def opened(model="small", said=None, **options):
    """The engine of a matcher, as a plug-in gets it, and what was said meanwhile."""
    said = [] if said is None else said
    return Models(config(**options), said.append).open("matcher", str(model)), said


def pair(m=40, n=50):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(max(m, n), 64)).astype(np.float32)
    keypoints = rng.uniform(0, 400, (max(m, n), 2)).astype(np.float32)
    return {"descriptors0": x[:m], "descriptors1": x[:n], "keypoints0": keypoints[:m], "keypoints1": keypoints[:n]}


def test_opening_builds_once(machine):
    model, said = opened()
    assert any("building its TensorRT engine, which takes minutes (there is none)" in line for line in said)
    assert any("8 cores cast to float32" in line for line in said), "the child's lines are passed on"
    assert any("comparing with its reference on tensorrt 10.13.3.9" in line for line in said)
    assert model.model.path == engine() and model.model.linked
    answer = model.run(pair())
    assert answer.outputs["matches0"].shape == (40,) and not answer.recovered
    again, said = opened()
    assert said == [] and again.model.sha256 == model.model.sha256


def test_its_identity_is_that_of_the_weights(machine, in_process):
    """So that features of an engine and of the file compare with one another."""
    on_gpu, _ = opened()
    on_cpu = Models(Config.from_flat({"runtime.threads": 1})).open("matcher", "small")
    assert on_gpu.model.identity.sha256 == on_cpu.model.sha256, "a passing record ties it to the fp32 file"


STALE = {
    "driver": (lambda m: m.use(gpu="Orin;8.7;580.1.0"), "driver 13.0, was 12.6"),
    "version": (lambda m: m.use(tensorrt="11.4.0.106"), "TensorRT 11.4.0.106, was 10.13.3.9"),
    "GPU": (lambda m: m.use(gpu="Orin;8.9;540.4.0"), "compute capability 8.9, was 8.7"),
    "weights": (lambda m: place("fp32", "fp16", seed=4), "the ONNX file has changed"),
    "older patch": (lambda m: older_patch(), "patch cumsum 1, was 0"),
    "truncated": (lambda m: engine().write_bytes(engine().read_bytes()[:-9]), "it is damaged: .*cut short"),
    "shapes": (lambda m: None, "shapes of keypoints0 1x2 300x2 700x2, was 1x2 256x2 600x2"),
}


def older_patch():
    header, content = engine_file.read_engine(engine())
    facts = dataclasses.replace(header.facts, key="0" * 64, patches={**header.facts.patches, "cumsum": 0})
    with open(engine(), "wb") as file:
        engine_file.write(file, engine_file.EngineHeader(header.card, facts), content)


@pytest.fixture
def in_process(monkeypatch):
    """Builds are made here rather than in a child, which takes a second for its imports."""

    def run(words, progress):
        return command(*words), []

    monkeypatch.setattr(engine_maker, "_run", run)


@pytest.mark.parametrize("what", STALE)
def test_what_is_stale_is_rebuilt_and_not_loaded(machine, in_process, what):
    ensure_engine("small", config().runtime, print)
    change, reason = STALE[what]
    change(machine)
    wider = {"shapes": "keypoints0: 1x2,300x2,700x2"} if what == "shapes" else {}
    never = config(build="never", **wider).runtime
    with pytest.raises(ModelFileError, match=f"{reason}.*build is never.*models build small --runtime tensorrt"):
        ensure_engine("small", never, print)
    said = []
    path = ensure_engine("small", config(**wider).runtime, said.append)
    assert re.search(reason, said[0])
    assert ensure_engine("small", never, said.append) == path, "now it serves as it is"


def test_without_an_engine_and_without_a_build(machine):
    text = "there is none.*build is never: run 'vslam-features models build small --runtime tensorrt --precision fp16"
    with pytest.raises(ModelMissingError, match=text):
        opened(build="never")


def test_the_command_of_the_message_is_the_remedy(machine):
    with pytest.raises(ModelMissingError) as raised:
        opened(build="never", workspace_mb=256)
    words = shlex.split(str(raised.value).partition("run '")[2].rstrip("'").replace("'\"'\"'", "'"))
    assert command(*words[1:]) == 0
    assert opened(build="never", workspace_mb=256)[1] == []


# -- files that are not here ---------------------------------------------------------------------


def unbuildable(*_):
    pytest.fail("an engine was built")


def test_an_engine_serves_without_its_onnx_file(machine, in_process, monkeypatch):
    """A robot need not have more than what runs. What it is compared with, and its identity, stay as they are."""
    before = opened()[0].model
    model_path("small", "fp16").unlink()
    monkeypatch.setattr(engine_maker, "_run", unbuildable)
    after, said = opened()
    assert (after.model.path, after.model.identity, said) == (before.path, before.identity, [])
    assert opened(typing="strong", build="never")[0].model.path == engine()
    assert classical.available(robot()) == (robot(), "")


def robot() -> Config:
    """The matcher is the only model."""
    values = {"features.name": "sift", "retrieval.name": "vlad"}
    return Config.from_flat({**values, "matcher.name": "lighterglue", "matcher.options.model": "small"}, base=config())


ALONE = {
    "driver": (lambda m: m.use(gpu="Orin;8.7;580.1.0"), {}),
    "version": (lambda m: m.use(tensorrt="10.3.0"), {}),
    "GPU": (lambda m: m.use(gpu="Orin;8.9;540.4.0"), {}),
    "older patch": (lambda m: older_patch(), {}),
    "a bit": (lambda m: engine().write_bytes(engine().read_bytes()[:-1] + b"?"), {}),
    "typing": (lambda m: None, {"typing": "weak"}),
    "attention": (lambda m: None, {"attention": "as_is"}),
    "shapes": (lambda m: None, {"shapes": "keypoints0: 1x2,256x2,700x2"}),
    "unknown shapes": (lambda m: None, {"shapes": "image: 1x1x480x640"}),
}


@pytest.mark.parametrize("what", ALONE)
def test_without_its_onnx_file_only_what_fits_serves(machine, in_process, monkeypatch, what):
    ensure_engine("small", config().runtime, print)
    for precision in ("fp16", "fp32"):
        model_path("small", precision).unlink()
    change, options = ALONE[what]
    change(machine)
    monkeypatch.setattr(engine_maker, "_run", unbuildable)
    with pytest.raises((ModelMissingError, ConfigError)):  # ConfigError: this name is none of the registry
        ensure_engine("small", config(**options).runtime, print)


def test_a_source_that_is_here_decides(machine, in_process):
    """An engine that was built from the fp32 file, as there is no other, is stale where that has changed."""
    model_path("small", "fp16").unlink()
    ensure_engine("small", config().runtime, print)
    assert engine_file.read_header(engine()).facts.typing == "weak"
    place("fp32", seed=4)
    said = []
    ensure_engine("small", config().runtime, said.append)
    assert "the ONNX file has changed" in said[0]


def test_an_engine_of_a_file_by_its_path_serves_without_it(machine, in_process, tmp_path):
    place("fp16")[0].replace(path := tmp_path / "third_party.onnx")
    built = ensure_engine(str(path), config().runtime, print)
    path.unlink()
    assert ensure_engine(str(path), config().runtime, unbuildable) == built
    with pytest.raises(ModelMissingError, match="there is no model file"):
        ensure_engine(str(tmp_path / "other.onnx"), config().runtime, unbuildable)


@pytest.mark.parametrize("version, runs", [("10.3.0", "lighterglue"), ("11.4.0.106", "nearest")])
def test_half_precision_of_an_fp32_file_is_no_missing_model(machine, monkeypatch, version, runs):
    """TensorRT 10 builds fp16 engines from it; 11 does not, so that classical methods run, with a warning."""
    machine.use(tensorrt=version)
    place("fp32")[0].replace(model_path("lighterglue", "fp32"))
    asked = robot().with_values(matcher__options__model="lighterglue")
    chosen, problem = classical.available(asked)
    assert chosen.matcher.name == runs and bool(problem) == (runs == "nearest")


def test_a_build_that_fails(machine):
    machine.use(faults='{"build": true}')
    with pytest.raises(BackendError, match="exit code 1.*Could not find any implementation.*repeat it with 'vslam"):
        opened()
    assert not engine().exists()


def test_a_child_that_is_killed(machine, monkeypatch, tmp_path):
    script = tmp_path / "killed.py"
    script.write_text("import os\nprint('working', flush=True)\nos.kill(os.getpid(), 9)\n")
    monkeypatch.setattr(engine_maker, "_CHILD", script)
    said = []
    with pytest.raises(BackendError, match="ended by signal 9: working; repeat it with"):
        opened(said=said)
    assert "working" in said and not engine().exists()


def test_a_child_that_says_all_is_well(machine, monkeypatch, tmp_path):
    script = tmp_path / "nothing.py"
    script.write_text("print('done')\n")
    monkeypatch.setattr(engine_maker, "_CHILD", script)
    with pytest.raises(BackendError, match=r"and yet the engine will not do \(there is none\): done"):
        opened()


def test_the_child_ends_with_its_caller(machine, monkeypatch, tmp_path):
    script = tmp_path / "long.py"
    script.write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n")
    monkeypatch.setattr(engine_maker, "_CHILD", script)
    pids = []

    def interrupt(line):
        if line.isdecimal():
            pids.append(int(line))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ensure_engine("small", config().runtime, interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_an_interrupted_builder_ends_what_it_started(machine, monkeypatch, tmp_path):
    """trtexec would go on for minutes, and keep the memory of the GPU; also of a node that runs in the background."""
    (folder := tmp_path / "bin").mkdir()
    (folder / "trtexec").write_text("#!/bin/sh\necho pid $$\nexec sleep 600\n")
    (folder / "trtexec").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    pids = []

    def interrupt(line):
        if "pid " in line:
            pids.append(int(line.split()[-1]))
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(KeyboardInterrupt):
            ensure_engine("small", config(builder="trtexec").runtime, interrupt)
    finally:
        signal.signal(signal.SIGINT, before)
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)
    assert not engine().exists()


def test_an_engine_that_computes_something_else_is_refused(machine, in_process):
    machine.set_faults(nan_inputs=[1, 2, 3])
    with pytest.raises(ParityError, match="small on tensorrt .* does not compute what its reference computes"):
        opened()
    machine.set_faults()
    with pytest.raises(ParityError):  # its record says so
        opened()


@pytest.mark.parametrize(
    "settings, options, error, text",
    [
        ({"gpu": ""}, {}, RuntimeMissingError, "no GPU that CUDA can use"),
        ({"tensorrt": "11.4.0.106"}, {"typing": "weak"}, ConfigError, "strongly typed engines only"),
        ({}, {"shapes": "nothing0: 1x2"}, ConfigError, "nothing0"),
    ],
)
def test_what_cannot_be_built_starts_no_child(machine, monkeypatch, settings, options, error, text):
    monkeypatch.setattr(engine_maker, "_run", lambda *_: pytest.fail("a child was started"))
    machine.use(**settings)
    with pytest.raises(error, match=text):
        opened(**options)


def test_a_gpu_that_the_configuration_does_not_name(machine):
    with pytest.raises(ConfigError, match="set runtime.device to 'cuda'"):
        ensure_engine("small", config().with_values(runtime__device="cpu").runtime, print)


def test_trtexec_builds_it_too(machine, monkeypatch):
    with_trtexec(machine, monkeypatch)
    model, said = opened(builder="trtexec")
    assert any("RUNNING TensorRT.trtexec" in line for line in said) and model.model.linked
    assert "trtexec" in engine_file.read_header(engine()).facts.made_with


# -- what an engine is compared with -------------------------------------------------------------


def test_the_reference_is_the_fp32_file(machine, in_process):
    path = ensure_engine("small", config().runtime, print)
    reference = Reference.of(ModelFile.at(path))
    assert reference.file.path == model_path("small", "fp32") and not reference.same and reference.proves


@pytest.mark.parametrize("where", ["where it was", "beside the engine"])
def test_the_reference_of_a_file_of_unknown_making_is_its_source(machine, in_process, tmp_path, where):
    source = saved(graph(), tmp_path / "third.onnx", dataclasses.replace(CARD, name="third", source_sha256=""))
    path = ensure_engine(str(source), config(attention="as_is").with_values(runtime__precision="fp32").runtime, print)
    sha256 = content_sha256(source)
    if where == "beside the engine":
        source = source.replace(path.with_name("third.onnx"))
    reference = Reference.of(ModelFile.at(path))
    assert (reference.file.path, reference.file.sha256, reference.same) == (source, sha256, False)
    saved(graph(seed=9), source, CARD)  # another one of this name is not its source
    assert Reference.of(ModelFile.at(path)).same


# -- the command that the child runs -------------------------------------------------------------

CHANGES = {
    "typing": st.sampled_from(["auto", "strong", "weak"]),
    "attention": st.sampled_from(["auto", "bf16", "fp32", "as_is"]),
    "patches": st.sampled_from(["auto", "none"]),
    "builder": st.sampled_from(["auto", "api", "trtexec"]),
    "shapes": st.sampled_from(["", SHAPES, "image:1x1x480x640"]),
    "workspace_mb": st.integers(0, 10_000),
    "optimisation_level": st.integers(0, 5),
    "cuda_graphs": st.booleans(),
}


@given(st.fixed_dictionaries({}, optional=CHANGES), st.sampled_from(["fp32", "fp16"]), st.integers(0, 3))
def test_the_child_is_told_all_that_matters(options, precision, device):
    wanted = config(**options).with_values(runtime__precision=precision, runtime__device=f"cuda:{device}").runtime
    args = build_parser().parse_args(build_words("small", wanted))
    got = model_build.configured(args).runtime
    assert (got.name, got.device, got.precision, got.options) == (
        "tensorrt", wanted.device, wanted.precision, wanted.options
    )  # fmt: skip


# -- real weights --------------------------------------------------------------------------------


@pytest.mark.endurance
@pytest.mark.parametrize(
    "name, version, attention",
    [
        ("lighterglue", "10.13.3.9", "auto"),
        ("lighterglue-early-stop", "10.3.0", "auto"),
        ("lighterglue", "11.4.0.106", "bf16"),
    ],
)
def test_lighterglue_from_weights_to_matches(own_cache, fake_tensorrt, monkeypatch, name, version, attention):  # noqa: F811
    """Strongly typed fp16 with attention in another type: built, compared on all pairs that ship, and run."""
    clear_environment(monkeypatch)
    if not any((USERS_CACHE / "weights").glob("*lighterglue*")):
        pytest.skip(f"no weights of lighterglue in {USERS_CACHE}: run vslam-features models fetch lighterglue")
    shutil.copytree(USERS_CACHE / "weights", own_cache / "weights")
    assert command("models", "fetch", name, "--precision", "fp16", "--offline") == 0
    fake_tensorrt.use(tensorrt=version)
    said = []
    base = {"runtime.name": "tensorrt", "runtime.device": "cuda", "runtime.precision": "fp16", "runtime.threads": 1}
    base["runtime.options.attention"] = attention
    half, said_of, patch = {
        "auto": ("fp16", "24 cores cast to float32", "fp32-attention"),
        "bf16": ("bf16", "24 cores cast to BF16", "bf16-attention centred"),
    }[attention]
    model = Models(Config.from_flat(base), said.append).open("matcher", name)
    assert model.model.card.precision == half and patch in model.model.card.patches
    assert model.model.linked and any(said_of in line for line in said)
    facts = engine_file.read_header(model.model.path).facts
    assert (facts.typing, facts.tensorrt, facts.has_if) == ("strong", version, name != "lighterglue")
    assert model.session.active.provider.split()[0] == "TensorRT" and half in model.session.active.provider.split()
    exact = Models(Config.from_flat({"runtime.threads": 1})).open("matcher", name)
    for case in shipped_cases(model.model.card, 64)[:3]:
        got, wanted = (len(engine.run(case.runs[0]).outputs["matches0"]) for engine in (model, exact))
        kept = [(e.run(case.runs[0]).outputs["matches0"] >= 0).sum() for e in (model, exact)]
        assert got == wanted and kept[1] > 40 and abs(kept[0] / kept[1] - 1) < 0.15
