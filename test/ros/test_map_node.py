"""Maps of the node as a real process, over DDS: saved, loaded, localised in, continued."""

import hashlib
import os
import signal
from contextlib import contextmanager

import numpy as np
import pytest

pytest.importorskip("rclpy")

from lifecycle_msgs.msg import Transition
from lifecycle_msgs.srv import ChangeState
from rcl_interfaces.msg import Parameter, ParameterValue
from rcl_interfaces.srv import SetParameters
from ros_helpers import CLOUDS, Peer, Process, environment, node_command, sequence
from std_srvs.srv import SetBool, Trigger

from vslam_features.config import Config
from vslam_features.frontend import FrontEnd
from vslam_features.map_keeper import MapKeeper
from vslam_features.maps.reader import MapReader
from vslam_features.types import PairKind, Status

PARAMETERS = {
    "features.name": "sift",
    "features.max_keypoints": 300,
    "keyframes.every": 1,
    "retrieval.exclude_s": 0.25,
    "rectified": "yes",
}
ON, OFF = SetBool.Request(data=True), SetBool.Request(data=False)


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("VSLAM_FEATURES_STATE", str(tmp_path / "state"))
    return tmp_path / "state" / "sessions"


@contextmanager
def node(domain, tmp_path, parameters=None, script=None):
    command = node_command("frontend_node", {**PARAMETERS, **(parameters or {})}, script=script)
    with Process(command, environment(domain, tmp_path / "log"), tmp_path) as process:
        yield process


class Caller:
    """Calls the services of the node as a peer does."""

    def __init__(self, peer):
        self.peer = peer
        kinds = {"save_map": Trigger, "load_map": Trigger, "reset": Trigger, "set_localization": SetBool}
        kinds["change_state"] = ChangeState
        self._clients = {n: peer.node.create_client(kind, f"/frontend/{n}") for n, kind in kinds.items()}

    def begin(self, name, request=None):
        client = self._clients[name]
        self.peer.spin_until(client.service_is_ready)
        return client.call_async(request or client.srv_type.Request())

    def __call__(self, name, request=None):
        return self.answer(self.begin(name, request))

    def answer(self, future):
        self.peer.spin_until(future.done)
        return future.result()

    def set_path(self, path):
        parameter = Parameter(name="map_path", value=ParameterValue(type=4, string_value=str(path)))
        request = SetParameters.Request(parameters=[parameter])
        return self.peer.call(SetParameters, "/frontend/set_parameters", request).results[0].successful

    def begin_change(self, transition):
        client = self._clients["change_state"]
        self.peer.spin_until(client.service_is_ready)
        return client.call_async(ChangeState.Request(transition=Transition(id=transition)))

    def change(self, transition):
        return self.answer(self.begin_change(transition)).success


def make_map(path, frames, **parameters):
    """A map of frames, made without ROS."""
    keeper = MapKeeper(FrontEnd(Config.from_flat({**PARAMETERS, **parameters, "map_path": str(path)})))
    keeper.start()
    for frame in frames:
        keeper._front_end.process(frame)
    keeper.close()
    return path


def headers(path):
    with MapReader(path) as m:
        return m.headers()


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def counts(peer):
    names = ("received", "processed", "dropped", "waiting")
    return {name: int(peer.value("frames", name) or -1) for name in names}


def keyframe_tables(peer):
    """id -> table of ~/keyframes."""
    tables = [CLOUDS["keyframes"](m) for m in peer.clouds["keyframes"]]
    return {int(t["kf_id"][0]): t for t in tables}


