"""Weights of :mod:`.flexglue`: of a file, random, or constructed so that pictures that overlap really match.

The network was never trained. Random weights show that two programs compute the same, constructed ones that what is
built around a matcher works; neither is of use for places.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from .flexglue import FlexGlue, FlexGlueConfig
from .flexglue_layers import CovisibilityHead
from .torch_state import load_state, with_state, without_values

# Of random weights: sharp attention and correlation, residual branches that leave room for nine layers, scores that
# differ from pair to pair and from layer to layer.
_GAINS = {
    ".q.weight": 1.5,
    ".k.weight": 1.5,
    ".out.weight": 0.5,
    "mlp.fc2.weight": 0.5,
    "readout.proj.weight": 2.0,
    "pooled.weight": 3.0,
}
_PICTURES = 6  # seeded ones, on which constructed weights are fitted
_STEEP = 12.0  # of the limit between tokens that find themselves and those that do not


def load(config: FlexGlueConfig, path: str | Path) -> FlexGlue:
    """The network with a state dict of this class, ``.safetensors`` or ``.pth``. Raises WeightsError."""
    return load_state(without_values(lambda: FlexGlue(config)), config.name, path, _hint)


def _hint(tensors: dict[str, np.ndarray], other_shapes: bool) -> str:
    return (
        "Take a state dict of vslam_features.networks.flexglue.FlexGlue; weights of the FlexGlue release do not fit, "
        "its ONNX files are used as they are (docs/flexglue.md)"
    )


def randomised(config: FlexGlueConfig, seed: int) -> FlexGlue:
    """Every parameter non-trivial, so that comparing outputs means something. The same seed gives the same weights."""
    model = without_values(lambda: FlexGlue(config))
    return with_state(model, _random_state(model, torch.Generator().manual_seed(seed)))


def _random_state(model: FlexGlue, generator: torch.Generator) -> dict[str, torch.Tensor]:
    state = {}
    for name, value in model.state_dict().items():
        noise = torch.randn(value.shape, generator=generator)
        if name.endswith("norm.weight") or name.endswith("gamma"):
            state[name] = 1 + 0.2 * noise
        elif name.endswith("weight"):
            gain = next((gain for end, gain in _GAINS.items() if name.endswith(end)), 1.0)
            state[name] = noise * (gain / math.sqrt(value[0].numel()))
        else:
            state[name] = 0.1 * noise
    return state


def constructed(config: FlexGlueConfig, seed: int) -> FlexGlue:
    """Weights without training with which pictures that overlap match, and score higher than pictures that do not.

    - The encoder is random up to its projection, which whitens its features on seeded pictures with the spectrum of
      natural ones: so tokens of different places are nearly orthogonal. They fill the first half of the channels.
    - Layer 1 writes what cross attention finds for a token into the second half, and the sum of absolute differences
      of the two halves into the last channel. The other layers add next to nothing.
    - The heads average, over all tokens, whether that difference is small. Scores part more from layer to layer.
    - The readout correlates the first half.
    """
    generator = torch.Generator().manual_seed(seed)
    model = without_values(lambda: FlexGlue(config))
    state = _random_state(model, generator)
    for name, value in state.items():
        if name.startswith("encoder."):
            state[name] = _smooth(name, value)
        elif not name.endswith("norm.weight"):
            value *= 1e-3
        else:
            value[:] = 1
    model = with_state(model, state)
    pictures = [_picture(config, generator) for _ in range(_PICTURES)]
    with torch.inference_mode():
        _whiten(model, pictures)
        _compare(model)
        _calibrate(model, pictures)
    return model


def _smooth(name: str, value: torch.Tensor) -> torch.Tensor:
    """Weights of the encoder with which tokens change little where the picture moves by parts of a cell."""
    if name.endswith(("stem.weight", "down.weight")):  # do not overlap: means, or there is aliasing
        return value.mean(dim=(2, 3), keepdim=True).expand_as(value) * value.shape[2]
    if name.endswith("conv.weight"):
        taps = torch.tensor([1.0, 4.0, 6.0, 4.0, 1.0]) / 16
        blur = functional.conv2d(value, torch.outer(taps, taps)[None, None], padding=2)
        return blur / blur.flatten(1).norm(dim=1)[:, None, None, None]
    if name.endswith(("stem.bias", "conv.bias", "down.bias")):  # constants that norms divide by: nearly linear
        return 20 * value
    return value


def _picture(config: FlexGlueConfig, generator: torch.Generator) -> torch.Tensor:
    """Noise with amplitudes of 1 over the frequency, half as wide again as the image: (1, 3, H', W')."""
    width, height = (3 * side // 2 // 8 * 8 for side in config.image_size)
    spectrum = torch.fft.rfft2(torch.randn(1, 3, height, width, generator=generator))
    frequency = torch.hypot(torch.fft.fftfreq(height)[:, None], torch.fft.rfftfreq(width)[None])
    frequency[0, 0] = math.inf
    picture = torch.fft.irfft2(spectrum / frequency, s=(height, width))
    return picture / picture.std()


def _crop(config: FlexGlueConfig, picture: torch.Tensor, x: int, y: int) -> torch.Tensor:
    width, height = config.image_size
    return picture[:, :, y : y + height, x : x + width]


def _whiten(model: FlexGlue, pictures: list[torch.Tensor]) -> None:
    """Fits the encoder's projection."""
    encoder, dim = model.encoder, model.config.dim
    views = [encoder.features(_crop(model.config, p, 0, 0)).flatten(0, 2) for p in pictures]
    tokens = torch.cat(views).double()
    mean = tokens.mean(dim=0)
    values, vectors = torch.linalg.eigh((tokens - mean).T @ (tokens - mean) / len(tokens))
    count = _half(dim)
    # The weakest directions are those that noise moves most.
    white = vectors[:, -count:] / (values[-count:] + 0.01 * values[-1]).sqrt()
    encoder.proj.weight.zero_()
    encoder.proj.bias.zero_()
    encoder.proj.weight[:count] = white.T.float()
    encoder.proj.bias[:count] = -(white.T @ mean).float()
    encoder.out_norm.weight.fill_(1)
    encoder.out_norm.bias.zero_()


