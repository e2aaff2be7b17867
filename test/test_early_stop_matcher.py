"""A matcher that stops early behind the plug-in: statuses, scores, options, and files that tell less.

The models are real ones, made to stop by the surgery and run by ONNX Runtime; what they must say is computed in NumPy
(``matcher_graph``).
"""

from dataclasses import dataclass

import numpy as np
import pytest
from model_helpers import Opened, engine, save
from stop_helpers import CARD, CHECKED, NETWORK, PLAIN, early_stop_model, matcher_of, plain_model, sides

from vslam_features.config import Config, GeometryConfig
from vslam_features.errors import ConfigError
from vslam_features.geometry import Verifier
from vslam_features.matching.learned import LearnedMatcher, LighterGlue, LightGlue, covisibility_option, decay_option
from vslam_features.matching.verified import VerifiedMatcher
from vslam_features.options import option
from vslam_features.types import Status

# -- what is right -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def opened(tmp_path_factory) -> Opened:
    """The model that stops early, for matchers of any options."""
    folder = tmp_path_factory.mktemp("glue")
    return Opened(engine(save(early_stop_model(), CARD, folder / "glue.onnx"), folder / "incidents"))


@pytest.mark.parametrize("decay", [0.0, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("least", [0.0, 0.3, 0.6, 0.8, 0.95])
def test_the_plug_in_says_what_the_rule_says(least, decay, opened):
    matcher, seen = LighterGlue(LighterGlue.Options("any", 0.0, least, decay), opened), set()
    for seed, (m, n) in enumerate([(40, 30), (17, 50), (1, 1), (64, 64), (5, 90), (33, 32)]):
        pair, (a, b) = sides(m, n, seed)
        matches, _, covisibility, stopped, scores = NETWORK.match(pair, np.float32(least), np.float32(decay), CHECKED)
        found = matcher.match(a, b)
        expected = {(i, j) for i, j in enumerate(matches.tolist()) if j >= 0}
        assert found.stopped_after_layer == stopped and {tuple(p) for p in found.pairs.tolist()} == expected
        assert found.covisibility == pytest.approx(covisibility, abs=1e-4)
        ran = [(k, s) for k, s in zip(CHECKED, scores) if s != -1]
        assert [k for k, _ in found.layer_scores] == [k for k, _ in ran]
        assert [s for _, s in found.layer_scores] == pytest.approx([s for _, s in ran], abs=1e-4)
        rejected = Status.STOPPED_EARLY if stopped else Status.NOT_COVISIBLE if covisibility < least else None
        assert found.status is (rejected or (None if expected else Status.NO_MATCHES))
        seen.add(found.status)
    if least == 0.95:
        assert (Status.STOPPED_EARLY if decay < 0.5 else Status.NOT_COVISIBLE) in seen


@pytest.mark.parametrize("least, decay", [(0.0, 0.0), (0.0, 0.5), (0.95, 1.0), (0.3, 1.0)])
def test_without_a_stop_it_is_the_plain_model_bit_for_bit(least, decay, tmp_path):
    (tmp_path / "plain").mkdir()
    stops = matcher_of(tmp_path, least=least, decay=decay)
    plain = matcher_of(tmp_path / "plain", plain_model(), PLAIN, least=least)
    for seed in range(4):
        _, (a, b) = sides(40, 60, seed)
        found, expected = stops.match(a, b), plain.match(a, b)
        assert np.array_equal(found.pairs, expected.pairs) and np.array_equal(found.scores, expected.scores)
        assert (found.covisibility, found.status) == (expected.covisibility, expected.status)
        assert expected.layer_scores == () and len(found.layer_scores) == 4


def test_a_stop_reaches_the_result_of_a_pair(tmp_path):
    matcher = matcher_of(tmp_path, least=0.95, decay=0.0)
    _, (a, b) = sides(40, 30, 1)
    result = VerifiedMatcher(matcher, Verifier(GeometryConfig())).match(a, b)
    assert result.status is Status.STOPPED_EARLY and len(result) == 0
    assert result.stopped_after_layer == result.layer_scores[-1][0] == 2
    assert result.covisibility == result.layer_scores[-1][1] < 0.95


def test_pairs_that_overlap_are_not_rejected(tmp_path):
    matcher, plain = matcher_of(tmp_path, least=0.9, decay=0.0), NETWORK.match(sides(40, 30, 7)[0], 0.0, 1.0)
    _, (a, b) = sides(40, 30, 7)
    assert matcher.match(a, b).status is Status.STOPPED_EARLY
    found = matcher.match_overlapping(a, b)
    expected = {(i, j) for i, j in enumerate(plain[0].tolist()) if j >= 0}
    assert found.status is None and {tuple(p) for p in found.pairs.tolist()} == expected and expected
    assert found.covisibility == pytest.approx(plain[2], abs=1e-4) and found.covisibility < 0.9
    assert [k for k, _ in found.layer_scores] == [2, 4, 6, 8] and found.stopped_after_layer == 0


def test_limits_are_known_before_a_run(tmp_path):
    """0.8 / 2^7, / 2^5, / 2^3, / 2."""
    limits = matcher_of(tmp_path, least=0.8, decay=0.5).stop_limits
    assert [k for k, _ in limits] == [2, 4, 6, 8]
    assert [limit for _, limit in limits] == pytest.approx([0.00625, 0.025, 0.1, 0.4], rel=1e-6)
    assert matcher_of(tmp_path, plain_model(), PLAIN).stop_limits == ()


def test_a_threshold_of_the_host_is_that_of_the_graph(tmp_path):
    """A pair whose covisibility is the threshold in float32 is not rejected by either."""
    _, (a, b) = sides(40, 30, 2)
    score = matcher_of(tmp_path).match(a, b).covisibility
    at, above = (
        matcher_of(tmp_path, least=s).match(a, b)
        for s in (score, float(np.nextafter(np.float32(score), np.float32(1))))
    )
    assert at.status is None and above.status is Status.NOT_COVISIBLE
    assert len(at.pairs) and not len(above.pairs)


# -- files that tell less --------------------------------------------------------------------------


def test_a_file_that_does_not_tell_its_stop_is_not_covisible(tmp_path):
    silent = matcher_of(tmp_path, early_stop_model("stopped_after_layer", "layer_scores"), least=0.95, decay=0.0)
    _, (a, b) = sides(40, 30, 1)
    found = silent.match(a, b)
    assert (found.status, found.stopped_after_layer, found.layer_scores) == (Status.NOT_COVISIBLE, 0, ())
    assert found.covisibility == pytest.approx(matcher_of(tmp_path, least=0.95, decay=0.0).match(a, b).covisibility)


def test_a_file_that_does_not_tell_its_layers_scores(tmp_path):
    found = matcher_of(tmp_path, early_stop_model("layer_scores"), least=0.95, decay=0.0).match(*sides(40, 30, 1)[1])
    assert (found.status, found.stopped_after_layer, found.layer_scores) == (Status.STOPPED_EARLY, 2, ())


def test_what_a_file_cannot_do_is_an_error_where_it_was_set(tmp_path):
    plain = plain_model("covisibility_score")
    assert matcher_of(tmp_path, plain, PLAIN).match(*sides(40, 30, 0)[1]).covisibility is None
    with pytest.raises(ConfigError, match=r"min_covisibility is 0.3, but .*glue.onnx has no output 'covisibility_sc"):
        matcher_of(tmp_path, plain, PLAIN, least=0.3)
    with pytest.raises(ConfigError, match=r"early_stop_decay is 0.5, but .*glue.onnx has no input 'early_stop_decay'"):
        matcher_of(tmp_path, plain_model(), PLAIN, least=0.3, decay=0.5)


class Eager(LearnedMatcher):
    """With defaults that reject."""

    @dataclass(frozen=True)
    class Options:
        model: str = option("any", "Model.")
        min_score: float = option(0.0, "Matches of smaller score are left out.")
        min_covisibility: float = covisibility_option(0.95)
        early_stop_decay: float = decay_option(0.0)


def test_defaults_hold_for_what_the_file_can_do(tmp_path):
    """A default was set by nobody: it is no error with a plain file."""
    _, (a, b) = sides(40, 30, 7)
    for left_out, status, covisibility in (((), Status.NOT_COVISIBLE, True), (("covisibility_score",), None, False)):
        path = save(plain_model(*left_out), PLAIN, tmp_path / "glue.onnx")
        found = Eager(Eager.Options(), Opened(engine(path, tmp_path))).match(a, b)
        assert (found.status, found.covisibility is not None) == (status, covisibility)
    path = save(early_stop_model(), CARD, tmp_path / "glue.onnx")
    assert Eager(Eager.Options(), Opened(engine(path, tmp_path))).match(a, b).status is Status.STOPPED_EARLY


@pytest.mark.parametrize("name", ["lighterglue", "lightglue"])
@pytest.mark.parametrize("option_name", ["min_covisibility", "early_stop_decay"])
def test_the_options_are_in_the_configuration(name, option_name):
    values = {"matcher.name": name, f"matcher.options.{option_name}": 1}
    assert Config.from_flat(values).matcher.options[option_name] == 1.0
    for wrong in (-0.1, 1.1):
        with pytest.raises(ConfigError, match=option_name):
            Config.from_flat({**values, f"matcher.options.{option_name}": wrong})
    assert all(hasattr(cls.Options(), option_name) for cls in (LighterGlue, LightGlue))
