"""From two refined maps to matches of keypoints: where each keypoint lies in the other image, and who agrees.

A keypoint's token is correlated with all tokens of the other map. Around the best one the expected position is read
from cumulative sums: for masses over the cells 0..n-1 of an axis and F their CumSum, E[i] = n - 1 - sum(F[:-1]) / F[-1]
(summation by parts). That is 4 CumSum over the map's sides: x and y, in both directions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

_LEAST_MASS = 1e-12


@dataclass(frozen=True)
class Seen:
    """Keypoints of an image in the other's map: ``cells`` (N, 2), x and y; ``certainty`` (N,): of the correlation."""

    cells: torch.Tensor
    certainty: torch.Tensor


class Readout(nn.Module):
    """Maps (dim, h, w) and keypoints of both images -> matches.

    Args:
        window: cells on each side of the best one that count for the expected position.
        radius: the furthest, in cells, that a keypoint may lie from where it is expected.
    """

    def __init__(self, dim: int, grid: tuple[int, int], window: int, radius: float):
        super().__init__()
        self.grid, self.window, self.radius = grid, window, radius
        self.norm = nn.LayerNorm(dim)
        self.proj = nn.Linear(dim, dim)
        self.refine = nn.Sequential(nn.Linear(2 * dim, dim), nn.GELU(), nn.Linear(dim, 2))

    def forward(self, x: torch.Tensor, points0: torch.Tensor, points1: torch.Tensor):
        """Matches (M,) int64, index into image 1 or -1, and their scores (M,) f32, 0 without a match.

        ``x``: tokens (2, h w, dim). ``points0`` (M, 2), ``points1`` (N, 2): keypoints in [0, 1] x [0, 1] of the image.
        """
        rows, columns = self.grid
        maps = self.proj(self.norm(x)).transpose(1, 2).reshape(2, -1, rows, columns)
        map0, map1 = maps[:1], maps[1:]
        seen0 = self._see(sampled(map0, points0), map1)
        seen1 = self._see(sampled(map1, points1), map0)
        size = torch.tensor([columns, rows], dtype=torch.float32)
        cells0, cells1 = points0 * size - 0.5, points1 * size - 0.5
        return self._agree(seen0, seen1, cells0, cells1)

    def _see(self, tokens: torch.Tensor, other: torch.Tensor) -> Seen:
        """Of tokens (N, dim) of keypoints in the other map (1, dim, h, w)."""
        rows, columns = self.grid
        dim = tokens.shape[1]
        chance = ((tokens * dim**-0.5) @ other.reshape(dim, rows * columns)).softmax(dim=-1)
        best = chance.argmax(dim=1)
        near_x = self._near(best % columns, columns)
        near_y = self._near(best // columns, rows)
        chance = chance.reshape(-1, rows, columns)
        x, mass = _expected((chance * near_y.unsqueeze(2)).sum(dim=1) * near_x)
        y, _ = _expected((chance * near_x.unsqueeze(1)).sum(dim=2) * near_y)
        cells = torch.stack((x, y), dim=1)
        there = sampled(other, (cells + 0.5) / torch.tensor([columns, rows], dtype=torch.float32))
        moved = self.refine(torch.cat((tokens, there), dim=1)).tanh() / 2  # half a cell at most
        return Seen(cells + moved, mass)

    def _near(self, best: torch.Tensor, length: int) -> torch.Tensor:
        """1 within the window around the cells ``best`` (N,) of an axis, else 0: (N, length)."""
        apart = torch.arange(length) - best.unsqueeze(1)
        return (apart.abs() <= self.window).float()

    def _agree(self, seen0: Seen, seen1: Seen, cells0: torch.Tensor, cells1: torch.Tensor):
        """Mutual best under the sum of both squared distances, each within the radius."""
        apart = _squared(seen0.cells, cells1) + _squared(cells0, seen1.cells)  # (M, N)
        least, best0 = apart.min(dim=1)
        best1 = apart.transpose(0, 1).argmin(dim=1)
        mutual = best1.index_select(0, best0) == torch.arange(best0.shape[0])
        kept = mutual & (least <= 2 * self.radius**2)
        certainty = (seen0.certainty * seen1.certainty.index_select(0, best0)).sqrt()
        scores = certainty * torch.exp(-least / (4 * self.radius**2))
        return torch.where(kept, best0, -1), torch.where(kept, scores, 0.0)


def sampled(maps: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """Tokens (N, dim) of a map (1, dim, h, w), bilinear, at points (N, 2) of [0, 1] x [0, 1], borders continued."""
    grid = (2 * points - 1)[None, None]
    found = functional.grid_sample(maps, grid, mode="bilinear", padding_mode="border", align_corners=False)
    return found[0, :, 0].transpose(0, 1)


def _expected(mass: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Expected cell (N,) of masses (N, n) along an axis, and their sum (N,)."""
    total = mass.cumsum(dim=-1)
    whole = total[:, -1]
    return mass.shape[1] - 1 - total[:, :-1].sum(dim=1) / whole.clamp(min=_LEAST_MASS), whole


def _squared(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Squared distances (M, N) between (M, 2) and (N, 2), each difference taken by itself: no cancellation."""
    x = a[:, None, 0] - b[None, :, 0]
    y = a[:, None, 1] - b[None, :, 1]
    return x * x + y * y
