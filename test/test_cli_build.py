"""``models build --runtime tensorrt``: plans without a GPU, builds that are done once, and what makes them stale."""

import dataclasses
import json
import os
import re
import shlex
import subprocess
import sys
import threading
from dataclasses import replace

import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnx_ir")
pytest.importorskip("onnxruntime")
pytest.importorskip("spox")

from engine_helpers import SHAPES, place, with_trtexec  # noqa: E402
from model_helpers import clear_environment, command, own_cache  # noqa: E402, F401

from vslam_features.artifacts import cache as artifacts_cache  # noqa: E402
from vslam_features.artifacts.cache import locked  # noqa: E402
from vslam_features.artifacts.card import read_card, sidecar_path  # noqa: E402
from vslam_features.artifacts.records import records_of  # noqa: E402
from vslam_features.artifacts.store import content_sha256, model_path  # noqa: E402
from vslam_features.cli import model_build_progress, models_show  # noqa: E402
from vslam_features.cli.model_build_progress import BuildProgress  # noqa: E402
from vslam_features.engines import make  # noqa: E402
from vslam_features.errors import CacheError  # noqa: E402
from vslam_features.runtimes import engine_file  # noqa: E402

ASSUMED = ("--dry-run", "--assume-version", "10.3", "--assume-gpu", "Orin 8.7")
BUILD = ("--precision", "fp16", "--set", f"runtime.options.shapes={SHAPES}")


@pytest.fixture(autouse=True)
def _models(own_cache, monkeypatch):  # noqa: F811
    clear_environment(monkeypatch)
    place("fp32", "fp16")


@pytest.fixture
def machine(fake_tensorrt):
    fake_tensorrt.use(gpu="Orin;8.7;540.4.0")
    return fake_tensorrt


def build(capsys, *args, model="small") -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    code = command("models", "build", str(model), "--runtime", "tensorrt", *map(str, args))
    return code, *capsys.readouterr()


def engine(name="small.fp16.orin"):
    return model_path("small", "fp32").parents[1] / "engines" / f"{name}.engine"


# -- without a GPU -------------------------------------------------------------------------------


