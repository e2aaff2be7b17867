"""SALAD (Izquierdo and Civera, 2024, arXiv:2311.15937) in torch: tokens of an image to one vector.

Patches are assigned to clusters by optimal transport; a cluster's vector is the weighted sum of its patches' features.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional


def transport(scores: torch.Tensor, dust_bin: torch.Tensor, iterations: int) -> torch.Tensor:
    """Log of the assignment of n patches to m clusters and the dust bin: scores (B, m, n) -> (B, m + 1, n).

    Sinkhorn iterations in the log domain. Each cluster may take the mass of one patch, the dust bin that of n - m.
    """
    batch, m, n = scores.shape
    couplings = scores.new_empty((batch, m + 1, n))
    couplings[:, :m, :] = scores
    couplings[:, m, :] = dust_bin
    return sinkhorn(couplings, iterations)


def sinkhorn(couplings: torch.Tensor, iterations: int) -> torch.Tensor:
    """Log of the transport plan, in units of a patch's mass: (B, m + 1, n) -> same. The last row is the dust bin."""
    batch, m, n = couplings.shape[0], couplings.shape[1] - 1, couplings.shape[2]
    unit = -torch.tensor(math.log(m + n), dtype=couplings.dtype, device=couplings.device)
    supply = unit.expand(m + 1).contiguous()
    supply[-1] = supply[-1] + math.log(n - m)
    supply, demand = supply.expand(batch, -1), unit.expand(batch, n)
    u, v = torch.zeros_like(supply), torch.zeros_like(demand)
    for _ in range(iterations):
        u = supply - torch.logsumexp(couplings + v.unsqueeze(1), dim=2)
        v = demand - torch.logsumexp(couplings + u.unsqueeze(2), dim=1)
    return couplings + u.unsqueeze(2) + v.unsqueeze(1) - unit


class Salad(nn.Module):
    """Tokens of the patches (B, dim, h, w) and of the image (B, dim) -> (B, token_dim + clusters cluster_dim).

    The result has unit length. ``dim``: width of the tokens; ``hidden``: width inside the three small networks;
    ``iterations``: of Sinkhorn's algorithm. There must be more patches than clusters.
    """

    def __init__(self, dim: int, hidden: int, clusters: int, cluster_dim: int, token_dim: int, iterations: int):
        super().__init__()
        self.iterations = iterations
        self.dust_bin = nn.Parameter(torch.tensor(1.0))
        self.token_features = nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, token_dim))
        self.cluster_features = _pointwise(dim, hidden, cluster_dim)
        self.score = _pointwise(dim, hidden, clusters)

    def forward(self, patches: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        features = self.cluster_features(patches).flatten(2)
        log_plan = transport(self.score(patches).flatten(2), self.dust_bin, self.iterations)
        assigned = log_plan.exp()[:, :-1, :]  # without the dust bin
        clusters = (features.unsqueeze(2) * assigned.unsqueeze(1)).sum(dim=-1)
        return self.join(token, clusters)

    def join(self, token: torch.Tensor, clusters: torch.Tensor) -> torch.Tensor:
        """The image's feature, then the clusters' (B, cluster_dim, m) channel by channel; each of unit length."""
        token = functional.normalize(self.token_features(token), dim=-1)
        clusters = functional.normalize(clusters, dim=1).flatten(1)
        return functional.normalize(torch.cat((token, clusters), dim=-1), dim=-1)


def _pointwise(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    # The identity is where training drops out; it keeps the number of the second layer.
    return nn.Sequential(nn.Conv2d(inputs, hidden, 1), nn.Identity(), nn.ReLU(), nn.Conv2d(hidden, outputs, 1))
