"""FlexGlue: a learned matcher of dense maps."""

from __future__ import annotations

from dataclasses import dataclass

from ..options import option
from .base import as_map
from .learned import LearnedMatcher, covisibility_option, decay_option


class FlexGlue(LearnedMatcher):
    """FlexGlue (https://github.com/cvg/FlexGlue): matches two maps at the keypoints of both images, wherever these lie.

    Its covisibility score rejects look-alike places; 0.5 and a decay of 0.5 are the published safe choice. A released
    file is bound by a card: ``docs/models.md``.
    """

    dense = True
    _descriptors = staticmethod(as_map)

    @dataclass(frozen=True)
    class Options:
        """The model and its thresholds."""

        model: str = option("flexglue-matcher", "Name in the model registry, or path of a model file.")
        min_score: float = option(0.1, "Matches of smaller score are left out.", low=0.0, high=1.0)
        min_covisibility: float = covisibility_option(0.5)
        early_stop_decay: float = decay_option(0.5)
