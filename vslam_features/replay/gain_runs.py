"""Runs of a matcher for :mod:`.gain`: each pair once without a stop, and some of them timed with their stops."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np

from ..artifacts.cache import cache_folder
from ..artifacts.card import ModelCard, read_card
from ..artifacts.catalogue import load_catalogue
from ..artifacts.stop_rule import NEVER
from ..engine import Engine
from ..errors import BackendError, ModelError, ModelFileError, PluginError
from ..matching.base import Matcher
from ..matching.verified import VerifiedMatcher
from ..types import Matches, Status
from .gain import Bar, Cost, Overlap, PairScores, Setting, stops
from .gain_views import Views

NO_STOP = Setting(NEVER["min_covisibility"], NEVER["early_stop_decay"])
_ROUNDS = 3
Progress = Callable[[int, int], None]


def silent(done: int, total: int) -> None:
    """Progress that nobody sees."""


def require_scores(matcher: Matcher) -> ModelCard:
    """The card of a matcher's model that stops early and tells the score of each checked layer.

    Raises:
        PluginError: the plug-in has no model, or no options for the rule.
        ModelFileError: the model has no such scores, or its card does not say of which layers.
    """
    name, engine = type(matcher).__name__, getattr(matcher, "engine", None)
    if engine is None or not set(NEVER) <= {f.name for f in fields(matcher.options)}:
        raise PluginError(f"matcher {name}: knows no early stop: choose one with a model, {_stopping_models()}")
    card = engine.model.card
    if not card.early_stop_layers or "layer_scores" not in engine.binding.outputs:
        raise ModelFileError(
            f"{engine.model.path}: {card.name} does not tell its score after each layer (output 'layer_scores', and "
            f"'early_stop_layers' in its card): choose {_stopping_models()}, or make one of a matcher that has such "
            "scores: vslam-features models patch early-stop FILE --layers 2,4"
        )
    if card.layers <= max(card.early_stop_layers):
        raise ModelFileError(
            f"{engine.model.path}: the card has {card.layers} layers and checks {list(card.early_stop_layers)}: the "
            "rule needs the number of all layers, which is above those; correct 'layers' in the card"
        )
    return card


def run_pairs(
    matcher: VerifiedMatcher,
    views: Views,
    pairs: np.ndarray,
    overlaps: Sequence[Overlap],
    bar: Bar,
    progress: Progress = silent,
) -> list[PairScores]:
    """Each pair without a stop. A pair on which the model fails has the status that says so, and no scores.

    ``bar``: what counts as verified.

    Raises ModelFileError where the model returns other scores than its card says.
    """
    free = VerifiedMatcher(with_setting(matcher.matcher, NO_STOP), matcher.verifier)
    checked = matcher.matcher.engine.model.card.early_stop_layers
    found = []
    for done, ((i, j), overlap) in enumerate(zip(pairs.tolist(), overlaps), 1):
        (features0, camera0), (features1, camera1) = views.get(i), views.get(j)
        try:
            matches = free.match(features0, features1, camera0, camera1)
        except BackendError as error:  # counted by the engine; one pair of thousands is no reason to end
            matches = Matches.empty(Status.BACKEND_ERROR, detail=str(error))
        verified = bar.passes(matches, min(len(features0), len(features1)))
        found.append(_scores((views.names[i], views.names[j]), overlap, matches, verified, checked))
        progress(done, len(pairs))
    return found


def _scores(
    names: tuple[str, str], overlap: Overlap, matches: Matches, verified: bool, checked: tuple[int, ...]
) -> PairScores:
    counts = len(matches), matches.num_inliers, verified
    if matches.covisibility is None or not matches.layer_scores:
        return PairScores(names, overlap, matches.status, *counts)
    layers, scores = zip(*matches.layer_scores)
    if layers != checked or matches.stopped_after_layer:
        raise ModelFileError(
            f"{names[0]} and {names[1]}: at decay 1 the model told scores after layers {list(layers)}, expected "
            f"{list(checked)}, and stopped after layer {matches.stopped_after_layer}, expected 0: is the card right?"
        )
    return PairScores(names, overlap, matches.status, *counts, matches.covisibility, scores)


@dataclass(frozen=True)
class Times:
    """Costs by the layer after which a pair stops, 0 for no stop; only those that a setting makes happen.

    ``strays``: timed pairs that stopped elsewhere than their scores say, which rounding alone explains.
    """

    costs: dict[int, Cost]
    strays: int


def time_stops(
    matcher: Matcher,
    plain: Matcher,
    views: Views,
    pairs: np.ndarray,
    scores: Sequence[PairScores],
    settings: Sequence[Setting],
    sample: int = 12,
    seed: int = 0,
    progress: Progress = silent,
) -> Times:
    """Time the matcher and the plain one on some pairs for each layer after which any of the settings stops a pair.

    For a layer they are ``sample`` of those pairs which a setting stops there, run with that setting. All are run in
    turns, in random order, three times: the median of a pair, then the median of the pairs.

    Args:
        plain: what it is compared with. pairs, scores: as of :func:`run_pairs`.
    """
    card, rng = matcher.engine.model.card, np.random.default_rng(seed)
    ran = np.flatnonzero([pair.ran for pair in scores])
    after = np.array([stops([scores[i] for i in ran], card.early_stop_layers, card.layers, s) for s in settings])
    jobs: list[tuple[int, int, Setting]] = []  # layer, pair, setting
    for layer in (0, *card.early_stop_layers):
        there = np.flatnonzero((after == layer).any(axis=0))
        for i in rng.permutation(there)[:sample]:
            which = int((after[:, i] == layer).argmax())
            jobs.append((layer, int(ran[i]), settings[which]))
    took, strays = np.zeros((2, len(jobs), _ROUNDS)), set()
    for turn, job in enumerate(np.concatenate([rng.permutation(len(jobs)) for _ in range(_ROUNDS + 1)])):
        layer, pair, setting = jobs[job]
        sides = [views.get(int(view))[0] for view in pairs[pair]]
        start = time.perf_counter()
        stopped = with_setting(matcher, setting).match(*sides).stopped_after_layer
        middle = time.perf_counter()
        plain.match(*sides)
        end = time.perf_counter()
        if stopped != layer:
            strays.add(job)
        if turn >= len(jobs):  # in the first round runtimes meet new sizes
            took[:, job, turn // len(jobs) - 1] = middle - start, end - middle
        progress(turn + 1, len(jobs) * (_ROUNDS + 1))
    own, other = np.median(took, axis=2) * 1e3
    layer_of = np.array([layer for layer, _, _ in jobs], int)
    costs = {
        int(layer): Cost(
            int((layer_of == layer).sum()),
            float(np.median(own[layer_of == layer])),
            float(np.median(other[layer_of == layer])),
        )
        for layer in np.unique(layer_of)
    }
    return Times(costs, len(strays))


def with_setting(matcher: Matcher, setting: Setting) -> Matcher:
    """The same matcher, on the same engine, with another threshold and decay."""
    own = {"min_covisibility": setting.min_covisibility, "early_stop_decay": setting.decay}
    return type(matcher)(replace(matcher.options, **own), _Opened(matcher.engine))


@dataclass(frozen=True)
class _Opened:
    """Stands for ``Models`` where the model is open already."""

    engine: Engine

    def open(self, role: str, model: str) -> Engine:
        return self.engine


def plain_twin(card: ModelCard) -> Path | None:
    """The model file in the cache that computes the same without early stop; None where there is none."""
    for path in sorted(cache_folder("models").glob(f"*.{card.precision}.onnx")):
        try:
            other = read_card(path)
        except ModelError:  # a file that is none is told of where it is used
            continue
        same = (other.role, other.source_sha256, other.precision) == (card.role, card.source_sha256, card.precision)
        if card.source_sha256 and same and not other.early_stop_layers:
            return path
    return None


def _stopping_models() -> str:
    names = sorted(name for name, entry in load_catalogue().items() if getattr(entry, "early_stop_layers", ()))
    return f"such as {' or '.join(names)}" if names else "one that stops early"
