"""``models collect --node``: a real front-end and a real player over DDS, and what is said where there is none."""

from __future__ import annotations

import json
import sys
import threading
import time
from contextlib import contextmanager

import cv2
import numpy as np
import pytest

pytest.importorskip("rclpy", reason="needs ROS 2: pip install 'vslam_features[ros]'")

import rclpy
from dense_models import DENSE, place_dense_models
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus, KeyValue
from model_helpers import (
    TINY,
    _tiny_cache,  # noqa: F401 (fixtures)
    own_cache,  # noqa: F401
    tiny,  # noqa: F401
)
from rclpy.executors import SingleThreadedExecutor
from ros_helpers import RELIABLE, START_NS, Process, environment, node_command, sequence
from sensor_msgs.msg import PointCloud2
from std_srvs.srv import SetBool

from vslam_features.artifacts.saved_pairs import pairs_in
from vslam_features.errors import ConfigError, MapError
from vslam_features.ros import codecs
from vslam_features.ros.clouds import to_cloud
from vslam_features.ros.collector_node import CollectorNode, listen
from vslam_features.ros.messages import header
from vslam_features.types import PairKind, Status

PARAMETERS = {**TINY, "retrieval.exclude_s": 0.5, "image_qos": "reliable"}
FPS = 4.0


def child(domain, tmp_path, command) -> Process:
    return Process(command, environment(domain, tmp_path / "log"), tmp_path)


def cli(*args) -> list[str]:
    return [sys.executable, "-m", "vslam_features", "models", *map(str, args)]


@pytest.fixture
def folder(tmp_path):
    """A walk along a wall and back."""
    (tmp_path / "walk").mkdir()
    for i, frame in enumerate(sequence(14)):
        cv2.imwrite(str(tmp_path / "walk" / f"{i:03d}.png"), frame.image)
    return tmp_path / "walk"


@contextmanager
def playing(domain, tmp_path, folder, parameters=PARAMETERS):
    """A front-end, which is there, and a player that waits for it and plays once."""
    with child(domain, tmp_path, node_command("frontend_node", parameters)) as node:
        with child(domain, tmp_path, node_command("player_node", {"path": folder, "fps": FPS, "qos": "reliable",
                                                                  "start_delay_s": 3.0})) as player:  # fmt: skip
            yield node, player


@pytest.mark.slow
@pytest.mark.parametrize("models", [TINY, DENSE], ids=["tiny", "dense"])
def test_pairs_of_a_running_node_are_saved_and_replay_in_verify(domain, tmp_path, tiny, folder, models):  # noqa: F811
    """Nothing is said of the models: the node tells what it runs."""
    out, matcher = tmp_path / "saved", models["matcher.options.model"]
    if models is DENSE:
        place_dense_models()
    with playing(domain, tmp_path, folder, {**PARAMETERS, **models}) as (node, player):
        collect = cli("collect", "--node", "/frontend", "--out", out, "--pairs", 8, "--seconds", 90, "--json")
        with child(domain, tmp_path, collect) as collector:
            assert collector.wait(120) == 0, collector.output + node.output
            text = collector.output
        assert node.popen.poll() is None, "the node goes on"
        assert node.stop() == 0
    found = json.loads(text[text.index('{"matcher"') :].splitlines()[0])
    assert (found["matcher"], found["features"]["name"]) == (matcher, models["features.options.model"])
    saved = pairs_in(out)
    assert len(saved) == len(found["pairs"]) == 8
    kinds = [p.kind for p in saved.values()]
    assert kinds.count("control") >= 2 and kinds.count("wide") and kinds.count("revisit"), found
    for pair in saved.values():
        assert pair.source == "frontend" and pair.matches > 0 and pair.stamps_ns[0] > pair.stamps_ns[1]
        assert pair.inputs["keypoints0"].shape[1] == 2 and pair.inputs["descriptors0"].ndim == (
            3 if models is DENSE else 2
        )
        assert tuple(pair.inputs["image_size0"]) == (320, 240)
        # Stamps of the player are FPS apart, ids of keyframes count its images (each is a keyframe, unless dropped).
        steps = (pair.stamps_ns[0] - pair.stamps_ns[1]) * FPS / 1e9
        assert steps == pytest.approx(round(steps), abs=1e-3) and steps >= pair.keyframes[0] - pair.keyframes[1]
    with child(domain, tmp_path, cli("verify", matcher, "--inputs", out)) as verify:
        assert verify.wait(60) == 0, verify.output
        assert "PASSED" in verify.output and verify.output.count("stamps") == 8


