"""Engines that are wrong to order: NaN, no matches, too few matches, as engines in the field were."""

from __future__ import annotations

import hashlib

import numpy as np
from fake_gpu.faults import FAULTS

_seen: dict[str, dict[str, int]] = {}


def spoil(engine: str, inputs: dict, results: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The results, changed as ``VSLAM_FAKE_FAULTS`` says.

    ``nan_inputs`` and ``zero_inputs`` list which DISTINCT inputs of this engine, from 1 in each process, give NaN in
    all floats, or no match. ``drop_matches`` is the share of matches that is lost at all inputs.
    """
    number = _number(engine, inputs)
    if number in FAULTS.value("nan_inputs", []):
        return {n: np.full_like(v, np.nan) if v.dtype.kind == "f" else v for n, v in results.items()}
    share = 1.0 if number in FAULTS.value("zero_inputs", []) else FAULTS.value("drop_matches", 0.0)
    return _drop(results, share) if share else results


def forget() -> None:
    """Count inputs anew."""
    _seen.clear()


def _number(engine: str, inputs: dict[str, np.ndarray]) -> int:
    digest = hashlib.sha256()
    for name in sorted(inputs):
        digest.update(np.ascontiguousarray(inputs[name]).tobytes())
    seen = _seen.setdefault(engine, {})
    return seen.setdefault(digest.hexdigest(), len(seen) + 1)


def _drop(results: dict[str, np.ndarray], share: float) -> dict[str, np.ndarray]:
    """Lose a share of the matches: an index becomes -1, its score 0; evenly over them all."""
    indices = [
        value for value in results.values() if value.dtype.kind == "i" and value.ndim and value.size == value.shape[-1]
    ]
    if not indices:
        raise AssertionError(f"no output of indices of matches among {sorted(results)}: nothing to drop")
    found = np.flatnonzero(indices[0].ravel() >= 0)
    lost = found[np.floor(np.arange(len(found)) * share) != np.floor(np.arange(1, len(found) + 1) * share)]
    changed = {}
    for name, value in results.items():
        changed[name] = value.copy()
        if value.shape == indices[0].shape:
            changed[name].ravel()[lost] = -1 if value.dtype.kind == "i" else 0
    return changed
