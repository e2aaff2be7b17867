"""A matcher that stops early behind the plug-in: statuses, scores, options, lies, and the second opinion.

The models are real ones, made to stop by the surgery and run by ONNX Runtime; what they must say is computed in NumPy
(``matcher_graph``). Lies are told by a session around such a one.
"""

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from helpers import features
from matcher_graph import Matcher as Network
from model_helpers import (
    Opened,
    _tiny_cache,  # noqa: F401 (fixtures)
    card,
    engine,
    own_cache,  # noqa: F401
    save,
    tiny,  # noqa: F401
    tiny_config,
)

from vslam_features.artifacts.binding import Binding
from vslam_features.config import Config, GeometryConfig
from vslam_features.errors import BackendError, ConfigError
from vslam_features.frontend import FrontEnd
from vslam_features.geometry import Verifier
from vslam_features.graph.early_stop import add_early_stop
from vslam_features.matching.learned import LearnedMatcher, LighterGlue, LightGlue, covisibility_option, decay_option
from vslam_features.matching.verified import VerifiedMatcher
from vslam_features.options import option
from vslam_features.replay.scenes import make_scene
from vslam_features.runtimes.base import Session, TensorSpec
from vslam_features.types import Status

CHECKED = (2, 4, 6, 8)
NETWORK = Network(seed=7)  # whose scores are nowhere near their limits, see early_stop_helpers
CARD = card("matcher", "glue", layers=9, early_stop_layers=CHECKED)
PLAIN = card("matcher", "glue", layers=9)


def with_keypoints(model: onnx.ModelProto) -> onnx.ModelProto:
    """The network looks at descriptors only; the file of a matcher takes keypoints as well."""
    infos = [onnx.helper.make_tensor_value_info(f"keypoints{i}", 1, [n, 2]) for i, n in enumerate("MN")]
    model.graph.input.extend(infos)
    return model


def stopping(network: Network) -> onnx.ModelProto:
    scores = {k: f"score_{k}" for k in range(1, 10)}
    made = add_early_stop(ir.from_proto(network.graph()), scores, CHECKED, 9, like=("descriptors0", 0))
    return with_keypoints(ir.to_proto(made.model))


@cache
def _stopping() -> bytes:
    return stopping(NETWORK).SerializeToString()


def early_stop_model(*left_out: str) -> onnx.ModelProto:
    model = onnx.load_from_string(_stopping())
    for name in left_out:
        model.graph.output.remove(next(o for o in model.graph.output if o.name == name))
    return model


def plain_model(*left_out: str) -> onnx.ModelProto:
    model = with_keypoints(NETWORK.graph())
    for name in (*left_out, *(f"score_{k}" for k in range(1, 10))):
        model.graph.output.remove(next(o for o in model.graph.output if o.name == name))
    return model


def matcher_of(tmp_path, model=None, own=CARD, least=0.0, decay=1.0, fallback=None, **faults) -> LighterGlue:
    path = save(model or early_stop_model(), own, tmp_path / "glue.onnx")
    options = LighterGlue.Options("any", 0.0, least, decay)
    return LighterGlue(options, Opened(engine(path, tmp_path / "incidents", fallback, **faults)))


def sides(m, n, seed):
    pair = NETWORK.pair(m, n, seed, overlap=seed % 2 == 0)
    return pair, [features(pair[f"descriptors{i}"]) for i in (0, 1)]


class Lying(Session):
    """Another session whose outputs are changed by ``lie(outputs, inputs)``; ``more``: outputs that are added."""

    def __init__(self, inner: Session, lie, **more: TensorSpec):
        self._inner, self._lie = inner, lie
        self.inputs, self.outputs, self.active = inner.inputs, {**inner.outputs, **more}, inner.active

    def _run(self, inputs):
        return self._lie(self._inner._run(inputs), inputs)


def lying(matcher: LearnedMatcher, lie, own=None, **more) -> LearnedMatcher:
    """The matcher with a session that lies."""
    e = matcher.engine
    e.session = Lying(e.session, lie, **more)
    e.model = replace(e.model, card=own or e.model.card)
    e.binding = Binding(e.session, e.model.card, str(e.model.path))
    return matcher


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
    at, above = (matcher_of(tmp_path, least=s).match(a, b) for s in (score, float(np.nextafter(np.float32(score), 1))))
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


# -- lies ----------------------------------------------------------------------------------------

LIES = {
    "a stop with matches": {"stopped_after_layer": np.array(2)},
    "a layer that is not checked": {"stopped_after_layer": np.array(5)},
    "a score beyond 1": {"covisibility_score": np.array(1.5, np.float32)},
    "a layer that did not run": {"layer_scores": np.array([0.9, 0.9, 0.9, -1], np.float32)},
    "scores below their limits": {"layer_scores": np.array([0.9, 0.9, 0.9, 0.1], np.float32)},
}


@pytest.mark.parametrize("changes", LIES.values(), ids=LIES)
def test_a_lie_is_a_fault(changes, tmp_path):
    _, (a, b) = sides(40, 30, 0)
    (tmp_path / "fallback").mkdir()
    fallback = save(early_stop_model(), CARD, tmp_path / "fallback/glue.onnx")
    expected = matcher_of(tmp_path, least=0.15, decay=0.0).match(a, b)
    assert expected.status is None and len(expected.pairs)
    with pytest.raises(BackendError):
        lying(matcher_of(tmp_path, least=0.15, decay=0.0), lambda o, i: {**o, **changes}).match(a, b)
    matcher = lying(matcher_of(tmp_path, least=0.15, decay=0.0, fallback=fallback), lambda o, i: {**o, **changes})
    found = matcher.match(a, b)
    assert np.array_equal(found.pairs, expected.pairs) and found.layer_scores == expected.layer_scores
    counts = matcher.engine.counts
    assert found.recovered and (counts.errors, counts.recovered, counts.incidents) == (1, 1, 1)


