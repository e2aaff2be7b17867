"""Learned models in the front-end node, a real process over DDS: what it says of them, what becomes of faults."""

import json
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("rclpy")

from lifecycle_msgs.msg import State, Transition
from lifecycle_msgs.srv import ChangeState, GetState
from model_helpers import (
    TINY,
    _tiny_cache,  # noqa: F401
    card,
    features_model,
    own_cache,  # noqa: F401
    place_tiny_models,
    save,
    tiny,  # noqa: F401
)
from rcl_interfaces.msg import Parameter, ParameterType, ParameterValue
from rcl_interfaces.srv import DescribeParameters, GetParameters, SetParameters
from ros_helpers import CLOUDS, Peer, Process, environment, node_command, sequence

from vslam_features.artifacts import records
from vslam_features.artifacts.cache import cache_folder
from vslam_features.artifacts.incidents import load
from vslam_features.artifacts.store import content_sha256, model_path
from vslam_features.config import Config
from vslam_features.replay.metrics import metrics
from vslam_features.replay.runner import replay
from vslam_features.replay.source import Source
from vslam_features.types import PairKind, Status

OK, WARN, ERROR = b"\x00", b"\x01", b"\x02"
PARAMETERS = {**TINY, "retrieval.exclude_s": 0.25, "rectified": "yes"}


@contextmanager
def node(domain, tmp_path, parameters):
    command = node_command("frontend_node", parameters)
    with Process(command, environment(domain, tmp_path / "log"), tmp_path) as process:
        yield process


class Watch(Peer):
    """A peer that also keeps every status in order: ``said(name)`` gives (level, message) without repetitions."""

    def __init__(self, domain):
        self.heard = []
        super().__init__(domain)

    def _diagnostics(self, message):
        super()._diagnostics(message)
        self.heard += [(s.name.removeprefix("frontend: "), s.level, s.message) for s in message.status]

    def said(self, name):
        texts = [(level, text) for n, level, text in self.heard if n == name]
        return [t for i, t in enumerate(texts) if i == 0 or t != texts[i - 1]]

    def values(self, name):
        return {v.key: v.value for v in self.status[name].values}

    def statuses(self, kind=PairKind.TRACK):
        """[(keyframe, older keyframe, status)] of the pairs that came."""
        tables = np.concatenate([CLOUDS["pairs"](m) for m in self.clouds["pairs"]])
        rows = tables[tables["kind"] == kind]
        return sorted((int(r["kf_id"]), int(r["ref_kf_id"]), Status(int(r["status"]))) for r in rows)

    def feed(self, frames, wait_s=10.0):
        """Publish frames and wait until all that comes of them is there, and told by diagnostics."""
        self.begin()
        self.publish(frames, wait_s=wait_s)
        self.wait_told(len(frames))

    def begin(self):
        """Wait until all is connected and diagnostics have come of a node that has done nothing yet."""
        self.wait_connected()
        self.wait_told(0)

    def wait_told(self, frames):
        """Wait for diagnostics that are newer than now."""
        self.heard.append(("now", OK, ""))
        mark = len(self.heard)
        self.spin_until(
            lambda: any(n == "map" for n, *_ in self.heard[mark:]) and self.value("frames", "processed") == str(frames)
        )


def lines_of(process, level):
    return [line for line in process.output.splitlines() if line.startswith(f"[{level}]")]


