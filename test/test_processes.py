"""Child processes of the demo: watched, ended together, their failures told."""

from __future__ import annotations

import os
import time

import pytest

from vslam_features.cli.processes import ProcessError, Processes
from vslam_features.errors import ConfigError
from vslam_features.share import share_path


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Modules to run: one that ends well, one that fails with words, one that waits, one deaf to SIGINT."""
    sources = {
        "well": "print('done')",
        "badly": "import sys; print('the reason'); sys.exit(3)",
        "waits": "import time, signal, sys\nsignal.signal(2, lambda *_: sys.exit(0))\n"
        "print('up', flush=True)\ntime.sleep(60)",
        "deaf": "import time, signal\nsignal.signal(2, signal.SIG_IGN)\nprint('up', flush=True)\ntime.sleep(60)",
    }
    for name, source in sources.items():
        (tmp_path / f"child_{name}.py").write_text(source)
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


def until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_ends_well(modules, tmp_path):
    with Processes(tmp_path / "logs", modules) as processes:
        processes.start("a", "child_well")
        until(lambda: processes.ended("a"))
        processes.forget("a")
    assert (tmp_path / "logs" / "a.log").read_text() == "done\n"


def test_a_failure_of_any_is_told_with_its_last_words(modules, tmp_path):
    with Processes(tmp_path / "logs", modules) as processes:
        pid = processes.start("good", "child_waits")
        processes.start("bad", "child_badly")
        with pytest.raises(ProcessError, match=r"bad ended with exit code 3(.|\n)*the reason"):
            until(lambda: processes.ended("good"))
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_killed_and_deaf_ones(modules, tmp_path):
    with Processes(tmp_path / "logs", modules) as processes:
        pid = processes.start("victim", "child_waits")
        os.kill(pid, 9)
        with pytest.raises(ProcessError, match="victim was killed by SIGKILL"):
            until(lambda: processes.ended("victim"))
    with Processes(tmp_path / "logs", modules) as processes:
        processes.start("deaf", "child_deaf")
        until(lambda: "up" in (tmp_path / "logs" / "deaf.log").read_text())
        with pytest.raises(ProcessError, match="did not stop within 0.5 s"):
            processes.stop("deaf", 0.5)


def test_an_early_end_is_a_failure_even_with_code_0(modules, tmp_path):
    with Processes(tmp_path / "logs", modules) as processes:
        processes.start("server", "child_well")
        processes.start("player", "child_waits")
        with pytest.raises(ProcessError, match="server ended with exit code 0"):
            until(lambda: processes.ended("player"))


def test_shipped_files_are_found_or_named():
    assert share_path("config/fastdds.xml").read_text().count("segment_size") >= 1
    with pytest.raises(ConfigError, match="config/none.xml is not there; looked at"):
        share_path("config/none.xml")