@pytest.mark.parametrize("layer", [2, 6, 9])
def test_a_nan_score_is_neither_a_stop_nor_a_match(layer, tmp_path):
    network = Network(seed=7)
    network.bias[layer] = np.nan
    for least, decay in ((0.0, 1.0), (0.3, 0.5)):
        matcher = matcher_of(tmp_path, stopping(network), least=least, decay=decay)
        _, (a, b) = sides(40, 30, 2)
        result = VerifiedMatcher(matcher, Verifier(GeometryConfig())).match(a, b)
        assert (result.status, len(result), result.stopped_after_layer) == (Status.NON_FINITE, 0, 0)
        assert matcher.engine.counts.non_finite == 1


def test_nan_of_a_runtime_is_made_good_by_the_fallback(tmp_path):
    (tmp_path / "fallback").mkdir()
    fallback = save(early_stop_model(), CARD, tmp_path / "fallback/glue.onnx")
    matcher = matcher_of(tmp_path, least=0.95, decay=0.0, fallback=fallback, nan_calls="1")
    _, (a, b) = sides(40, 30, 1)
    first, second = matcher.match(a, b), matcher.match(a, b)
    assert "not finite" in first.recovered and not second.recovered
    assert first.status is second.status is Status.STOPPED_EARLY and first.layer_scores == second.layer_scores


def test_a_runtime_that_finds_nothing_says_no_stop(tmp_path):
    """In the fake runtime: an empty result without a reason, which the guard of empty results is there for."""
    found = matcher_of(tmp_path, zero_calls="all").match(*sides(40, 30, 0)[1])
    assert (found.status, found.stopped_after_layer, found.covisibility) == (Status.NO_MATCHES, 0, 0.0)


# -- the second opinion ----------------------------------------------------------------------------


def blind(outputs, inputs):
    """A broken model: it sees nothing in common anywhere, and says so without a contradiction."""
    n = len(inputs["descriptors0"])
    scores = np.array([0.01, -1, -1, -1], np.float32)
    return {
        "matches0": np.full(n, -1, np.int64), "mscores0": np.zeros(n, np.float32), "covisibility_score": scores[0],
        "stopped_after_layer": np.array(2, np.int64), "layer_scores": scores,
    }  # fmt: skip


def test_a_wrong_stop_is_found_out_by_the_fallback(tmp_path):
    (tmp_path / "fallback").mkdir()
    fallback = save(early_stop_model(), CARD, tmp_path / "fallback/glue.onnx")
    _, (a, b) = sides(40, 30, 2)
    matcher = lying(matcher_of(tmp_path, least=0.5, decay=0.2, fallback=fallback), blind)
    assert matcher.match(a, b).status is Status.STOPPED_EARLY
    second = matcher.match_again(a, b, "they look alike")
    assert len(second.pairs) and second.recovered == "they look alike" and second.stopped_after_layer == 0
    assert [k for k, _ in second.layer_scores] == [2, 4, 6, 8]
    counts = matcher.engine.counts
    assert (counts.empty, counts.empty_agreed, counts.incidents) == (1, 0, 1) and matcher.suspect


def test_a_stop_that_the_whole_model_confirms_is_right(tmp_path):
    """Although the fallback, asked to reject nothing, finds matches."""
    (tmp_path / "fallback").mkdir()
    fallback = save(early_stop_model(), CARD, tmp_path / "fallback/glue.onnx")
    pair, (a, b) = sides(40, 30, 7)
    matches, _, covisibility, *_ = NETWORK.match(pair, 0.0, 1.0)
    assert covisibility < 0.9 and (matches >= 0).any()
    matcher = matcher_of(tmp_path, least=0.9, decay=0.0, fallback=fallback)
    assert matcher.match(a, b).status is Status.STOPPED_EARLY
    assert matcher.match_again(a, b, "they look alike") is None
    assert matcher.engine.counts.empty_agreed == 1 and not matcher.suspect


@pytest.mark.usefixtures("tiny")
def test_wrong_stops_between_look_alike_keyframes_are_asked_of_the_fallback():
    made = make_scene("room", width=320, height=240, fps=5.0)
    front_end = FrontEnd(tiny_config())

    def stop(outputs, inputs):
        n = len(inputs["descriptors0"])
        return {"matches0": np.full(n, -1), "mscores0": np.zeros(n, np.float32), "stopped_after_layer": np.array(2)}

    spec = TensorSpec(np.dtype(np.int64), ())
    lying(front_end.matcher.matcher, stop, stopped_after_layer=spec)
    pairs = [p.matches for i in range(5) for p in front_end.process(made.frame(i))[0].pairs]
    assert [p.status for p in pairs] == [Status.FAULT_RECOVERED] * 4
    assert "no match (stopped_early) between keyframes 0 and 1, whose images look alike" in pairs[0].detail
    assert front_end.matcher.matcher.engine.counts.empty == 4