def test_a_dry_run_needs_neither_gpu_nor_library(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    monkeypatch.setitem(sys.modules, "cuda", None)
    code, out, err = build(capsys, *BUILD, *ASSUMED)
    assert code == 0, err
    assert "TensorRT 10.3, fp16, strongly typed: STRONGLY_TYPED, no TF32" in out
    assert "shapes of keypoints0: 1x2,256x2,600x2" in out and "8 cores cast to float32" in out
    assert f"{engine()} would be built" in out
    words = shlex.split(out.splitlines()[-1])
    assert words[0] == "trtexec" and {"--stronglyTyped", "--noTF32", "--skipInference"} <= set(words)
    assert not {"--fp16", "--bf16"} & set(words) and "nothing was built" in err
    assert not engine().parent.exists()


@pytest.mark.parametrize(
    "args, text",
    [
        (("--dry-run",), "tensorrt cannot be imported.* --assume-version 10.3"),
        (("--dry-run", "--assume-version", "10.3"), "(no GPU|cannot be imported).* --assume-gpu"),
        ((*ASSUMED[:3], "--assume-gpu", "Orin"), "expected its name and compute capability"),
        (("--dry-run", "--assume-version", "8.6", *ASSUMED[3:]), "expected 10.1 or newer"),
        (ASSUMED[1:], "are for --dry-run"),
        ((*ASSUMED, "--typing", "weak", "--precision", "fp32", "--save-onnx", "x.onnx"), "nothing is patched"),
        (("--out", "x.plan"), "ends in .engine"),
        (("--set", "runtime.name=onnxruntime"), "contradicts --runtime tensorrt"),
        ((*ASSUMED, "--set", "runtime.options.shapes=nonsense"), "shapes"),
        ((*ASSUMED, "--set", "runtime.options.nonsense=1"), "nonsense"),
    ],
)
def test_what_is_wrong_is_told(capsys, monkeypatch, args, text):
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    monkeypatch.setitem(sys.modules, "cuda", None)
    code, _, err = build(capsys, *args)
    assert code != 0 and re.search(text, err), err


def test_options_of_engines_need_the_runtime(capsys):
    assert command("models", "build", "xfeat", "--dry-run", "--typing", "weak") == 1
    assert "--typing, --dry-run: for engines; add --runtime tensorrt" in capsys.readouterr().err


@pytest.mark.parametrize("version", ["10.3.0", "11.4.0.106"])
def test_the_command_that_is_printed_builds(capsys, monkeypatch, machine, tmp_path, version):
    machine.use(tensorrt=version)
    with_trtexec(machine, monkeypatch)
    kept = tmp_path / "patched.onnx"
    code, out, _ = build(capsys, *BUILD, "--dry-run", "--save-onnx", kept)
    assert code == 0 and read_card(kept).patches == ("fp32-attention",)
    engine().parent.mkdir(parents=True)
    words = shlex.split(out.splitlines()[-1])
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    (saved,) = (w.partition("=")[2] for w in words if w.startswith("--saveEngine="))
    assert os.path.getsize(saved) > 10_000
    assert build(capsys, *BUILD, "--dry-run", "--save-onnx", kept)[0] != 0, "a file of others is not replaced"


# -- on a machine with one -----------------------------------------------------------------------


def test_the_second_call_does_nothing(capsys, machine):
    code, out, err = build(capsys, *BUILD)
    assert code == 0, err
    assert "building the engine of" in err and "there is none" in err and "the engine equals its reference" in out
    (record,) = records_of(content_sha256(engine()))
    assert record.passed and record.runtime == "tensorrt" and record.precision == "fp16"
    before = engine().stat().st_mtime_ns
    machine.set_faults(build=True)  # none is asked for
    code, out, err = build(capsys, *BUILD)
    assert (code, err) == (0, "") and f"{engine()} is up to date" in out
    assert engine().stat().st_mtime_ns == before
    machine.set_faults()
    assert build(capsys, *BUILD, "--force", "--no-verify")[0] == 0 and engine().stat().st_mtime_ns > before


def changed_header(**facts):
    """As another version of this program, or another machine, would have written it."""
    header, content = engine_file.read_engine(engine())
    changed = dataclasses.replace(header.facts, key="0" * 64, **facts)
    with open(engine(), "wb") as file:
        engine_file.write(file, engine_file.EngineHeader(header.card, changed), content)


def cut():
    engine().write_bytes(engine().read_bytes()[:-100])


def flip():
    content = bytearray(engine().read_bytes())
    content[-1000] ^= 1
    engine().write_bytes(bytes(content))


def card_beside():
    """The user has found out how this file takes keypoints."""
    path = model_path("small", "fp16")
    fields = replace(read_card(path), keypoints="corner_pixels", schema=3).to_dict()
    sidecar_path(path).write_text(json.dumps(fields))


STALE = {
    "driver": (lambda m: m.use(gpu="Orin;8.7;580.1.0"), "driver 13.0, was 12.6"),
    "version": (lambda m: m.use(tensorrt="10.3.0"), r"TensorRT 10\.3\.0, was 10\.13"),
    "GPU": (lambda m: m.use(gpu="Orin;8.9;540.4.0"), "compute capability 8.9, was 8.7"),
    "weights": (lambda m: place("fp32", "fp16", seed=4), "the ONNX file has changed"),
    "older patch": (
        lambda m: changed_header(patches={"cumsum": 0, "attention": 2}), "patch cumsum 1, was 0"
    ),
    "no patch": (lambda m: changed_header(patches={}), "patch attention 2, was none; patch cumsum 1, was none"),
    "card": (lambda m: card_beside(), "'keypoints' of the card has changed"),
    "another program": (lambda m: changed_header(), "built by another version of vslam_features"),
    "truncated": (lambda m: cut(), "damaged: .*cut short"),
    "a bit": (lambda m: flip(), "damaged: .*bytes of engine changed"),
    "no engine": (lambda m: engine().write_bytes(b"<html>"), "damaged: "),
}  # fmt: skip


@pytest.mark.parametrize("what", STALE)
def test_what_is_stale_is_rebuilt(capsys, machine, what):
    assert build(capsys, *BUILD, "--no-verify")[0] == 0
    change, reason = STALE[what]
    change(machine)
    code, out, err = build(capsys, *BUILD, "--dry-run")
    assert code == 0 and re.search(f"would be built: .*{reason}", out)
    code, _, err = build(capsys, *BUILD)
    assert code == 0 and re.search(f"building the engine of .*: .*{reason}", err), err
    assert "is up to date" in build(capsys, *BUILD)[1]


def test_weights_that_change_beside_their_file(capsys, machine):
    """External data: the ONNX file itself stays as it is."""
    path = model_path("small", "fp16")
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="weights.bin", size_threshold=100)
    assert build(capsys, *BUILD, "--no-verify")[0] == 0
    assert "is up to date" in build(capsys, *BUILD, "--no-verify")[1]
    weights, before = path.with_name("weights.bin"), content_sha256(path)
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(bytes(content))
    code, _, err = build(capsys, *BUILD, "--no-verify")
    assert code == 0 and "building the engine of" in err and "the ONNX file has changed" in err
    assert engine_file.read_header(engine()).facts.source_sha256 == content_sha256(path) != before


