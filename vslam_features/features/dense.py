"""Dense features: a map of descriptors by a model, and keypoints from any detector or a grid."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from .. import registry
from ..errors import ModelFileError, PluginError
from ..images import resize_long_side
from ..options import option
from ..types import Features, Frame, ModelIdentity
from .base import FeatureExtractor

GRID = "grid"


class DenseFeatures(FeatureExtractor):
    """A map (C, h, w) f32 that covers the image, by a model from ``image`` (1, C, H, W) to ``descriptors``.

    Keypoints come from the plug-in ``detector`` with its default options, or lie on a grid: a matcher of maps looks up
    what it needs at any place. So they are no part of the identity, which is that of the model.

    Raises ModelFileError where other tensors are missing, PluginError for a detector that is none.
    """

    dense = True

    def __init__(self, max_keypoints, long_side, options, models=None):
        super().__init__(max_keypoints, long_side, options, models)
        self.engine = self.models.open("features", options.model)
        if not self.engine.binding.dense:
            raise ModelFileError(
                f"{self.engine.model.path}: gives a descriptor a keypoint, no dense map: set features.name to the "
                "plug-in of such features, e.g. xfeat, or tie 'descriptors' to its map in 'outputs' of its card"
            )
        self.engine.require(("image",), ("descriptors",))
        self.detector = self._detector(options.detector, options.grid_step)

    def _detector(self, name: str, step: int) -> FeatureExtractor:
        if name == GRID:
            return Grid(self.max_keypoints, step)
        if name not in registry.names("features"):
            choices = [n for n in registry.names("features") if n != self.engine.model.card.name]
            raise PluginError(f"features.options.detector: '{name}' is none of {', '.join([*choices, GRID])}")
        plugin = registry.get("features", name)
        if getattr(plugin, "dense", False):
            raise PluginError(f"features.options.detector: '{name}' has no keypoints of its own: choose sift or {GRID}")
        return plugin(
            max_keypoints=self.max_keypoints, long_side=self.long_side, options=plugin.Options(), models=self.models
        )

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
        """C, as the model file fixes it."""
        return self.engine.binding.channels("descriptors")

    def extract(self, frame: Frame) -> Features:
        """See :meth:`FeatureExtractor.extract`. N may be 0. Raises NonFiniteError, BackendError, DataError."""
        return self._described(frame, self.detector.extract(frame))

    def extract_again(self, frame: Frame, doubt: str) -> Features | None:
        """See :meth:`FeatureExtractor.extract_again`: asks the detector, where it can."""
        found = self.detector.extract_again(frame, doubt)
        return None if found is None else self._described(frame, found)

    def _described(self, frame: Frame, found: Features) -> Features:
        """The keypoints that were found, with the map."""
        steps, image = self.engine.model.card.preprocessing, frame.image
        if self.long_side and not steps.width:
            image, _ = resize_long_side(image, self.long_side)
        answer = self.engine.run({"image": steps.apply(image)})
        recovered = "; ".join(filter(None, (found.recovered, answer.recovered)))
        return replace(found, descriptors=answer.outputs["descriptors"], model=self.identity, recovered=recovered)


class Grid(FeatureExtractor):
    """Keypoints at the centres of square cells, all of score 1, without descriptors (N, 0).

    Args:
        step: side of a cell in input pixels; larger where the image would have more than ``max_keypoints`` cells.
    """

    def __init__(self, max_keypoints: int, step: int):
        super().__init__(max_keypoints, 0, self.Options())
        self.step = step

    @property
    def identity(self) -> ModelIdentity:
        """Of the method."""
        return ModelIdentity.of_algorithm("features", GRID, "none")

    def extract(self, frame: Frame) -> Features:
        """See :meth:`FeatureExtractor.extract`. A match is exact to half a cell, so this is the scale of the search."""
        width, height = frame.image_size
        step = max(self.step, math.isqrt(width * height // self.max_keypoints))
        while math.ceil(width / step) * math.ceil(height / step) > self.max_keypoints:
            step += 1
        x, y = (np.minimum(np.arange(0, side, step) + (step - 1) / 2, side - 1) for side in (width, height))
        keypoints = np.stack(np.meshgrid(x, y), axis=-1).reshape(-1, 2).astype(np.float32)
        if frame.mask is not None:
            at = np.rint(keypoints).astype(int)
            keypoints = keypoints[frame.mask[at[:, 1], at[:, 0]]]
        n = len(keypoints)
        return Features(
            keypoints,
            np.ones(n, np.float32),
            np.empty((n, 0), np.float32),
            frame.image_size,
            self.identity,
            pixel_scale=max(1.0, step / 2),
        )


class FlexGlue(DenseFeatures):
    """The descriptor model of FlexGlue (https://github.com/cvg/FlexGlue): a map at an eighth of its input's size."""

    default_matcher = "flexglue"

    @dataclass(frozen=True)
    class Options:
        """The model and where keypoints come from."""

        model: str = option("flexglue", "Name in the model registry, or path of a model file.")
        detector: str = option(
            "sift", "Feature plug-in that finds the keypoints, with its default options, or grid: one in each cell."
        )
        grid_step: int = option(8, "Side of the cells of detector: grid, input pixels.", low=1, high=1024)
