"""Learned matchers: a model that takes two sets of features and returns the match of each keypoint."""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields

import numpy as np

from ..artifacts.stop_contract import NOT_RUN
from ..artifacts.stop_rule import NEVER, limits_of_run
from ..engine import Answer
from ..errors import ConfigError, ModelFileError, PluginError
from ..options import option
from ..types import Features, ModelIdentity, Status
from .base import Correspondences, Matcher, as_vectors

logger = logging.getLogger(__name__)

_INPUTS = [f"{name}{side}" for side in (0, 1) for name in ("keypoints", "descriptors", "image_size")]
# What each option of a rejection needs: kind and name of the file's tensor.
_NEEDS = {"min_covisibility": ("output", "covisibility_score"), "early_stop_decay": ("input", "early_stop_decay")}


def covisibility_option(default: float):
    """The option ``min_covisibility`` of a matcher; in what unit depends on its model."""
    return option(
        default,
        "Pairs of smaller covisibility are not_covisible and have no matches; 0: none. Models without a covisibility "
        "score take 0 only.",
        low=0.0,
        high=1.0,
    )


def decay_option(default: float):
    """The option ``early_stop_decay`` of a matcher."""
    return option(
        default,
        "How soon a pair of low covisibility is stopped: after layer k of L below min_covisibility * (1 - "
        "early_stop_decay)^(L - k). 1: never, 0: at min_covisibility already. Models without early stop take 1 only.",
        low=0.0,
        high=1.0,
    )


_OF_OTHER_KIND = {
    False: "{}: takes dense maps: set matcher.name to 'flexglue'",
    True: "{}: takes a descriptor a keypoint, no dense map: set matcher.name to 'lighterglue' or 'lightglue', or say "
    "in 'layouts' of its card how it takes maps (descriptors0: chw, hwc or tokens)",
}


