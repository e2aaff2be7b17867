"""From a model file to a verdict on its engine, on the fake TensorRT: build, engine file, runtime, gate, record.

The engines are made wrong as those of TinyNav's pull request 261 were.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from model_helpers import (
    _tiny_cache,  # noqa: F401
    command,
    own_cache,  # noqa: F401
    tiny,  # noqa: F401
    tiny_config,
)

from vslam_features import classical
from vslam_features.artifacts import records
from vslam_features.artifacts.cases import matching
from vslam_features.artifacts.store import content_sha256, model_path
from vslam_features.config import Config
from vslam_features.errors import ParityError
from vslam_features.models import Models
from vslam_features.runtimes.choice import runtime_of

COUNTS = (275, 264, 148, 185, 239, 244, 265, 229)
BEFORE = 11  # different inputs before the saved ones: eight pairs that ship, the largest, the first and the last turned
ROWS = BEFORE + 2 + len(COUNTS)  # the first again, twice


@pytest.fixture
def machine(fake_tensorrt, tiny):  # noqa: F811
    """An Orin with the tiny models in its cache."""
    fake_tensorrt.use(tensorrt="10.3.0", gpu="Orin;8.7;540.4.0")
    return fake_tensorrt


@pytest.fixture
def engine(machine, tmp_path, capsys):
    """The matcher's engine, weakly typed fp16, not compared yet."""
    path = tmp_path / "matcher.engine"
    build = ["models", "build", "tiny-matcher", "--runtime", "tensorrt", "--precision", "fp16", "--typing", "weak"]
    assert command(*build, "--no-verify", "--out", str(path)) == 0
    capsys.readouterr()
    return path


@pytest.fixture
def saved(tmp_path):
    """Pairs with as many matches as those of the document."""
    folder, rng = tmp_path / "saved", np.random.default_rng(11)
    folder.mkdir()
    for i, count in enumerate(COUNTS):
        d0, d1 = rng.normal(size=(2, 300, 64))
        d1[:count] = d0[:count] + 0.1 * rng.normal(size=(count, 64))
        sides = [(rng.uniform(0, 500, (300, 2)), d / np.linalg.norm(d, axis=1)[:, None], (544, 640)) for d in (d0, d1)]
        np.savez(folder / f"pair-{i}.npz", **matching(sides))
    return folder


def reference() -> str:
    return str(model_path("tiny-matcher", "fp32"))


def verify(engine, saved, capsys):
    """Exit code, and rows of the saved pairs, of ``models verify ENGINE --reference MODEL.onnx --inputs saved/``."""
    code = command("models", "verify", str(engine), "--reference", reference(), "--inputs", str(saved), "--json")
    values = json.loads(capsys.readouterr().out)
    assert len(values["pairs"]) == ROWS and values["passed"] == (code == 0)
    assert [row["pairs"] for row in values["engines"]] == ["shipped", "shipped", "saved", "saved"]
    assert values["engines"][2]["matches"] == list(COUNTS), "the reference"
    return code, values


def start(engine):
    """Open the matcher as a front-end whose other models run elsewhere does."""
    return Models(tiny_config()).open("matcher", str(engine))


def saved_inputs(*numbers) -> list[int]:
    return [BEFORE + n for n in numbers]


FAULTS = {  # NaN, zero-match pairs, and which saved pairs fail
    "nan on 6 of 8": ({"nan_inputs": saved_inputs(1, 2, 3, 4, 5, 6)}, 6, 6, range(6)),
    "zero matches on 1 of 8": ({"zero_inputs": saved_inputs(4)}, 0, 1, [3]),
    "30 % low": ({"drop_matches": 0.3}, 0, 0, range(8)),
}


@pytest.mark.parametrize("name", FAULTS)
def test_an_engine_that_is_wrong_as_the_documents_is_found_and_refused(engine, saved, machine, capsys, name):
    faults, nan, zero, wrong = FAULTS[name]
    machine.set_faults(**faults)
    code, values = verify(engine, saved, capsys)
    row = values["engines"][3]
    assert code == 1 and values["record"] == "kept for cuda:0 Orin"
    assert row["engine"] == "tensorrt 10.3.0 TensorRT fp16 on cuda:0 Orin"
    assert (row["nan"], row["zero_matches"]) == ([nan, 8], [zero, 8])
    failed = [pair["name"] for pair in values["pairs"] if pair["problems"]]
    assert [f for f in failed if f.startswith("pair-")] == [f"pair-{i}" for i in wrong]
    assert len(failed) == len(wrong) or "drop_matches" in faults, "the pairs that ship do not show it"
    with pytest.raises(ParityError, match="tiny-matcher on tensorrt 10.3.0 .* on saved pairs"):
        start(engine)