def test_an_engine_that_tensorrt_does_not_take_is_rebuilt(capsys, machine):
    """Its header fits, as after an update of a library that keeps its version."""
    assert build(capsys, *BUILD, "--no-verify")[0] == 0
    machine.set_faults(deserialize=1)
    code, _, err = build(capsys, *BUILD)
    assert code == 0 and "building the engine of" in err and "cannot load the engine" in err


@pytest.mark.parametrize("name", ["workspace_mb", "optimisation_level", "typing", "attention", "patches", "shapes"])
def test_other_options_are_another_engine(capsys, machine, name):
    value = {"workspace_mb": "64", "optimisation_level": "1", "typing": "weak", "attention": "as_is",
             "patches": "none", "shapes": "keypoints0: 1x2,2x2,9x2; keypoints1: 1x2,2x2,9x2"}[name]  # fmt: skip
    assert build(capsys, *BUILD, "--no-verify")[0] == 0
    code, out, _ = build(capsys, *BUILD, "--dry-run", "--set", f"runtime.options.{name}={value}")
    assert code == 0 and "would be built" in out


def test_options_that_decide_nothing_of_the_engine(capsys, machine):
    assert build(capsys, *BUILD, "--no-verify")[0] == 0
    for name, value in (("cuda_graphs", "false"), ("build", "never"), ("builder", "trtexec")):
        assert "is up to date" in build(capsys, *BUILD, "--set", f"runtime.options.{name}={value}")[1]


def test_another_gpu_has_an_engine_of_its_own(capsys, machine):
    assert build(capsys, *BUILD, "--no-verify")[0] == 0
    machine.use(gpu="NVIDIA GeForce RTX 3060;8.6;550.0.0")
    assert build(capsys, *BUILD, "--no-verify")[0] == 0
    assert engine().is_file() and engine("small.fp16.nvidia-geforce-rtx-3060").is_file()


def test_an_engine_that_computes_something_else(capsys, machine):
    """It stays, with a record that keeps it from being run."""
    machine.set_faults(nan_inputs=[1, 2])
    code, out, err = build(capsys, *BUILD)
    assert code == 1 and "differs from its reference" in out and "is refused from now on" in err
    (record,) = records_of(content_sha256(engine()))
    assert not record.passed
    machine.set_faults()
    code, out, err = build(capsys, *BUILD)
    assert code == 1 and "is up to date" in out and "failed its comparison" in err


