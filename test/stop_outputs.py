"""Outputs of a matcher that stops early, by the rule as it is written down."""

from __future__ import annotations

import numpy as np

from vslam_features.artifacts.card import ModelCard

CARD = ModelCard("matcher", "glue", "", layers=9, early_stop_layers=(2, 4, 6, 8))
SIDES = {f"keypoints{i}": np.zeros((12, 2), np.float32) for i in (0, 1)}
CHECKED = np.array(CARD.early_stop_layers)


def scalars(least, decay):
    return {"min_covisibility": np.array(least, np.float32), "early_stop_decay": np.array(decay, np.float32)}


def model(all_scores, final=0.9):
    """A matcher of 12 keypoints that scores its checked layers so, and stops by the rule as it is written down."""

    def run(inputs):
        least, decay = (float(inputs.get(n, d)) for n, d in (("min_covisibility", 0), ("early_stop_decay", 1)))
        scores = np.full(4, -1, np.float32)
        for i, layer in enumerate((2, 4, 6, 8)):
            scores[i] = all_scores[i]
            if scores[i] < np.float32(least * (1 - decay) ** (9 - layer)):
                return outputs(layer, scores[i], scores, matched=False)
        return outputs(0, np.float32(final), scores, matched=True)

    return run


def outputs(stopped, covisibility, scores, matched):
    found = np.arange(12) if matched else np.full(12, -1)
    return {
        "matches0": found.astype(np.int64),
        "mscores0": np.full(12, 0.9 if matched else 0, np.float32),
        "covisibility_score": np.array(covisibility, np.float32),
        "stopped_after_layer": np.array(stopped, np.int64),
        "layer_scores": np.array(scores, np.float32),
    }


RUNS = (0.9, 0.8, 0.7, 0.6)
STOPPED = outputs(4, 0.3, [0.9, 0.3, -1, -1], matched=False)
WENT = outputs(0, 0.9, RUNS, matched=True)
