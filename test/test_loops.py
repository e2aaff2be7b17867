"""LoopJudge: which verified pairs are loops, with pairs made up here."""

from dataclasses import replace

import numpy as np
import pytest
from helpers import SECOND, T0, keyframe, matches, pose, rotation

from vslam_features.config import LoopsConfig
from vslam_features.loops import LoopJudge
from vslam_features.maps.keyframe_map import KeyframeMap
from vslam_features.maps.memory import MemoryStore
from vslam_features.odometry_gate import OdometryGate
from vslam_features.types import Candidate, PairKind, PairResult, Pose, Status


class Walk:
    """A map of keyframes and a judge over it, fed with made-up pairs."""

    def __init__(
        self, n: int = 100, poses=None, camera_poses=True, keypoints=1, sessions=(), read_only=False, loops=(), **config
    ):
        """``sessions``: lengths of those before the running one, which has the rest of the ``n`` keyframes."""
        self.config = LoopsConfig(**config)
        store = MemoryStore()
        kept = [keyframe(T0 + i * SECOND, poses(i) if poses else None, n=keypoints) for i in range(n)]
        for count in sessions:
            self.map = KeyframeMap(store)
            for one in kept[:count]:
                self.map.finish(self.map.add(one).id)
            kept = kept[count:]
        store.read_only = read_only
        self.map = KeyframeMap(store, keep=64)  # a localisation forgets older ones
        for one in kept:
            self.map.add(one)
        gate = OdometryGate(self.config, self.map, camera_poses)
        self.judge = LoopJudge(self.config, self.map, gate, loops)

    def pair(self, kf: int, ref: int, inliers: int = 50, status: Status = Status.OK, **fields) -> PairResult:
        m = matches(inliers, status)
        for name, value in fields.items():
            object.__setattr__(m, name, value)
        return PairResult(PairKind.LOOP, kf, ref, self.map[ref].stamp_ns, m)

    def decide(self, kf: int, *refs, **fields) -> list[str]:
        """Labels of the judged pairs; a ref is an id or (id, inliers)."""
        pairs = [self.pair(kf, *(r if isinstance(r, tuple) else (r,)), **fields) for r in refs]
        return [p.matches.status.label for p in self.judge.judge(self.map[kf], pairs)]

    def gate(self, kf: int, *refs) -> tuple[list[int], list[int]]:
        candidates = [Candidate(kf, r, self.map[r].stamp_ns, 0.9, np.nan, i) for i, r in enumerate(refs)]
        return tuple([c.ref_kf_id for c in part] for part in self.judge.gate(self.map[kf], candidates))


def circle(i):
    """Around a circle of 60 m in 60 keyframes."""
    a = 2 * np.pi * i / 60
    return pose(60 / (2 * np.pi) * np.cos(a), 60 / (2 * np.pi) * np.sin(a), 6 * i)


# -- consensus ---------------------------------------------------------------------------------


def test_a_single_keyframe_confirms_nothing_without_poses():
    walk = Walk()
    assert walk.decide(60, 5, 6, 7, 8, 9) == ["ambiguous"] * 5
    assert walk.decide(61, 6) == ["ok"]


def test_keyframes_that_disagree_confirm_nothing():
    walk = Walk()
    for kf, ref in ((60, 5), (61, 40), (62, 20), (63, 5)):
        assert walk.decide(kf, ref) == ["ambiguous"]
    assert walk.decide(64, 6) == ["ok"]


@pytest.mark.parametrize("consensus, window", [(1, 1), (2, 2), (2, 3), (3, 3), (3, 5)])
def test_as_many_agreeing_keyframes_as_asked_for(consensus, window):
    walk = Walk(consensus=consensus, consensus_window=window)
    labels = [walk.decide(60 + i, 5 + i)[0] for i in range(window)]
    assert labels == ["ambiguous"] * (consensus - 1) + ["ok"] * (window - consensus + 1)


