"""What ``doctor`` says of the configured models: each broken file told apart, and which parity records count."""

from __future__ import annotations

import json
import logging
import shutil

import pytest
from model_helpers import (
    _tiny_cache,  # noqa: F401 (fixtures)
    card,
    clear_environment,
    features_model,
    matcher_model,
    own_cache,  # noqa: F401
    save,
    tiny,  # noqa: F401
    tiny_config,
)

from vslam_features.artifacts import records
from vslam_features.artifacts.cache import cache_folder
from vslam_features.artifacts.store import model_path
from vslam_features.cli import doctor_models, models_show
from vslam_features.cli.doctor_session import _onnxruntime
from vslam_features.config import Config
from vslam_features.runtimes import hardware

VERSIONS = {"onnxruntime": _onnxruntime()["version"]}


@pytest.fixture(autouse=True)
def _settings(own_cache, monkeypatch):  # noqa: F811
    clear_environment(monkeypatch)


def checks(config: Config | None = None):
    """Of the tiny models."""
    return list(doctor_models.check_models(config or tiny_config(), VERSIONS))


def states() -> dict[str, tuple[str, str, str]]:
    found = [(c.state, c.text, c.fix) for c in checks()]
    return dict(zip(("features", "matcher", "global"), found))


def test_doctor_on_models_that_are_verified(tiny):  # noqa: F811
    found = states()
    assert [s for s, *_ in found.values()] == ["OK"] * 3
    assert "tiny-features fp32, 0.0 MB; verified on fake(onnxruntime), onnxruntime" == found["features"][1]


def test_doctor_on_a_fresh_machine():
    names = models_show.default_models()
    assert [(c.state, c.fix) for c in checks(Config())] == [("WARN", f"vslam-features models fetch {n}") for n in names]


def test_doctor_on_a_damaged_file_and_one_without_a_record(tiny):  # noqa: F811
    model_path("tiny-features", "fp32").write_bytes(b"<html>")
    save(matcher_model(least=0.61), card("matcher", "tiny-matcher"))
    found = states()
    assert (
        found["features"][0] == "FAIL" and found["features"][2] == "vslam-features models fetch tiny-features --force"
    )
    assert found["matcher"][0] == "OK" and "verified at its first use" in found["matcher"][1]


def test_doctor_fails_on_a_model_that_fails_where_it_is_to_run(tiny, caplog):  # noqa: F811
    """A failed record of another runtime is no reason: nobody runs it there."""
    caplog.set_level(logging.CRITICAL)
    for runtime, state in (("fake(onnxruntime)", "OK"), ("onnxruntime", "FAIL")):
        for file in cache_folder("records").iterdir():
            values = json.loads(file.read_text())
            if values["name"] == "tiny-matcher" and values["runtime"] == runtime:
                values |= {"passed": False, "reasons": ["pair 3: no match, the reference has 90"]}
                file.write_text(json.dumps(values))
        found = states()["matcher"]
        assert found[0] == state, runtime
    assert "failed on onnxruntime: pair 3: no match" in found[1] and "models verify tiny-matcher" in found[2]


def change_records(keep=lambda values: True, **changes) -> None:
    """Change the records of the tiny matcher that ``keep`` picks."""
    for file in cache_folder("records").iterdir():
        values = json.loads(file.read_text())
        if values["name"] == "tiny-matcher" and keep(values):
            file.write_text(json.dumps({**values, **changes}))


def test_doctor_takes_the_newest_record_of_a_runtime(tiny):  # noqa: F811
    """An older one failed, under another precision."""
    file = next(f for f in cache_folder("records").iterdir() if json.loads(f.read_text())["runtime"] == "onnxruntime")
    values = json.loads(file.read_text())
    old = {"passed": False, "reasons": ["old"], "time": "2020-01-01T00:00:00Z"}
    shutil.copy(file, file.with_name(file.name[:17] + "0123456789abcdef.json"))
    file.with_name(file.name[:17] + "0123456789abcdef.json").write_text(json.dumps({**values, **old}))
    assert len(records.records_of(values["sha256"])) == 3
    assert [s for s, *_ in states().values()] == ["OK"] * 3


