"""Pairs that are known to overlap are not rejected; those of which it is not known, such as loop candidates, are.

The scores of the matcher are told by NumPy (gain_helpers.layer_scores), its limits by the rule as it is written.
"""

import json
from functools import cache

import numpy as np
import onnx
import pytest
from gain_helpers import CHECKED, LAYERS, PLAIN, STOPS, layer_scores, place_matchers, write_scene
from helpers import features, unit
from model_helpers import (
    DIM,
    TINY,
    Opened,
    _tiny_cache,  # noqa: F401 (fixtures)
    command,
    engine,
    own_cache,  # noqa: F401
    save,
    tiny,  # noqa: F401
    tiny_config,
)

from vslam_features.artifacts.store import model_path
from vslam_features.config import GeometryConfig
from vslam_features.frontend import FrontEnd
from vslam_features.geometry import Verifier
from vslam_features.matching.base import Correspondences, Matcher
from vslam_features.matching.learned import LighterGlue
from vslam_features.matching.verified import VerifiedMatcher
from vslam_features.replay.scenes import make_scene
from vslam_features.types import Frame, PairKind, Status

ALL = 1.0, 0.0  # min_covisibility and decay: every pair of which a keypoint is not seen again is rejected


def sides(shared: float, n: int = 100):
    """Two images of n keypoints: the last ``shared`` of those of the first are in the second too, 4 px to the right."""
    rng = np.random.default_rng(0)
    d0, d1, xy = unit(rng, n, DIM), unit(rng, n, DIM), rng.uniform(20, 280, (n, 2)).astype(np.float32)
    d1[n - round(shared * n) :] = d0[n - round(shared * n) :]
    return features(d0, xy), features(d1, xy + np.float32([4, 0]))


def expected(features0, features1, least: float, decay: float):
    """Score of each layer that is checked, the final one, and the layer after which the rule stops (0: none)."""
    scores = layer_scores(*(f.descriptors.astype(np.float32) for f in (features0, features1)))
    below = [k for k in CHECKED if scores[k - 1] < least * (1 - decay) ** (LAYERS - k)]
    return [(k, scores[k - 1]) for k in CHECKED], scores[-1], below[0] if below else 0


def matcher(folder, name=STOPS.name, setting=ALL, **faults) -> LighterGlue:
    """Of a tiny matcher in the cache, which is its own fallback where it has faults."""
    path = model_path(name, "fp32")
    options = LighterGlue.Options("any", 0.0, *setting)
    return LighterGlue(options, Opened(engine(path, folder, path if faults else None, **faults)))


@pytest.fixture
def matchers(tiny):  # noqa: F811
    """The tiny cache with the matcher that stops and its plain twin."""
    place_matchers()
    return tiny


# -- matchers ------------------------------------------------------------------------------------


class Counting(Matcher):
    """A plug-in that knows nothing of overlap."""

    def match(self, features0, features1) -> Correspondences:
        return Correspondences(np.array([[2, 1]], np.int32), np.array([0.25], np.float32))


def test_a_plug_in_that_does_not_reject_matches_all_pairs_alike():
    found = Counting(None).match_overlapping(*sides(0.5))
    assert found.pairs.tolist() == [[2, 1]] and found.scores.tolist() == [0.25] and found.status is None


@pytest.mark.parametrize("shared, checked", [(0.1, 2), (0.7, 2), (0.99, 2), (1.0, 0)])
def test_all_layers_run_and_no_covisibility_is_too_small(shared, checked, matchers, tmp_path):
    pair = sides(shared)
    scores, final, stopped = expected(*pair, *ALL)
    assert stopped == checked and final == pytest.approx(shared)
    found, plain = matcher(tmp_path).match_overlapping(*pair), matcher(tmp_path, PLAIN.name, (0.0, 1.0)).match(*pair)
    assert (found.status, found.stopped_after_layer) == (None, 0) and found.covisibility == pytest.approx(final)
    assert [k for k, _ in found.layer_scores] == list(CHECKED) and dict(found.layer_scores) == pytest.approx(
        dict(scores)
    )
    assert len(found.pairs) == round(100 * shared) and found.pairs.tolist() == plain.pairs.tolist()
    assert found.scores.tolist() == plain.scores.tolist()
    rejected = matcher(tmp_path).match(*pair)
    assert rejected.stopped_after_layer == stopped and (rejected.status is Status.STOPPED_EARLY) == (stopped > 0)


