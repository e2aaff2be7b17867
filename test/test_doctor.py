"""``vslam-features doctor`` as a command: exit codes, broken configurations, checks that break, hang or crash."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest
from doctor_helpers import module

from vslam_features.cli import doctor, doctor_libraries
from vslam_features.cli.check import Check
from vslam_features.cli.doctor_child import Child, ChildError
from vslam_features.cli.main import main


def run_json(capsys, *args) -> tuple[int, dict, dict]:
    """Exit code, all that was printed, and the lines by name."""
    code = main(["doctor", "--json", *map(str, args)])
    values = json.loads(capsys.readouterr().out)
    return code, values, {c["name"]: c for c in values["checks"]}


def test_a_run(capsys, monkeypatch):
    monkeypatch.setenv("ROS_AUTOMATIC_DISCOVERY_RANGE", "LOCALHOST")
    code, values, names = run_json(capsys)
    assert {c["state"] for c in values["checks"]} <= {"OK", "WARN", "FAIL"} and code == (values["state"] == "FAIL")
    wanted = (
        "configuration python numpy opencv poselib codebooks machine clock onnxruntime gpu model state cache ros shm"
    )
    assert {*wanted.split(), "self test", "discovery", "fast dds"} <= set(names)
    assert [names[n]["state"] for n in ("self test", "codebooks", "onnxruntime", "configuration")] == ["OK"] * 4, values
    assert "a session got CPUExecutionProvider on cpu" in names["onnxruntime"]["text"]
    assert all(c["fix"] for c in values["checks"] if c["state"] != "OK")


def quick(monkeypatch, **checks) -> None:
    """Only these checks, and no child."""
    lines = {name: (lambda lines: lambda patient: iter(lines))(found) for name, found in checks.items()}
    monkeypatch.setattr(doctor, "_CHECKS", lines)
    monkeypatch.setattr(doctor.doctor_runtimes, "start_session", lambda *_: None)
    monkeypatch.setattr(doctor.doctor_ros, "has_rclpy", lambda: False)


@pytest.mark.parametrize("state, code", [("OK", 0), ("WARN", 0), ("FAIL", 1)])
def test_the_exit_code_is_of_the_worst_line(state, code, monkeypatch, capsys):
    quick(monkeypatch, first=[Check("OK", "first", "well")], second=[Check(state, "second", "so so", "do this")])
    assert main(["doctor"]) == code
    out = capsys.readouterr().out
    assert f"{state:<5} second        so so\n" in out and "-> do this" in out
    assert ("all is well" in out) == (state == "OK") and ("1 of 3 lines" in out) == (state != "OK")


@pytest.mark.parametrize(
    "text, said",
    [
        ("matcher: [1, 2", "cannot be read"),
        ("matcher:\n  nome: nearest\n", "did you mean"),
        ("/**:\n  ros__parameters:\n    runtime: {threads: many}\n", "threads"),
        (None, "No such file"),
    ],
    ids=["not YAML", "unknown name", "wrong type", "not there"],
)
def test_a_broken_parameter_file_fails_and_the_rest_is_looked_at(text, said, tmp_path, monkeypatch, capsys):
    path = tmp_path / "robot.yaml"
    if text is not None:
        path.write_text(text)
    quick(monkeypatch, numpy=doctor_libraries.check_numpy())
    code, _, names = run_json(capsys, "--params-file", path)
    assert code == 1 and names["configuration"]["state"] == "FAIL" and said in names["configuration"]["text"]
    assert names["numpy"]["state"] == "OK" and str(path) in names["configuration"]["text"]


def test_the_configuration_is_that_of_the_arguments(tmp_path, monkeypatch, capsys):
    (tmp_path / "robot.yaml").write_text("features: {name: sift}\n")
    quick(monkeypatch)
    _, _, names = run_json(capsys, "--config", tmp_path / "robot.yaml", "--set", "retrieval.top_k=3")
    assert (
        "robot.yaml, 2 values of its own: sift + nearest + vlad on onnxruntime cpu fp32"
        in names["configuration"]["text"]
    )


def test_a_check_that_breaks_or_hangs_is_a_line(monkeypatch, capsys):
    def half():
        yield Check("OK", "half", "this much is known")
        raise OSError("gone")

    def slow(patient):
        time.sleep(30)
        yield Check("OK", "slow", "never")

    quick(monkeypatch, half=half())
    monkeypatch.setitem(doctor._CHECKS, "slow", slow)
    monkeypatch.setitem(doctor._CHECKS, "broken", lambda patient: 1 / 0)
    monkeypatch.setattr(doctor, "LIMIT_S", 0.5)
    start = time.monotonic()
    assert main(["doctor"]) == 1 and time.monotonic() - start < 20
    out = capsys.readouterr().out
    assert "this much is known" in out and "OSError: gone" in out and "ZeroDivisionError" in out
    assert "FAIL  slow          no answer within 0.5 s" in out


def test_without_opencv_doctor_still_says_what_to_do():
    program = (
        "import sys; sys.modules['cv2'] = None\n"
        "from vslam_features.cli import doctor, main\n"
        "print(main.main(['models', 'list'])); sys.exit(main.main(['doctor']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "FAIL  opencv        cannot be imported" in done.stdout and "OK    numpy" in done.stdout
    assert (
        "FAIL  configuration features plug-in" in done.stdout
        and " shm " in done.stdout
        and "the check failed" not in done.stdout
    )
    assert "pip install opencv-python-headless" in done.stdout
    assert "models cannot run: import of cv2 halted" in done.stderr and done.stdout.startswith("1\n")


# -- children --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source, said",
    [
        ("import os\ndef main(): os.kill(os.getpid(), 11)", "crashed with SIGSEGV"),
        ("def main(): raise RuntimeError('no such thing')", "exit code 1: RuntimeError: no such thing"),
        ("def main():\n    print('Loading ...')\n    return 0", "gave no answer"),
        ("import time\ndef main(): time.sleep(60)", "no answer within 1 s"),
    ],
    ids=["crash", "error", "silence", "hang"],
)
def test_a_child_without_an_answer(source, said, tmp_path, monkeypatch):
    module(tmp_path, "patient_probe", source, monkeypatch)
    child = Child("patient_probe:main")
    with pytest.raises(ChildError, match=said):
        child.result(1.0 if "within" in said else 30.0)
    child.end()
    assert child._process.poll() is not None


def test_a_child_may_print_before_its_answer_and_answers_twice(tmp_path, monkeypatch):
    source = (
        "from vslam_features.cli.doctor_child import answer, question\n"
        "def main():\n    print('a library says hello')\n    return answer({'twice': question() * 2})"
    )
    module(tmp_path, "patient_probe", source, monkeypatch)
    child = Child("patient_probe:main", [1, "a"])
    assert child.result(30.0) == child.result(30.0) == {"twice": [1, "a", 1, "a"]}
    child.end()