def test_the_window_is_of_consecutive_keyframes():
    walk = Walk(consensus=2, consensus_window=3)
    assert walk.decide(60, 5) == ["ambiguous"]
    assert walk.decide(61) == walk.decide(62) == []
    assert walk.decide(63, 5) == ["ambiguous"]
    assert walk.decide(64) == []
    assert walk.decide(65, 5) == ["ok"]


def test_what_is_not_verified_counts_for_nothing():
    walk = Walk(min_inliers=20)
    for status in (Status.DEGENERATE, Status.TOO_FEW_INLIERS, Status.NON_FINITE, Status.BACKEND_ERROR):
        assert walk.decide(60, 5, status=status) == [status.label]
    assert walk.decide(61, (5, 19)) == ["too_few_inliers"]
    assert walk.decide(62, (5, 20)) == ["ambiguous"]


# -- look-alike places -------------------------------------------------------------------------


@pytest.mark.parametrize("inliers, expected", [(29, "ambiguous"), (30, "ok")])
def test_inliers_on_a_small_share_of_the_keypoints_confirm_nothing_without_poses(inliers, expected):
    walk = Walk(keypoints=200, min_inlier_share=0.15, consensus=1)
    judged = walk.judge.judge(walk.map[60], [walk.pair(60, 5, inliers)])[0].matches
    assert judged.status.label == expected and ("14.5% of the keypoints" in judged.detail) == (expected != "ok")


def test_with_poses_odometry_tells_look_alikes_apart():
    walk = Walk(keypoints=200, min_inlier_share=0.15, poses=circle)
    assert walk.decide(61, (1, 20)) == ["ok"]


@pytest.mark.parametrize("rival, expected", [(41, "ambiguous"), (40, "ambiguous"), (39, "ok"), (20, "ok")])
def test_a_different_place_that_verifies_about_as_well(rival, expected):
    walk = Walk(ambiguity_ratio=0.8)
    walk.decide(60, 5)
    labels = walk.decide(61, (5, 50), (40, rival), (6, 45))
    assert labels == [expected, "ambiguous", expected]


def test_the_detail_names_the_rival():
    walk = Walk()
    judged = walk.judge.judge(walk.map[60], [walk.pair(60, 5, 50), walk.pair(60, 40, 48)])
    assert "keyframe 40" in judged[0].matches.detail and "keyframe 5" in judged[1].matches.detail
    assert judged[0].matches.num_inliers == 50, "the matches themselves stay"


def test_poses_do_not_excuse_look_alikes():
    walk = Walk(poses=lambda i: pose(3.5 * i))
    assert walk.decide(60, (30, 50), (5, 50)) == ["ambiguous", "ambiguous"]


# -- the same place ----------------------------------------------------------------------------


def test_near_in_sequence_is_the_same_place():
    walk = Walk(place_radius=10)
    assert walk.judge.same_place(5, 15) and walk.judge.same_place(15, 5) and not walk.judge.same_place(5, 16)


def test_a_confirmed_loop_joins_its_ends():
    """After one lap is confirmed, the first and the second lap are one place for the third."""
    walk = Walk(place_radius=3)
    assert not walk.judge.same_place(5, 60)
    walk.decide(60, 5)
    assert not walk.judge.same_place(5, 60), "ambiguous joins nothing"
    walk.decide(61, 6)
    assert walk.judge.same_place(6, 61) and walk.judge.same_place(63, 4)
    assert not walk.judge.same_place(6, 65) and not walk.judge.same_place(2, 61)
    walk.decide(90, 5)
    assert walk.decide(91, (6, 50), (61, 49)) == ["ok", "ok"]


def test_with_poses_near_in_space_is_the_same_place():
    walk = Walk(poses=circle)
    assert walk.judge.same_place(2, 62) and not walk.judge.same_place(2, 32)
    assert walk.decide(90, (30, 50), (31, 50)) == ["ok", "ok"]


# -- odometry ----------------------------------------------------------------------------------


