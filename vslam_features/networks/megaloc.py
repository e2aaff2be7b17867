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

from ..errors import DataError, WeightsError
from .dinov2 import DinoV2
from .salad import Salad
from .weights import read_tensors

_GAINS = {"attn.qkv.weight": 2.0, "score.3.weight": 5.0}  # of random weights
_NAMED = 5  # keys that a message names of each kind


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
    tensors = read_tensors(path)
    model = _without_values(config)
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    _require(config, path, expected, tensors)
    state = {}
    for name in expected:
        value = tensors.pop(name).astype(np.float32, copy=False)
        if not np.isfinite(value).all():
            raise WeightsError(f"{path}: {name} has NaN or infinity; the file is damaged or its training diverged")
        state[name] = torch.from_numpy(value)
    model.load_state_dict(state, strict=True, assign=True)
    return model.eval().requires_grad_(False)


def _without_values(config: MegaLocConfig) -> MegaLoc:
    # What nn.Module would draw takes seconds at the released size, and the caller's random numbers.
    with torch.device("meta"):
        return MegaLoc(config)


def _require(config: MegaLocConfig, path: str | Path, expected: dict[str, tuple], tensors: dict[str, np.ndarray]):
    missing = [name for name in expected if name not in tensors]
    unexpected = [name for name in tensors if name not in expected]
    shapes = [
        f"{name} {tensors[name].shape}, expected {shape}"
        for name, shape in expected.items()
        if name in tensors and tensors[name].shape != shape
    ]
    types = [
        f"{name} {tensors[name].dtype}, expected a float"
        for name in expected
        if name in tensors and tensors[name].dtype.kind != "f"
    ]
    kinds = {"missing": missing, "unexpected": unexpected, "of another shape": shapes, "of another type": types}
    problems = [f"{len(k)} {kind} ({_few(k)})" for kind, k in kinds.items() if k]
    if problems:
        raise WeightsError(
            f"{path} is not the weights of {config.name} ({len(expected)} tensors): {'; '.join(problems)}. "
            f"{_seems(tensors, bool(shapes))}Take model.safetensors of the MegaLoc release"
        )


def _few(names: list[str]) -> str:
    # Names of a file that others made: escaped, so that none of them moves the cursor of a terminal.
    shown = [name[:120].encode("unicode_escape").decode() for name in names[:_NAMED]]
    return ", ".join(shown) + (", ..." if len(names) > _NAMED else "")


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
    model = _without_values(config).to_empty(device="cpu")
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
