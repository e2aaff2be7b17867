"""Dense maps of a model against those of its reference, cell by cell."""

from __future__ import annotations

import numpy as np

from .comparison import Comparison, Limits, figures_of, row_cosine


def compare_maps(result: Comparison, expected, got, limits: Limits) -> None:
    """Fill in ``result`` for outputs ``descriptors`` (C, h, w) of role ``features``, of one view or two."""
    shapes = [[o["descriptors"].shape for o in outputs] for outputs in (got, expected)]
    if shapes[0] != shapes[1]:
        result.problems.append(f"descriptors has shape {shapes[0][0]}, the reference {shapes[1][0]}")
        return
    e, g = ([o["descriptors"].reshape(len(o["descriptors"]), -1) for o in outputs] for outputs in (expected, got))
    good = [row_cosine(a.T, b.T) >= limits.descriptor for a, b in zip(e, g)]
    result.agreement = min(float(cells.mean()) for cells in good)
    if result.agreement < limits.agreement:
        result.problems.append(
            f"{result.agreement:.1%} of the cells have the same descriptor (cosine {limits.descriptor}), at least "
            f"{limits.agreement:.0%}"
        )
    # A reference that says the same of every cell, or of every picture, proves nothing.
    result.evidence = all(np.ptp(maps, axis=1).any() for maps in e) and not (len(e) == 2 and np.array_equal(*e))
    result.tensors["descriptors"] = figures_of(np.concatenate(e, axis=None), np.concatenate(g, axis=None))
