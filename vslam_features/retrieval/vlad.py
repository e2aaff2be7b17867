"""VLAD over local descriptors (Jegou et al., CVPR 2010).

With intra-normalisation (Arandjelovic and Zisserman, CVPR 2013): the residual
sum of each visual word is normalised by itself, so that bursts of one word do
not drown the others. Words come from ``codebooks/vlad_<features>.npz``, made
by ``tools/make_codebooks.py``.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from importlib import resources

import numpy as np

from ..errors import DataError, PluginError
from ..matching.base import as_vectors
from ..types import Features, Frame, ModelIdentity
from .base import GlobalDescriptor


class Vlad(GlobalDescriptor):
    """Global descriptor (K D,) f32: residuals of local descriptors to their nearest of K words."""

    @dataclass(frozen=True)
    class Options:
        """VLAD has no parameters: the codebook fixes everything."""

    def __init__(self, options, features_model: ModelIdentity):
        super().__init__(options, features_model)
        self._words, self._sha256 = load_codebook(features_model.name)

    @cached_property
    def identity(self) -> ModelIdentity:
        """Weights are the codebook; preprocessing is the model of the local features."""
        return ModelIdentity(
            "global", "vlad", self._sha256, f"{self.features_model.name}:{self.features_model.sha256[:16]}"
        )

    def describe(self, frame: Frame, features: Features) -> np.ndarray:
        """See :meth:`GlobalDescriptor.describe`; all zero where there are no keypoints.

        Raises DataError where descriptors do not fit the codebook or are not finite.
        """
        return vlad(as_vectors(features), self._words)


def vlad(descriptors: np.ndarray, words: np.ndarray) -> np.ndarray:
    """(N, D) f32 descriptors and (K, D) f32 words to the (K D,) f32 unit VLAD vector. Raises DataError."""
    k, dim = words.shape
    if descriptors.shape[1] != dim:
        raise DataError(f"vlad: the codebook is for {dim}-d descriptors, got {descriptors.shape[1]}-d")
    if not np.isfinite(descriptors).all():
        raise DataError("vlad: local descriptors are not finite")
    word = (descriptors @ words.T - 0.5 * np.einsum("kd,kd->k", words, words)).argmax(axis=1)
    out = np.zeros((k, dim), np.float32)
    np.add.at(out, word, descriptors - words[word])
    norms = np.linalg.norm(out, axis=1, keepdims=True)
    out /= np.maximum(norms, 1e-12)
    total = np.linalg.norm(out)
    return (out / total if total > 0 else out).ravel()


def load_codebook(features_name: str) -> tuple[np.ndarray, str]:
    """Words (K, D) f32 of the shipped codebook and the file's sha256. Raises PluginError where there is none."""
    folder = resources.files("vslam_features") / "codebooks"
    path = folder / f"vlad_{features_name}.npz"
    if not path.is_file():
        have = sorted(p.name[len("vlad_") : -len(".npz")] for p in folder.iterdir() if p.name.startswith("vlad_"))
        raise PluginError(
            f"no VLAD codebook for features '{features_name}'; there are codebooks for: {', '.join(have) or 'none'}; "
            "make one with tools/make_codebooks.py or choose another global descriptor"
        )
    with path.open("rb") as file:
        words = np.load(file, allow_pickle=False)["words"].astype(np.float32)
    return words, hashlib.sha256(path.read_bytes()).hexdigest()