def test_without_models_it_runs_classical_plugins_and_says_so(domain, tmp_path, own_cache):  # noqa: F811
    with node(domain, tmp_path, {}) as process, Watch(domain) as peer:
        peer.wait_connected()
        peer.publish(sequence(6), wait_s=0, period_s=0.2)
        peer.spin_until(lambda: int(peer.value("frames", "processed") or 0) >= 5 and peer.clouds["matches"])
        status = peer.status["models"]
        assert status.level == WARN and status.message == peer.value("models", "instead")
        assert status.message.startswith("running sift + nearest instead of xfeat + lighterglue: models xfeat, lighter")
        assert "run 'vslam-features models fetch xfeat lighterglue-early-stop'" in status.message
        plugins = [peer.value(stage, "plugin") for stage in ("describe", "match", "global", "verify")]
        assert plugins == ["sift", "nearest", "vlad", "nearest"]
        assert not [name for name in peer.status if name.startswith("model ")]
        assert any(status is Status.OK for *_, status in peer.statuses()), peer.statuses()
        assert sum(len(CLOUDS["matches"](m)) for m in peer.clouds["matches"]) > 100
        assert process.stop() == 0
    (line,) = lines_of(process, "WARN")
    assert "run 'vslam-features models fetch xfeat lighterglue-early-stop'" in line


@pytest.mark.slow
def test_the_gate_runs_once_and_its_progress_is_shown(domain, tmp_path, own_cache):  # noqa: F811
    place_tiny_models()
    with Watch(domain) as peer:
        with node(domain, tmp_path, PARAMETERS) as process:
            peer.feed(sequence(4))
            told = [text for _, text in peer.said("models")]
            assert any(text.startswith("tiny-features: ") for text in told), told
            assert any("tiny-global: parity pair" in text for text in told) and told[-1] == "verified"
            assert "tiny-features: comparing with its reference on onnxruntime" in process.output
            assert {level for level, _ in peer.said("models")} == {OK}
            assert len(list(cache_folder("records").iterdir())) == 3
            values = peer.values("model tiny-features")
            sha256 = content_sha256(model_path("tiny-features", "fp32"))
            (record,) = records.records_of(sha256)
            assert values["engine_id"] == sha256[:16]
            assert values["runtime"].startswith("onnxruntime") and "CPU" in values["runtime"]
            assert (values["role"], values["precision"], values["runs"]) == ("features", "fp32", "4")
            assert values["device"] and values["file"] == "tiny-features.fp32.onnx"
            assert values["verified"] == record.summary and values["verified"].startswith("passed on ")
            assert (values["non_finite"], values["lost"], values["note"], values["fallback"]) == ("0", "0", "", "ready")
            assert peer.value("describe", "plugin") == "xfeat" and "onnxruntime" in peer.value("describe", "runtime")
            assert {s.level for name, s in peer.status.items() if name.startswith("model")} == {OK}
            assert process.stop() == 0
        peer.heard.clear(), peer.clouds.clear(), peer.order.clear()
        with node(domain, tmp_path, PARAMETERS) as process:
            peer.feed(sequence(3))
            assert peer.said("models") == [(OK, "verified")], "no gate at the second start"
            assert process.stop() == 0
    assert "Traceback" not in process.output


def test_a_lifecycle_manager_waits_no_longer_than_the_gate_may_take(domain, tmp_path, own_cache):  # noqa: F811
    """Meanwhile diagnostics tell the progress; afterwards the node answers, and can be configured again."""
    place_tiny_models()
    slow = {"runtime.name": "fake", "runtime.options.delay_ms": 200.0, "models.gate_s": 1.0, "autostart": False}
    with node(domain, tmp_path, {**PARAMETERS, **slow}) as process, Watch(domain) as peer:

        def change(transition):
            request = ChangeState.Request(transition=Transition(id=transition))
            return peer.call(ChangeState, "/frontend/change_state", request, timeout=20).success

        peer.call(GetState, "/frontend/get_state", GetState.Request())
        start = time.monotonic()
        assert not change(Transition.TRANSITION_CONFIGURE)
        assert time.monotonic() - start < 10
        state = peer.call(GetState, "/frontend/get_state", GetState.Request()).current_state
        assert state.id == State.PRIMARY_STATE_UNCONFIGURED
        assert "configure failed: tiny-features on fake(onnxruntime)" in process.output
        assert "pairs were compared within models.gate_s (1 s)" in process.output
        told = [text for _, text in peer.said("models")]
        assert told[0].startswith("tiny-features: comparing with its reference on fake(onnxruntime)")
        assert told[1].startswith("tiny-features: parity pair 1 of ")
        peer.spin_until(lambda: peer.values("models") == {"state": "failed"})
        assert peer.said("models")[-1][0] == ERROR and "models.gate_s (1 s)" in peer.said("models")[-1][1]

        changes = [
            Parameter(name=name, value=ParameterValue(type=ParameterType.PARAMETER_DOUBLE, double_value=value))
            for name, value in (("runtime.options.delay_ms", 0.0), ("models.gate_s", 60.0))
        ]
        request = SetParameters.Request(parameters=changes)
        assert all(r.successful for r in peer.call(SetParameters, "/frontend/set_parameters", request).results)
        assert change(Transition.TRANSITION_CONFIGURE) and change(Transition.TRANSITION_ACTIVATE)
        peer.feed(sequence(3))
        assert peer.status["models"].message == "verified" and "state" not in peer.values("models")
        assert process.stop() == 0
    assert "Traceback" not in process.output


