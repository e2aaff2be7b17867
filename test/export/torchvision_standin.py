"""The parts of torchvision that upstream's ALIKED imports, in torch alone: torchvision has no build for every torch."""

import sys
from types import ModuleType

import torch
from torch import nn


def deform_conv2d(input, offset, weight, bias=None, stride=1, padding=0, dilation=1, mask=None):
    """torchvision.ops.deform_conv2d of stride 1, dilation 1 and one offset group, tap after tap.

    Args:
        input: (B, C, h, w), zero outside.
        offset: (B, 2 kh kw, H, W) pixels, (dy, dx) tap after tap.
        weight: (O, C, kh, kw).
        mask: (B, kh kw, H, W), factors of the taps.
    """
    assert (stride, dilation) == (1, 1), "only what ALIKED uses"
    pad_y, pad_x = (padding, padding) if isinstance(padding, int) else padding
    _, _, h, w = input.shape
    rows, columns = (torch.arange(n, dtype=input.dtype) for n in offset.shape[-2:])
    flat = input.flatten(2)

    def value(y, x):
        """Input at whole pixels (B, H, W), zero outside: (B, C, H, W)."""
        inside = (y >= 0) & (y < h) & (x >= 0) & (x < w)
        index = y.clamp(0, h - 1).long() * w + x.clamp(0, w - 1).long()
        picked = torch.gather(flat, 2, index.flatten(1)[:, None].expand(-1, flat.shape[1], -1))
        return picked.reshape(*picked.shape[:2], *y.shape[1:]) * inside[:, None]

    out = 0
    _, _, kh, kw = weight.shape
    for tap in range(kh * kw):
        y = rows[:, None] + (tap // kw - pad_y) + offset[:, 2 * tap]
        x = columns + (tap % kw - pad_x) + offset[:, 2 * tap + 1]
        y0, x0 = y.floor(), x.floor()
        fy, fx = (y - y0)[:, None], (x - x0)[:, None]
        top = value(y0, x0) * (1 - fx) + value(y0, x0 + 1) * fx
        bottom = value(y0 + 1, x0) * (1 - fx) + value(y0 + 1, x0 + 1) * fx
        seen = top * (1 - fy) + bottom * fy
        if mask is not None:
            seen = seen * mask[:, tap : tap + 1]
        out = out + torch.einsum("bchw,oc->bohw", seen, weight[:, :, tap // kw, tap % kw])
    return out if bias is None else out + bias[None, :, None, None]


def conv1x1(inputs, outputs, stride=1):
    """torchvision.models.resnet.conv1x1."""
    return nn.Conv2d(inputs, outputs, 1, stride, bias=False)


def conv3x3(inputs, outputs, stride=1):
    """torchvision.models.resnet.conv3x3."""
    return nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)


def install():
    """Makes ``import torchvision`` give the stand-in."""
    torchvision, ops, models, resnet = (
        ModuleType(n) for n in ("torchvision", "torchvision.ops", "torchvision.models", "torchvision.models.resnet")
    )
    ops.deform_conv2d = deform_conv2d
    resnet.conv1x1, resnet.conv3x3 = conv1x1, conv3x3
    torchvision.ops, torchvision.models, models.resnet = ops, models, resnet
    for module in (torchvision, ops, models, resnet):
        sys.modules[module.__name__] = module
