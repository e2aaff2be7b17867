"""A ConvNeXt (Liu et al., 2022, arXiv:2201.03545) of two stages in torch: a token for every 8 x 8 pixels of an image.

Written from the paper: depthwise 7x7 convolution, LayerNorm over channels, two linear layers with GELU, LayerScale.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from .dinov2 import LayerScale, Mlp

STRIDE = 8  # pixels a token, horizontally and vertically
_EPS = 1e-6
_STEM = 4  # pixels a side of the first, non-overlapping convolution
_KERNEL = 7


class ChannelNorm(nn.Module):
    """LayerNorm over the channels of (B, C, H, W), written with transposes so that it exports as one operator."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=_EPS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Block(nn.Module):
    """One residual block, (B, C, H, W) -> same."""

    def __init__(self, width: int):
        super().__init__()
        self.conv = nn.Conv2d(width, width, _KERNEL, padding=_KERNEL // 2, groups=width)
        self.norm = nn.LayerNorm(width, eps=_EPS)
        self.mlp = Mlp(width, 4 * width)
        self.scale = LayerScale(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x).permute(0, 2, 3, 1)
        return x + self.scale(self.mlp(self.norm(y))).permute(0, 3, 1, 2)


class Encoder(nn.Module):
    """Image (1, 3, H, W) f32, normalised, H and W multiples of 8 -> map (dim, H / 8, W / 8) f32.

    Each token has mean 0 and variance 1 over its channels before the last norm's weights.

    Args:
        widths, depths: channels and blocks of the stages at stride 4 and at stride 8.
        dim: channels of the map.
    """

    def __init__(self, widths: Sequence[int], depths: Sequence[int], dim: int):
        super().__init__()
        self.stem = nn.Conv2d(3, widths[0], _STEM, stride=_STEM)
        self.stem_norm = ChannelNorm(widths[0])
        self.fine = nn.Sequential(*(Block(widths[0]) for _ in range(depths[0])))
        self.down_norm = ChannelNorm(widths[0])
        self.down = nn.Conv2d(widths[0], widths[1], STRIDE // _STEM, stride=STRIDE // _STEM)
        self.coarse = nn.Sequential(*(Block(widths[1]) for _ in range(depths[1])))
        self.norm = nn.LayerNorm(widths[1], eps=_EPS)
        self.proj = nn.Linear(widths[1], dim)
        self.out_norm = nn.LayerNorm(dim, eps=_EPS)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.out_norm(self.proj(self.features(image)))[0].permute(2, 0, 1)

    def features(self, image: torch.Tensor) -> torch.Tensor:
        """What the projection takes: (1, H / 8, W / 8, widths[1])."""
        x = self.fine(self.stem_norm(self.stem(image)))
        x = self.coarse(self.down(self.down_norm(x)))
        return self.norm(x.permute(0, 2, 3, 1))