NAN_IN_PAIR_3 = {"runtime.name": "fake", "runtime.options.only": "tiny-matcher", "runtime.options.nan_calls": "'3'"}


def test_nan_is_made_good_by_the_fallback_and_told_once(domain, tmp_path, tiny):  # noqa: F811
    parameters = {**PARAMETERS, **NAN_IN_PAIR_3, "loops.enabled": False}
    with node(domain, tmp_path, parameters) as process, Watch(domain) as peer:
        peer.begin()
        got = peer.call(
            GetParameters,
            "/frontend/get_parameters",
            GetParameters.Request(names=["runtime.options.nan_calls", "runtime.options.inner"]),
        )
        assert [v.string_value for v in got.values] == ["3", "onnxruntime"]
        names = ["runtime.options.nan_calls", "runtime.options.delay_ms"]
        request = DescribeParameters.Request(names=names)
        calls, delay = peer.call(DescribeParameters, "/frontend/describe_parameters", request).descriptors
        assert calls.description == "Calls whose float outputs hold NaN."
        assert (delay.floating_point_range[0].from_value, delay.floating_point_range[0].to_value) == (0.0, 600_000.0)

        frames = sequence(8)
        peer.publish(frames)
        peer.wait_told(8)
        wanted = [(i, i - 1, Status.FAULT_RECOVERED if i == 3 else Status.OK) for i in range(1, 8)]
        assert peer.statuses() == wanted and Status.FAULT_RECOVERED == 10
        values = peer.values("model tiny-matcher")
        counts = {n: values[n] for n in ("runs", "non_finite", "errors", "empty", "recovered", "lost", "incidents")}
        assert counts == {"runs": "7", "non_finite": "1", "errors": "0", "empty": "0", "recovered": "1", "lost": "0",
                          "incidents": "1"}  # fmt: skip
        assert values["runtime"].startswith("fake(onnxruntime)") and "onnxruntime" in values["fallback"]
        peer.wait_told(8)  # and again, when nothing is new
        levels = [level for level, _ in peer.said("model tiny-matcher")]
        assert levels == [OK, WARN, OK]
        warned = next(text for level, text in peer.said("model tiny-matcher") if level == WARN)
        assert warned.startswith("1 runs failed and were repeated on the fallback: ") and "not finite" in warned
        assert peer.values("model tiny-features")["non_finite"] == "0" and peer.value("match", "faults") == "0"
        assert peer.value("match", "status.fault_recovered") == "1" and peer.value("match", "non_finite") == "0"
        assert process.stop() == 0
    (file,) = cache_folder("incidents").iterdir()
    assert load(file).name == "tiny-matcher" and "1 of 300 in 'mscores0'" in load(file).fault
    assert "Traceback" not in process.output and "fault 1" in "".join(lines_of(process, "ERROR"))


