"""Learned matchers: a model that takes two sets of features and returns the match of each keypoint."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..engine import Answer
from ..errors import PluginError
from ..options import option
from ..types import Features, ModelIdentity, Status
from .base import Correspondences, Matcher, as_vectors

_INPUTS = [f"{name}{side}" for side in (0, 1) for name in ("keypoints", "descriptors", "image_size")]


class LearnedMatcher(Matcher):
    """Matches by a model: keypoints, descriptors and image sizes of both sides to ``matches0`` and ``mscores0``.

    Raises ModelFileError where the file lacks one of these tensors.
    """

    def __init__(self, options, models=None):
        super().__init__(options, models)
        self.engine = self.models.open("matcher", self.options.model)
        self.engine.require(_INPUTS, ("matches0", "mscores0"))

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
        spec = self.engine.session.inputs[card.inputs.get("descriptors0", "descriptors0")]
        length = spec.shape[-1] if spec.shape else None
        if length is not None and descriptor_length is not None and length != descriptor_length:
            raise PluginError(
                f"matcher {card.name} takes descriptors of length {length}, {features_model.name} has "
                f"{descriptor_length}: set matcher.name to 'nearest' or features.name to what it takes"
            )

    @property
    def suspect(self) -> bool:
        """See :attr:`Matcher.suspect`."""
        return self.engine.suspect

    def match(self, features0: Features, features1: Features) -> Correspondences:
        """See :meth:`Matcher.match`; N may be 0. Raises NonFiniteError, BackendError, DataError."""
        if not len(features0) or not len(features1):  # models need not take none
            return Correspondences(np.empty((0, 2), np.int32), np.empty(0, np.float32), status=Status.NO_KEYPOINTS)
        inputs = self._inputs(features0, features1)
        return self._correspondences(self.engine.run(inputs), features0, features1)

    def match_again(self, features0: Features, features1: Features, doubt: str) -> Correspondences | None:
        """See :meth:`Matcher.match_again`: asks the fallback."""
        inputs = self._inputs(features0, features1)
        answer = self.engine.doubt(inputs, doubt, lambda outputs: not self._found(outputs).any())
        return None if answer is None else self._correspondences(answer, features0, features1)

    def _inputs(self, *sides: Features) -> dict[str, np.ndarray]:
        inputs = {}
        for i, features in enumerate(sides):
            inputs[f"keypoints{i}"] = features.keypoints
            inputs[f"descriptors{i}"] = as_vectors(features)
            inputs[f"image_size{i}"] = np.array(features.image_size, np.float32)
        return inputs

    def _found(self, outputs: dict[str, np.ndarray]) -> np.ndarray:
        return (outputs["matches0"] >= 0) & (outputs["mscores0"] > self.options.min_score)

    def _correspondences(self, answer: Answer, features0: Features, features1: Features) -> Correspondences:
        matches0, scores0 = answer.outputs["matches0"], answer.outputs["mscores0"]
        rows = np.flatnonzero(self._found(answer.outputs))
        rows = rows[np.argsort(-scores0[rows], kind="stable")]
        pairs = np.stack([rows, matches0[rows]], axis=1).astype(np.int32)
        scores = np.clip(scores0[rows], 0, 1).astype(np.float32)
        status = None if len(rows) else Status.NO_MATCHES
        covisibility = answer.outputs.get("covisibility_score")
        return Correspondences(
            pairs,
            scores,
            covisibility=None if covisibility is None else float(np.ravel(covisibility)[0]),
            status=status,
            runtime=answer.runtime,
            recovered=answer.recovered,
        )


class LighterGlue(LearnedMatcher):
    """LighterGlue: LightGlue distilled for XFeat features (Potje et al., 2024)."""

    # A matcher that looks at the whole scene aligns the doors and lamps of any two corridors: up to 12 % of XFeat's
    # keypoints, where true revisits have 14 % (median of all candidates; more for the best). Nearest neighbours with a
    # ratio test have few there.
    loop_share = 0.15

    @dataclass(frozen=True)
    class Options:
        """The model and its threshold."""

        model: str = option("lighterglue", "Name in the model registry, or path of a model file.")
        min_score: float = option(0.15, "Matches of smaller score are left out.", low=0.0, high=1.0)


class LightGlue(LearnedMatcher):
    """LightGlue (Lindenberger et al., ICCV 2023) for ALIKED features."""

    loop_inliers = 35  # up to 29 between look-alike corridors, where ALIKED has 50 to 150 keypoints

    @dataclass(frozen=True)
    class Options:
        """The model and its threshold."""

        model: str = option("lightglue-aliked", "Name in the model registry, or path of a model file.")
        min_score: float = option(0.1, "Matches of smaller score are left out.", low=0.0, high=1.0)
