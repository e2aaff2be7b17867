"""MegaLoc (Berton and Masone, 2025, arXiv:2502.17237) in torch: one descriptor of an image, to find its place again.

DINOv2 gives tokens of patches and of the image, SALAD gathers them, a linear layer makes the descriptor. Written from
the papers and the published behaviour, with the names of the released state dict.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from ..errors import DataError
from .dinov2 import DinoV2
from .salad import Salad
from .torch_state import load_state, without_values

_GAINS = {"attn.qkv.weight": 2.0, "score.3.weight": 5.0}  # of random weights


@dataclass(frozen=True)
class MegaLocConfig:
    """Sizes of the network. ``image_size``: (width, height) in pixels; ``pos_grid``: side of the stored positions."""

    name: str
    image_size: tuple[int, int]
    patch: int
    dim: int
    depth: int
    heads: int
    pos_grid: int
    clusters: int
    cluster_dim: int
    token_dim: int
    hidden: int
    out_dim: int
    mlp_ratio: int = 4
    sinkhorn_iterations: int = 3

    @property
    def grid(self) -> tuple[int, int]:
        """Patches of an image of ``image_size``: (rows, columns)."""
        width, height = self.image_size
        return height // self.patch, width // self.patch

    @property
    def aggregated_dim(self) -> int:
        return self.token_dim + self.clusters * self.cluster_dim


MEGALOC = MegaLocConfig(
    name="megaloc",
    image_size=(322, 322),
    patch=14,
    dim=768,
    depth=12,
    heads=12,
    pos_grid=37,
    clusters=64,
    cluster_dim=256,
    token_dim=256,
    hidden=512,
    out_dim=8448,
)
# For tests of everything around the network: seconds instead of minutes, and an image that is not square.
MEGALOC_TINY = MegaLocConfig(
    name="megaloc-tiny",
    image_size=(70, 56),
    patch=14,
    dim=64,
    depth=2,
    heads=4,
    pos_grid=37,
    clusters=8,
    cluster_dim=16,
    token_dim=16,
    hidden=32,
    out_dim=64,
)


class Aggregator(nn.Module):
    """SALAD and the linear layer after it."""

    def __init__(self, config: MegaLocConfig):
        super().__init__()
        c = config
        self.agg = Salad(c.dim, c.hidden, c.clusters, c.cluster_dim, c.token_dim, c.sinkhorn_iterations)
        self.linear = nn.Linear(config.aggregated_dim, config.out_dim)

    def forward(self, patches: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        return self.linear(self.agg(patches, token))


class MegaLoc(nn.Module):
    """The network. Image (B, 3, H, W) f32, RGB, ImageNet-normalised -> (B, out_dim) f32, rows of unit length.

    H and W are multiples of ``patch``; those of ``image_size`` are what the configuration is for, and all that an
    export takes. Raises DataError for others, and where the patches do not outnumber the clusters.
    """

    def __init__(self, config: MegaLocConfig):
        super().__init__()
        self.config = config
        hidden = config.mlp_ratio * config.dim
        self.backbone = DinoV2(config.patch, config.dim, config.depth, config.heads, hidden, config.pos_grid)
        self.aggregator = Aggregator(config)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        self._check(image)
        patches, token = self.backbone(image)
        return functional.normalize(self.aggregator(patches, token), dim=1)

    def _check(self, image: torch.Tensor) -> None:
        patch, clusters, shape = self.config.patch, self.config.clusters, tuple(image.shape)
        if len(shape) != 4 or shape[1] != 3 or shape[2] % patch or shape[3] % patch:
            raise DataError(
                f"image {shape} for {self.config.name}, expected (B, 3, H, W), H and W multiples of {patch}"
            )
        if (shape[2] // patch) * (shape[3] // patch) <= clusters:
            raise DataError(
                f"image {shape} for {self.config.name} has {shape[2] // patch} x {shape[3] // patch} patches, expected "
                f"more than its {clusters} clusters; use a larger image"
            )


def load(config: MegaLocConfig, path: str | Path) -> MegaLoc:
    """The network with the weights of a file: the released ``model.safetensors``, or a state dict as ``.pth``.

    Floats of half precision become float32. Raises WeightsError where the file cannot be read, is of another network
    (keys or shapes differ) or holds NaN or infinity.
    """
    return load_state(without_values(lambda: MegaLoc(config)), config.name, path, _hint)


def _hint(tensors: dict[str, np.ndarray], other_shapes: bool) -> str:
    return f"{_seems(tensors, other_shapes)}Take model.safetensors of the MegaLoc release"


def _seems(tensors: dict[str, np.ndarray], other_shapes: bool) -> str:
    if "backbone.model.cls_token" in tensors:
        return "It seems to be megaloc.torch of the first release, whose names differ. "
    if "cls_token" in tensors and "blocks.0.attn.qkv.weight" in tensors:
        return "It seems to be a vision transformer alone, such as DINOv2. "
    if "backbone.cls_token" in tensors and other_shapes:
        return "It seems to be a MegaLoc of other sizes. "
    return ""


def randomised(config: MegaLocConfig, seed: int) -> MegaLoc:
    """The network with weights in which every parameter is non-trivial, so that comparing outputs means something.

    The usual initial values have LayerScale near 0 and positions, biases and norms that do nothing. Here layers keep
    the size of what goes through them, attention and assignment are sharper than uniform and the biases small, so that
    the descriptor follows the image: of different smooth images the cosine is 0.6 to 0.9. The same seed gives the same
    weights.
    """
    generator = torch.Generator().manual_seed(seed)
    model = without_values(lambda: MegaLoc(config)).to_empty(device="cpu")
    with torch.no_grad():
        for name, value in model.named_parameters():
            noise = torch.randn(value.shape, generator=generator)
            if name.endswith(("gamma", "norm.weight", "norm1.weight", "norm2.weight", "dust_bin")):
                value.copy_(1 + 0.2 * noise)
            elif name.endswith("weight"):
                gain = next((gain for end, gain in _GAINS.items() if name.endswith(end)), 1.0)
                value.copy_(noise * (gain / math.sqrt(value[0].numel())))
            else:
                value.copy_((0.05 if name.endswith("bias") else 0.2) * noise)
    # The input of the last layer has unit length: its bias would be all that is left.
    model.aggregator.linear.weight.data *= math.sqrt(config.aggregated_dim)
    return model.eval().requires_grad_(False)