def test_save_while_images_flow(domain, tmp_path, state):
    """All images are accounted for, and the file has the keyframes that were published."""
    target, frames = tmp_path / "saved.vmap", sequence(60)
    with node(domain, tmp_path) as process, Peer(domain) as peer:
        call = Caller(peer)
        peer.wait_connected()
        answer = call("save_map")
        assert not answer.success and "map_path is empty" in answer.message and "ros2 param set" in answer.message
        assert call.set_path(target)
        peer.publish(frames[:20], wait_s=0, period_s=1 / 30)
        saving, seen = call.begin("save_map"), len(peer.clouds["keyframes"])
        peer.publish(frames[20:], wait_s=0, period_s=1 / 30)
        answer = call.answer(saving)
        assert answer.success and f"keyframes in {target}" in answer.message
        peer.spin_until(lambda: counts(peer)["received"] == 60 and counts(peer)["waiting"] == 0)
        c = counts(peer)
        assert c["received"] == c["processed"] + c["dropped"] and peer.value("frames", "missing") == "0"
        peer.spin_until(lambda: len(peer.clouds["keyframes"]) == c["processed"])
        published, stored = keyframe_tables(peer), headers(target)
        assert seen <= len(stored) <= c["processed"] and answer.message.startswith(f"{len(stored)} keyframes")
        with MapReader(target) as m:
            for kf_id in range(len(stored)):
                xy = np.stack([published[kf_id]["x"], published[kf_id]["y"]], axis=1)
                assert np.array_equal(m.keyframe(kf_id).features.keypoints, xy)
        peer.spin_until(lambda: peer.value("map", "last_save") == answer.message)
        assert float(peer.value("map", "last_save_age_s")) >= 0
        peer.spin_until(lambda: peer.value("map", "stored") == str(c["processed"]))
        assert (peer.value("map", "mode"), peer.value("map", "waiting")) == ("mapping", "0")
        running = peer.value("map", "path")
        assert process.stop() == 0
    assert "Traceback" not in process.output
    assert [str(p) for p in state.glob("*.vmap")] == [running] and len(headers(state / running)) == c["processed"]


def test_load_and_what_cannot_be_saved_or_loaded(domain, tmp_path):
    frames = sequence(6)
    good = make_map(tmp_path / "good.vmap", frames[:4])
    broken, other = tmp_path / "broken.vmap", make_map(tmp_path / "other.vmap", frames[:2], **{"features.name": "orb"})
    broken.write_bytes(good.read_bytes()[:-20_000])
    (tmp_path / "notes.txt").write_text("mine")
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    with node(domain, tmp_path) as process, Peer(domain) as peer:
        call = Caller(peer)
        peer.wait_connected()
        peer.publish(frames[:2])
        refused = [
            ("load_map", broken, ["broken.vmap"]),
            ("load_map", tmp_path / "no.vmap", ["no.vmap: no such file"]),
            ("load_map", other, ["other.vmap", "orb", "sift"]),
            ("save_map", tmp_path / "no" / "a.vmap", ["/no does not exist; create it"]),
            ("save_map", tmp_path / "notes.txt", ["notes.txt is no map"]),
            *([("save_map", locked / "a.vmap", ["Permission denied"])] if os.geteuid() else []),
        ]
        for name, path, texts in refused:
            assert call.set_path(path)
            answer = call(name)
            assert not answer.success and all(t in answer.message for t in texts), answer.message
            assert "\n" not in answer.message
        peer.publish(frames[2:3])
        peer.wait_keyframes(3)
        assert sorted(keyframe_tables(peer)) == [0, 1, 2], "the running map went on"
        assert (tmp_path / "notes.txt").read_text() == "mine" and len(headers(good)) == 4

        assert call.set_path(good)
        answer = call("load_map")
        assert answer.success and f"{good} is continued: 4 keyframes" in answer.message
        peer.publish(frames[3:4])
        peer.wait_keyframes(4)
        assert sorted(keyframe_tables(peer)) == [0, 1, 2, 4]
        peer.spin_until(lambda: peer.value("map", "path") == str(good) and peer.value("map", "stored") == "5")
        assert peer.value("map", "first_id") == "4"

        assert call.change(Transition.TRANSITION_DEACTIVATE)
        assert len(headers(good)) == 5
        assert "5 keyframes in" in call("save_map").message, "also while it is inactive"
        assert call.change(Transition.TRANSITION_ACTIVATE)
        peer.wait_connected()
        peer.publish(frames[4:5])
        peer.wait_keyframes(5)
        assert 5 in keyframe_tables(peer), "what the service loaded stays the map"
        assert process.stop() == 0
    assert "Traceback" not in process.output and len(headers(good)) == 6