@pytest.mark.parametrize(
    "changes",
    [
        {"version": "1.0"},
        {"device": "cpu Another Processor"},
        {"device": "cuda:0 Another GPU"},
        {"gate": "0-session"},
        {"card": "0" * 16},
    ],
    ids=lambda changes: str(*changes),
)
def test_records_of_another_version_device_or_gate_say_nothing_of_this_machine(changes, tiny):  # noqa: F811
    change_records(**changes, passed=False, reasons=["old"])
    state, text, fix = states()["matcher"]
    assert state == "WARN" and "not with what is installed here" in text
    assert fix == "verified again at the next start, or: vslam-features models verify tiny-matcher"
    assert all(str(value) in text for name, value in changes.items() if name in ("version", "device"))
    assert states()["features"][0] == "OK"


def test_a_failure_on_a_device_that_is_not_the_configured_one_is_no_reason(tiny, monkeypatch):  # noqa: F811
    monkeypatch.setattr(hardware, "gpu_name", lambda: "Some GPU")
    file = next(
        f for f in cache_folder("records").iterdir()
        if (v := json.loads(f.read_text()))["name"] == "tiny-matcher" and v["runtime"] == "onnxruntime"
    )  # fmt: skip
    failed = {"device": "cuda:0 Some GPU", "passed": False, "reasons": ["NaN"], "time": "2999-01-01T00:00:00Z"}
    other = file.with_name(file.name[:17] + "0123456789abcdef.json")
    other.write_text(json.dumps({**json.loads(file.read_text()), **failed}))
    assert states()["matcher"][0] == "OK"


def test_a_runtime_that_was_verified_here_counts_beside_one_that_was_not(tiny):  # noqa: F811
    change_records(lambda values: values["runtime"] == "onnxruntime", version="1.0")
    state, text, _ = states()["matcher"]
    assert state == "OK" and text.endswith("verified on fake(onnxruntime)")


# -- files -----------------------------------------------------------------------------------------

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 2700000\n"


def whole() -> bytes:
    return model_path("tiny-features", "fp32").read_bytes()