def test_rejection_at_the_end_is_left_out_as_well(matchers, tmp_path):
    """A decay of 1 stops nothing, and the final score is below the least one."""
    late, pair = matcher(tmp_path, setting=(1.0, 1.0)), sides(0.7)
    assert late.match(*pair).status is Status.NOT_COVISIBLE
    found = late.match_overlapping(*pair)
    assert found.status is None and len(found.pairs) == 70 and found.covisibility == pytest.approx(0.7)


def test_overlapping_images_without_a_match_or_a_keypoint_say_so(matchers, tmp_path):
    stops = matcher(tmp_path)
    assert stops.match_overlapping(*sides(0.0)).status is Status.NO_MATCHES
    none = features(np.empty((0, DIM), np.float32))
    for pair in ((none, sides(0.5)[1]), (sides(0.5)[0], none)):
        assert stops.match_overlapping(*pair).status is Status.NO_KEYPOINTS


def test_a_verified_pair_is_rejected_only_where_it_is_not_known_to_overlap(matchers, tmp_path):
    verified, pair = VerifiedMatcher(matcher(tmp_path), Verifier(GeometryConfig())), sides(0.7)
    scores, final, stopped = expected(*pair, *ALL)
    for asked in ({}, {"overlapping": False}):
        found = verified.match(*pair, **asked)
        assert (found.status, found.stopped_after_layer, len(found)) == (Status.STOPPED_EARLY, stopped, 0)
        assert dict(found.layer_scores) == pytest.approx({k: s for k, s in scores if k <= stopped})
    found = verified.match(*pair, overlapping=True)
    assert (found.status, found.stopped_after_layer, found.num_inliers) == (Status.OK, 0, 70)
    assert found.covisibility == pytest.approx(final) and dict(found.layer_scores) == pytest.approx(dict(scores))


def test_a_second_opinion_of_an_overlapping_pair_is_not_rejected_either(matchers, tmp_path):
    """The runtime finds nothing, the fallback finds what the model finds: matches, and a covisibility of 0.7."""
    pair, doubt = sides(0.7), "they look alike"
    broken = matcher(tmp_path, setting=(1.0, 1.0), zero_calls="all")
    verified = VerifiedMatcher(broken, Verifier(GeometryConfig()))
    assert verified.match(*pair).status is Status.NOT_COVISIBLE and verified.match_again(*pair, doubt=doubt) is None
    assert broken.engine.counts.empty_agreed == 1 and not broken.suspect

    assert verified.match(*pair, overlapping=True).status is Status.NO_MATCHES
    second = verified.match_again(*pair, doubt=doubt, overlapping=True)
    assert (second.status, second.num_inliers, second.stopped_after_layer) == (Status.FAULT_RECOVERED, 70, 0)
    assert second.covisibility == pytest.approx(0.7) and doubt in second.detail and broken.suspect
    again = verified.match(*pair, overlapping=True)  # each empty result is asked about from now on
    assert (again.status, again.num_inliers) == (Status.FAULT_RECOVERED, 70)


# -- the front-end -------------------------------------------------------------------------------


@cache
def walk() -> list[Frame]:
    return list(make_scene("room", width=320, height=240, fps=2.0, num_frames=10))


