"""What ``doctor`` says of runtimes and GPUs: a missing library, a missing driver and a wrong provider told apart."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest
from doctor_helpers import Answer, module, only

from vslam_features.cli import doctor_gpu_probe, doctor_runtimes
from vslam_features.config import Config

NO_GPU = {"driver_error": "no driver: libcuda.so.1: not found", "kernel": "", "cuda_python": "", "gpu_error": "none"}
ORIN = {"index": 0, "name": "Orin", "capability": "8.7", "driver": "12.6", "runtime": "12.6", "memory_mb": 7620}
FAKES = Path(__file__).with_name("fakes")
# A build for GPUs on a machine without a driver: it lists the providers, and its sessions get the CPU's.
CLAIMS_CUDA = """
import sys
sys.path.remove(__file__.rpartition("/")[0])
del sys.modules["onnxruntime"]
import onnxruntime
onnxruntime.get_available_providers = lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"]
"""


def distributions(tmp_path, monkeypatch, *names) -> None:
    """Installed distributions of these names, and no other ONNX Runtime."""
    for name in names:
        info = tmp_path / f"{name.replace('-', '_')}-9.9.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.9\n")
    there = [d for d in metadata.distributions() if not (d.metadata["Name"] or "").startswith("onnxruntime")]
    there += list(metadata.distributions(path=[str(tmp_path)]))
    monkeypatch.setattr(metadata, "distributions", lambda **kwargs: iter(there))


def config(device: str = "cpu", name: str = "onnxruntime", **values) -> Config:
    return Config.from_flat({"runtime.name": name, "runtime.device": device, **values})


def session(**facts) -> Answer:
    """Of a child that opened a session of ONNX Runtime."""
    base = {"version": "1.23.0", "offers": ["CPUExecutionProvider"], "provider": "CPUExecutionProvider"}
    return Answer({**base, "on": "cpu Some Processor", "note": "", **facts})


def onnxruntime(config: Config, session, gpu=NO_GPU):
    return only(doctor_runtimes.check_onnxruntime(config, session, Answer(gpu)))


# -- ONNX Runtime ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "names, extra",
    [
        (["onnxruntime", "onnxruntime-gpu"], "cuda"),
        (["onnxruntime", "onnxruntime_gpu"], "cuda"),
        (["onnxruntime", "onnxruntime-openvino"], "cpu"),
    ],
)
def test_two_distributions_of_onnxruntime_fail_and_the_fix_is_named(names, extra, tmp_path, monkeypatch):
    distributions(tmp_path, monkeypatch, *names)
    state, text, fix = onnxruntime(config(), session())
    second = names[1].replace("_", "-")
    assert state == "FAIL" and f"onnxruntime and {second} overwrite each other" in text
    assert fix == f"pip uninstall -y onnxruntime {second} && pip install 'vslam_features[{extra}]'"


@pytest.mark.parametrize("name", ["onnxruntime", "onnxruntime-gpu"])
def test_one_distribution_of_onnxruntime_is_well(name, tmp_path, monkeypatch):
    distributions(tmp_path, monkeypatch, name)
    state, text, _ = onnxruntime(config(), session())
    assert state == "OK" and text.startswith(
        f"1.23.0 from {name} (offers CPU); a session got CPUExecutionProvider on cpu"
    )


def test_no_onnxruntime_is_a_warning_but_not_where_a_gpu_was_chosen(tmp_path, monkeypatch):
    distributions(tmp_path, monkeypatch)
    state, text, fix = onnxruntime(config(), None)
    assert state == "WARN" and "sift + nearest + vlad" in text and "pip install 'vslam_features[cpu]'" in fix
    state, text, _ = onnxruntime(config("cuda"), None)
    assert state == "FAIL" and "runtime.device is cuda" in text


def test_a_build_without_the_provider_a_missing_driver_and_wrong_libraries_are_told_apart():
    """All three end with a session on the CPU."""
    offers, note = ["CUDAExecutionProvider", "CPUExecutionProvider"], "asked for 'cuda': it got the CPU"
    without = onnxruntime(config("cuda"), session(note=note))
    undriven = onnxruntime(config("cuda"), session(note=note, offers=offers))
    driven = onnxruntime(config("cuda"), session(note=note, offers=offers), {**NO_GPU, "driver_error": ""})
    assert [found[0] for found in (without, undriven, driven)] == ["FAIL"] * 3
    assert all("a session got CPUExecutionProvider" in found[1] for found in (without, undriven, driven))
    assert "[cuda]" in without[2] and "no working GPU (no driver: libcuda.so.1" in undriven[2] and "cuDNN" in driven[2]


def test_a_wrong_provider_that_is_allowed_is_a_warning():
    loose = config("cuda", **{"runtime.strict": False})
    assert onnxruntime(loose, session(note="asked for 'cuda': it got the CPU"))[0] == "WARN"


def test_a_wrong_provider_of_a_real_session(tmp_path, monkeypatch):
    """The list of the library says CUDA; only the session tells the truth."""
    module(tmp_path, "onnxruntime", CLAIMS_CUDA, monkeypatch)
    child = doctor_runtimes.start_session("onnxruntime", config("cuda"))
    try:
        facts = child.result(60.0)
    finally:
        child.end()
    assert facts["offers"][0] == "CUDAExecutionProvider" and facts["provider"] == "CPUExecutionProvider"
    state, text, fix = onnxruntime(config("cuda"), Answer(facts))
    assert state == "FAIL" and "offers CUDA, CPU" in text and "no working GPU" in fix


@pytest.mark.parametrize(
    "source, said",
    [
        ("raise ImportError('libonnxruntime.so is cut')", "libonnxruntime.so is cut"),
        ("import os; os.abort()", "SIGABRT"),
    ],
    ids=["broken", "crashes"],
)
def test_a_library_that_is_installed_but_broken(source, said, tmp_path, monkeypatch):
    module(tmp_path, "onnxruntime", source, monkeypatch)
    child = doctor_runtimes.start_session("onnxruntime", config())
    try:
        state, text, fix = onnxruntime(config(), child)
    finally:
        child.end()
    assert (
        state == "FAIL" and "is installed, but cannot be used" in text and said in text and "--force-reinstall" in fix
    )


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_real_sessions_compute(runtime):
    pytest.importorskip(runtime)
    child = doctor_runtimes.start_session(runtime, config("cpu", runtime))
    try:
        check = getattr(doctor_runtimes, f"check_{runtime}")
        state, text, _ = only(check(config("cpu", runtime), child, Answer(NO_GPU)))
        found = doctor_runtimes.versions({runtime: child}, Answer("gone"))
    finally:
        child.end()
    assert state == "OK" and text.startswith(found[runtime]) and "on cpu" in text


def test_openvino_is_no_line_where_nobody_asked_for_it():
    assert not list(doctor_runtimes.check_openvino(config(), None, Answer(NO_GPU)))
    state, text, fix = only(doctor_runtimes.check_openvino(config("cpu", "openvino"), None, Answer(NO_GPU)))
    assert state == "FAIL" and "runtime.name is openvino" in text and "[openvino]" in fix


# -- GPU and TensorRT ------------------------------------------------------------------------------


def gpu(config: Config, **facts):
    return only(doctor_runtimes.check_gpu(config, Answer({**NO_GPU, **facts})))


def test_no_gpu_is_a_fault_only_where_one_is_asked_for():
    state, text, _ = gpu(config())
    assert state == "OK" and "none is asked for" in text
    for wanted in (config("cuda"), config("tensorrt:0"), config("cuda", "tensorrt")):
        state, text, fix = gpu(wanted, kernel="NVRM version: 540.4.0")
        assert state == "FAIL" and "libcuda.so.1" in text and "540.4.0" in text and "--gpus all" in fix


def test_a_driver_without_the_python_bindings():
    well = {"driver_error": "", "gpu_error": "cuda-python cannot be imported"}
    assert gpu(config("cuda"), **well)[0] == "OK"  # ONNX Runtime needs none
    state, text, fix = gpu(config("cuda", "tensorrt"), **well)
    assert state == "FAIL" and "cuda-python cannot be imported" in text and "[tensorrt]" in fix


def test_a_gpu_is_named_with_its_versions():
    state, text, _ = gpu(config("cuda", "tensorrt"), gpu=ORIN, driver_error="", cuda_python="12.9.1")
    assert state == "OK" and "Orin, compute capability 8.7, 7.4 GB" in text and "cuda-python 12.9.1" in text
    state, text, _ = gpu(config("cuda", "tensorrt"), gpu={**ORIN, "runtime": "13.0"}, driver_error="")
    assert state == "WARN" and "newer than the driver" in text


def test_a_driver_that_hangs():
    assert only(doctor_runtimes.check_gpu(config(), Answer("no answer within 60 s")))[0] == "WARN"
    assert only(doctor_runtimes.check_gpu(config("cuda"), Answer("no answer within 60 s")))[0] == "FAIL"
    assert not list(doctor_runtimes.check_tensorrt(config("cuda", "tensorrt"), Answer("no answer")))


def probe(config: Config) -> dict:
    child = doctor_runtimes.start_gpu(config, [])
    try:
        return child.result(60.0)
    finally:
        child.end()


def test_this_machine_has_no_driver():
    if not doctor_gpu_probe._driver_error():
        pytest.skip("this machine has a GPU")
    facts = probe(config())
    assert "libcuda" in facts["driver_error"] and "gpu" not in facts


@pytest.mark.parametrize(
    "version, said", [("10.3.0", "weakly and strongly typed engines"), ("11.4.0.106", "strongly typed engines only")]
)
def test_tensorrt_and_its_gpu(version, said, monkeypatch):
    """By the fakes: nothing of TensorRT is constructed."""
    monkeypatch.setenv("PYTHONPATH", str(FAKES))
    monkeypatch.setenv("VSLAM_FAKE_TENSORRT", version)
    monkeypatch.setenv("VSLAM_FAKE_GPU", "Orin;8.7;540.4.0")
    wanted = config("cuda", "tensorrt")
    facts = probe(wanted)
    assert gpu(wanted, **facts)[1].startswith("Orin, compute capability 8.7")
    assert facts["gpu"]["name"] == "Orin" and facts["gpu"]["capability"] == "8.7"
    state, text, _ = only(doctor_runtimes.check_tensorrt(wanted, Answer(facts)))
    assert state == "OK" and text.startswith(version) and said in text
    assert doctor_runtimes.versions({}, Answer(facts)) == {"tensorrt": version}
    monkeypatch.setenv("VSLAM_FAKE_GPU", "")
    facts = probe(wanted)
    assert "gpu" not in facts and "no GPU that CUDA can use" in facts["gpu_error"]


def test_a_device_that_tensorrt_cannot_take_and_a_gpu_that_is_not_there(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(FAKES))
    monkeypatch.setenv("VSLAM_FAKE_GPU", "Orin;8.7;540.4.0")
    for device, said in (("cpu", "GPUs only"), ("cuda:3", "no such GPU")):
        wanted = config(device, "tensorrt")
        state, text, fix = gpu(wanted, **probe(wanted))
        assert state == "FAIL" and said in text and "runtime.device" in fix


def test_tensorrt_that_is_asked_for_and_missing():
    wanted, facts = config("cuda", "tensorrt"), {**NO_GPU, "tensorrt_error": "tensorrt cannot be imported"}
    state, text, fix = only(doctor_runtimes.check_tensorrt(wanted, Answer(facts)))
    assert state == "FAIL" and "cannot be imported" in text and "python3-libnvinfer" in fix
    assert not list(doctor_runtimes.check_tensorrt(config(), Answer(facts)))