@pytest.mark.slow
def test_localisation_and_one_writer(domain, tmp_path):
    """Places are recognised from the first frame, and the file never changes; one node writes, others read."""
    frames = sequence(6)
    path = make_map(tmp_path / "a.vmap", frames)
    before, parameters = digest(path), {"map_path": str(path), "mode": "localization"}
    with node(domain, tmp_path, parameters) as process, Peer(domain) as peer:
        call = Caller(peer)
        peer.wait_connected()
        peer.publish(frames[:3])
        peer.wait_keyframes(3)
        pairs = np.concatenate([CLOUDS["pairs"](m) for m in peer.clouds["pairs"]])
        located = pairs[(pairs["kind"] == PairKind.RELOCALISATION) & (pairs["status"] != Status.BACKEND_ERROR)]
        assert not (pairs["kind"] == PairKind.LOOP).any()
        for i in range(3):
            own = located[located["kf_id"] == 6 + i]
            assert {i, 5 - i} & set(own["ref_kf_id"][own["num_inliers"] > 50])  # the same place, walked by twice
        peer.spin_until(lambda: peer.value("map", "keyframes") == "9")
        assert (peer.value("map", "mode"), peer.value("map", "stored")) == ("localization", "6")
        assert int(peer.value("verify", "runs")) >= 3
        tried = sum(int(v.value) for v in peer.status["verify"].values if v.key.startswith("status."))
        assert tried == len(located)
        assert "3 keyframes are forgotten" in call("reset").message
        assert process.stop(signal.SIGTERM) == 0
    assert digest(path) == before and "Traceback" not in process.output
    assert sorted(p.name for p in tmp_path.glob("*a.vmap*")) == ["a.vmap"]

    with node(domain, tmp_path, {"map_path": str(path)}) as writer, Peer(domain) as peer:
        call = Caller(peer)
        peer.wait_connected()
        with node(domain, tmp_path, {"map_path": str(path)}) as second:
            assert second.wait() == 1
        assert f"a.vmap: another process (pid {writer.popen.pid}) writes to this map" in second.output
        assert len([line for line in second.output.splitlines() if "FATAL" in line]) == 1
        answer = call("set_localization", ON)
        assert answer.success and f"localising in {path}: 6 keyframes" in answer.message
        assert digest(path) == before
        assert "is continued" in call("set_localization", OFF).message
        assert writer.stop() == 0


def test_a_run_that_is_interrupted_has_stored_all_and_is_continued(domain, tmp_path):
    frames, path = sequence(8), tmp_path / "a.vmap"
    for number, (first, last) in ((signal.SIGINT, (0, 4)), (signal.SIGTERM, (4, 8))):
        with node(domain, tmp_path, {"map_path": str(path)}) as process, Peer(domain) as peer:
            peer.wait_connected()
            peer.publish(frames[first:last])  # the last keyframe is just tracked, its loops are not searched for
            assert process.stop(number) == 0
        assert sorted(keyframe_tables(peer)) == list(range(first, last))
        assert [h.stamp_ns for h in headers(path)] == [f.stamp_ns for f in frames[:last]]
        assert "Traceback" not in process.output
    assert [h.session for h in headers(path)] == [0] * 4 + [1] * 4


@pytest.mark.slow
def test_a_jump_back_continues_the_map_and_a_reset_leaves_it(domain, tmp_path, state):
    frames, path = sequence(6), tmp_path / "a.vmap"
    with node(domain, tmp_path, {"map_path": str(path)}) as process, Peer(domain) as peer:
        call = Caller(peer)
        peer.wait_connected()
        peer.publish(frames)
        peer.publish(frames[:1], wait_s=0, period_s=0.2)  # held until the next one confirms the jump
        peer.publish(frames[1:2])
        peer.wait_keyframes(8)
        assert sorted(keyframe_tables(peer)) == list(range(8))
        peer.spin_until(lambda: peer.value("frames", "jumps_back") == "1")
        assert peer.value("frames", "resets") == "0"
        answer = call("reset")
        assert (
            answer.success
            and f"8 keyframes are forgotten; ids count from 0 again; they stay in {path}" in answer.message
        )
        peer.clouds.clear()
        peer.publish(frames[2:4])
        peer.wait_keyframes(2)
        assert sorted(keyframe_tables(peer)) == [0, 1]
        peer.spin_until(lambda: "was left (reset)" in peer.status["map"].message)
        assert peer.status["map"].level == b"\x01" and peer.value("frames", "resets") == "1"
        assert process.stop() == 0
    assert [h.session for h in headers(path)] == [0] * 6 + [1] * 2
    assert [len(headers(p)) for p in state.glob("*.vmap")] == [2]