def test_engines_of_tensorrt_11_are_judged_alike(machine, saved, tmp_path, capsys):
    """Strongly typed, from the fp32 file."""
    machine.use(tensorrt="11.4.0.106", gpu="NVIDIA RTX 3060;8.6;580.1")
    engine = tmp_path / "matcher.engine"
    build = ["models", "build", "tiny-matcher", "--runtime", "tensorrt", "--no-verify", "--out", str(engine)]
    assert command(*build) == 0
    capsys.readouterr()
    machine.set_faults(nan_inputs=saved_inputs(1, 2, 3, 4, 5, 6))
    code, values = verify(engine, saved, capsys)
    row = values["engines"][3]
    assert code == 1 and row["engine"] == "tensorrt 11.4.0.106 TensorRT on cuda:0 NVIDIA RTX 3060"
    assert (row["nan"], row["matches"]) == ([6, 8], [0] * 6 + list(COUNTS[6:]))
    with pytest.raises(ParityError, match="11.4.0.106"):
        start(engine)


def test_an_engine_within_2_percent_passes_and_runs(engine, saved, machine, capsys):
    machine.set_faults(drop_matches=0.015)
    code, values = verify(engine, saved, capsys)
    counts = values["engines"][3]["matches"]
    assert code == 0 and all(0.98 * n <= m < n for n, m in zip(COUNTS, counts))
    opened = start(engine)
    assert opened.health().linked and opened.health().verified.startswith(f"passed on {ROWS} pairs (8 saved ones")
    assert opened.runtime == "tensorrt 10.3.0 TensorRT fp16 fp16"


def test_the_table_of_the_command(engine, saved, machine, capsys):
    machine.set_faults(nan_inputs=saved_inputs(1, 2, 3, 4, 5, 6))
    assert command("models", "verify", str(engine), "--reference", reference(), "--inputs", str(saved)) == 1
    out = capsys.readouterr().out.splitlines()
    assert max(map(len, out)) <= 120 and out[-1] == "record: kept for cuda:0 Orin"
    at = next(i for i, line in enumerate(out) if line.startswith("engine "))
    lines = [[part.strip() for part in line.split("  ") if part.strip()] for line in out[at:] if " saved " in line]
    assert [line[:4] for line in lines] == [
        [f"reference tiny-matcher.fp32.onnx on onnxruntime {ort_version()}", "saved", "0/8", "0/8"],
        ["tensorrt 10.3.0 TensorRT fp16 on cuda:0 Orin", "saved", "6/8", "6/8"],
    ]
    assert any(line.startswith(f"  - 6 of {ROWS} pairs: ") and "NaN" in line for line in out)


def ort_version() -> str:
    return pytest.importorskip("onnxruntime").__version__


def test_an_engine_that_replaces_one_that_failed_is_no_better_known(engine, saved, machine, capsys, caplog):
    machine.set_faults(nan_inputs=saved_inputs(2))
    assert verify(engine, saved, capsys)[0] == 1
    machine.set_faults()
    before = content_sha256(engine)
    build = ["models", "build", "tiny-matcher", "--runtime", "tensorrt", "--precision", "fp16", "--typing", "weak"]
    assert (
        command(*build, "--no-verify", "--force", "--set", "runtime.options.workspace_mb=512", "--out", str(engine))
        == 0
    )
    assert content_sha256(engine) != before
    health = start(engine).health()
    assert health.linked and "an engine before it failed on saved pairs on 2" in health.verified
    assert "an engine before it failed on saved pairs" in caplog.text
    capsys.readouterr()
    assert verify(engine, saved, capsys)[0] == 0
    assert "before it" not in start(engine).health().verified


def test_a_start_compares_an_engine_that_nobody_did_and_keeps_what_it_finds(engine, machine):
    machine.set_faults(zero_inputs=[9])  # the largest
    with pytest.raises(ParityError, match="largest: no match, the reference has "):
        start(engine)
    machine.set_faults()
    with pytest.raises(ParityError, match="largest"):
        start(engine)
    (record,) = records.records_of(content_sha256(engine))
    assert (record.runtime, record.device, record.pairs, record.saved) == ("tensorrt", "cuda:0 Orin", 13, 0)
    unverified = Models(tiny_config(models__allow_unverified=True)).open("matcher", str(engine))
    assert not unverified.health().linked


