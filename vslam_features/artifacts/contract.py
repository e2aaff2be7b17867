"""What outputs of a role must be, whatever the reference says: shapes, types, and pixels that lie in the image."""

from __future__ import annotations

import numpy as np

TENSORS = {
    "features": ("keypoints", "scores", "descriptors"),
    "matcher": ("matches0", "mscores0"),
    "global": ("descriptor",),
}
_UNIT = 1e-2
_MARGIN_PX = 1.0  # refined positions may leave the image by less than a pixel


def breaches(role: str, inputs: dict[str, np.ndarray], outputs: dict[str, np.ndarray]) -> list[str]:
    """How outputs break the contract of their role (``docs/models.md``), in words; empty where they keep it.

    NaN is looked for elsewhere.
    """
    missing = [name for name in TENSORS[role] if name not in outputs]
    if missing:
        there = ", ".join(sorted(outputs))
        return [f"output '{name}' is missing, there are {there}; check the card's binding" for name in missing]
    return {"features": _features, "matcher": _matcher, "global": _global}[role](inputs, outputs)


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
