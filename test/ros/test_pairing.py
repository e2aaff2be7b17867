"""Pairing, slot and workers, in process and without time passing."""

import sys
import threading
from types import SimpleNamespace

import pytest

pytest.importorskip("rclpy")

from geometry_msgs.msg import PoseStamped

from vslam_features.errors import PluginError
from vslam_features.ros.messages import header, stamp_of
from vslam_features.ros.pairing import Input, Pairing
from vslam_features.ros.pipeline import Pipeline
from vslam_features.ros.poses import ApproximatePoses, InterpolatedPoses
from vslam_features.ros.slot import Slot
from vslam_features.ros.statistics import Statistics
from vslam_features.ros.workers import Worker

MS = 1_000_000


class Bench:
    """A pairing with a clock that the test moves."""

    def __init__(self, poses=None):
        self.now, self.out = 0.0, []
        self.pairing = Pairing(self.out.append, poses, wait_s=0.5, clock=lambda: self.now)

    def image(self, ms):
        self.pairing.add_image(ms * MS, f"image {ms}")

    def info(self, ms):
        self.pairing.add_info(ms * MS, f"info {ms}")

    def pose(self, ms, x):
        self.pairing.add_pose(ms * MS, pose(ms, x))

    def wait(self, seconds):
        self.now += seconds
        self.pairing.release()

    @property
    def pairs(self):
        return [(item.image, item.info) for item in self.out]


def pose(ms, x=0.0):
    message = PoseStamped(header=header(ms * MS, "odom"))
    message.pose.position.x, message.pose.orientation.w = float(x), 1.0
    return message


@pytest.mark.parametrize("info_first", [True, False])
def test_exact_stamps_pair_in_either_order(info_first):
    b = Bench()
    for ms in (0, 100, 200):
        for add in (b.info, b.image) if info_first else (b.image, b.info):
            add(ms)
    assert b.pairs == [(f"image {ms}", f"info {ms}") for ms in (0, 100, 200)]


def test_without_camera_info_one_image_waits_once():
    b = Bench()
    b.image(0)
    assert not b.out
    b.wait(0.5)
    b.image(100)
    assert b.pairs == [("image 0", None), ("image 100", None)]
    b.info(250)  # at other stamps: the latest is taken, and nothing waits
    b.image(300)
    assert b.pairs[-1] == ("image 300", "info 250")
    b.info(300)  # late, but exact: it pays to wait again
    b.image(400)
    assert len(b.out) == 3
    b.info(400)
    assert b.pairs[-1] == ("image 400", "info 400")
    assert (b.pairing.counts.info_missing, b.pairing.counts.info_inexact) == (2, 1)


def test_pose_is_interpolated_and_waited_for():
    b = Bench(InterpolatedPoses())
    b.info(100), b.pose(50, 0.0), b.image(100)
    assert not b.out
    b.pose(150, 1.0)
    assert b.out[0].pose.t[0] == pytest.approx(0.5)


def test_late_poses_cost_a_wait_not_the_image():
    b = Bench(InterpolatedPoses())
    b.info(0), b.image(0)
    b.wait(0.4)
    assert not b.out
    b.wait(0.1)
    assert b.out[0].pose is None and b.pairing.counts.pose_missing == 1


