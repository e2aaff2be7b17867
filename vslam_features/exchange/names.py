"""What a map has no name for: its images, and models that others ran."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from ..types import ModelIdentity

Progress = Callable[[int, int], None]
"""Called with keyframes done so far and keyframes in all."""


def image_name(kf_id: int) -> str:
    """Name of a keyframe's image in exports: ``kf_000012.png``. A map holds no images; names only identify them."""
    return f"kf_{kf_id:06d}.png"


def imported_model(role: str, name: str, content: str) -> ModelIdentity:
    """Identity of a model that is known by its output only.

    ``content`` tells outputs apart; its hash stands where ours have that of their weights or parameters, and the
    preprocessing is ``imported``, which none of ours has: so it equals no other identity by accident.
    """
    text = f"imported {role} {name}\n{content}"
    return ModelIdentity(role, name, hashlib.sha256(text.encode()).hexdigest(), "imported")
