"""TensorRT engines in the front-end node, a real process over DDS, on the fake TensorRT: gate, refusal, guard."""

import json
from contextlib import contextmanager

import numpy as np
import pytest

pytest.importorskip("rclpy")

from lifecycle_msgs.msg import State, Transition
from lifecycle_msgs.srv import ChangeState, GetState
from model_helpers import (
    TINY,
    _tiny_cache,  # noqa: F401
    command,
    own_cache,  # noqa: F401
    tiny,  # noqa: F401
)
from ros_helpers import CLOUDS, Peer, Process, environment, node_command, sequence

from vslam_features.artifacts import records
from vslam_features.artifacts.cache import cache_folder
from vslam_features.artifacts.cases import matching
from vslam_features.artifacts.incidents import load
from vslam_features.artifacts.store import content_sha256, model_path
from vslam_features.types import Status

OK, WARN, ERROR = b"\x00", b"\x01", b"\x02"
GATE = 11  # different inputs of the gate: eight pairs that ship, the largest, the first and the last turned


@pytest.fixture
def machine(fake_tensorrt, tiny):  # noqa: F811
    fake_tensorrt.use(tensorrt="10.3.0", gpu="Orin;8.7;540.4.0")
    return fake_tensorrt


@pytest.fixture
def engine(machine, tmp_path):
    """The matcher's engine, not compared yet."""
    path = tmp_path / "matcher.engine"
    assert command("models", "build", "tiny-matcher", "--runtime", "tensorrt", "--no-verify", "--out", str(path)) == 0
    return path


def parameters(engine, **values):
    """The other models run on ONNX Runtime: an engine chooses TensorRT by itself."""
    return {**TINY, "matcher.options.model": engine, "rectified": "yes", "loops.enabled": False, **values}


@contextmanager
def node(domain, tmp_path, values, **faults):
    env = {**environment(domain, tmp_path / "log"), "VSLAM_FAKE_FAULTS": json.dumps(faults)}
    with Process(node_command("frontend_node", values), env, tmp_path) as process:
        yield process


def run(peer, frames):
    """Publish frames and wait until diagnostics tell all of them; values of the matcher's status."""
    peer.wait_connected()
    peer.publish(frames)
    peer.spin_until(lambda: peer.value("frames", "processed") == str(len(frames)))
    peer.spin_until(lambda: peer.value("model tiny-matcher", "runs") == str(len(frames) - 1))
    return {v.key: v.value for v in peer.status["model tiny-matcher"].values}


def statuses(peer):
    rows = np.concatenate([CLOUDS["pairs"](m) for m in peer.clouds["pairs"]])
    return [Status(int(s)) for s in rows[np.argsort(rows["kf_id"])]["status"]]


def last_line(process):
    assert process.wait() == 1 and "Traceback" not in process.output
    return process.output.splitlines()[-1]


def test_an_engine_is_compared_at_its_first_start_and_guarded_from_then_on(domain, tmp_path, engine):
    """NaN on a pair that is none of the gate's: the source of the engine computes it again."""
    with node(domain, tmp_path, parameters(engine), nan_inputs=[GATE + 3]) as process, Peer(domain) as peer:
        values = run(peer, sequence(8))
        wanted = [Status.FAULT_RECOVERED if i == 3 else Status.OK for i in range(1, 8)]
        assert statuses(peer) == wanted
        assert values["runtime"].startswith("tensorrt 10.3.0 TensorRT") and values["device"] == "cuda:0 Orin"
        assert values["file"] == "matcher.engine" and values["verified"].startswith("passed on 13 pairs against model")
        counts = [values[n] for n in ("runs", "non_finite", "errors", "recovered", "lost", "incidents")]
        assert counts == ["7", "1", "0", "1", "0", "1"]
        assert values["fallback"].startswith("onnxruntime") and "not finite" in values["last_fault"]
        assert {v.key: v.value for v in peer.status["model tiny-features"].values}["runtime"].startswith("onnxruntime")
        assert process.stop() == 0
    assert "tiny-matcher: comparing with its reference on tensorrt 10.3.0" in process.output
    (file,) = cache_folder("incidents").iterdir()
    assert load(file).name == "tiny-matcher" and load(file).runtime.startswith("tensorrt 10.3.0")
    (record,) = records.records_of(content_sha256(engine))
    assert record.passed and record.device == "cuda:0 Orin"
    with node(domain, tmp_path, parameters(engine)) as process, Peer(domain) as peer:
        assert run(peer, sequence(3))["non_finite"] == "0"
        assert process.stop() == 0
    assert "comparing with its reference" not in process.output and "Traceback" not in process.output


