"""How maps are exchanged between frames, and what is told of them; in process."""

import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("rclpy")

from visualization_msgs.msg import Marker

from vslam_features.ros.diagnostic_report import ERROR, OK, WARN
from vslam_features.ros.map_diagnostics import MapDiagnostics
from vslam_features.ros.markers import Markers
from vslam_features.ros.pairing import Input, Pairing
from vslam_features.ros.pipeline import Pipeline
from vslam_features.ros.slot import Counts, Slot
from vslam_features.ros.statistics import Statistics
from vslam_features.running_map import MapStatus
from vslam_features.types import Loops, Matches, PairKind, PairResult, Pose, Status


def test_a_slot_is_still_when_nothing_is_at_work():
    slot = Slot(3)
    assert slot.wait_still(0)
    for item in "abc":
        slot.put(item)
    slot.take()
    slot.clear()
    assert not slot.wait_still(0) and (slot.counts.dropped, slot.counts.waiting) == (2, 1)
    threading.Timer(0.02, slot.done).start()
    assert slot.wait_still(5)
    slot.close()
    assert slot.wait_still(0) and slot.counts.processed == 1


class Bench:
    """A pipeline that notes who uses the front-end, fed faster than it works."""

    def __init__(self):
        self.users, self.together, self.frames = set(), [], 0
        frontend = SimpleNamespace(
            config=SimpleNamespace(loops=SimpleNamespace(enabled=True)),
            track=lambda frame: self._use("track", 0.004, SimpleNamespace(keyframe=frame)),
            close_loops=lambda tracked: self._use("loops", 0.003, tracked),
        )
        nothing = SimpleNamespace(latency=lambda *_: None, tracked=lambda _: None, loops=lambda _: None)
        self.pipeline = Pipeline(
            frontend, lambda item: item.stamp_ns, nothing, lambda _: None, lambda _: None, lambda forget: True
        )

    def _use(self, name, seconds, result):
        self.users.add(name)
        time.sleep(seconds)
        self.frames += name == "track"
        if "map" in self.users:
            self.together.append(name)
        self.users.discard(name)
        return result


def test_a_map_is_exchanged_while_nobody_uses_the_front_end():
    """Also where the next image always waits already: the exchange comes after the frame at hand."""
    bench, stop = Bench(), threading.Event()
    pipeline = bench.pipeline
    pipeline.start()

    def feed():
        i = 0
        while not stop.wait(0.0005):
            i += 1
            pipeline.put(Input(0, i, "image"))

    feeder = threading.Thread(target=feed)
    feeder.start()
    while bench.frames < 5:
        time.sleep(0.001)
    for _ in range(5):
        before = bench.frames
        with pipeline.between_frames():
            assert bench.frames <= before + 20  # a busy machine may take its time to begin
            bench.users.add("map")
            at = bench.frames
            time.sleep(0.02)
            assert bench.frames == at and bench.users == {"map"}
            bench.users.discard("map")
    stop.set()
    feeder.join()
    pipeline.stop()
    counts = pipeline.frames.counts
    assert not bench.together and counts.processed == bench.frames
    assert counts.received == counts.processed + counts.dropped and not counts.waiting
    with pipeline.between_frames():  # stopped
        pass


def test_an_exchange_waits_only_a_moment_for_loop_closure():
    bench, slow = Bench(), threading.Event()
    bench.pipeline.frontend.close_loops = lambda tracked: slow.wait(0.6)
    bench.pipeline.start()
    for i in range(6):
        bench.pipeline.put(Input(0, i, "image"))
        assert bench.pipeline.frames.wait_idle()
    with bench.pipeline.between_frames():
        counts = bench.pipeline.keyframes.counts
        assert counts.waiting == 0 and counts.received == 6 and counts.dropped >= 3
    slow.set()
    bench.pipeline.stop()


def test_stopping_during_an_exchange_ends_when_that_is_over():
    bench = Bench()
    bench.pipeline.start()
    with bench.pipeline.between_frames():
        bench.pipeline.put(Input(0, 1, "image"))
        stopper = threading.Thread(target=bench.pipeline.stop)
        stopper.start()
        time.sleep(0.02)
    stopper.join(5)
    assert not stopper.is_alive() and not bench.together