@pytest.mark.slow
def test_ctrl_c_ends_the_listening_with_what_has_come(domain, tmp_path, tiny, folder):  # noqa: F811
    out = tmp_path / "saved"
    with playing(domain, tmp_path, folder) as (node, player):
        collect = cli("collect", "--node", "frontend", "--out", out, "--pairs", 100, "--seconds", 300)
        with child(domain, tmp_path, collect) as collector:
            assert player.wait(60) == 0, player.output
            time.sleep(2)
            assert collector.stop() == 0, collector.output
            assert "note: interrupted: what had come by then is used" in collector.output
            assert "pairs of tiny-features features in" in collector.output
        assert node.stop() == 0
    assert len(pairs_in(out)) > 8


@pytest.mark.slow
def test_a_node_that_localises_keeps_nothing(domain, tmp_path, tiny, folder):  # noqa: F811
    with playing(domain, tmp_path, folder) as (node, player):
        assert player.wait(60) == 0
        context = rclpy.Context()
        rclpy.init(context=context, domain_id=domain)
        try:
            caller, executor = rclpy.create_node("caller", context=context), SingleThreadedExecutor(context=context)
            executor.add_node(caller)
            client = caller.create_client(SetBool, "/frontend/set_localization")
            assert client.wait_for_service(10)
            future = client.call_async(SetBool.Request(data=True))
            executor.spin_until_future_complete(future, 20)
            assert future.result().success, future.result().message
            executor.shutdown()
        finally:
            context.try_shutdown()
        with pytest.raises(ConfigError, match="/frontend localises, and keeps nothing of its keyframes"):
            listen("/frontend", 1, 2.0)
        assert node.stop() == 0


def test_where_no_front_end_is_up_that_is_said_within_seconds(domain):
    start = time.monotonic()
    with pytest.raises(ConfigError, match=r"--node: nothing publishes /frontend/pairs; no front-end is up: start it"):
        listen("/frontend", 8, 60.0, wait_s=1.0)
    assert time.monotonic() - start < 30
    with pytest.raises(ConfigError, match=r"--node //a b: is no name of a node"):
        listen("//a b", 8, 60.0)


class Pretender:
    """A node that publishes what a front-end named ``name`` would."""

    def __init__(self, domain, name):
        self.context = rclpy.Context()
        rclpy.init(context=self.context, domain_id=domain)
        self.node = rclpy.create_node(name, context=self.context)
        self.pairs = self.node.create_publisher(PointCloud2, "~/pairs", RELIABLE)
        self.status = self.node.create_publisher(DiagnosticArray, "/diagnostics", RELIABLE)
        self.name = name
        self.executor = SingleThreadedExecutor(context=self.context)
        self.executor.add_node(self.node)

    def say(self, part="map", **values):
        pairs = [KeyValue(key=k, value=str(v)) for k, v in values.items()]
        self.status.publish(DiagnosticArray(status=[DiagnosticStatus(name=f"{self.name}: {part}", values=pairs)]))

    def close(self):
        self.executor.shutdown()
        self.node.destroy_node()
        self.context.try_shutdown()


@pytest.fixture
def pretender(domain):
    made = Pretender(domain, "front")
    yield made
    made.close()


@pytest.fixture
def collector(domain, pretender):
    """A collector that listens to the pretender, in this thread."""
    made = CollectorNode("/front", context=pretender.context)
    pretender.executor.add_node(made)
    spin(pretender, lambda: pretender.pairs.get_subscription_count() and pretender.status.get_subscription_count())
    yield made
    made.destroy_node()


def spin(pretender, condition, timeout=20):
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end
        pretender.executor.spin_once(timeout_sec=0.02)


