"""Child processes of the demo: watched, ended together, their failures told."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import vslam_features
from vslam_features.cli.processes import ProcessError, Processes
from vslam_features.errors import ConfigError
from vslam_features.share import share_path


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Functions to call: one that ends well, one that fails with words, one that waits, one deaf to SIGINT."""
    source = """
import os, signal, sys, time
import vslam_features

def well():
    print("done", sys.argv[1:])

def badly():
    print("the reason")
    return 3

def waits():
    signal.signal(2, lambda *_: sys.exit(0))
    print("up", flush=True)
    time.sleep(60)

def deaf():
    signal.signal(2, signal.SIG_IGN)
    print("up", flush=True)
    time.sleep(60)

def where():
    import match  # in the folder of the commands, too
    print(vslam_features.__file__, match.__file__)
"""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "child_module.py").write_text(source)
    (folder / "match.py").touch()
    return {**os.environ, "PYTHONPATH": str(folder)}


def until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_ends_well(modules, tmp_path):
    with Processes(tmp_path / "logs", modules) as processes:
        processes.start("a", "child_module:well", "x", "y")
        until(lambda: processes.ended("a"))
        processes.forget("a")
    assert (tmp_path / "logs" / "a.log").read_text() == "done ['x', 'y']\n"


def test_a_failure_of_any_is_told_with_its_last_words(modules, tmp_path):
    with Processes(tmp_path / "logs", modules) as processes:
        pid = processes.start("good", "child_module:waits")
        processes.start("bad", "child_module:badly")
        with pytest.raises(ProcessError, match=r"bad ended with exit code 3(.|\n)*the reason"):
            until(lambda: processes.ended("good"))
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_killed_and_deaf_ones(modules, tmp_path):
    with Processes(tmp_path / "logs", modules) as processes:
        pid = processes.start("victim", "child_module:waits")
        os.kill(pid, 9)
        with pytest.raises(ProcessError, match="victim was killed by SIGKILL"):
            until(lambda: processes.ended("victim"))
    with Processes(tmp_path / "logs", modules) as processes:
        processes.start("deaf", "child_module:deaf")
        until(lambda: "up" in (tmp_path / "logs" / "deaf.log").read_text())
        with pytest.raises(ProcessError, match="did not stop within 0.5 s"):
            processes.stop("deaf", 0.5)


def test_an_early_end_is_a_failure_even_with_code_0(modules, tmp_path):
    with Processes(tmp_path / "logs", modules) as processes:
        processes.start("server", "child_module:well")
        processes.start("player", "child_module:waits")
        with pytest.raises(ProcessError, match="server ended with exit code 0"):
            until(lambda: processes.ended("player"))


def test_none_outlives_an_impatient_or_a_killed_user(modules, tmp_path):
    # In a process of its own: other tests leave libraries in this one whose signal handlers are not ours to try.
    impatient = f"""
import os, signal, threading, time
from pathlib import Path
from vslam_features.cli.processes import Processes
try:
    with Processes(Path({str(tmp_path / "logs")!r}), {modules!r}) as processes:
        print(processes.start("deaf", "child_module:deaf"), flush=True)
        while "up" not in Path({str(tmp_path / "logs" / "deaf.log")!r}).read_text():
            time.sleep(0.05)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()  # the second Ctrl-C, while it waits
        raise ValueError("the first")
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", impatient], stdout=subprocess.PIPE, text=True, timeout=60)
    pid, said = done.stdout.split()
    assert said == "interrupted"
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)
    code = f"""
import time
from pathlib import Path
from vslam_features.cli.processes import Processes
with Processes(Path({str(tmp_path / "logs")!r}), {modules!r}) as processes:
    print(processes.start("orphan", "child_module:waits"), flush=True)
    time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    until(lambda: "up" in (tmp_path / "logs" / "orphan.log").read_text())
    parent.kill()
    parent.wait()
    until(lambda: not running(pid), 5)


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_children_run_this_package_whatever_lies_in_the_working_directory(modules, tmp_path, monkeypatch):
    (tmp_path / "vslam_features").mkdir()
    (tmp_path / "vslam_features" / "__init__.py").write_text("raise ImportError('not this one')")
    monkeypatch.chdir(tmp_path)
    with Processes(tmp_path / "logs", modules) as processes:
        processes.start("a", "child_module:where")
        until(lambda: processes.ended("a"))
    expected = f"{vslam_features.__file__} {tmp_path / 'modules' / 'match.py'}\n"
    assert (tmp_path / "logs" / "a.log").read_text() == expected


def test_shipped_files_are_found_or_named():
    assert share_path("config/fastdds.xml").read_text().count("segment_size") >= 1
    with pytest.raises(ConfigError, match="config/none.xml is not there; looked at"):
        share_path("config/none.xml")