def test_without_a_fallback_it_is_lost_and_an_error(domain, tmp_path, tiny):  # noqa: F811
    """Features with NaN cost the frame, a pair with NaN is told by its status."""
    broken = {"runtime.name": "fake", "runtime.options.nan_calls": "'3'", "runtime.fallback": "none"}
    with node(domain, tmp_path, {**PARAMETERS, **broken, "loops.enabled": False}) as process, Watch(domain) as peer:
        peer.feed(sequence(8), wait_s=3.0)
        # Image 2 (from 0) has no features; its neighbours are matched, in runs 1 to 6 of the matcher.
        wanted = [(i, i - 1, Status.NON_FINITE if i == 3 else Status.OK) for i in range(1, 7)]
        assert peer.statuses() == wanted and Status.NON_FINITE == 8
        for name in ("tiny-features", "tiny-matcher"):
            values = peer.values(f"model {name}")
            assert [values[n] for n in ("non_finite", "recovered", "lost", "incidents")] == ["1", "0", "1", "1"], name
            assert values["fallback"] == "none" and values["last_fault"]
            levels = [level for level, _ in peer.said(f"model {name}")]
            assert levels[:2] == [OK, ERROR] and levels.count(ERROR) == 1
        assert (peer.value("describe", "faults"), peer.value("match", "faults")) == ("1", "0")
        assert "not finite" in peer.value("describe", "last_fault")
        assert peer.value("match", "non_finite") == "1"
        assert process.stop() == 0
    assert "Traceback" not in process.output


def test_errors_and_empty_results_of_the_matcher_are_made_good(domain, tmp_path, tiny):  # noqa: F811
    """Nothing found between keyframes that look alike is a fault like an error, and no 'not covisible'."""
    faults = {"runtime.options.error_calls": "'2'", "runtime.options.zero_calls": "'4'"}
    parameters = {**PARAMETERS, **NAN_IN_PAIR_3, "runtime.options.nan_calls": "''", **faults, "loops.enabled": False}
    with node(domain, tmp_path, parameters) as process, Watch(domain) as peer:
        frames = sequence(8)
        frames[4] = replace(frames[3], stamp_ns=frames[4].stamp_ns)  # certainly alike
        peer.feed(frames)
        statuses = [status for *_, status in peer.statuses()]
        assert statuses == [Status.FAULT_RECOVERED if i in (2, 4) else Status.OK for i in range(1, 8)]
        values = peer.values("model tiny-matcher")
        counts = [values[n] for n in ("runs", "non_finite", "errors", "empty", "recovered", "lost", "incidents")]
        assert counts == ["7", "0", "1", "1", "2", "0", "2"]
        assert "look alike" in values["last_fault"]
        assert process.stop() == 0
    assert "Traceback" not in process.output


def test_a_device_that_is_not_here(domain, tmp_path, tiny):  # noqa: F811
    cuda = {**PARAMETERS, "runtime.device": "cuda"}
    with node(domain, tmp_path, cuda) as process:
        assert process.wait() == 1
    lines = [line for line in process.output.splitlines() if line.strip()]
    assert len(lines) == 1 and "configure failed" in lines[0], lines
    assert "asked for 'cuda'" in lines[0] and "CPUExecutionProvider" in lines[0], lines

    with node(domain, tmp_path, {**cuda, "runtime.strict": False}) as process, Watch(domain) as peer:
        peer.feed(sequence(3))
        for role in ("features", "matcher", "global"):
            status = peer.status[f"model tiny-{role}"]
            assert status.level == WARN and status.message == peer.value(f"model tiny-{role}", "note")
            assert "cuda" in status.message and peer.value(f"model tiny-{role}", "device")
        assert [status for *_, status in peer.statuses()] == [Status.OK] * 2
        assert process.stop() == 0
    assert any("cuda" in line for line in lines_of(process, "WARN"))


