"""The demo as a user runs it: real processes over DDS."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from model_helpers import learned  # noqa: F401

pytest.importorskip("rclpy", reason="needs ROS 2: pip install 'vslam_features[ros]'")

from vslam_features.cli.isolation import free_domain
from vslam_features.cli.main import main

pytestmark = [pytest.mark.ros, pytest.mark.slow, pytest.mark.timeout(300)]


def demo(out: Path, *arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "vslam_features", "demo", "--out", str(out), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def children(pid: int) -> list[int]:
    return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.endurance
def test_the_whole_demo(tmp_path):
    """Every true loop verified, no false one, nothing lost: the command checks it, and so do its numbers.

    Without model files it runs on classical plug-ins, and says so.
    """
    process = demo(tmp_path)
    text, errors = process.communicate(timeout=280)
    assert process.returncode == 0, errors[-3000:]
    numbers, progress = (json.loads((tmp_path / f"{n}.json").read_text()) for n in ("metrics", "progress"))
    truth = numbers["loop_truth"]
    assert truth["queries"] >= 15 and truth["queries_with_loop"] == truth["queries"] and truth["false_loops"] == []
    assert progress["received"] == progress["processed"] == numbers["frames"] == 287
    assert progress["dropped"] == progress["missing"] == progress["resets"] == 0
    assert numbers["pairs"] == progress["pairs"] > 100 and not numbers["faults"]
    assert "24 of 24" in text or f"{truth['queries']} of {truth['queries']} true ones verified, 0 false" in text
    said = "running sift + nearest instead of xfeat + lighterglue: models xfeat, lighterglue-early-stop (fp32) are not"
    assert re.search(
        rf"^  models +{re.escape(said)}.*'vslam-features models fetch xfeat lighterglue-early-stop'", text, re.MULTILINE
    )
    assert numbers["engines"] == [] and numbers["provenance"]["instead"].startswith(said)
    page = (tmp_path / "report.html").read_text()
    assert "Not what was configured:</b> running sift + nearest" in page
    assert "http-equiv" not in page and not re.search(r"(src|href)=[\"']https?:", page)
    assert page.count("data:image/jpeg") > 10, "pictures of pairs"


def test_with_models_it_names_them(tmp_path, learned):  # noqa: F811
    process = demo(tmp_path / "out", "--frames", "12", "--rate-hz", "3")
    text, errors = process.communicate(timeout=280)
    assert process.returncode == 0, errors[-3000:]
    assert re.search(
        r"^  models +xfeat \+ lighterglue-early-stop on onnxruntime \S+ CPUExecutionProvider; 0 runs",
        text,
        re.MULTILINE,
    )
    numbers = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert [(e["name"], e["linked"], e["lost"]) for e in numbers["engines"]] == [
        ("xfeat", True, 0),
        ("lighterglue-early-stop", True, 0),
    ]
    assert numbers["engines"][0]["runs"] == numbers["frames"] == 12 and numbers["provenance"]["instead"] == ""
    assert numbers["by_kind"]["track"]["statuses"].get("ok", 0) >= 2


def test_a_killed_front_end_is_an_error_with_its_reason(tmp_path):
    process = demo(tmp_path, "--frames", "60")
    pid = None
    head = ""
    while pid is None:  # the progress bar names the pid
        character = process.stderr.read(1)
        assert character, head[-2000:]
        head += character
        found = re.search(r"front-end pid (\d+)\): +(?:[1-9]|\d\d)%", head)
        pid = int(found[1]) if found else None
    os.kill(pid, signal.SIGKILL)
    text, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "front-end was killed by SIGKILL" in errors and "Traceback" not in errors
    assert "loops" not in text, "no table of results after a failed run"
    assert not alive(pid)


def test_sigterm_ends_all_processes_and_meanwhile_the_folder_is_taken(tmp_path, monkeypatch):
    """In a working directory with a folder of the package's name, and into one whose name is a YAML mapping."""
    (tmp_path / "vslam_features").mkdir()
    monkeypatch.chdir(tmp_path)
    code = "import sys; del sys.path[0]; from vslam_features.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "demo", "--frames", "30", "--out", "2024: a 'b'"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    head = ""
    while not re.search(r"front-end pid \d+\): +[1-9]", head):
        character = process.stderr.read(1)
        assert character, head[-2000:]
        head += character
    second = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert second.returncode == 1 and "another demo is using 2024: a 'b'" in second.stderr
    pids = children(process.pid)
    assert len(pids) == 3
    process.send_signal(signal.SIGTERM)
    text, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM and "Traceback" not in errors and "loops" not in text
    assert not any(alive(pid) for pid in pids)


@pytest.mark.parametrize("arguments", [("--rate-hz", "0"), ("--rate-hz", "nan"), ("--rate-hz=-1",), ("--frames=-1",)])
def test_wrong_numbers_are_wrong_usage(tmp_path, capsys, arguments):
    assert main(["demo", "--out", str(tmp_path / "out"), *arguments]) == 2
    assert arguments[0].partition("=")[0] in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_domain_in_use_is_left_alone():
    free = free_domain()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.bind(("", 7410 + 250 * free))
        assert free_domain() != free


def test_an_unknown_scene_names_the_known_ones(tmp_path):
    process = demo(tmp_path, "--scene", "castle")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1 and "corridor" in errors and "Traceback" not in errors