def test_an_engine_that_was_never_compared(capsys, machine):
    """As where its build was interrupted behind it."""
    assert build(capsys, *BUILD, "--no-verify")[0] == 0
    code, out, _ = build(capsys, *BUILD, "--no-verify")
    assert code == 0 and "is up to date" in out and "at its first use" in out
    machine.set_faults(nan_inputs=[1, 2])
    code, out, err = build(capsys, *BUILD)
    assert code == 1 and "is up to date" in out and "differs from its reference" in out and "is refused" in err


def test_what_another_gpu_of_this_machine_found_is_not_of_this_one(capsys, machine):
    machine.use(gpu="Orin;8.7;540.4.0|Orin;8.7;540.4.0")
    machine.set_faults(nan_inputs=[1, 2])
    assert build(capsys, *BUILD, "--set", "runtime.device=cuda:1")[0] == 1
    machine.set_faults()
    code, out, err = build(capsys, *BUILD)
    assert code == 0 and "the engine equals its reference" in out, err


def test_an_engine_that_is_up_to_date_needs_neither_lock_nor_libraries(capsys, machine, monkeypatch):
    assert build(capsys, *BUILD)[0] == 0

    def read_only(target, waiting=None):
        raise CacheError(f"cannot write to {target.parent}")

    monkeypatch.setattr(artifacts_cache, "locked", read_only)
    monkeypatch.setitem(sys.modules, "vslam_features.engines.make", None)
    monkeypatch.delattr("vslam_features.engines.make", raising=False)
    code, out, err = build(capsys, *BUILD)
    assert (code, err) == (0, "") and "is up to date" in out
    code, _, err = build(capsys, *BUILD, "--force")
    assert code != 0 and "building engines needs onnx and onnx-ir" in err


def test_a_source_that_changes_during_its_build(capsys, machine, monkeypatch):
    """The header would say that the engine is of the file of before."""
    done = make.planned

    def planned(*args):
        place("fp16", seed=4)
        return done(*args)

    monkeypatch.setattr(make, "planned", planned)
    code, _, err = build(capsys, *BUILD)
    assert code != 0 and "its content changed while its engine was built" in err and not engine().exists()


def test_the_list_has_engines(capsys, machine):
    def listed():
        assert command("models", "list") == 0
        return capsys.readouterr().out

    assert "TensorRT engines" not in listed()
    assert build(capsys, *BUILD, "--no-verify")[0] == 0
    line = r"  small\.fp16\.orin\.engine: Orin, driver 12\.6, TensorRT 10\.13\.3\.9, \d{4}-\d\d-\d\d; "
    assert re.search(f"{line}not verified yet\n", listed())
    assert build(capsys, *BUILD)[0] == 0 and re.search(f"{line}verified on cuda:0 Orin\n", listed())
    machine.set_faults(nan_inputs=[1, 2])
    assert build(capsys, *BUILD, "--force")[0] == 1 and re.search(f"{line}FAILED on cuda:0 Orin\n", listed())
    assert command("models", "list", "--json") == 0
    (told,) = json.loads(capsys.readouterr().out)["engines"]
    assert (told["name"], told["typing"], told["failed"]) == ("small", "strong", ["cuda:0 Orin"])
    cut()
    assert "small.fp16.orin.engine: " in listed() and "cut short" in listed()


def test_where_it_is_written(capsys, machine, tmp_path):
    target = tmp_path / "robot" / "matcher.engine"
    code, out, err = build(capsys, *BUILD, "--out", target)
    assert code == 0, err
    assert target.is_file() and not engine().is_file() and "the engine equals its reference" in out
    assert f"{target} is up to date" in build(capsys, *BUILD, "--out", target)[1]


