"""Learned global descriptors: a model that takes an image and returns one unit vector."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..options import option
from ..types import Features, Frame, ModelIdentity
from .base import GlobalDescriptor, check_descriptor


class LearnedGlobal(GlobalDescriptor):
    """Global descriptor by a model: ``image`` (1, C, H, W) to ``descriptor`` (D,).

    Raises ModelFileError where the file lacks one of these tensors.
    """

    def __init__(self, options, features_model, models=None):
        super().__init__(options, features_model, models)
        self.engine = self.models.open("global", self.options.model)
        self.engine.require(("image",), ("descriptor",))

    @property
    def identity(self) -> ModelIdentity:
        """That of the model."""
        return self.engine.identity

    @property
    def runtime(self) -> str:
        """What the model runs on."""
        return self.engine.runtime

    def describe(self, frame: Frame, features: Features) -> np.ndarray:
        """See :meth:`GlobalDescriptor.describe`; its values are those of half precision.

        Raises NonFiniteError, BackendError, DataError.
        """
        inputs = {"image": self.engine.model.card.preprocessing.apply(frame.image)}
        outputs = self.engine.run(inputs).outputs
        if not outputs["descriptor"].any():  # as of a blank image, or of a model that broke
            again = self.engine.doubt(inputs, "the descriptor is all zero", lambda o: not o["descriptor"].any())
            outputs = outputs if again is None else again.outputs
        descriptor = check_descriptor(np.ravel(outputs["descriptor"]), None)
        # A map stores what is exact in half precision in half the bytes (16.9 KB of MegaLoc's 8448 numbers). Rounded
        # here, the descriptor that is searched with is the stored one, bit for bit, live and after a reload. It moves
        # by 2^-11 of its length at most, far less than two images of a place differ.
        return descriptor.astype(np.float16).astype(np.float32)


class EffNetCov(LearnedGlobal):
    """Channel covariance of EfficientNet-lite0's middle features (Tan and Le, ICML 2019): small and fast."""

    @dataclass(frozen=True)
    class Options:
        """The model."""

        model: str = option("effnet_cov", "Name in the model registry, or path of a model file.")


class MegaLoc(LearnedGlobal):
    """8448 numbers that tell places apart under other light and from other views (Berton and Masone, 2025)."""

    @dataclass(frozen=True)
    class Options:
        """The model."""

        model: str = option("megaloc", "Name in the model registry, or path of a model file.")