def test_a_reset_is_told_by_any_later_input():
    emitted = []
    pairing = Pairing(emitted.append)
    pairing.restart()
    pairing.reset()
    pairing.restart()
    pairing.add_image(10, "image")
    pairing.flush()
    assert [(item.session, item.reset) for item in emitted] == [(2, 2), (3, 2)]


# -- what is told ------------------------------------------------------------------------------


def told(status, dropped=0, diagnostics=None):
    queue = Counts(10, 10 - dropped, dropped, 0)
    message = (diagnostics or MapDiagnostics()).report(status, Statistics(), queue).message("frontend")
    return message.level, message.message, {v.key: v.value for v in message.values}


def test_the_map_in_the_diagnostics(tmp_path, monkeypatch):
    path = str(tmp_path / "a.vmap")
    level, text, values = told(MapStatus(path, "mapping", 7, 3, 5, 2, 1_500_000, 2_500_000))
    assert (level, text) == (OK, "growing")
    wanted = {"path": path, "mode": "mapping", "keyframes": "7", "first_id": "3", "stored": "5", "waiting": "2"}
    wanted |= {"file_megabytes": "1.500", "megabytes": "2.500", "last_save": "", "last_save_age_s": "", "problem": ""}
    assert values.items() >= wanted.items() and float(values["disk_free_megabytes"]) > 0
    assert told(MapStatus(path))[:2] == (OK, "empty")
    assert told(MapStatus(path, "localization", 7))[:2] == (OK, "localising")
    assert told(MapStatus(warning="the map is in memory only"))[:2] == (WARN, "the map is in memory only")
    assert told(MapStatus(path, problem="disk is full"))[:2] == (ERROR, "keyframes cannot be stored: disk is full")
    assert told(MapStatus("/no/such/folder/a.vmap"))[2]["disk_free_megabytes"] == ""
    free = SimpleNamespace(free=120_000_000)
    monkeypatch.setattr("vslam_features.ros.map_diagnostics.shutil.disk_usage", lambda folder: free)
    assert told(MapStatus(path))[:2] == (WARN, f"120 MB free on the disk of {path}")
    assert told(MapStatus(path, "localization"))[0] == OK


def test_skipped_keyframes_are_told_once():
    diagnostics = MapDiagnostics()
    assert told(MapStatus(), 4, diagnostics)[1].startswith("4 keyframes skipped by loop closure")
    assert told(MapStatus(), 4, diagnostics)[:2] == (OK, "empty")


def pair(kind, status=Status.OK, inliers=20):
    index = np.arange(20, dtype=np.int32)
    matches = Matches(np.stack([index, index], 1), np.ones(20, np.float32), index < inliers, status)
    return PairResult(kind, 5, 1, 0, matches)


def test_relocalisations_are_counted_like_loops():
    statistics = Statistics()
    empty = PairResult(PairKind.RELOCALISATION, 5, 2, 0, Matches.empty(Status.NO_MATCHES))
    statistics.loops(Loops(None, (), (pair(PairKind.RELOCALISATION), empty, pair(PairKind.LOOP, Status.AMBIGUOUS))))
    assert statistics.pair_statuses("verify") == {Status.OK: 1, Status.NO_MATCHES: 1, Status.AMBIGUOUS: 1}
    assert statistics.zero_match_ratio("verify") == pytest.approx(1 / 3)
    report = MapDiagnostics().report(MapStatus(), statistics, Counts(0, 0, 0, 0)).message("frontend")
    values = {v.key: v.value for v in report.values}
    assert (values["loops_verified"], values["loops_ambiguous"], values["relocalisations_verified"]) == ("0", "1", "1")


@pytest.mark.parametrize(("session", "lines"), [(1, 1), (0, 0)])
def test_no_line_leads_to_where_an_earlier_session_was(session, lines):
    def keyframe(kf_id, session):
        return SimpleNamespace(stamp_ns=kf_id, session=session, pose=Pose(np.eye(3), np.array([kf_id, 0.0, 0]), "odom"))

    markers = Markers()
    markers.add_keyframe(keyframe(5, 1))
    result = Loops(keyframe(5, 1), (), (pair(PairKind.LOOP),))
    markers.add_loops(result, lambda kf_id: keyframe(kf_id, session))
    message = markers.message()
    assert sum(m.ns == "loops" and m.type == Marker.LINE_LIST for m in message.markers) == lines