def test_an_engine_that_fails_is_refused_with_the_reason(domain, tmp_path, engine):
    faults = {"zero_inputs": [4], "nan_inputs": [7]}
    with Peer(domain) as peer, node(domain, tmp_path, parameters(engine), **faults) as process:
        peer.spin_until(lambda: peer.value("models", "state") == "failed", 30)
        told = peer.status["models"]
        assert told.level == ERROR and "seeded-3: no match" in told.message
        line = last_line(process)
    assert "configure failed: tiny-matcher on tensorrt 10.3.0" in line and "seeded-3: no match, the reference" in line
    assert "seeded-6: " in line and "are NaN or infinite" in line
    assert f"models verify {engine}" in line and "models.allow_unverified" in line
    # What was found holds, now that nothing is wrong any more, until somebody compares again.
    with node(domain, tmp_path, parameters(engine)) as process:
        line = last_line(process)
    assert "seeded-3: no match" in line and "parity pair" not in process.output
    with (
        node(domain, tmp_path, parameters(engine, **{"models.allow_unverified": True})) as process,
        Peer(domain) as peer,
    ):
        run(peer, sequence(3))
        status = peer.status["model tiny-matcher"]
        assert status.level == WARN and status.message.startswith("runs unverified: failed: ")
        assert peer.status["models"].message == "not all are verified"
        assert process.stop() == 0
    assert command("models", "verify", str(engine)) == 0
    with node(domain, tmp_path, parameters(engine)) as process, Peer(domain) as peer:
        assert run(peer, sequence(3))["verified"].startswith("passed on 13 pairs")
        assert peer.status["models"].level == OK
        assert process.stop() == 0


def test_the_verdict_on_saved_pairs_refuses_an_engine_that_passes_the_pairs_that_ship(
    domain, tmp_path, engine, machine
):
    """And the reason is in the diagnostics of a node that a lifecycle manager configures."""
    saved, rng = tmp_path / "saved", np.random.default_rng(0)
    saved.mkdir()
    d = rng.normal(size=(90, 64))
    d /= np.linalg.norm(d, axis=1)[:, None]
    np.savez(saved / "revisit.npz", **matching([(rng.uniform(0, 200, (90, 2)), d, (320, 240)) for _ in range(2)]))
    reference = str(model_path("tiny-matcher", "fp32"))
    machine.set_faults(nan_inputs=[GATE + 1])
    assert command("models", "verify", str(engine), "--reference", reference, "--inputs", str(saved)) == 1
    values = parameters(engine, autostart=False)
    with node(domain, tmp_path, values) as process, Peer(domain) as peer:
        request = ChangeState.Request(transition=Transition(id=Transition.TRANSITION_CONFIGURE))
        assert not peer.call(ChangeState, "/frontend/change_state", request, timeout=20).success
        state = peer.call(GetState, "/frontend/get_state", GetState.Request()).current_state
        assert state.id == State.PRIMARY_STATE_UNCONFIGURED
        peer.spin_until(lambda: "models" in peer.status)
        told = peer.status["models"]
        assert told.level == ERROR and "revisit: " in told.message and "on saved pairs" in told.message
        assert peer.value("models", "state") == "failed"
        assert process.stop() == 0
    assert "revisit: " in process.output and "parity pair" not in process.output


def test_an_engine_of_another_gpu_names_both_and_the_command(domain, tmp_path, engine, machine):
    machine.use(gpu="NVIDIA RTX 3060;8.6;560.1")
    with node(domain, tmp_path, parameters(engine)) as process:
        line = last_line(process)
    assert "Orin" in line and "NVIDIA RTX 3060" in line and "8.6" in line and str(engine) in line
    assert "vslam-features models build tiny-matcher --runtime tensorrt" in line
