"""Learned local features: a model that takes an image and returns keypoints, scores and descriptors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..images import resize_long_side
from ..options import option
from ..types import Features, Frame, ModelIdentity
from .base import FeatureExtractor


class LearnedFeatures(FeatureExtractor):
    """Features by a model: ``image`` (1, C, H, W) and ``max_keypoints`` to ``keypoints``, ``scores``, ``descriptors``.

    Rows whose score is 0 are no keypoints: the number of rows never depends on the image. A model without the input
    ``max_keypoints`` has a number of its own. Raises ModelFileError where other tensors are missing.
    """

    def __init__(self, max_keypoints, long_side, options, models=None):
        super().__init__(max_keypoints, long_side, options, models)
        self.engine = self.models.open("features", self.options.model)
        self.engine.require(("image", "max_keypoints"), ("keypoints", "scores", "descriptors"))

    @property
    def identity(self) -> ModelIdentity:
        """That of the model."""
        return self.engine.identity

    @property
    def runtime(self) -> str:
        """What the model runs on."""
        return self.engine.runtime

    @property
    def descriptor_length(self) -> int | None:
        """As the model file fixes it."""
        engine = self.engine
        spec = engine.session.outputs[engine.model.card.outputs.get("descriptors", "descriptors")]
        return spec.shape[-1] if spec.shape else None

    def extract(self, frame: Frame) -> Features:
        """See :meth:`FeatureExtractor.extract`. N may be 0. Raises NonFiniteError, BackendError, DataError."""
        inputs, searched = self._inputs(frame)
        answer = self.engine.run(inputs)
        return self._features(frame, searched, answer.outputs, answer.recovered)

    def extract_again(self, frame: Frame, doubt: str) -> Features | None:
        """See :meth:`FeatureExtractor.extract_again`: asks the fallback."""
        inputs, searched = self._inputs(frame)
        answer = self.engine.doubt(inputs, doubt, lambda outputs: not len(self._features(frame, searched, outputs)))
        return None if answer is None else self._features(frame, searched, answer.outputs, answer.recovered)

    def _inputs(self, frame: Frame) -> tuple[dict[str, np.ndarray], tuple[int, int]]:
        """What the model takes, and (width, height) of the image that is searched."""
        image = frame.image
        if self.long_side:
            image, _ = resize_long_side(image, self.long_side)
        inputs = {
            "image": self.engine.model.card.preprocessing.apply(image),
            "max_keypoints": np.array([self.max_keypoints], np.int64),
        }
        return inputs, (image.shape[1], image.shape[0])

    def _features(self, frame: Frame, searched, outputs: dict[str, np.ndarray], recovered: str = "") -> Features:
        keypoints, scores, descriptors = (outputs[name] for name in ("keypoints", "scores", "descriptors"))
        factor = np.array(frame.image_size, np.float64) / searched
        keypoints = ((keypoints + 0.5) * factor - 0.5).astype(np.float32)
        order = np.argsort(-scores, kind="stable")
        keep = order[scores[order] > 0]
        if frame.mask is not None:
            at = np.clip(np.rint(keypoints[keep]).astype(int), 0, np.array(frame.image_size) - 1)
            keep = keep[frame.mask[at[:, 1], at[:, 0]]]
        keep = keep[: self.max_keypoints]  # a model may have a number of its own
        return Features(
            keypoints[keep],
            scores[keep],
            descriptors[keep],
            frame.image_size,
            self.identity,
            pixel_scale=float(factor.max()),
            recovered=recovered,
        )


class XFeat(LearnedFeatures):
    """XFeat (Potje et al., CVPR 2024): fast, 64-d descriptors."""

    default_matcher = "lighterglue"

    @dataclass(frozen=True)
    class Options:
        """The model."""

        model: str = option("xfeat", "Name in the model registry, or path of a model file.")


class Aliked(LearnedFeatures):
    """ALIKED (Zhao et al., IEEE TIM 2023): slower, strong on wide baselines."""

    default_matcher = "lightglue"

    @dataclass(frozen=True)
    class Options:
        """The model."""

        model: str = option(
            "aliked-n16", "Name in the model registry (aliked-n16, aliked-t16), or path of a model file."
        )