@pytest.mark.parametrize(
    ("configured", "file", "runs_on"),
    [
        (("onnxruntime", "cpu"), "a.engine", ("tensorrt", "cuda")),
        (("onnxruntime", "cuda:1"), "a.engine", ("tensorrt", "cuda:1")),
        (("onnxruntime", "tensorrt:1"), "a.engine", ("tensorrt", "cuda:1")),
        (("openvino", "gpu"), "a.engine", ("tensorrt", "cuda")),
        (("tensorrt", "cuda:1"), "a.engine", ("tensorrt", "cuda:1")),
        (("fake", "cpu"), "a.engine", ("fake", "cuda")),
        (("fake", "cuda:1"), "a.engine", ("fake", "cuda:1")),
        (("onnxruntime", "cuda:1"), "a.onnx", ("onnxruntime", "cuda:1")),
        (("fake", "cpu"), "a.onnx", ("fake", "cpu")),
    ],
)
def test_what_runs_a_file(configured, file, runs_on):
    config = Config.from_flat({"runtime.name": configured[0], "runtime.device": configured[1]}).runtime
    name, options, request = runtime_of(Path(file), config)
    assert (name, request.device) == runs_on
    if name == "fake":
        assert options["inner"] == ("tensorrt" if file == "a.engine" else "onnxruntime")
    elif name != config.name:
        assert options == {}, "those of the other runtime mean nothing to it"


def test_the_fake_runtime_takes_an_engine_too(engine, machine):
    """Drills of the guard on the robot itself."""
    opened = Models(tiny_config(runtime__name="fake", runtime__options__error_calls="20")).open("matcher", str(engine))
    assert opened.session.active.runtime == "fake(tensorrt)" and opened.session.active.device == "cuda:0 Orin"


def test_nan_of_an_engine_that_passed_is_made_good_by_its_source(engine, machine, saved):
    opened = start(engine)
    machine.set_faults(nan_inputs=saved_inputs(1))
    with np.load(saved / "pair-2.npz") as file:
        inputs = dict(file)
    answer = opened.run(inputs)
    assert "not finite" in answer.recovered and answer.runtime.startswith("fallback onnxruntime")
    assert (answer.outputs["matches0"] >= 0).sum() == COUNTS[2]
    assert (opened.counts.non_finite, opened.counts.recovered, opened.counts.incidents) == (1, 1, 1)


def test_an_engine_is_compared_with_its_source_where_that_is_all_there_is(engine, saved, capsys, tmp_path):
    """A robot that got the engine alone knows no reference; one that is named there holds for its starts."""
    moved = tmp_path / "source.onnx"
    model_path("tiny-matcher", "fp32").rename(moved)
    asked = ["models", "verify", str(engine)]
    assert command(*asked) == 1 and "no fp32 ONNX file of its weights" in capsys.readouterr().err
    assert command(*asked, "--reference", str(moved), "--inputs", str(saved), "--json") == 0
    assert json.loads(capsys.readouterr().out)["record"] == "kept for cuda:0 Orin"
    opened = start(engine)
    assert opened.health().linked and opened.health().fallback == "none"


def test_a_robot_with_tensorrt_alone_runs_its_engines_and_no_classical_methods(engine, monkeypatch):
    monkeypatch.setattr(classical.importlib.util, "find_spec", lambda name: None)
    models = {f"{group}__options__model": str(engine) for group in ("features", "matcher", "retrieval")}
    asked = tiny_config(**models)
    assert classical.available(asked) == (asked, "")
    assert "onnxruntime is not installed" in classical.available(tiny_config())[1]


def test_info_shows_the_header_of_an_engine(engine, capsys):
    assert command("models", "info", str(engine), "--json") == 0
    values = json.loads(capsys.readouterr().out)
    told = values["engine"]
    assert (told["gpu"], told["capability"], told["driver"], told["tensorrt"]) == ("Orin", "8.7", "12.6", "10.3.0")
    assert (told["typing"], told["precision"], told["source"]) == ("weak", "fp16", reference())
    assert told["profiles"]["keypoints0"] == [[1, 2], [1024, 2], [4096, 2]] and told["patches"]["cumsum"] == 1
    assert len(told["key"]) == 64 and values["card"]["name"] == "tiny-matcher" and "tensors" not in values
    engine.write_bytes(engine.read_bytes()[:-100])
    assert command("models", "info", str(engine), "--json") == 0
    assert "is cut short" in json.loads(capsys.readouterr().out)["engine"]