@pytest.mark.parametrize("setting", [ALL, (0.9, 0.05), (0.9, 1.0)])
def test_tracked_pairs_are_matched_whatever_their_covisibility_and_loop_candidates_are_rejected(setting, matchers):
    least, decay = setting
    options = {"model": STOPS.name, "min_score": 0.0, "min_covisibility": least, "early_stop_decay": decay}
    settings = tiny_config(
        retrieval__exclude_s=1.0, retrieval__min_similarity=-1.0, loops__verify=3,
        **{f"matcher__options__{name}": value for name, value in options.items()},
    )  # fmt: skip
    front_end, seen, low = FrontEnd(settings), [], 0
    for one in walk():
        tracked, loops = front_end.process(one)
        assert not tracked.faults and not loops.faults
        for p in (*tracked.pairs, *loops.pairs):
            m, now, then = p.matches, tracked.features, front_end.keyframes[p.ref_kf_id].features
            scores, final, stopped = expected(now, then, least, decay)
            if p.kind is PairKind.TRACK:
                assert m.status not in (Status.STOPPED_EARLY, Status.NOT_COVISIBLE) and m.stopped_after_layer == 0
                assert len(m) and m.covisibility == pytest.approx(final, abs=1e-6)
                assert dict(m.layer_scores) == pytest.approx(dict(scores), abs=1e-6)
                low += final < least
            else:
                assert p.kind is PairKind.LOOP and m.stopped_after_layer == stopped
                assert (m.status is Status.STOPPED_EARLY) == (stopped > 0)
                assert (m.status is Status.NOT_COVISIBLE) == (stopped == 0 and final < least)
                seen.append(m.status)
    assert low >= 5 and len(seen) >= 10
    assert set(seen) == {Status.NOT_COVISIBLE if decay == 1 else Status.STOPPED_EARLY} and not front_end.warning


# -- match A B -----------------------------------------------------------------------------------


@pytest.fixture
def pictures(matchers, tmp_path):
    """Arguments of ``match`` for two pictures of one place, the second a step to the right."""
    folder = write_scene(tmp_path / "pictures", 3, 3)
    given = [f"--set={name}={value}" for name, value in TINY.items() if name != "matcher.options.model"]
    return [str(folder / "2.png"), str(folder / "0.png"), *given]


def options(**values) -> list[str]:
    given = {"model": STOPS.name, "min_score": 0.0, **values}
    return [f"--set=matcher.options.{name}={value}" for name, value in given.items()]


def said(capsys, *args) -> str:
    assert command("match", *args) == 0
    return capsys.readouterr().out


def test_match_says_what_a_loop_candidate_would_do(pictures, capsys):
    strict = options(min_covisibility=1.0, early_stop_decay=0.0)
    r = json.loads(said(capsys, *pictures, *strict, "--json"))
    assert r["status"] == "ok" and not r["rejects"] and r["stopped_after_layer"] == 0 and r["num_matches"]
    scores = dict(r["layer_scores"])
    assert list(scores) == list(CHECKED) and max(scores.values()) < 1
    text = said(capsys, *pictures, *strict)
    assert f"a loop candidate would stop after layer {CHECKED[0]}" in text and "did not stop" not in text
    rejected = said(capsys, *pictures, *strict, "--early-stop-decay", "0")
    assert rejected.startswith("stopped_early") and f"after layer {CHECKED[0]}: " in rejected
    assert "loop candidate" not in rejected

    # The second check only: a limit between both scores, where the first has a lower one.
    between = scores[CHECKED[0]] * 0.5
    kept = options(min_covisibility=between, early_stop_decay=0.0)
    assert "a loop candidate would not stop early" in said(capsys, *pictures, *kept)
    assert "  did not stop early\n" in said(capsys, *pictures, *kept, "--min-covisibility", str(between)) + "\n"
    never = options(min_covisibility=1.0, early_stop_decay=1.0)
    assert "did not stop early, and with limits of 0 it cannot" in said(capsys, *pictures, *never)


def test_match_does_not_say_what_a_model_does_not_tell(pictures, capsys):
    """A file without an output of the scores after its layers."""
    path = model_path(STOPS.name, "fp32")
    model = onnx.load(path)
    model.graph.output.remove(next(o for o in model.graph.output if o.name == "layer_scores"))
    save(model, STOPS)
    text = said(capsys, *pictures, *options(min_covisibility=1.0, early_stop_decay=0.0))
    assert text.startswith("ok: ") and "whether a loop candidate would stop early is not known" in text
