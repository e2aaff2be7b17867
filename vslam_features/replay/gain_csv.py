"""The pairs of a gain table as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from .gain import PairScores, Row


def pairs_csv(pairs: Sequence[PairScores], rows: Sequence[Row], checked: Sequence[int]) -> bytes:
    """A line for each pair. ``lost_at``: settings (min_covisibility/decay) that lose it, where it verifies.

    Args:
        rows: made of these pairs. checked: layers of the scores.
    """
    lost_at: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for pair in row.lost:
            lost_at.setdefault(pair.names, []).append(str(row.setting))
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    head = ["image0", "image1", "truth", "status", "matches", "inliers"]
    table.writerow([*head, *(f"score_{layer}" for layer in checked), "covisibility_score", "lost_at"])
    for p in pairs:
        scores = [f"{score:.6g}" for score in p.layer_scores] or [""] * len(checked)
        final = "" if p.covisibility is None else f"{p.covisibility:.6g}"
        known = [*p.names, p.overlap.value, p.status.label, p.matches, p.inliers]
        table.writerow([*known, *scores, final, " ".join(lost_at.get(p.names, ()))])
    return text.getvalue().encode()