@pytest.mark.slow
def test_a_model_that_fails_its_gate(domain, tmp_path, tiny):  # noqa: F811
    """fp16 features that are not those of the fp32 file."""
    save(features_model(seed=3), card("features", "tiny-features", precision="fp16"))
    half = {**PARAMETERS, "runtime.precision": "fp16", "loops.enabled": False, "matcher.name": "nearest"}
    half = {n: v for n, v in half.items() if not n.startswith("matcher.options")}
    with node(domain, tmp_path, half) as process:
        assert process.wait() == 1
    last = process.output.splitlines()[-1]
    assert "configure failed: tiny-features on onnxruntime" in last and "does not compute what its reference" in last
    assert "%" in last and "models.allow_unverified" in last, "the figures, and the next step"
    assert "Traceback" not in process.output

    with node(domain, tmp_path, {**half, "models.allow_unverified": True}) as process, Watch(domain) as peer:
        peer.feed(sequence(3))
        status = peer.status["model tiny-features"]
        assert status.level == WARN and status.message.startswith("runs unverified: failed: ") and "%" in status.message
        assert peer.status["models"].message == "not all are verified"
        assert process.stop() == 0
    assert "models.allow_unverified is set" in "".join(lines_of(process, "WARN"))


LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize 9\n" % (b"0" * 64)


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda data: data[: len(data) // 2], "is cut short"),
        (lambda data: LFS_POINTER, "is a Git LFS pointer (it stands for 9 bytes"),
    ],
)
def test_a_damaged_file_is_named_and_nothing_runs_instead(domain, tmp_path, tiny, damage, text):  # noqa: F811
    path = model_path("tiny-matcher", "fp32")
    path.write_bytes(damage(path.read_bytes()))
    with node(domain, tmp_path, PARAMETERS) as process:
        assert process.wait() == 1
    lines = [line for line in process.output.splitlines() if line.strip()]
    assert len(lines) == 1 and "configure failed" in lines[0] and str(path) in lines[0] and text in lines[0], lines


def test_a_recorder_counts_what_a_replay_counts(domain, tmp_path, tiny):  # noqa: F811
    faults = {"runtime.options.nan_calls": "'2,5'", "runtime.options.error_calls": "'4'"}
    parameters = {**PARAMETERS, "runtime.name": "fake", **faults, "loops.enabled": False}
    out, frames = tmp_path / "out", sequence(8)
    with node(domain, tmp_path, parameters) as process, Watch(domain) as peer:
        command = node_command("recorder_node", {"out": out})
        with Process(command, environment(domain, tmp_path / "log"), tmp_path) as recorder:
            peer.begin()
            peer.spin_until(lambda: peer.node.count_subscribers("/frontend/matches") == 2)
            peer.publish(frames)
            peer.wait_told(8)
            assert process.stop() == 0 and recorder.stop() == 0
    numbers = json.loads((out / "metrics.json").read_text())
    values = {name: str(value).strip("'") if "_calls" in name else value for name, value in parameters.items()}
    wanted = metrics(replay(Frames(frames), Config.from_flat(values)))
    assert [e["name"] for e in wanted["engines"]] == ["tiny-features", "tiny-matcher"]
    assert [e["recovered"] for e in wanted["engines"]] == [3, 3]
    for part in ("engines", "statuses", "faults", "frames", "keyframes"):
        assert numbers[part] == wanted[part], part
    assert numbers["provenance"]["run"]["incidents"] == wanted["provenance"]["run"]["incidents"]
    html = (out / "report.html").read_text()
    assert "Complete, with faults that the fallback made good" in html and "Model tiny-matcher: 3 failed runs" in html


class Frames(Source):
    """Frames of a list, without poses."""

    def __init__(self, frames):
        super().__init__(Path("frames"), Config())
        self._frames = frames

    def __len__(self):
        return len(self._frames)

    def __iter__(self):
        for i, frame in enumerate(self._frames):
            self.position = i
            yield replace(frame, pose=None)

    def describe(self):
        return {"name": self.name}
