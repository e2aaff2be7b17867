"""VLAD over local descriptors (Jegou et al., CVPR 2010).

With intra-normalisation (Arandjelovic and Zisserman, CVPR 2013): the residual
sum of each visual word is normalised by itself, so that bursts of one word do
not drown the others. Words come from ``codebooks/vlad_<features>.npz``, made
by ``tools/make_codebooks.py``. A codebook may ask that residuals count by the
score of their keypoint: with XFeat's, which says how reliable a descriptor
is, true revisits rank somewhat higher (average precision +0.3 to +2 points).
With the contrast that SIFT and ORB call score, changed images are found less
often, so theirs do not.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from typing import NamedTuple

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

    def __init__(self, options, features_model: ModelIdentity, models=None):
        super().__init__(options, features_model, models)
        self._codebook = load_codebook(features_model.name)

    @cached_property
    def identity(self) -> ModelIdentity:
        """Weights are the codebook; preprocessing is the model of the local features."""
        return ModelIdentity(
            "global", "vlad", self._codebook.sha256, f"{self.features_model.name}:{self.features_model.sha256[:16]}"
        )

    def describe(self, frame: Frame, features: Features) -> np.ndarray:
        """See :meth:`GlobalDescriptor.describe`; all zero where there are no keypoints.

        Raises DataError where descriptors do not fit the codebook, or they or their scores are not finite.
        """
        weights = features.scores if self._codebook.weighted else None
        return vlad(as_vectors(features), self._codebook.words, weights)


def vlad(descriptors: np.ndarray, words: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """(N, D) f32 descriptors and (K, D) f32 words to the (K D,) f32 unit VLAD vector.

    ``weights``: (N,), factors of the residuals; None: all count alike. Raises DataError.
    """
    k, dim = words.shape
    if descriptors.shape[1] != dim:
        raise DataError(f"vlad: the codebook is for {dim}-d descriptors, got {descriptors.shape[1]}-d")
    if not np.isfinite(descriptors).all():
        raise DataError("vlad: local descriptors are not finite")
    word = (descriptors @ words.T - 0.5 * np.einsum("kd,kd->k", words, words)).argmax(axis=1)
    out = np.zeros((k, dim), np.float32)
    residuals = descriptors - words[word]
    if weights is not None:
        if weights.shape != (len(descriptors),) or not np.isfinite(weights).all():
            raise DataError(f"vlad: expected {len(descriptors)} finite weights, got shape {weights.shape}: {weights}")
        residuals *= weights[:, None]
    np.add.at(out, word, residuals)
    norms = np.linalg.norm(out, axis=1, keepdims=True)
    out /= np.maximum(norms, 1e-12)
    total = np.linalg.norm(out)
    return (out / total if total > 0 else out).ravel()


class Codebook(NamedTuple):
    """Visual words.

    Args:
        words: (K, D) f32.
        sha256: of the file.
        weighted: residuals count by the score of their keypoint.
    """

    words: np.ndarray
    sha256: str
    weighted: bool


def load_codebook(features_name: str) -> Codebook:
    """The shipped codebook of these features. Raises PluginError where there is none."""
    folder = resources.files("vslam_features") / "codebooks"
    path = folder / f"vlad_{features_name}.npz"
    if not path.is_file():
        have = sorted(p.name[len("vlad_") : -len(".npz")] for p in folder.iterdir() if p.name.startswith("vlad_"))
        raise PluginError(
            f"no VLAD codebook for features '{features_name}'; there are codebooks for: {', '.join(have) or 'none'}; "
            "make one with tools/make_codebooks.py or choose another global descriptor"
        )
    with path.open("rb") as file:
        content = np.load(file, allow_pickle=False)
        words, weighted = content["words"].astype(np.float32), bool(content.get("weighted", False))
    return Codebook(words, hashlib.sha256(path.read_bytes()).hexdigest(), weighted)
