"""The demo as a user runs it: real processes over DDS."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("rclpy", reason="needs ROS 2: pip install 'vslam_features[ros]'")
pytestmark = [pytest.mark.ros, pytest.mark.slow, pytest.mark.timeout(300)]


def demo(out: Path, *arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "vslam_features", "demo", "--out", str(out), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_the_whole_demo(tmp_path):
    """Every true loop verified, no false one, nothing lost: the command checks it, and so do its numbers."""
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
    page = (tmp_path / "report.html").read_text()
    assert "http-equiv" not in page and not re.search(r"(src|href)=[\"']https?:", page)
    assert page.count("data:image/jpeg") > 10, "pictures of pairs"


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


def test_an_unknown_scene_names_the_known_ones(tmp_path):
    process = demo(tmp_path, "--scene", "castle")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1 and "corridor" in errors and "Traceback" not in errors
