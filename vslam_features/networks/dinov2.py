"""The DINOv2 vision transformer (Oquab et al., 2023, arXiv:2304.07193) in torch: patches of an image to tokens.

Names of parameters are those of the published state dict. The released attention is written with one reshape of the
joint q, k and v, as everywhere; :mod:`vslam_features.export.megaloc` writes it otherwise for ONNX.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

_NORM_EPS = 1e-6
# Added to the number of patches a side before the scale of the position grid is taken. Published that way against
# rounding; it moves the sampled positions, so that weights trained with it need it.
_GRID_OFFSET = 0.1


class PatchEmbed(nn.Module):
    """Each patch of ``patch`` x ``patch`` pixels as a vector: (B, 3, H, W) -> (B, H W / patch^2, dim), row by row."""

    def __init__(self, patch: int, dim: int):
        super().__init__()
        self.proj = nn.Conv2d(3, dim, kernel_size=patch, stride=patch)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.proj(image).flatten(2).transpose(1, 2)


class Attention(nn.Module):
    """Multi-head self-attention, by matrix products and softmax so that an export has no fused operator."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.scale = (dim // heads) ** -0.5
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, dim = x.shape
        # (3, B, heads, tokens, dim / heads)
        joint = self.qkv(x).reshape(batch, tokens, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        return self.attend(joint[0], joint[1], joint[2])

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """(B, heads, tokens, dim / heads) each -> (B, tokens, dim)."""
        weights = ((q @ k.transpose(-2, -1)) * self.scale).softmax(dim=-1)
        mixed = (weights @ v).transpose(1, 2)
        return self.proj(mixed.reshape(*mixed.shape[:2], -1))


class Mlp(nn.Module):
    """Two linear layers with the exact (erf) GELU between them."""

    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(functional.gelu(self.fc1(x)))


class LayerScale(nn.Module):
    """A learnt factor for each channel of a residual branch."""

    def __init__(self, dim: int):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gamma


class Block(nn.Module):
    """Pre-norm transformer block, (B, tokens, dim) -> same."""

    def __init__(self, dim: int, heads: int, hidden: int):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=_NORM_EPS)
        self.attn = Attention(dim, heads)
        self.ls1 = LayerScale(dim)
        self.norm2 = nn.LayerNorm(dim, eps=_NORM_EPS)
        self.mlp = Mlp(dim, hidden)
        self.ls2 = LayerScale(dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.ls1(self.attn(self.norm1(x)))
        return x + self.ls2(self.mlp(self.norm2(x)))


class DinoV2(nn.Module):
    """Without register tokens and mask token.

    Args:
        patch: pixels a side of a patch.
        dim, depth, heads: width, number of blocks, heads of each.
        hidden: width inside the MLPs.
        pos_grid: patches a side of the position embedding that the weights have (37: trained at 518 pixels).
    """

    def __init__(self, patch: int, dim: int, depth: int, heads: int, hidden: int, pos_grid: int):
        super().__init__()
        self.patch = patch
        self.pos_grid = pos_grid
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + pos_grid**2, dim))
        self.patch_embed = PatchEmbed(patch, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, hidden) for _ in range(depth))
        self.norm = nn.LayerNorm(dim, eps=_NORM_EPS)

    def position_embedding(self, rows: int, columns: int) -> torch.Tensor:
        """Of the class token and ``rows`` x ``columns`` patches: (1, 1 + rows columns, dim).

        Bicubic (a = -0.75), without antialias, pixel centres at halves, by the published scale of (n + 0.1) / pos_grid.
        """
        if (rows, columns) == (self.pos_grid, self.pos_grid):
            return self.pos_embed
        of_class, grid = self.pos_embed[:, 0], self.pos_embed[:, 1:]
        grid = grid.unflatten(1, (self.pos_grid, self.pos_grid)).permute(0, 3, 1, 2)
        scale = ((rows + _GRID_OFFSET) / self.pos_grid, (columns + _GRID_OFFSET) / self.pos_grid)
        grid = functional.interpolate(grid, scale_factor=scale, mode="bicubic", align_corners=False)
        return torch.cat((of_class.unsqueeze(1), grid.flatten(2).transpose(1, 2)), dim=1)

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalised output tokens of an image (B, 3, H, W): patches (B, dim, H / patch, W / patch), class (B, dim)."""
        rows, columns = image.shape[2] // self.patch, image.shape[3] // self.patch
        x = torch.cat((self.cls_token.expand(image.shape[0], -1, -1), self.patch_embed(image)), dim=1)
        x = x + self.position_embedding(rows, columns)
        for block in self.blocks:
            x = block(x)
        return self.split(self.norm(x), rows, columns)

    @staticmethod
    def split(tokens: torch.Tensor, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens (B, 1 + rows columns, dim) as map of the patches (B, dim, rows, columns) and class token (B, dim)."""
        patches = tokens[:, 1:].reshape(tokens.shape[0], rows, columns, tokens.shape[2]).permute(0, 3, 1, 2)
        return patches, tokens[:, 0]