@pytest.mark.parametrize(("late", "kept_waiting"), [(700, False), (300, True)])
def test_late_poses_and_calibration_hold_back_no_queue(late, kept_waiting):
    """At 10 Hz: later than the wait they cost one delay, then images go on at once and one by one."""
    b, latency = Bench(InterpolatedPoses()), []
    for now in range(0, 4000, 50):
        b.wait(now / 1e3 - b.now)
        if now % 100 == 0:
            b.image(now)
        if now >= late and (now - late) % 100 == 0:
            b.pose(now - late, 1.0), b.info(now - late)
        latency += [now - item.stamp_ns // MS for item in b.out[len(latency) :]]
    assert latency[6:] == [late if kept_waiting else 0] * len(latency[6:])
    assert (b.pairing.counts.pose_missing == 0) == kept_waiting


def test_waiting_begins_again_with_a_pose_in_time():
    b = Bench(InterpolatedPoses())
    b.info(0), b.image(0)
    b.wait(0.6)
    b.info(600), b.image(600)
    assert len(b.out) == 2  # nothing waits any more
    b.wait(0.1)
    b.pose(600, 1.0)
    b.info(700), b.image(700)
    assert len(b.out) == 2
    b.pose(700, 2.0)
    assert [item.pose and item.pose.t[0] for item in b.out] == [None, None, 2.0]


@pytest.mark.parametrize("pose_first", [True, False])
def test_after_a_jump_back_poses_are_of_the_new_session(pose_first):
    b = Bench(InterpolatedPoses())
    for session in range(3):
        for ms in range(0, 2000, 200):
            b.info(ms)
            for add in (b.pose, b.image) if pose_first else (b.image, b.pose):
                add(ms) if add == b.image else add(ms, 100 * session + ms)
            b.wait(0.05)
    assert [(item.session, item.pose.t[0]) for item in b.out] == [
        (s, 100 * s + ms) for s in range(3) for ms in range(0, 2000, 200)
    ]
    assert b.pairing.pose_resets == 2


def test_a_reset_keeps_the_poses_that_are_there():
    b = Bench(InterpolatedPoses())
    b.pose(0, 0.0)
    b.pairing.restart()
    b.info(50), b.image(50), b.pose(100, 1.0)
    assert b.out[0].pose.t[0] == pytest.approx(0.5)


def test_a_jump_back_begins_a_session_and_bad_order_does_not():
    b = Bench()
    for ms in (0, 1000, 900, 1000, 2000, 0, 1000):
        b.info(ms), b.image(ms), b.wait(0.05)
    assert [item.session for item in b.out] == [0, 0, 0, 1, 1]
    assert (b.pairing.counts.out_of_order, b.pairing.counts.jumps, b.pairing.counts.received) == (2, 1, 7)


def test_what_waits_at_a_jump_goes_on_with_its_session():
    b = Bench()
    b.image(5000), b.image(0)
    assert not b.out and b.pairing.pending == 2
    b.image(100)
    assert [(item.image, item.session) for item in b.out] == [("image 5000", 0)]
    b.info(0), b.info(100)
    assert (b.out[1].image, b.out[1].session, b.out[1].info) == ("image 0", 1, "info 0")
    assert len(b.out) == 2  # else the second would take the place of the first in the slot
    b.wait(0.05)
    assert (b.out[2].image, b.out[2].session, b.out[2].info) == ("image 100", 1, "info 100")
    assert b.pairing.counts.together == 0


@pytest.mark.parametrize("wrong", [0, 50_000, 10**9])
def test_one_wrong_stamp_costs_one_image(wrong):
    b = Bench()
    stamps = [100_000, 101_000, wrong, 102_000, 103_000, wrong, wrong, 104_000]
    for ms in stamps:
        b.info(ms), b.image(ms)
        c = b.pairing.counts
        assert c.received == c.out_of_order + b.pairing.pending + len(b.out)
    assert [(item.image, item.session) for item in b.out] == [(f"image {ms}", 0) for ms in stamps if ms != wrong]
    assert (c.out_of_order, c.jumps, c.gaps, b.pairing.pending) == (3, 0, 0, 0)


@pytest.mark.parametrize("count", [2, 3, 20])
def test_a_bag_played_again_begins_a_session_and_loses_nothing(count):
    b = Bench()
    stamps = [1000 * i for i in range(count)]
    for _ in range(3):
        for ms in stamps:
            b.info(ms), b.image(ms), b.wait(0.05)
    assert [(item.image, item.session) for item in b.out] == [(f"image {ms}", s) for s in range(3) for ms in stamps]
    assert (b.pairing.counts.jumps, b.pairing.counts.out_of_order) == (2, 0)


def test_a_held_image_is_dropped_where_nothing_follows():
    for end in ("flush", "restart"):
        b = Bench()
        b.info(1000), b.image(1000), b.image(0)
        getattr(b.pairing, end)()
        assert (len(b.out), b.pairing.pending, b.pairing.counts.out_of_order) == (1, 0, 1)


def test_an_error_in_the_poses_costs_no_image():
    poses = InterpolatedPoses()
    poses.add_image = lambda *_: 1 / 0
    b = Bench(poses)
    b.info(0), b.image(0), b.wait(0.5)
    assert len(b.out) == 1 and b.pairing.counts.pose_rejected == 1


def test_the_latest_calibration_is_one():
    b = Bench()
    for ms, k in ((0, 0.0), (100, 300.0), (200, 0.0)):
        b.pairing.add_info(ms * MS, SimpleNamespace(k=[k], ms=ms))
        b.image(ms)
    b.image(300), b.wait(0.5)
    assert [item.info.ms for item in b.out] == [0, 100, 200, 100]


def test_queues_are_bounded():
    b = Bench()
    for i in range(1000):
        b.image(10 * i)
    assert b.pairing.pending <= 32 and len(b.out) + b.pairing.pending == 1000
    for i in range(1000):
        b.info(10 * i + 5)
    assert len(b.pairing._infos) <= 64


def test_missing_images_are_estimated_from_the_period():
    b = Bench()
    for i in (0, 1, 2, 3, 4, 5, 6, 9, 10, 11, 13):  # 7, 8 and 12 are missing
        b.image(33 * i)
    assert b.pairing.counts.missing == 3
    b.pairing.forget_gap()
    b.image(10_000)
    assert b.pairing.counts.missing == 3
    b.image(100_000_000_000), b.image(100_000_000_033)  # another clock is no count of images
    assert (b.pairing.counts.missing, b.pairing.counts.gaps) == (3, 1)
    assert b.pairing.counts.last_gap_s == pytest.approx(99_999_990)


# -- sync: approximate ---------------------------------------------------------------------


def test_missing_message_filters_names_the_package(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "message_filters", None)
    with pytest.raises(PluginError, match="ros-.ROS_DISTRO-message-filters"):
        ApproximatePoses(0.02)


def image(ms):
    return SimpleNamespace(header=header(ms * MS, "cam"))


def test_approximate_stamps_pair_also_after_jumps_and_faults():
    pytest.importorskip("message_filters")
    out, now = [], [0.0]
    poses = ApproximatePoses(0.02, queue_size=8)
    pairing = Pairing(out.append, poses, clock=lambda: now[0])

    def play(offset):
        for ms in range(0, 2000, 100):
            m, p = image(ms), pose(ms + offset, ms)
            pairing.add_info(stamp_of(m), "info"), pairing.add_image(stamp_of(m), m), pairing.add_pose(stamp_of(p), p)

    for _ in range(3):  # the plain synchroniser never matches again after the first jump back
        out.clear()
        play(5)
        assert [item.pose.t[0] for item in out] == list(range(0, 2000, 100))
    out.clear()
    play(50)  # out of reach: every image goes on without a pose
    now[0] += 1
    pairing.release()
    assert len(out) == 20 and all(item.pose is None for item in out)

    def broken(*_):
        raise ValueError("inside")

    poses._matched, matched = broken, poses._matched
    poses._renew()
    with pytest.raises(ValueError):
        play(5)
    poses._matched = matched
    poses._renew()
    out.clear()
    play(5)
    assert sum(item.pose is not None for item in out) >= 18

    resets = pairing.pose_resets
    m = image(2000)
    pairing.add_info(stamp_of(m), "info"), pairing.add_image(stamp_of(m), m)
    for ms in (1895, 2000):  # a pose a little older than the last is disorder: what waits keeps its place
        pairing.add_pose(ms * MS, pose(ms, ms))
    assert out[-1].pose.t[0] == 2000 and pairing.pose_resets == resets


# -- slot and workers ----------------------------------------------------------------------


def test_slot_keeps_the_newest_and_counts():
    slot = Slot()
    for i in range(5):
        slot.put(i)
    assert slot.take() == 4
    slot.put(5), slot.put("command", counted=False)
    c = slot.counts
    assert (c.received, c.processed, c.dropped, c.waiting) == (6, 0, 5, 1)
    slot.done()
    assert slot.take() == "command"
    slot.done(), slot.close()
    c = slot.counts
    assert slot.take() is None and (c.received, c.processed, c.dropped, c.waiting) == (6, 1, 5, 0)


def test_worker_survives_exceptions_and_stops():
    slot, done, errors = Slot(10), [], []

    def work(item):
        if item == 1:
            raise ValueError("one")
        if item == 2:
            sys.exit("two")
        done.append(item)

    worker = Worker("test", slot, work, errors.append, niceness=1)
    worker.start()
    for i in range(4):
        slot.put(i)
    assert slot.wait_idle()
    worker.stop(), worker.stop()
    assert done == [0, 3] and [str(e) for e in errors] == ["one", "two"]
    assert slot.counts.processed == 4
    worker.start()
    slot.put(9)
    slot.wait_idle()
    worker.stop()
    assert done[-1] == 9


def test_counts_balance_under_load():
    slot, stop = Slot(), threading.Event()
    worker = Worker("test", slot, lambda item: None, lambda error: None)
    worker.start()
    bad = []

    def watch():
        while not stop.is_set():
            c = slot.counts
            if c.received != c.processed + c.dropped + c.waiting:
                bad.append(c)

    watcher = threading.Thread(target=watch)
    watcher.start()
    for i in range(5000):
        slot.put(i)
    slot.wait_idle()
    stop.set()
    watcher.join()
    worker.stop()
    assert not bad and slot.counts.received == 5000


def test_an_image_that_waits_for_a_reset_when_all_stops_joins_no_old_map():
    tracked, resets, searching, go_on = [], [], threading.Event(), threading.Event()

    def close_loops(result):
        searching.set()
        go_on.wait(5)

    frontend = SimpleNamespace(
        config=SimpleNamespace(loops=SimpleNamespace(enabled=True)),
        track=lambda frame: SimpleNamespace(keyframe=frame),
        close_loops=close_loops,
    )
    statistics = SimpleNamespace(
        latency=lambda *_: None, tracked=lambda _: None, loops=lambda _: None, reset=Statistics().reset
    )
    pipeline = Pipeline(
        frontend,
        lambda item: item.image,
        statistics,
        on_tracked=lambda result: tracked.append(result.keyframe),
        on_loops=lambda result: None,
        restart=lambda forget: bool(resets.append(forget)) or True,
    )
    pipeline.start()
    pipeline.put(Input(0, 1, "old"))
    assert searching.wait(5)
    pipeline.put(Input(1, 2, "waits for the loops of the old one"))
    while pipeline.frames._items:  # until it is taken
        threading.Event().wait(0.001)
    threading.Timer(0.1, go_on.set).start()
    pipeline.stop()
    assert tracked == ["old"] and not resets
    assert (pipeline.frames.counts.received, pipeline.frames.counts.processed) == (2, 2)
    pipeline.start()
    pipeline.put(Input(1, 3, "new"))
    assert pipeline.frames.wait_idle()
    pipeline.stop()
    assert tracked == ["old", "new"] and resets == [False]
    pipeline.start()
    for session, reset in ((2, 2), (3, 2)):  # the first may be dropped: the second tells of the reset as well
        pipeline.put(Input(session, 4, "newer", reset=reset))
    assert pipeline.frames.wait_idle()
    pipeline.stop()
    assert any(resets[1:]) and len(resets) in (2, 3)
