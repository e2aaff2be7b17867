"""MegaLoc as ONNX exporters want it: the same function and parameters, without the operators that backends lack.

Four rewrites. What is exported without them has a Resize, two Scatters and some forty Gathers, the operators with the
patchiest support on CoreML and in TensorRT; ONNX Runtime does not care.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from ..errors import DataError
from ..networks.dinov2 import Attention, Block
from ..networks.megaloc import MegaLoc
from ..networks.salad import Salad, sinkhorn


class Exportable(nn.Module):
    """A MegaLoc for images (B, 3, H, W) of its configured size, -> (B, out_dim) f32 of unit length.

    Shares the parameters of ``model`` and computes what it does, up to the order of sums. The position embedding is
    taken at construction, so wrap the model after its weights are loaded. Raises DataError for another size.
    """

    def __init__(self, model: MegaLoc):
        super().__init__()
        self.config = model.config
        self.backbone = model.backbone
        self.aggregator = model.aggregator
        self.train(model.training)
        # Rewrite 1: the interpolated positions are a constant of the size; else the graph resizes them at each run.
        with torch.no_grad():
            self.register_buffer("positions", model.backbone.position_embedding(*self.config.grid).clone())

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        width, height = self.config.image_size
        if tuple(image.shape[1:]) != (3, height, width):
            raise DataError(f"image {tuple(image.shape)} for {self.config.name}, expected (B, 3, {height}, {width})")
        backbone = self.backbone
        x = torch.cat((backbone.cls_token.expand(image.shape[0], -1, -1), backbone.patch_embed(image)), dim=1)
        x = x + self.positions
        for block in backbone.blocks:
            x = _block(block, x)
        patches, token = backbone.split(backbone.norm(x), *self.config.grid)
        joined = _aggregate(self.aggregator.agg, patches, token)
        return functional.normalize(self.aggregator.linear(joined), dim=1)


def _block(block: Block, x: torch.Tensor) -> torch.Tensor:
    x = x + block.ls1(_attention(block.attn, block.norm1(x)))
    return x + block.ls2(block.mlp(block.norm2(x)))


def _attention(attention: Attention, x: torch.Tensor) -> torch.Tensor:
    """Rewrite 2: q, k and v are slices of the joint projection; indexing a tensor of five dimensions is a Gather."""
    batch, tokens, dim = x.shape
    joint = attention.qkv(x)
    parts = (joint[..., i * dim : (i + 1) * dim] for i in range(3))
    q, k, v = (part.reshape(batch, tokens, attention.heads, -1).transpose(1, 2) for part in parts)
    return attention.attend(q, k, v)


def _aggregate(salad: Salad, patches: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    features = salad.cluster_features(patches).flatten(2)
    scores = salad.score(patches).flatten(2)
    # Rewrite 3: the dust bin is concatenated; written into a slice, it becomes a Scatter.
    dust = salad.dust_bin.expand(scores.shape[0], 1, scores.shape[2])
    assigned = sinkhorn(torch.cat((scores, dust), dim=1), salad.iterations).exp()[:, :-1, :]
    # Rewrite 4: one Einsum; else a product of cluster_dim x clusters x patches numbers is made and then summed.
    return salad.join(token, torch.einsum("bcn,bkn->bck", features, assigned))
