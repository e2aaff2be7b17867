"""The transformer of FlexGlue in torch: self and cross attention over two maps, a covisibility head after each layer.

The maps are the two entries of a batch, so that each sees the other by exchanging the entries, and the whole is
symmetric: exchanging the images exchanges the results.
"""

from __future__ import annotations

import torch
from torch import nn

from .dinov2 import Mlp

_BASE = 100.0  # of the rotary frequencies: wavelengths from 2 pi to about 600 cells


def exchanged(x: torch.Tensor) -> torch.Tensor:
    """The two entries of a batch (2, ...), the other way round."""
    return torch.cat((x[1:], x[:1]))


def rotation(rows: int, columns: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and signed sines (rows columns, width) of rotary positions in a grid (Su et al., arXiv:2104.09864).

    The first half of the ``width`` channels turns with x, the other with y; ``width`` is a multiple of 4.
    """
    frequency = _BASE ** (-torch.arange(width // 4, dtype=torch.float64) / (width // 4))
    y, x = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    turns = [torch.outer(axis.flatten().double(), frequency) for axis in (x, y)]
    angle = torch.cat(turns, dim=1)  # (T, width / 2): pairs are the channels i and i + width / 2
    cos, sin = angle.cos().float(), angle.sin().float()
    return torch.cat((cos, cos), dim=1), torch.cat((-sin, sin), dim=1)


class Attention(nn.Module):
    """Multi-head attention of tokens (2, T, dim) over tokens (2, T, dim), by matrix products and softmax.

    The scale is on the queries: on the logits it would be one more pass over T x T numbers, and half precision, where
    they are largest before it, would overflow earlier.
    """

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads, self.scale = heads, (dim // heads) ** -0.5
        self.q = nn.Linear(dim, dim)
        self.k = nn.Linear(dim, dim)
        self.v = nn.Linear(dim, dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor, source: torch.Tensor, turn=None) -> torch.Tensor:
        """``turn``: cosines and sines by which queries and keys are rotated."""
        q, k, v = self._by_head(self.q(x) * self.scale), self._by_head(self.k(source)), self._by_head(self.v(source))
        if turn is not None:
            q, k = _turned(q, *turn), _turned(k, *turn)
        weights = (q @ k.transpose(-2, -1)).softmax(dim=-1)
        mixed = (weights @ v).transpose(1, 2)
        return self.out(mixed.reshape(x.shape))

    def _by_head(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(*x.shape[:2], self.heads, -1).transpose(1, 2)


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((x[..., half:], x[..., :half]), dim=-1) * sin


class Layer(nn.Module):
    """Attention within each map, then to the other, then an MLP; pre-norm, (2, T, dim) -> same."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.self_norm = nn.LayerNorm(dim)
        self.self_attention = Attention(dim, heads)
        self.cross_norm = nn.LayerNorm(dim)
        self.cross_attention = Attention(dim, heads)
        self.mlp_norm = nn.LayerNorm(dim)
        self.mlp = Mlp(dim, 4 * dim)

    def forward(self, x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        y = self.self_norm(x)
        x = x + self.self_attention(y, y, turn)
        y = self.cross_norm(x)
        x = x + self.cross_attention(y, exchanged(y))
        return x + self.mlp(self.mlp_norm(x))


class CovisibilityHead(nn.Module):
    """Tokens of both maps (2, T, dim) -> () f32 in [0, 1]: whether they see the same place at all.

    What each token says is averaged over both maps, which makes the score the same for either order of the images.
    """

    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.tokens = nn.Linear(dim, hidden)
        self.pooled = nn.Linear(hidden, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        said = nn.functional.gelu(self.tokens(self.norm(x))).mean(dim=1)  # (2, hidden)
        return self.pooled((said[0] + said[1]) / 2).sigmoid().reshape(())