def table(*rows) -> np.ndarray:
    """(kf_id, ref, kind, status, matches) rows of ``~/pairs``."""
    made = np.zeros(len(rows), codecs.PAIRS)
    for row, (kf_id, ref, kind, status, count) in zip(made, rows):
        row["kf_id"], row["ref_kf_id"], row["kind"], row["status"] = kf_id, ref, kind, status
        row["num_matches"] = row["num_inliers"] = count
        row["ref_sec"], row["ref_nanosec"] = divmod(START_NS - 1, 10**9)
    return made


def test_who_has_another_name_or_tells_nothing_of_its_map_is_named(domain, pretender):
    with pytest.raises(ConfigError, match=r"nothing publishes /frontend/pairs; there are /front$"):
        listen("/frontend", 8, 60.0, wait_s=5.0)
    with pytest.raises(ConfigError, match="publishes pairs, but no diagnostics came"):
        listen("/front", 8, 60.0, wait_s=5.0)


def test_a_node_that_is_being_configured_has_more_time(domain, pretender):
    """It says so once a second, and publishes no pairs meanwhile."""
    timer = pretender.node.create_timer(0.1, lambda: pretender.say(part="models", state="configuring"))
    pretender.node.destroy_publisher(pretender.pairs)
    thread = threading.Thread(target=pretender.executor.spin, daemon=True)
    thread.start()
    start = time.monotonic()
    with pytest.raises(ConfigError, match="/front is still being configured: try again when it is active"):
        listen("/front", 8, 8.0, wait_s=3.0)
    assert time.monotonic() - start > 8.0
    pretender.node.destroy_timer(timer)


def test_what_is_published_is_read_and_nonsense_is_left_out(pretender, collector):
    cloud = to_cloud(table((7, 2, PairKind.LOOP, Status.AMBIGUOUS, 40)), header(START_NS, "cam"))
    pretender.pairs.publish(cloud)
    spin(pretender, lambda: collector.pairs)
    (pair,) = collector.pairs
    assert (pair.kf_id, pair.ref_kf_id, pair.stamp_ns, pair.ref_stamp_ns) == (7, 2, START_NS, START_NS - 1)
    assert (pair.kind, pair.status, pair.matches, pair.worth) == (PairKind.LOOP, Status.AMBIGUOUS, 40, "revisit")
    pretender.pairs.publish(to_cloud(table((7, 2, 9, 0, 40)), header(START_NS, "cam")))
    pretender.say(part="frames", received="many")
    spin(pretender, lambda: len(collector.rejected) == 2)
    assert len(collector.pairs) == 1 and "unknown kind" in collector.rejected["/front/pairs"]
    assert "received must be a count" in collector.rejected["/diagnostics"]


def test_of_a_node_that_begins_another_map_the_pairs_of_that_count(tmp_path, pretender, collector):
    for path in ("a.vmap", "b.vmap"):
        (tmp_path / path).touch()
    pretender.say(path=tmp_path / "a.vmap", mode="mapping")
    pretender.say(part="model fine", role="matcher")
    pretender.say(part="match", plugin="lighterglue")
    pretender.pairs.publish(to_cloud(table((7, 2, PairKind.LOOP, Status.OK, 40)), header(START_NS, "cam")))
    spin(pretender, lambda: collector.pairs and "match" in collector.diagnostics.parts)
    found = collector.heard([])
    assert (found.map_path, found.matcher, found.notes) == (tmp_path / "a.vmap", "fine", ())
    assert found.plugins == {"matcher.name": "lighterglue"}
    pretender.say(path=tmp_path / "b.vmap", mode="mapping")
    spin(pretender, lambda: not collector.pairs)
    assert collector.heard(["x"]).map_path == tmp_path / "b.vmap"


def test_a_map_that_cannot_be_read_here_is_told(tmp_path, pretender, collector):
    pretender.say(path="", mode="mapping")
    spin(pretender, lambda: "map" in collector.diagnostics.parts)
    with pytest.raises(ConfigError, match="/front has its map in memory only"):
        collector.heard([])
    pretender.say(path=tmp_path / "gone.vmap", mode="mapping")
    spin(pretender, lambda: collector.diagnostics.parts["map"]["path"])
    with pytest.raises(MapError, match=r"gone.vmap, the map of /front, is not on this machine"):
        collector.heard([])