def test_a_folder_in_its_place_is_told_before_the_build(capsys, machine, tmp_path):
    (target := tmp_path / "folder.engine").mkdir()
    code, _, err = build(capsys, *BUILD, "--out", target)
    assert code != 0 and "is a folder" in err and "building the engine of" not in err


def test_a_record_that_cannot_be_kept_is_not_said_to_be(capsys, machine):
    assert build(capsys, *BUILD, "--no-verify")[0] == 0
    engine().parents[1].joinpath("records").write_text("in the way")
    assert command("models", "verify", str(engine())) == 0
    assert "record: not kept: the cache cannot be written to" in capsys.readouterr().out


def test_a_file_by_its_path(capsys, machine, tmp_path):
    place("fp32")[0].replace(path := tmp_path / "third_party.onnx")
    code, out, err = build(capsys, "--set", f"runtime.options.shapes={SHAPES}", model=path)
    assert code == 0, err
    assert engine("small.fp32.orin").is_file() and "small.fp32" not in out.split("against")[0]


def test_a_failure_of_one_leaves_the_others(capsys, machine):
    code = command("models", "build", "nonsense", "small", "--runtime", "tensorrt", *BUILD, "--no-verify")
    out, err = capsys.readouterr()
    assert code != 0 and "nonsense" in err and engine().is_file()


def test_a_set_of_models_by_its_name(capsys, monkeypatch, machine):
    monkeypatch.setattr(models_show, "default_models", lambda: ["small"])
    code, out, err = build(capsys, *BUILD, "--dry-run", model="default")
    assert code == 0 and f"{engine()} would be built" in out, err


def test_two_builds_wait_for_each_other(capsys, machine):
    words = [sys.executable, "-m", "vslam_features", "models", "build", "small", "--runtime", "tensorrt", *BUILD]
    children = [
        subprocess.Popen([*words, "--no-verify"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    told = [child.communicate(timeout=300) for child in children]
    assert [child.returncode for child in children] == [0, 0, 0], told
    assert sorted("building the engine" in err for _, err in told) == [False, False, True]
    assert sum("is up to date" in out for out, _ in told) == 2


def test_who_waits_says_so(capsys, machine):
    held = threading.Event()

    def hold():
        with locked(engine()):
            held.set()
            release.wait(60)

    release = threading.Event()
    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(60)
    threading.Timer(1, release.set).start()
    code, _, err = build(capsys, *BUILD, "--no-verify")
    thread.join()
    assert code == 0 and f"waiting for another process that builds {engine()}" in err


class Terminal:
    """Standard error as a terminal, or a log file."""

    def __init__(self, live):
        self.live, self.text = live, ""

    def isatty(self):
        return self.live

    def write(self, text):
        self.text += text

    def flush(self):
        pass


def test_progress_on_a_terminal_is_a_bar_for_each_phase(monkeypatch):
    terminal = Terminal(True)
    monkeypatch.setattr(sys, "stderr", terminal)
    with BuildProgress() as steps:
        for step in range(1, 4):
            steps("Building", step, 3)
            steps("Tactics", step, 5)  # goes on, and is closed at the end
        assert set(steps._bars) == {"Tactics"}, "the finished one makes way"
    assert (
        re.search("Building: .*0/3", terminal.text) and re.search("Tactics: .*0/5", terminal.text) and not steps._bars
    )


def test_progress_in_a_log_is_a_line_now_and_then(monkeypatch):
    log, clock = Terminal(False), iter([0.0, 1.0, 6.0, 6.0, 7.0])
    monkeypatch.setattr(sys, "stderr", log)
    monkeypatch.setattr(model_build_progress.time, "monotonic", lambda: next(clock))
    with BuildProgress() as steps:
        for step in range(1, 4):
            steps("Building", step, 3)
    assert log.text == "  Building: 2 of 3\n"