class LearnedMatcher(Matcher):
    """Matches by a model: keypoints, descriptors and image sizes of both sides to ``matches0`` and ``mscores0``.

    A model with a covisibility score rejects pairs (``min_covisibility``): status ``not_covisible``. One that stops
    early (``early_stop_decay``) rejects the worst of them after some of its layers: ``stopped_early``; where its file
    has no output ``stopped_after_layer``, such pairs are ``not_covisible``, with layer 0. Neither has matches.

    ``Options`` have ``model``, ``min_score``, ``min_covisibility`` and ``early_stop_decay``. The defaults of the
    latter two hold for models that can do it.

    Raises ModelFileError where the file lacks one of these tensors, ConfigError where an option was set to what the
    model cannot do.
    """

    _descriptors = staticmethod(as_vectors)

    def __init__(self, options, models=None):
        super().__init__(options, models)
        self.engine = self.models.open("matcher", self.options.model)
        self.engine.require((*_INPUTS, *NEVER), ("matches0", "mscores0"))
        if self.engine.binding.dense != self.dense:
            raise ModelFileError(_OF_OTHER_KIND[self.dense].format(self.engine.model.path))
        able = {name: np.array(self._able(name), np.float32) for name in NEVER}
        self._least = able["min_covisibility"]
        self._stop = {name: value for name, value in able.items() if name in self.engine.binding.inputs}
        self._never = {name: np.array(NEVER[name], np.float32) for name in self._stop}

    def _able(self, name: str) -> float:
        """An option of rejection as far as the model can do it."""
        value, never, (kind, tensor) = getattr(self.options, name), NEVER[name], _NEEDS[name]
        binding = self.engine.binding
        if value == never or tensor in (binding.inputs if kind == "input" else binding.outputs):
            return value
        lacks = f"{self.engine.model.path} has no {kind} '{tensor}'"
        if value != next(f.default for f in fields(self.options) if f.name == name):
            raise ConfigError(
                f"matcher.options.{name} is {value:g}, but {lacks}: set it to {never:g}, or matcher.options.model to a "
                "model that has one ('vslam-features models list' shows which stop early)"
            )
        logger.info("%s: no pair is rejected by %s", lacks, name)
        return never

    @property
    def runtime(self) -> str:
        """What the model runs on."""
        return self.engine.runtime

    def require(self, features_model: ModelIdentity, descriptor_length: int | None = None) -> None:
        """Raises PluginError for features that the model did not learn to match, or of another length."""
        takes, card = self.engine.model.card.features_model, self.engine.model.card
        if takes and features_model.name != takes:
            raise PluginError(
                f"matcher {card.name} matches features of {takes}, got {features_model.name}: "
                "set matcher.name to 'nearest' or features.name to what it takes"
            )
        length = self.engine.binding.channels("descriptors0")
        if length is not None and descriptor_length is not None and length != descriptor_length:
            raise PluginError(
                f"matcher {card.name} takes descriptors of length {length}, {features_model.name} has "
                f"{descriptor_length}: set matcher.name to 'nearest' or features.name to what it takes"
            )

    @property
    def suspect(self) -> bool:
        """See :attr:`Matcher.suspect`."""
        return self.engine.suspect

    @property
    def has_covisibility(self) -> bool:
        """See :attr:`Matcher.has_covisibility`."""
        return "covisibility_score" in self.engine.binding.outputs

    @property
    def stop_limits(self) -> tuple[tuple[int, float], ...]:
        """See :attr:`Matcher.stop_limits`."""
        card = self.engine.model.card
        limits = limits_of_run(card, self._stop) if "early_stop_decay" in self._stop else None
        return () if limits is None else tuple(zip(card.early_stop_layers, limits.tolist()))

    def match(self, features0: Features, features1: Features) -> Correspondences:
        """See :meth:`Matcher.match`; N may be 0. Raises NonFiniteError, BackendError, DataError."""
        if not len(features0) or not len(features1):  # models need not take none
            return Correspondences(np.empty((0, 2), np.int32), np.empty(0, np.float32), status=Status.NO_KEYPOINTS)
        inputs = {**self._inputs(features0, features1), **self._stop}
        return self._correspondences(self.engine.run(inputs))

    def match_overlapping(self, features0: Features, features1: Features) -> Correspondences:
        """See :meth:`Matcher.match_overlapping`: all layers run, and no covisibility is too small."""
        if not len(features0) or not len(features1):
            return self.match(features0, features1)
        inputs = {**self._inputs(features0, features1), **self._never}
        return self._correspondences(self.engine.run(inputs), rejects=False)

    def match_again(
        self, features0: Features, features1: Features, doubt: str, overlapping: bool = False
    ) -> Correspondences | None:
        """See :meth:`Matcher.match_again`: asks the fallback the same question.

        It rejects by its own scores: so a wrong stop is found out, and a right one is shared, although all layers might
        find matches. An ``overlapping`` pair goes through all of them.
        """
        limits, rejects = self._never if overlapping else self._stop, not overlapping
        inputs = {**self._inputs(features0, features1), **limits}
        answer = self.engine.doubt(inputs, doubt, lambda outputs: not self._found(outputs, rejects).any())
        return None if answer is None else self._correspondences(answer, rejects)

    def _inputs(self, *sides: Features) -> dict[str, np.ndarray]:
        inputs = {}
        for i, features in enumerate(sides):
            inputs[f"keypoints{i}"] = features.keypoints
            inputs[f"descriptors{i}"] = self._descriptors(features)
            inputs[f"image_size{i}"] = np.array(features.image_size, np.float32)
        return inputs

    def _rejected(self, outputs: dict[str, np.ndarray], rejects: bool = True) -> Status | None:
        """Why the pair has no matches whatever the others say; without ``rejects`` a model that stops all the same."""
        if _number(outputs, "stopped_after_layer"):
            return Status.STOPPED_EARLY
        covisibility = _number(outputs, "covisibility_score")
        if rejects and covisibility is not None and np.float32(covisibility) < self._least:
            return Status.NOT_COVISIBLE
        return None

    def _found(self, outputs: dict[str, np.ndarray], rejects: bool = True) -> np.ndarray:
        """Bool (M,): keypoints that have a match."""
        found = (outputs["matches0"] >= 0) & (outputs["mscores0"] > self.options.min_score)
        return np.zeros_like(found) if self._rejected(outputs, rejects) else found

    def _correspondences(self, answer: Answer, rejects: bool = True) -> Correspondences:
        outputs = answer.outputs
        matches0, scores0 = outputs["matches0"], outputs["mscores0"]
        rows = np.flatnonzero(self._found(outputs, rejects))
        rows = rows[np.argsort(-scores0[rows], kind="stable")]
        pairs = np.stack([rows, matches0[rows]], axis=1).astype(np.int32)
        scores = np.clip(scores0[rows], 0, 1).astype(np.float32)
        layer_scores = zip(answer.card.early_stop_layers, outputs.get("layer_scores", np.empty(0)).tolist())
        return Correspondences(
            pairs,
            scores,
            covisibility=_number(outputs, "covisibility_score"),
            stopped_after_layer=int(_number(outputs, "stopped_after_layer") or 0),
            layer_scores=tuple((layer, score) for layer, score in layer_scores if score != NOT_RUN),
            status=self._rejected(outputs, rejects) or (None if len(rows) else Status.NO_MATCHES),
            runtime=answer.runtime,
            recovered=answer.recovered,
        )


def _number(outputs: dict[str, np.ndarray], name: str) -> float | None:
    """The one value of an output, None where there is no such output."""
    return float(outputs[name].flat[0]) if name in outputs else None


class LighterGlue(LearnedMatcher):
    """LighterGlue: LightGlue distilled for XFeat features (Potje et al., 2024)."""

    # A matcher that looks at the whole scene aligns the doors and lamps of any two corridors: up to 12 % of XFeat's
    # keypoints, where true revisits have 14 % (median of all candidates; more for the best). Nearest neighbours with a
    # ratio test have few there.
    loop_share = 0.15

    @dataclass(frozen=True)
    class Options:
        """The model and its thresholds."""

        model: str = option("lighterglue-early-stop", "Name in the model registry, or path of a model file.")
        min_score: float = option(0.15, "Matches of smaller score are left out.", low=0.0, high=1.0)
        min_covisibility: float = covisibility_option(0.5)
        early_stop_decay: float = decay_option(0.1)


class LightGlue(LearnedMatcher):
    """LightGlue (Lindenberger et al., ICCV 2023) for ALIKED features."""

    loop_inliers = 35  # up to 29 between look-alike corridors, where ALIKED has 50 to 150 keypoints

    @dataclass(frozen=True)
    class Options:
        """The model and its thresholds."""

        model: str = option("lightglue-aliked-early-stop", "Name in the model registry, or path of a model file.")
        min_score: float = option(0.1, "Matches of smaller score are left out.", low=0.0, high=1.0)
        min_covisibility: float = covisibility_option(0.5)
        early_stop_decay: float = decay_option(0.3)