def test_odometry_gates_what_is_impossible():
    walk = Walk(poses=circle, pose_gate_m=3.0, pose_gate_drift=0.05)
    assert walk.gate(62, 2, 32, 4, 20) == ([2, 4], [32, 20])
    line = Walk(poses=lambda i: pose(1.0 * i), pose_gate_m=3.0, pose_gate_drift=0.05)
    # 50 keyframes on: 50 m away, and 3 + 0.05 x 50 allowed
    assert line.gate(60, 10, 55, 57, 58) == ([57, 58], [10, 55])
    assert Walk(poses=circle, pose_gate_m=0.0).gate(62, 2, 32) == ([2, 32], [])
    assert Walk().gate(62, 2, 32) == ([2, 32], [])


def test_the_gate_opens_with_the_distance_travelled():
    walk = Walk(poses=lambda i: pose(5.0 * (i % 2), 0), pose_gate_m=3.0, pose_gate_drift=0.05)  # 5 m to and fro
    assert walk.gate(99, 90, 98) == ([90], [98])  # 5 m off: allowed after 45 m (5.25), not after 5 m (3.25)


def test_with_poses_one_keyframe_is_enough_but_not_with_the_gate_off():
    assert Walk(poses=circle).decide(62, 2) == ["ok"]
    assert Walk(poses=circle, pose_gate_m=0.0).decide(62, 2) == ["ambiguous"]


def test_a_pose_of_another_frame_is_no_pose():
    walk = Walk(poses=lambda i: pose(100.0 * i, frame_id="map" if i < 50 else "odom"))
    assert walk.gate(62, 2, 60) == ([2], [60])
    assert walk.decide(62, 2) == ["ambiguous"]


def loop_at(R, t, visual: Pose, camera_poses=True, **config):
    """Keyframe 60 at (R, t) in keyframe 0's camera, with a visual relative pose."""
    start = Pose(rotation((20, 30, 40)), np.array([5.0, 6, 7]), "map")
    end = Pose(start.R @ R, start.t + start.R @ np.asarray(t, float), "map")
    walk = Walk(poses=lambda i: end if i == 60 else start, camera_poses=camera_poses, pose_gate_drift=0.0, **config)
    return walk.decide(60, 0, pose=visual, hypotheses=(visual,))[0]


def visual(t, rotation_deg=(0, 0, 0)) -> Pose:
    return Pose(rotation(rotation_deg), np.asarray(t, float), scale_known=False)


def test_the_relative_pose_must_agree_with_odometry():
    eye = np.eye(3)
    assert loop_at(eye, (2, 0, 0), visual((1, 0, 0))) == "ok"
    assert loop_at(eye, (2, 0, 0), visual((0.97, 0.24, 0))) == "ok"
    assert loop_at(eye, (2, 0, 0), visual((-1, 0, 0))) == "ambiguous"
    assert loop_at(eye, (2, 0, 0), visual((0, 0, 0))) == "ambiguous"  # looks the same, but 2 m on
    assert loop_at(eye, (0.3, 0, 0), visual((0, 0, 0))) == "ok"
    assert loop_at(eye, (0.3, 0, 0), visual((-1, 0, 0))) == "ok"  # too near for a direction
    assert loop_at(eye, (2, 0, 0), visual((1, 0, 0), (0, 30, 0))) == "ambiguous"
    assert loop_at(rotation((0, 30, 0)), (2, 0, 0), visual((1, 0, 0), (0, 30, 0))) == "ok"
    assert loop_at(eye, (2, 0, 0), visual((1, 0, 0), (0, 30, 0)), pose_gate_deg=40.0) == "ok"


def test_poses_of_a_body_are_held_against_the_angle_only():
    turn = rotation((0, 30, 0))
    assert loop_at(turn, (2, 0, 0), visual((-1, 0, 0), (30, 0, 0)), camera_poses=False) == "ok"
    assert loop_at(turn, (2, 0, 0), visual((-1, 0, 0), (0, 0, 0)), camera_poses=False) == "ambiguous"


def test_any_hypothesis_that_agrees_will_do():
    walk = Walk(poses=lambda i: pose(2.0 if i == 60 else 0.0), pose_gate_drift=0.0)
    wrong, right = visual((0, 1, 0)), visual((1, 0, 0))
    assert walk.decide(60, 0, hypotheses=(wrong, right)) == ["ok"]
    assert walk.decide(60, 0, hypotheses=(wrong,)) == ["ambiguous"]
    assert walk.decide(60, 0, hypotheses=()) == ["ok"]


