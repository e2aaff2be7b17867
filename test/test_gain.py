"""What stopping early gains and loses: counts by hand, the model at each setting, times by a clock of the test's."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
from gain_helpers import CHECKED, LAYERS, PLAIN, STOPS, layer_scores, place_matchers, tiny_pair_config, write_scene
from hypothesis import given
from hypothesis import strategies as st
from model_helpers import (
    _tiny_cache,  # noqa: F401 (fixtures)
    card,
    matcher_model,
    own_cache,  # noqa: F401
    save,
    tiny,  # noqa: F401
)

from vslam_features.artifacts.store import model_path
from vslam_features.errors import BackendError, BagError, ConfigError, DataError, ModelFileError, PluginError
from vslam_features.frontend import FrontEnd
from vslam_features.matching.base import as_vectors
from vslam_features.matching.verified import VerifiedMatcher
from vslam_features.replay import gain_runs
from vslam_features.replay.gain import Bar, Cost, Overlap, PairScores, Setting, gain_row, stops
from vslam_features.replay.gain_csv import pairs_csv
from vslam_features.replay.gain_plot import _GROUPS, _LINES, gain_plot
from vslam_features.replay.gain_runs import plain_twin, require_scores, run_pairs, time_stops, with_setting
from vslam_features.replay.gain_views import Views, choose_pairs, overlaps, views_of_images
from vslam_features.types import Matches, Status


def pair(name, scores, final, verified=True, overlap=Overlap.UNKNOWN) -> PairScores:
    status = Status.OK if verified else Status.TOO_FEW_INLIERS
    return PairScores((name, "0"), overlap, status, 30, 20, verified, final, tuple(scores))


# 4 layers, checked after 2 and 3. At 0.8/0.5 the limits are 0.2 and 0.4, and 0.8 at the end.
PAIRS = [
    pair("good", (0.9, 0.9), 0.9),
    pair("hasty", (0.1, 0.9), 0.9, overlap=Overlap.MARKED),  # stops after 2, though all is well later
    pair("late", (0.3, 0.3), 0.85),  # stops after 3
    pair("wrong", (0.3, 0.39), 0.8, verified=False, overlap=Overlap.APART),  # 0.8 is not below 0.8
    pair("weak", (0.5, 0.5), 0.7),  # runs through and fails at the end
    pair("bad", (0.05, 0.01), 0.01, verified=False, overlap=Overlap.APART),
    pair("edge", (0.2, 0.4), 0.9),  # on the limits, not below
    PairScores(("dark", "0"), Overlap.MARKED, Status.NO_KEYPOINTS),
]
CHECKED_BY_HAND = (2, 3)


def test_what_counts_as_verified_is_the_rule_of_loops():
    """20 inliers on 15 % of the keypoints, as for loops of LighterGlue without poses."""
    bar = Bar(20, 0.15)

    def verified(inliers: int, keypoints: int, status=Status.OK) -> bool:
        pairs, mask = np.zeros((40, 2), np.int32), np.arange(40) < inliers
        return bar.passes(Matches(pairs, np.ones(40, np.float32), mask, status), keypoints)

    assert verified(20, 100) and verified(20, 133) and not verified(20, 134) and verified(30, 200)
    assert not verified(19, 100) and not verified(30, 100, Status.TOO_FEW_INLIERS)
    assert Bar().passes(Matches.empty(Status.NO_MATCHES), 0) is False
    assert str(bar) == "by geometry, 20 inliers or more on 15% of the keypoints" and str(Bar()) == "by geometry"


def names(pairs) -> list[str]:
    return [p.names[0] for p in pairs]


# -- counts --------------------------------------------------------------------------------------


def test_counts_of_a_small_case_by_hand():
    row = gain_row(PAIRS, CHECKED_BY_HAND, 4, Setting(0.8, 0.5))
    assert (row.pairs, row.verified) == (7, 5)  # the dark one did not run
    assert row.stopped == {2: 2, 3: 2} and row.num_stopped == 4
    assert names(row.hasty) == ["hasty", "late", "wrong"]
    assert names(row.lost) == ["hasty", "late", "weak"] and row.rejected == 1
    told = row.to_dict()
    assert told["passing_but_stopped"] == {
        **{"count": 3, "share": round(3 / 7, 6), "verified": 2},
        **{"known_marked": 1, "known_apart": 1},
    }
    assert told["verified_lost"]["share"] == 0.6 and told["verified_lost"]["pairs"][2] == ["weak", "0"]


def test_a_row_without_pairs_says_nothing():
    row = gain_row(PAIRS[-1:], CHECKED_BY_HAND, 4, Setting(0.8, 0.5), {})
    assert (row.pairs, row.num_stopped, row.time) == (0, 0, None)
    assert row.to_dict()["stopped_share"] is None and row.to_dict()["verified_lost"]["share"] is None


def test_time_is_the_sum_over_all_pairs_of_what_their_layer_costs():
    # Of 7 pairs 3 run through (11 against 10 ms), 2 stop after layer 2 (4 against 12), 2 after 3 (6 against 8).
    costs = {0: Cost(5, 11.0, 10.0), 2: Cost(2, 4.0, 12.0), 3: Cost(2, 6.0, 8.0)}
    row = gain_row(PAIRS, CHECKED_BY_HAND, 4, Setting(0.8, 0.5), costs)
    assert row.time == pytest.approx((3 * 11 + 2 * 4 + 2 * 6) / (3 * 10 + 2 * 12 + 2 * 8))
    assert gain_row(PAIRS, CHECKED_BY_HAND, 4, Setting(0.8, 1.0), costs).time == pytest.approx(1.1)


share = st.floats(0, 1, width=32)
tables = st.lists(st.tuples(share, share, share, st.booleans()), min_size=1, max_size=20)


@given(tables, share, share, share, share)
def test_more_decay_and_a_lower_threshold_stop_fewer_and_later(table, t0, t1, d0, d1):
    pairs = [pair(str(i), scores, final, ok) for i, (*scores, final, ok) in enumerate(table)]
    (low, high), (less, more) = sorted((t0, t1)), sorted((d0, d1))

    def outcome(threshold, decay):
        row = gain_row(pairs, CHECKED_BY_HAND, 4, Setting(threshold, decay))
        after = stops(pairs, CHECKED_BY_HAND, 4, Setting(threshold, decay))
        return np.where(after == 0, 99, after), set(names(row.lost)), row

    strict, lost, row = outcome(high, less)
    for other, fewer, _ in (outcome(low, less), outcome(high, more), outcome(low, more)):
        assert (other >= strict).all() and fewer <= lost
    assert row.num_stopped == (strict < 99).sum() and {p.names[0] for p in row.hasty if p.verified} <= lost
    for threshold, decay in ((0, less), (high, 1)):
        assert not outcome(threshold, decay)[2].num_stopped


@given(tables, share, share)
def test_the_rule_pair_by_pair(table, threshold, decay):
    """After the first checked layer k of L whose score is below threshold * (1 - decay) ** (L - k)."""
    pairs = [pair(str(i), scores, final, ok) for i, (*scores, final, ok) in enumerate(table)]
    for found, p in zip(stops(pairs, CHECKED_BY_HAND, 4, Setting(threshold, decay)), pairs):
        limits = {k: threshold * (1 - decay) ** (4 - k) for k in CHECKED_BY_HAND}
        scores = dict(zip(CHECKED_BY_HAND, p.layer_scores))
        if any(abs(scores[k] - limits[k]) < 1e-6 for k in scores):
            continue  # rounding of float32 decides
        assert found == next((k for k in CHECKED_BY_HAND if scores[k] < limits[k]), 0)


def test_the_csv_has_a_line_for_each_pair_with_where_it_is_lost():
    rows = [gain_row(PAIRS, CHECKED_BY_HAND, 4, Setting(0.8, d)) for d in (0.5, 0.0)]
    lines = pairs_csv(PAIRS, rows, CHECKED_BY_HAND).decode().splitlines()
    assert lines[0] == "image0,image1,truth,status,matches,inliers,score_2,score_3,covisibility_score,lost_at"
    assert lines[2] == "hasty,0,overlaps,ok,30,20,0.1,0.9,0.9,0.8/0.5 0.8/0"
    assert lines[6] == "bad,0,other scene,too_few_inliers,30,20,0.05,0.01,0.01,"
    assert lines[7] == "edge,0,unknown,ok,30,20,0.2,0.4,0.9,0.8/0"
    assert lines[8] == "dark,0,overlaps,no_keypoints,0,0,,,," and len(lines) == 9


# -- pairs and truth -----------------------------------------------------------------------------


def test_all_pairs_are_later_and_earlier():
    assert choose_pairs(4).tolist() == [[1, 0], [2, 0], [2, 1], [3, 0], [3, 1], [3, 2]]
    assert choose_pairs(4, most=6).tolist() == choose_pairs(4, most=99).tolist() == choose_pairs(4).tolist()


@given(st.integers(2, 60), st.integers(1, 400))
def test_some_pairs_are_evenly_spread(count, most):
    chosen, every = choose_pairs(count, most), choose_pairs(count).tolist()
    places = [every.index(p) for p in chosen.tolist()]
    most = min(most, len(every))
    assert [place * most // len(every) for place in places] == pytest.approx(range(most), abs=1)
    assert len(set(places)) == most and places == sorted(places)
    assert (chosen == choose_pairs(count, most)).all()


def test_some_pairs_of_a_large_map_need_no_list_of_all():
    chosen = choose_pairs(1_000_000, 1000)
    assert len(chosen) == 1000 and (chosen[:, 0] > chosen[:, 1]).all() and chosen.min() >= 0
    assert 900_000 < chosen[:, 0].max() < 1_000_000


def views(scenes, places=None, total=0) -> Views:
    count = len(scenes)
    places = tuple(range(count)) if places is None else places
    return Views(tuple("abcdef"[:count]), places, total or count, tuple(scenes), lambda i: (i, None))


def test_truth_marks_either_triangle_and_says_nothing_of_others(tmp_path):
    matrix = np.zeros((4, 4), np.uint8)
    matrix[2, 0] = matrix[1, 3] = 255
    cv2.imwrite(str(tmp_path / "m.png"), matrix)
    found = overlaps(views([0] * 4), choose_pairs(4), tmp_path / "m.png")
    marked = [p for p, known in zip(choose_pairs(4).tolist(), found) if known is Overlap.MARKED]
    assert marked == [[2, 0], [3, 1]] and found.count(Overlap.UNKNOWN) == 4
    # Image 1 could not be read: the views are images 0, 2 and 3.
    found = overlaps(views([0] * 3, places=(0, 2, 3), total=4), choose_pairs(3), tmp_path / "m.png")
    assert found == [Overlap.MARKED, Overlap.UNKNOWN, Overlap.UNKNOWN]


def test_scenes_are_apart_and_a_truth_that_says_otherwise_is_refused(tmp_path):
    found = overlaps(views([0, 0, 1]), choose_pairs(3), scenes=True)
    assert found == [Overlap.UNKNOWN, Overlap.APART, Overlap.APART]
    matrix = np.zeros((3, 3), np.uint8)
    matrix[0, 2] = 255
    cv2.imwrite(str(tmp_path / "m.png"), matrix)
    with pytest.raises(DataError, match="marks c and a.*--scenes"):
        overlaps(views([0, 0, 1]), choose_pairs(3), tmp_path / "m.png", scenes=True)
    with pytest.raises(DataError, match="is of 3 images, there are 4"):
        overlaps(views([0] * 4), choose_pairs(4), tmp_path / "m.png")


def test_images_have_the_names_of_their_scenes_and_the_unreadable_are_told(tmp_path, tiny):  # noqa: F811
    front_end = FrontEnd(tiny_pair_config(matcher__options__model="tiny-matcher"))
    folders = [write_scene(tmp_path / scene / "images", 1, 2) for scene in "ab"]
    (folders[0] / "5.png").write_bytes(b"no picture")
    cv2.imwrite(str(folders[1] / "1.jpg"), cv2.imread(str(folders[1] / "1.png")))
    seen = []
    found = views_of_images(folders, front_end.config, front_end.extract, progress=lambda *at: seen.append(at))
    assert found.names == ("a/0.png", "a/1.png", "b/0.png", "b/1.jpg", "b/1.png")
    assert found.places == (0, 1, 3, 4, 5) and found.total == 6 and seen[-1] == (6, 6)
    assert len(found.notes) == 1 and "5.png" in found.notes[0]
    assert found.scenes == (0, 0, 1, 1, 1) and found.get(4)[0].image_size == (240, 160)
    with pytest.raises(ConfigError, match="twice"):
        views_of_images([folders[0], tmp_path / "b" / ".." / "a" / "images"], front_end.config, front_end.extract)
    with pytest.raises(BagError, match="no such file or folder"):
        views_of_images([tmp_path / "none"], front_end.config, front_end.extract)
    (tmp_path / "one").mkdir()
    cv2.imwrite(str(tmp_path / "one" / "0.png"), np.zeros((60, 80), np.uint8))
    with pytest.raises(ConfigError, match="1 readable images; pairs need two"):
        views_of_images([tmp_path / "one"], front_end.config, front_end.extract)


# -- the model -----------------------------------------------------------------------------------


@pytest.fixture
def opened(tmp_path, tiny):  # noqa: F811
    """A front-end with the matcher that stops, and two scenes of pictures and a dark one."""
    place_matchers()
    front_end = FrontEnd(tiny_pair_config())
    folders = [write_scene(tmp_path / scene, seed, 5) for seed, scene in enumerate("ab", 1)]
    cv2.imwrite(str(folders[1] / "9.png"), np.zeros((160, 240), np.uint8))
    return front_end, views_of_images(folders, front_end.config, front_end.extract)


def test_the_table_is_what_the_model_does_at_each_setting(opened):
    front_end, found = opened
    assert require_scores(front_end.matcher.matcher).early_stop_layers == CHECKED
    pairs = choose_pairs(len(found))
    steps = []
    scores = run_pairs(
        front_end.matcher, found, pairs, overlaps(found, pairs, scenes=True), Bar(), lambda *at: steps.append(at)
    )
    assert steps[-1] == (55, 55) and sum(p.ran for p in scores) == 45
    assert {p.status for p in scores if not p.ran} == {Status.NO_KEYPOINTS}
    for (i, j), p in zip(pairs.tolist(), scores):
        if p.ran:
            *_, last = expected = layer_scores(*(as_vectors(found.get(view)[0]) for view in (i, j)))
            assert p.covisibility == pytest.approx(last, abs=1e-6)
            assert p.layer_scores == pytest.approx([expected[k - 1] for k in CHECKED], abs=1e-6)
    seen = set()
    for setting in [Setting(t, d) for t in (0.3, 0.75, 0.9, 1) for d in (0, 0.02, 0.1, 0.5, 1)]:
        row = gain_row(scores, CHECKED, LAYERS, setting)
        direct = VerifiedMatcher(with_setting(front_end.matcher.matcher, setting), front_end.matcher.verifier)
        results = [direct.match(found.get(i)[0], found.get(j)[0]) for i, j in pairs.tolist()]
        after = [m.stopped_after_layer for m in results]
        assert row.stopped == {k: after.count(k) for k in CHECKED}
        assert row.rejected == sum(m.status is Status.NOT_COVISIBLE for m in results)
        gone = [p.names for p, m in zip(scores, results) if p.verified and not m.verified]
        assert [p.names for p in row.lost] == gone
        hasty = [
            p.names for p, k in zip(scores, after) if k and not p.covisibility < np.float32(setting.min_covisibility)
        ]
        assert [p.names for p in row.hasty] == hasty
        seen |= {k for k in after if k} | ({"lost"} if gone else set()) | ({"hasty"} if hasty else set())
        assert setting.decay < 1 or not row.num_stopped
    assert seen == {*CHECKED, "lost", "hasty"}  # each kind of outcome was there


def test_a_pair_on_which_the_model_fails_is_told_and_the_rest_goes_on(opened, monkeypatch):
    front_end, found = opened
    engine, calls = front_end.matcher.matcher.engine, []

    def run(inputs, original=engine.run):
        calls.append(1)
        if len(calls) == 2:
            raise BackendError("the driver went away")
        return original(inputs)

    monkeypatch.setattr(engine, "run", run)
    scores = run_pairs(front_end.matcher, found, choose_pairs(3), [Overlap.UNKNOWN] * 3, Bar())
    assert [p.ran for p in scores] == [True, False, True] and scores[1].status is Status.BACKEND_ERROR


def test_scores_of_other_layers_than_the_card_says_are_refused(opened):
    front_end, found = opened
    matches = VerifiedMatcher(with_setting(front_end.matcher.matcher, Setting(0, 1)), front_end.matcher.verifier).match(
        found.get(1)[0], found.get(0)[0]
    )
    matches = replace(matches, layer_scores=tuple(zip((2, 3), (score for _, score in matches.layer_scores))))
    with pytest.raises(ModelFileError, match=r"after layers \[2, 3\], expected \[2, 4\]"):
        gain_runs._scores(("a", "b"), Overlap.UNKNOWN, matches, True, CHECKED)


@pytest.mark.parametrize(
    "values, error, said",
    [
        ({"matcher.name": "nearest"}, PluginError, "Nearest: knows no early stop"),
        ({"matcher.options.model": "tiny-matcher"}, ModelFileError, "models patch early-stop"),
        ({"matcher.options.model": "tiny-short"}, ModelFileError, "0 layers and checks"),
    ],
)
def test_a_matcher_without_layer_scores_says_how_to_get_one(tiny, values, error, said):  # noqa: F811
    place_matchers(replace(STOPS, name="tiny-short", layers=0))
    config = tiny_pair_config(**{name.replace(".", "__"): value for name, value in values.items()})
    with pytest.raises(error, match=said):
        require_scores(FrontEnd(config).matcher.matcher)


# -- times ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    model: str = "any"
    min_covisibility: float = 0.0
    early_stop_decay: float = 1.0


class Clocked:
    """A matcher that takes a known time: of pair i a layer takes i + 1 ms. ``wrong``: it stops where it should not."""

    scores, now, first, wrong = {}, 0.0, 0.0, None

    def __init__(self, options, models):
        self.options, self.engine = options, models.open("matcher", options.model)

    def match(self, later, earlier):
        setting = Setting(self.options.min_covisibility, self.options.early_stop_decay)
        layer = 0 if self.options.model == "plain" else int(stops([self.scores[later, earlier]], (2, 3), 4, setting)[0])
        slow = (later, earlier) not in self.met  # what runtimes do with new sizes
        self.met.add((later, earlier))
        Clocked.now += (later * (later - 1) // 2 + earlier + 1) * (layer or 4) * 1e-3 + slow * 100
        return SimpleNamespace(stopped_after_layer=self.wrong or layer)


@pytest.fixture
def clocked(monkeypatch):
    chosen = choose_pairs(4)
    table = [pair(str(i), scores, 0.9) for i, scores in enumerate([(0.9, 0.9)] * 3 + [(0, 0.9)] * 2 + [(0.5, 0.1)])]
    engine = SimpleNamespace(model=SimpleNamespace(card=SimpleNamespace(early_stop_layers=(2, 3), layers=4)))
    monkeypatch.setattr(Clocked, "scores", {tuple(p): s for p, s in zip(chosen.tolist(), table)})
    monkeypatch.setattr(Clocked, "met", set(), raising=False)
    monkeypatch.setattr(gain_runs, "time", SimpleNamespace(perf_counter=lambda: Clocked.now))
    opened = SimpleNamespace(open=lambda role, model: engine)
    return Clocked(Options(), opened), Clocked(Options("plain"), opened), views([0] * 4), chosen, table


def test_times_are_medians_of_pairs_that_stop_there(clocked):
    steps = []
    times = time_stops(*clocked, [Setting(0.4, 0.0)], progress=lambda *at: steps.append(at))
    # Pairs 0, 1, 2 go on: 4 layers of 1, 2, 3 ms. Pairs 3 and 4 stop after 2 layers of 4 and 5 ms, pair 5 after 3 of 6.
    assert times.costs == {
        0: Cost(3, pytest.approx(8), pytest.approx(8)),
        2: Cost(2, pytest.approx(9), pytest.approx(18)),
        3: Cost(1, pytest.approx(18), pytest.approx(24)),
    }
    assert times.strays == 0 and steps[-1] == (24, 24)
    only = time_stops(*clocked, [Setting(0.4, 1.0)], sample=2)
    assert list(only.costs) == [0] and only.costs[0].pairs == 2


def test_a_pair_that_stops_elsewhere_than_its_scores_say_is_counted(clocked, monkeypatch):
    monkeypatch.setattr(Clocked, "wrong", 3)
    assert time_stops(*clocked, [Setting(0.4, 0.0)]).strays == 5


def test_the_plain_twin_is_the_file_of_the_same_weights_that_never_stops(own_cache):  # noqa: F811
    assert plain_twin(STOPS) is None
    save(matcher_model(), replace(PLAIN, name="other", source_sha256="0" * 64))
    save(matcher_model(), replace(PLAIN, name="half", precision="fp16"))
    save(matcher_model(), replace(STOPS, name="also-stops"))
    save(matcher_model(), replace(card("features", "a"), source_sha256=STOPS.source_sha256))
    (own_cache / "models" / "aaa.fp32.onnx").write_bytes(b"no model")
    assert plain_twin(STOPS) is None
    save(matcher_model(), PLAIN)
    assert plain_twin(STOPS) == model_path("tiny-plain", "fp32")
    assert plain_twin(replace(STOPS, precision="fp16")) == model_path("half", "fp16")
    assert plain_twin(replace(STOPS, source_sha256="")) is None


# -- the picture ---------------------------------------------------------------------------------


def test_the_picture_shows_each_threshold_and_each_group():
    costs = {layer: Cost(1, 2.0 + layer, 6.0) for layer in (0, 2, 3)}
    rows = [gain_row(PAIRS, CHECKED_BY_HAND, 4, Setting(t, d), costs) for t in (0.5, 0.8) for d in (0.2, 0.5)]
    picture = gain_plot(rows, PAIRS, CHECKED_BY_HAND, 4, 0.5, "a title")
    assert picture.dtype == np.uint8 and picture.shape[2] == 3

    def places(colour, top, bottom):
        return np.argwhere((picture[top:bottom] == colour).all(axis=2))

    for colour in _LINES[:2]:
        assert len(places(colour, 100, 500)) > 200 and len(places(colour, 650, 1130)) > 200
    assert not len(places(_LINES[2], 0, 1240))  # there is no third threshold
    for colour in (_GROUPS["verified, or marked as overlapping"], _GROUPS["of different scenes"]):
        assert len(places(colour, 650, 1130)) > 200
    assert not len(places(_GROUPS["not verified"], 0, 1240))
    # The limit of 0.8 at decay 0.5: 0.2, 0.4 and 0.8 of the height of the scale from its foot.
    top = 0.9 * 1.05  # a little above the largest score
    rows_of = np.unique(places(_LINES[1], 660, 1121)[:, 0])
    assert [min(abs(rows_of - 460 * (1 - limit / top))) <= 2 for limit in (0.2, 0.4, 0.8)] == [True] * 3


@pytest.mark.parametrize("pairs, decays", [(PAIRS[-1:], (0.5,)), (PAIRS[:1], (0.0, 1.0))])
def test_a_picture_of_little_is_drawn_too(pairs, decays):
    rows = [gain_row(pairs, CHECKED_BY_HAND, 4, Setting(0.0, d)) for d in decays]
    assert gain_plot(rows, pairs, CHECKED_BY_HAND, 4, decays[0], "").min() < 255
