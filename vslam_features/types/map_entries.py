"""What a map keeps."""

from __future__ import annotations

from dataclasses import dataclass

from .frames import ModelIdentity
from .keyframes import Candidate, Keyframe, PairResult


@dataclass(frozen=True)
class MapModels:
    """Identities of what a map's descriptors were computed by. ``global_descriptor`` None: the map has none."""

    features: ModelIdentity
    global_descriptor: ModelIdentity | None = None


@dataclass(frozen=True)
class MapEntry:
    """A keyframe with all that a map keeps of it, stored together or not at all.

    ``pairs``: attempted pairs with older keyframes. ``candidates``, ``gated``: as in :class:`Loops`.
    """

    keyframe: Keyframe
    pairs: tuple[PairResult, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    gated: tuple[Candidate, ...] = ()