# -- sessions ----------------------------------------------------------------------------------


def test_odometry_of_another_session_gates_nothing():
    """The frame has the same name each time, and begins somewhere else."""
    walk = Walk(poses=lambda i: pose(100.0 * i, frame_id="odom"), sessions=(30, 30))
    assert walk.gate(62, 2, 29, 31, 59, 61) == ([2, 29, 31, 59], [61])
    assert walk.decide(62, 2) == ["ambiguous"], "without comparable poses it takes a consensus"
    assert walk.decide(63, 3) == ["ok"]


def test_poses_of_another_session_contradict_nothing():
    at = Pose(np.eye(3), np.array([5.0, 6, 7]), "odom")
    walk = Walk(poses=lambda i: at, sessions=(50,), consensus=1, consensus_window=1)
    assert walk.decide(60, 0, hypotheses=(visual((0, 0, 0), (0, 90, 0)),)) == ["ok"]
    assert walk.decide(61, 55, hypotheses=(visual((0, 0, 0), (0, 90, 0)),)) == ["ambiguous"]


def test_inliers_on_a_small_share_confirm_nothing_between_sessions():
    walk = Walk(keypoints=200, min_inlier_share=0.15, poses=circle, sessions=(30,), consensus=1)
    assert walk.decide(61, (1, 20)) == ["ambiguous"] and walk.decide(92, (32, 20)) == ["ok"]


def test_ids_across_the_border_of_sessions_are_different_places():
    walk = Walk(place_radius=10, sessions=(30, 30))
    assert walk.judge.same_place(25, 29) and walk.judge.same_place(30, 40)
    assert not walk.judge.same_place(29, 30) and not walk.judge.same_place(59, 60)
    with_poses = Walk(poses=lambda i: pose(0.01 * i), sessions=(30, 30))
    assert with_poses.judge.same_place(5, 29) and not with_poses.judge.same_place(29, 30)


def test_a_confirmed_loop_joins_places_of_its_sessions_only():
    walk = Walk(place_radius=3, sessions=(30, 30), loops=[(31, 5)])
    assert walk.judge.same_place(31, 5) and walk.judge.same_place(3, 33)
    assert not walk.judge.same_place(29, 5), "near to 31 by its id, but of another session"
    assert walk.decide(70, 5) == ["ambiguous"]
    assert walk.decide(71, (6, 50), (32, 49)) == ["ok", "ok"], "one place, known from the stored loop"


def test_a_stored_loop_makes_two_laps_one_place():
    rivals = (5, 50), (61, 50)
    for loops, expected in (((), "ambiguous"), ([(60, 5)], "ok")):
        walk = Walk(loops=loops, consensus=1, consensus_window=1)
        assert walk.decide(90, *rivals) == [expected] * 2


def test_a_localisation_is_confirmed_by_consensus_and_remembers_no_loops():
    walk = Walk(sessions=(60,), read_only=True, poses=circle)
    assert walk.map.read_only and walk.decide(60, 5) == ["ambiguous"]
    assert [walk.decide(60 + i, 5 + i) for i in range(1, 30)] == [["ok"]] * 29
    assert walk.decide(90, (35, 50), (5, 50)) == ["ambiguous"] * 2, "two places of the map, by its poses"
    assert not walk.judge._confirmed._cells


def test_judging_reads_no_keyframe(monkeypatch):
    walk = Walk(sessions=(60,), poses=circle, place_radius=5)
    monkeypatch.setattr(KeyframeMap, "__getitem__", lambda *_: pytest.fail("a keyframe was read"))
    now = replace(keyframe(n=100), id=70, session=1, pose=pose())
    candidates = [Candidate(70, r, T0, 0.9, np.nan, r) for r in range(20)]
    possible, _ = walk.judge.gate(now, candidates)
    pairs = [PairResult(PairKind.LOOP, 70, c.ref_kf_id, T0, matches(50)) for c in possible]
    assert len(walk.judge.judge(now, pairs)) == 20