SLOW = """
import pathlib, sys, time
from vslam_features.maps.file_store import FileStore
from vslam_features.ros import frontend_node

copy = FileStore.copy
def slow(self, target, progress=None):
    while not pathlib.Path(f"{target}.go").exists():
        time.sleep(0.01)
    return copy(self, target, progress)
FileStore.copy = slow
sys.exit(frontend_node.main())
"""


@pytest.mark.slow
def test_calls_during_a_slow_save(domain, tmp_path):
    """Images flow, calls wait for their turn, and each gets an answer: also where the node is cleaned up, or ends."""
    script, frames = tmp_path / "slow.py", sequence(10)
    script.write_text(SLOW)
    paths = [tmp_path / f"{name}.vmap" for name in "abc"]
    go = [tmp_path / f"{name}.vmap.go" for name in "abc"]
    with node(domain, tmp_path, script=script) as process, Peer(domain) as peer:
        call = Caller(peer)
        peer.wait_connected()
        peer.publish(frames[:3])
        assert call.set_path(paths[0])
        calls = [call.begin("save_map"), call.begin("save_map")]
        peer.publish(frames[3:8])
        peer.wait_keyframes(8)
        assert not calls[0].done() and not paths[0].exists()
        go[0].touch()
        assert [call.answer(c).success for c in calls] == [True, True]
        assert len(headers(paths[0])) == 8, "with what came until it was written"

        assert call.set_path(paths[1])
        calls = [call.begin("save_map"), call.begin("set_localization", ON)]
        peer.spin(0.3)
        assert call.change(Transition.TRANSITION_DEACTIVATE)
        cleaning = call.begin_change(Transition.TRANSITION_CLEANUP)
        peer.spin(0.3)
        assert not cleaning.done()
        go[1].touch()
        saved, located = map(call.answer, calls)
        assert saved.success and not located.success and "call again" in located.message
        assert call.answer(cleaning).success
        for name in ("save_map", "load_map", "set_localization"):
            answer = call(name)
            assert not answer.success and "not configured" in answer.message

        assert call.change(Transition.TRANSITION_CONFIGURE)
        assert call.change(Transition.TRANSITION_ACTIVATE)
        peer.wait_connected()
        assert call.set_path(paths[2])
        saving = call.begin("save_map")
        peer.spin(0.3)
        process.popen.send_signal(signal.SIGINT)
        peer.spin(0.3)
        assert process.popen.poll() is None
        go[2].touch()
        assert call.answer(saving).success and process.wait() == 0
    assert "Traceback" not in process.output
    assert [len(headers(p)) for p in paths] == [8, 8, 8]


FULL = """
import sys, threading
from vslam_features.errors import MapError
from vslam_features.maps.writer import MapWriter
from vslam_features.ros import frontend_node

append = MapWriter.append
def full(self, *entries):
    if entries[-1].keyframe.id >= 2:
        raise MapError(f"{self.path}: database or disk is full")
    append(self, *entries)
MapWriter.append = full
sys.exit(frontend_node.main())
"""


@pytest.mark.slow
def test_a_full_disk_is_told_and_costs_no_image(domain, tmp_path):
    script, frames, path = tmp_path / "full.py", sequence(12), tmp_path / "a.vmap"
    script.write_text(FULL)
    with (
        node(domain, tmp_path, {"map_path": str(path), "map.queue": 4}, script=script) as process,
        Peer(domain) as peer,
    ):
        call = Caller(peer)
        peer.wait_connected()
        peer.publish(frames[:5])
        peer.spin_until(lambda: peer.value("map", "waiting") == "3")
        assert "disk is full" in peer.status["map"].message and peer.status["map"].level == b"\x02"
        answer = call("save_map")
        assert not answer.success and "3 keyframes are not stored" in answer.message and "full" in answer.message
        peer.publish(frames[5:], wait_s=0.5)
        peer.spin_until(lambda: peer.value("frames", "processed") == "12")
        assert "no more are taken" in peer.value("store", "last_fault")
        assert process.stop() == 0
    assert "keyframes are lost" in process.output and "Traceback" not in process.output
    assert len(headers(path)) == 2