@pytest.mark.parametrize(
    "content, said",
    [
        (lambda: POINTER, "is a Git LFS pointer (it stands for 2700000 bytes"),
        (lambda: b"<!DOCTYPE html><title>Sign in</title>", "is a web page (titled 'Sign in'"),
        (lambda: b"", "(0 bytes) is empty"),
        (lambda: whole()[: len(whole()) // 2], "is an ONNX model that is cut short"),
        (lambda: b"\x80\x04]q", "is a pickle"),
        (lambda: b"PK\x03\x04" + b"x" * 50, "is a zip archive"),
    ],
    ids="pointer page empty cut pickle zip".split(),
)
def test_what_lies_in_place_of_a_model_is_called_by_its_name(content, said, tiny):  # noqa: F811
    path = model_path("tiny-features", "fp32")
    path.write_bytes(content())
    found = checks()[0]
    assert found.state == "FAIL" and str(path) in found.text and said in found.text
    assert "vslam-features models fetch tiny-features --force" in found.fix
    assert ("git lfs pull" in found.fix) == ("pointer" in said)


def named(path) -> doctor_models.Check:
    """What is said of features that are named by their path."""
    return checks(tiny_config(features__options__model=str(path)))[0]


def test_a_path_is_not_fetched(tiny, tmp_path):  # noqa: F811
    path = tmp_path / "robot" / "mine.onnx"
    found = named(path)
    assert found.state == "FAIL" and str(path) in found.text and "path" in found.fix and "fetch" not in found.fix
    path.parent.mkdir()
    path.write_bytes(POINTER)
    found = named(path)
    assert found.state == "FAIL" and "git lfs pull" in found.fix and "fetch" not in found.fix


def test_a_file_without_a_card(tiny, tmp_path):  # noqa: F811
    path = tmp_path / "mine.onnx"
    path.write_bytes(features_model().SerializeToString())
    found = named(path)
    assert found.state == "FAIL" and "has no model card" in found.text and "mine.onnx.card.yaml" in found.fix


def test_missing_models_that_are_an_error(tiny):  # noqa: F811
    found = checks(tiny_config(features__options__model="xfeat"))[0]
    assert (found.state, found.fix) == ("WARN", "vslam-features models fetch xfeat")
    found = checks(
        tiny_config(features__options__model="xfeat", models__if_missing="error", runtime__precision="fp16")
    )[0]
    assert found.state == "FAIL" and "xfeat (fp16) is not here" in found.text
    assert found.fix == "vslam-features models fetch xfeat --precision fp16"


def test_a_name_that_is_none(tiny):  # noqa: F811
    found = checks(tiny_config(features__options__model="xfaet"))[0]
    assert found.state in ("WARN", "FAIL") and "xfaet" in found.text and found.fix


def test_a_failed_model_that_is_allowed(tiny, caplog):  # noqa: F811
    change_records(lambda values: True, passed=False, reasons=["NaN on pair 3"])
    assert [c.state for c in checks() if "tiny-matcher" in c.text] == ["FAIL"]
    allowed = checks(tiny_config(models__allow_unverified=True))
    assert [c.state for c in allowed if "tiny-matcher" in c.text] == ["WARN"]


# -- engines ---------------------------------------------------------------------------------------

ORIN = {"name": "Orin"}


def engine_checks(found: dict, **values) -> list:
    """Of a configuration for TensorRT whose matcher's engine is ``found``; the other models are not looked at."""
    wanted = tiny_config(runtime__name="tensorrt", runtime__device="cuda", **values)
    gpu = {"gpu": ORIN, "engines": {"tiny-matcher": found}}
    return [c for c in doctor_models.check_models(wanted, {"tensorrt": "10.3.0"}, gpu) if "tiny-matcher" in c.text]


def test_an_engine_that_has_to_be_built(tiny, tmp_path):  # noqa: F811
    found = {"source": str(model_path("tiny-matcher", "fp32")), "path": str(tmp_path / "tiny-matcher.engine")}
    found |= {"there": True, "reasons": ["driver 12.4, was 12.2", "GPU Orin, was NVIDIA RTX A4000"]}
    (check,) = engine_checks(found)
    assert check.state == "WARN" and "driver 12.4, was 12.2; GPU Orin, was NVIDIA RTX A4000" in check.text
    assert "vslam-features models build tiny-matcher --runtime tensorrt --set runtime.device=cuda" in check.fix
    (check,) = engine_checks(found, runtime__options__build="never")
    assert check.state == "FAIL" and "runtime.options.build is never" in check.text
    (check,) = engine_checks({"error": "tiny-matcher: compute capability 7.5 has no BF16"})
    assert check.state == "FAIL" and "7.5 has no BF16" in check.text and "models build tiny-matcher" in check.fix


def test_an_engine_whose_source_is_no_model(tiny):  # noqa: F811
    model_path("tiny-matcher", "fp32").write_bytes(POINTER)
    (check,) = engine_checks({"error": "whatever the builder said"})
    assert check.state == "FAIL" and "is a Git LFS pointer" in check.text


def test_a_named_engine_of_another_gpu_is_refused(tiny, tmp_path, monkeypatch):  # noqa: F811
    """Nothing is built in place of a file that somebody names."""
    path = tmp_path / "tiny-matcher.engine"
    monkeypatch.setattr(doctor_models, "_file_problem", lambda *_: None)
    wanted = tiny_config(runtime__name="tensorrt", runtime__device="cuda", matcher__options__model=str(path))
    found = {"source": str(path), "path": str(path), "there": True, "reasons": ["GPU Orin, was NVIDIA H200"]}
    gpu = {"gpu": ORIN, "engines": {name: found for name in doctor_models.configured_models(wanted)}}
    lines = [c for c in doctor_models.check_models(wanted, {}, gpu) if c.name == "engine"]
    assert [c.state for c in lines if "is refused" in c.text] == ["FAIL"] and len(lines) == 3
    assert all("GPU Orin, was NVIDIA H200" in c.text and c.fix for c in lines)