def _half(dim: int) -> int:
    """Channels of a token's own features; as many are for what it finds in the other map, one for the difference."""
    return dim // 2 - 1


def _compare(model: FlexGlue) -> None:
    """Layer 1, and the readout."""
    config, layer, readout = model.config, model.matcher.layers[0], model.matcher.readout
    count, width = _half(config.dim), config.dim // config.heads
    cross = layer.cross_attention
    seen = min(count, width)
    for h in range(config.heads):  # each looks with the strongest features and carries some of them
        rows = slice(h * width, h * width + seen)
        for part in (cross.q, cross.k):
            part.weight[rows, count - seen : count] = 1.5 * torch.eye(seen)
        carried = torch.arange(min(h * width, count), min((h + 1) * width, count))
        cross.v.weight[carried, carried] = 1
        cross.out.weight[count + carried, carried] = 1
    own, found = torch.arange(count), count + torch.arange(count)
    for sign, unit in ((1, own), (-1, found)):  # gelu(a) + gelu(-a) is near |a|
        layer.mlp.fc1.weight[unit, own] = 4.0 * sign
        layer.mlp.fc1.weight[unit, found] = -4.0 * sign
        layer.mlp.fc2.weight[-1, unit] = 0.25 / count
    readout.proj.weight[own, own] = 1.5


def _calibrate(model: FlexGlue, pictures: list[torch.Tensor]) -> None:
    """Fits the heads, on views of one picture that overlap by half and on views of different pictures."""
    config, matcher = model.config, model.matcher
    near, far = [], []
    x, y = (side // 4 for side in config.image_size)
    for i, picture in enumerate(pictures):
        first, second = (model.encoder(_crop(config, picture, *corner)) for corner in ((0, 0), (x, y)))
        other = model.encoder(_crop(config, pictures[i - 1], x, y))
        for view, group in ((second, near), (other, far)):
            group.append(matcher.layer(0, matcher.tokens(first, view))[0])
    differences = [[matcher.heads[0].norm(tokens)[..., -1] for tokens in group] for group in (near, far)]
    limit = torch.stack([torch.stack(group).median() for group in differences]).mean()
    for k, head in enumerate(matcher.heads, start=1):
        head.tokens.weight[0, -1] = -_STEEP
        head.tokens.bias[0] = _STEEP * limit
        found = [torch.stack([_said(head, tokens) for tokens in group]).mean() for group in (near, far)]
        # Of these views the last head gives scores of 0.95 and 0.05 on average, the first ones nearer to 0.5.
        slope = 6 / (found[0] - found[1]) * (0.4 + 0.6 * k / config.layers)
        head.pooled.weight[0] = 0
        head.pooled.weight[0, 0] = slope
        head.pooled.bias[:] = -slope * (found[0] + found[1]) / 2


def _said(head: CovisibilityHead, tokens: torch.Tensor) -> torch.Tensor:
    """What the first unit of a head says of tokens (2, T, dim), on average."""
    return functional.gelu(head.tokens(head.norm(tokens))[..., 0]).mean()
