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
