"""A picture of the matches of a keyframe: current image left, reference right."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import cv2
import numpy as np

from ..types import Keyframe, PairResult

_HEIGHT = 480
_GREEN, _RED = (40, 220, 60), (230, 60, 50)


class MatchImages:
    """Draws pairs; keeps the latest few images, since a keyframe holds only its thumbnail."""

    def __init__(self, keep: int = 8):
        # by id and stamp, since ids count from 0 again after a reset
        self._images: OrderedDict[tuple[int, int], np.ndarray] = OrderedDict()
        self._keep = keep

    def draw(
        self,
        image: np.ndarray | None,
        kf: Keyframe,
        pairs: Sequence[PairResult],
        keyframe: Callable[[int], Keyframe],
    ) -> np.ndarray:
        """(H, W, 3) RGB: the pair with the most inliers; the image alone where there is no pair.

        Args:
            image: of ``kf``; None takes the one seen before, or the thumbnail.
            keyframe: the keyframe of an id.
        """
        if image is not None:
            self._images[kf.id, kf.stamp_ns] = image
            if len(self._images) > self._keep:
                self._images.popitem(last=False)
        left, scale = self._picture(kf)
        if not pairs:
            return _title(left, f"keyframe {kf.id}: {len(kf.features)} keypoints")
        pair = max(pairs, key=lambda p: p.matches.num_inliers)
        ref = keyframe(pair.ref_kf_id)
        right, ref_scale = self._picture(ref)
        canvas = np.hstack([left, right])
        m = pair.matches
        order = np.argsort(m.inliers, kind="stable")  # inliers on top
        start = (kf.features.keypoints[m.pairs[order, 0]] + 0.5) * scale
        end = (ref.features.keypoints[m.pairs[order, 1]] + 0.5) * ref_scale + (left.shape[1], 0)
        for a, b, inlier in zip(np.rint(start).astype(int), np.rint(end).astype(int), m.inliers[order]):
            cv2.line(canvas, tuple(map(int, a)), tuple(map(int, b)), _GREEN if inlier else _RED, 1, cv2.LINE_AA)
        text = f"{pair.kind.name.lower()} {kf.id} - {ref.id}: {m.status.label}, {m.num_inliers}/{len(m)} inliers"
        return _title(canvas, text)

    def _picture(self, keyframe: Keyframe) -> tuple[np.ndarray, float]:
        """RGB of ``_HEIGHT`` rows and its scale over the input image."""
        width, height = keyframe.features.image_size
        image = self._images.get((keyframe.id, keyframe.stamp_ns), keyframe.thumbnail)
        if image is None:
            image = np.zeros((height, width), np.uint8)
        scale = _HEIGHT / height
        image = cv2.resize(image, (max(1, round(width * scale)), _HEIGHT), interpolation=cv2.INTER_AREA)
        return (image if image.ndim == 3 else cv2.cvtColor(image, cv2.COLOR_GRAY2RGB)), scale


def _title(canvas: np.ndarray, text: str) -> np.ndarray:
    for colour, width in (((0, 0, 0), 4), ((255, 255, 255), 1)):
        cv2.putText(canvas, text, (8, 20), cv2.FONT_HERSHEY_SIMPLEX, 0.55, colour, width, cv2.LINE_AA)
    return canvas
