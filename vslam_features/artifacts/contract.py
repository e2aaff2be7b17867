"""What outputs of a role must be, whatever the reference says: shapes, types, and pixels that lie in the image."""

from __future__ import annotations

import numpy as np

from .card import ModelCard
from .stop_contract import stop_breaches

TENSORS = {
    "features": ("keypoints", "scores", "descriptors"),
    "matcher": ("matches0", "mscores0"),
    "global": ("descriptor",),
}
MAPS = ("descriptors",)  # all that dense features are: (C, h, w); keypoints come from elsewhere
_UNIT = 1e-2
_MARGIN_PX = 1.0  # refined positions may leave the image by less than a pixel


def breaches(card: ModelCard, inputs: dict[str, np.ndarray], outputs: dict[str, np.ndarray]) -> list[str]:
    """How outputs break the contract of the card's role (``docs/models.md``), in words; empty where they keep it.

    NaN is looked for elsewhere.
    """
    role = card.role
    if role == "features" and are_maps(outputs):
        d = outputs["descriptors"]
        return [] if d.size and d.dtype.kind == "f" else [f"descriptors are {d.dtype} {d.shape}, expected floats"]
    missing = [name for name in TENSORS[role] if name not in outputs]
    if missing:
        there = ", ".join(sorted(outputs))
        return [f"output '{name}' is missing, there are {there}; check the card's binding" for name in missing]
    found = {"features": _features, "matcher": _matcher, "global": _global}[role](inputs, outputs)
    return found or (stop_breaches(card, inputs, outputs) if role == "matcher" else [])


def are_maps(outputs: dict[str, np.ndarray]) -> bool:
    """True for the outputs of dense features."""
    return "keypoints" not in outputs and "descriptors" in outputs and outputs["descriptors"].ndim == 3


def _features(inputs, outputs) -> list[str]:
    keypoints, scores, descriptors = (outputs[name] for name in TENSORS["features"])
    n = len(keypoints)
    if keypoints.shape != (n, 2):
        return [f"keypoints has shape {keypoints.shape}, expected (N, 2)"]
    if scores.shape != (n,):
        return [f"scores has shape {scores.shape}, expected ({n},) as there are {n} keypoints"]
    if descriptors.ndim != 2 or len(descriptors) != n or (n and not descriptors.shape[1]):
        return [f"descriptors has shape {descriptors.shape}, expected ({n}, D)"]
    if "image" not in inputs:
        return []
    height, width = inputs["image"].shape[-2:]
    points = keypoints[(scores > 0) & np.isfinite(keypoints).all(axis=1)]
    outside = ((points < -_MARGIN_PX) | (points > np.array([width, height]) - 1 + _MARGIN_PX)).any(axis=1)
    return (
        [f"{outside.sum()} of {len(points)} keypoints lie outside of {width}x{height} pixels"] if outside.any() else []
    )


def _matcher(inputs, outputs) -> list[str]:
    matches, scores = outputs["matches0"], outputs["mscores0"]
    m, n = (len(inputs[f"keypoints{i}"]) if f"keypoints{i}" in inputs else None for i in "01")
    if m is not None and matches.shape != (m,):
        return [f"matches0 has shape {matches.shape}, expected ({m},)"]
    if scores.shape != matches.shape:
        return [f"mscores0 has shape {scores.shape}, expected {matches.shape} as matches0"]
    if matches.dtype.kind != "i":
        return [f"matches0 is {matches.dtype}, expected whole numbers"]
    if n is not None and len(matches) and ((matches >= n).any() or (matches < -1).any()):
        return [f"matches0 goes from {matches.min()} to {matches.max()} for {n} keypoints"]
    return []


def _global(inputs, outputs) -> list[str]:
    d = outputs["descriptor"]
    if not d.size or d.size != max(d.shape, default=0):
        return [f"descriptor has shape {d.shape}, expected (D,)"]
    length = float(np.linalg.norm(d.astype(np.float64)))
    if np.isfinite(length) and length > 0 and abs(length - 1) > _UNIT:
        return [f"descriptor has length {length:.4f}, expected 1 (or 0 where there is nothing to describe)"]
    return []
