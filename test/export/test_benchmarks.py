"""The benchmark of speed and memory: its parts on runs of known cost, and as a whole on a tiny setting."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from model_helpers import learned  # noqa: F401  (fixture)

from vslam_features.types import Features, ModelIdentity

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import _memory  # noqa: E402
import _timing  # noqa: E402
import _upstream  # noqa: E402


def approx(value: float):
    """Equal but for figures rounded to three decimals."""
    return pytest.approx(value, rel=0.01, abs=0.002)


class Clock:
    """Stands for the module ``time``: only sleep takes time, and none of the processor."""

    def __init__(self):
        self.now = self.cpu = 0.0

    def perf_counter(self) -> float:
        return self.now

    def process_time(self) -> float:
        return self.cpu

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def features(n: int) -> Features:
    model = ModelIdentity("features", "fake", "0" * 64, "any")
    return Features(np.zeros((n, 2), np.float32), np.ones(n, np.float32), np.zeros((n, 8), np.float32), (64, 48), model)


def test_runs_take_turns_on_the_same_item():
    calls = []
    runs = {"a": lambda item: calls.append(("a", item)), "b": lambda item: calls.append(("b", item))}
    times = _timing.interleaved(runs, ["x", "y"], rounds=1)
    assert calls == [("a", "x"), ("b", "x"), ("a", "y"), ("b", "y"), ("a", "x"), ("b", "x")]
    assert {name: len(values) for name, values in times.items()} == {"a": 1, "b": 1}


def test_a_seed_mixes_the_order_within_rounds():
    calls = []
    runs = {name: lambda item, name=name: calls.append((name, item)) for name in "abc"}
    times = _timing.interleaved(runs, range(30), rounds=28, seed=0)
    rounds = [calls[i : i + 3] for i in range(0, 90, 3)]
    assert all(sorted(r) == [(name, i) for name in "abc"] for i, r in enumerate(rounds))
    assert len({tuple(name for name, _ in r) for r in rounds}) == 6
    assert {name: len(values) for name, values in times.items()} == dict.fromkeys("abc", 28)


def test_warm_up_does_not_count(monkeypatch):
    clock, slow = Clock(), iter([0.3, 0.2])
    monkeypatch.setattr(_timing, "time", clock)
    times = _timing.interleaved({"a": lambda item: clock.sleep(next(slow, 0.01))}, [0], rounds=3)
    assert times["a"] == pytest.approx([10, 10, 10])


def test_fastest_ratio_leaves_disturbed_runs_out():
    whole, bare = np.array([11.0, 99.0, 50.0, 22.0]), np.array([70.0, 20.0, 10.0, 80.0])  # items 0 1 0 1
    assert _timing.fastest_ratio(whole, bare, items=2) == pytest.approx((11 + 22) / (10 + 20))


def test_random_sizes_show_a_leak_and_a_slow_call(monkeypatch):
    clock, sizes = Clock(), []
    monkeypatch.setattr(_memory, "time", clock)
    # What is resident counts all that the process of the tests holds and gives back: see the test below.
    monkeypatch.setattr(_memory, "resident_mib", lambda: 100.0 + 2 * len(sizes))

    def run(pair):
        sizes.append(tuple(map(len, pair)))
        clock.sleep(0.2 if len(sizes) == 30 else 0.005)
        clock.cpu += 0.001

    found = _memory.random_sizes(run, (features(200), features(150)), calls=40)
    assert (found["warm_mib"], found["end_mib"]) == (126, 180)  # the warm-up took 13 calls
    assert found["growth_mib"] == 2 * 27
    assert (found["median_ms"], found["worst_ms"], found["worst_ratio"]) == pytest.approx((5, 200, 40), rel=0.01)
    assert found["cpu_worst_ratio"] == pytest.approx(1, rel=0.01)
    assert sizes[0] == (200, 150) and {0, 1, 127} <= set(np.ravel(sizes))


_LEAK = """
import numpy as np, _memory
from vslam_features.types import Features, ModelIdentity
model = ModelIdentity("features", "fake", "0" * 64, "any")
a = Features(np.zeros((200, 2), np.float32), np.ones(200, np.float32), np.zeros((200, 8), np.float32), (64, 48), model)
kept = []
steady = _memory.random_sizes(lambda pair: None, (a, a), calls=40)
leak = _memory.random_sizes(lambda pair: kept.append(np.ones(2 << 20, np.uint8)), (a, a), calls=40)
print(steady["growth_mib"], leak["growth_mib"])
"""


def test_what_is_resident_shows_a_leak_and_no_other():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(BENCHMARKS), str(BENCHMARKS.parent)])}
    done = subprocess.run([sys.executable, "-c", _LEAK], capture_output=True, text=True, env=environment, timeout=100)
    assert done.returncode == 0, done.stderr
    steady, leak = map(float, done.stdout.split())
    assert steady < 4
    assert leak == pytest.approx(2 * 27, abs=8)


def test_packages_that_are_missing_are_named(monkeypatch):
    assert _upstream.missing("xfeat") == ""
    monkeypatch.setitem(_upstream._NEEDS, "xfeat", ("torch", "no_such_package"))
    assert _upstream.missing("xfeat") == "no_such_package"


@pytest.mark.data
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_whole_benchmark_on_a_tiny_setting(learned, data_dir, tmp_path):  # noqa: F811
    out = tmp_path / "figures.json"
    command = [sys.executable, BENCHMARKS / "model_speed.py", "--data", data_dir, "--json", out, "--rounds", "1"]
    command += ["--models", "xfeat", "--runtimes", "onnxruntime"]
    environment = os.environ | {"PYTHONPATH": str(BENCHMARKS.parent)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert [row["keypoints"] for row in found["models"]] == [1024, 2048]
    # How large times are is the machine's affair. Of a single round the ratio is that of the times beside it.
    for row in found["models"]:
        assert row["ms"]["median"] > 0 and row["torch_ms"]["median"] > 0
        assert row["ratio"]["median"] == approx(row["ms"]["median"] / row["torch_ms"]["median"])
    for row in found["end-to-end"]:  # of four rounds, so that a median of ratios is no ratio of medians
        for spread in (row["ms"], row["bare_ms"], row["ratio"]):
            assert 0 < spread["low"] <= spread["median"] <= spread["high"]
        assert row["fastest_ratio"] > 0
        assert all(row["parts_ms"][name] > 0 for name in ("decode", "features", "matcher", "solver"))
    torch, ours = found["memory"]
    assert (torch["engine"], ours["engine"]) == ("torch", "onnxruntime")
    assert ours["total_ratio"] == pytest.approx(ours["total"] / torch["total"], abs=0.01)
    assert ours["growth"] > 640 * 480 * 4 / 2**20, "an image in f32 is the least that a run takes"
