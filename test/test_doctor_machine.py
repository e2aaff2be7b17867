"""What ``doctor`` says of the computer: made-up trees of ``/proc``, ``/sys`` and ``/etc``."""

from __future__ import annotations

import pytest
from doctor_helpers import only

from vslam_features.cli import doctor_machine

MEMINFO = "MemTotal: {total} kB\nMemFree: 1 kB\nMemAvailable: {free} kB\nSwapTotal: 0 kB\n"
ORIN = "# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic, EABI: aarch64\n"


def tree(root, **files):
    """Files by path, with ``__`` for slashes."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture(autouse=True)
def _four_cores(monkeypatch):
    monkeypatch.setattr(doctor_machine, "usable_cpus", lambda: 4)


@pytest.mark.parametrize(
    "total_gb, free_gb, state, said",
    [(8, 5, "OK", "4 cores"), (1, 0.9, "WARN", "1.0 GB"), (8, 0.2, "WARN", "0.2 free")],
)
def test_memory(total_gb, free_gb, state, said, tmp_path):
    text = MEMINFO.format(total=int(total_gb * 2**20), free=int(free_gb * 2**20))
    found = only(doctor_machine.check_machine(tree(tmp_path, proc__meminfo=text)))
    assert found[0] == state and said in found[1]


def test_the_limit_of_a_container_counts(tmp_path):
    text = MEMINFO.format(total=8 * 2**20, free=5 * 2**20)
    root = tree(tmp_path, proc__meminfo=text)
    (root / "sys/fs/cgroup").mkdir(parents=True)
    (root / "sys/fs/cgroup/memory.max").write_text(f"{2**30}\n")
    state, text, _ = only(doctor_machine.check_machine(root))
    assert state == "WARN" and "this container may use 1.0 GB" in text
    (root / "sys/fs/cgroup/memory.max").write_text("max\n")
    assert only(doctor_machine.check_machine(root))[0] == "OK"


@pytest.mark.parametrize("driver, warned", [("cpufreq-dt", True), ("intel_pstate", False), ("amd-pstate-epp", False)])
def test_powersave_is_slow_but_for_drivers_that_choose_themselves(driver, warned, tmp_path):
    root = tree(tmp_path, proc__meminfo=MEMINFO.format(total=8 * 2**20, free=5 * 2**20))
    for i in range(2):
        folder = f"sys__devices__system__cpu__cpu{i}__cpufreq__scaling_"
        tree(root, **{f"{folder}governor": "powersave\n", f"{folder}driver": f"{driver}\n"})
    checks = list(doctor_machine.check_machine(root))
    assert [c.state for c in checks] == ["OK", *(["WARN"] if warned else [])]
    assert not warned or ("on 2 cores" in checks[1].text and "scaling_governor" in checks[1].fix)


def test_a_clock_that_was_never_set():
    assert only(doctor_machine.check_clock())[0] == "OK"
    state, text, fix = only(doctor_machine.check_clock(1.0e9))
    assert state == "WARN" and text.startswith("2001-09-09 01:46:40 UTC") and "time-sync.target" in fix


# -- Jetson ----------------------------------------------------------------------------------------


def nvpmodel(folder, monkeypatch, script: str) -> None:
    path = folder / "bin" / "nvpmodel"
    path.parent.mkdir()
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:/bin:/usr/bin")


def test_no_jetson(tmp_path):
    assert not list(doctor_machine.check_jetson(tmp_path))


@pytest.mark.parametrize(
    "script, states, said",
    [
        ("echo 'NV Power Mode: MAXN'; echo 0", ["OK", "OK"], "jetson_clocks"),
        ("echo 'NV Power Mode: MAXN_SUPER'; echo 2", ["OK", "OK"], "MAXN_SUPER"),
        ("echo 'NV Power Mode: 15W'; echo 1", ["OK", "WARN"], "slowed down"),
        ("echo nothing", ["OK", "WARN"], "names no mode"),
    ],
)
def test_power_modes_of_a_jetson(script, states, said, tmp_path, monkeypatch):
    nvpmodel(tmp_path, monkeypatch, script)
    checks = list(doctor_machine.check_jetson(tree(tmp_path, etc__nv_tegra_release=ORIN)))
    assert [c.state for c in checks] == states and checks[0].text == "L4T 36.4.3 (JetPack 6)" and said in checks[1].text


def test_a_jetson_whose_tool_is_not_there_and_one_of_an_older_jetpack(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    release = ORIN.replace("R36", "R35")
    old, power = doctor_machine.check_jetson(tree(tmp_path, etc__nv_tegra_release=release))
    assert old.state == power.state == "WARN" and "L4T 35.4.3" in old.text and "JetPack 6" in old.fix
    assert "nvpmodel" in power.text and power.fix
