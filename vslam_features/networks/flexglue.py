"""A matcher of the shape of FlexGlue (https://github.com/cvg/FlexGlue), in torch: NOT weight-compatible with it.

Written from the published description alone: a ConvNeXt encodes an image into a map of one token every 8 pixels, a
transformer refines two maps jointly, with a covisibility score after each layer, tokens are interpolated at keypoints
and located in the other map, and keypoints that find one another match. What is not published (widths, heads, norms,
the form of the heads) is ours; so a state dict of the release does not fit, and its ONNX files are used as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..errors import ConfigError, DataError
from .flexglue_encoder import STRIDE, Encoder
from .flexglue_layers import CovisibilityHead, Layer, rotation
from .flexglue_readout import Readout


@dataclass(frozen=True)
class FlexGlueConfig:
    """Sizes of the network.

    Args:
        image_size: (width, height) in pixels, multiples of 8.
        widths, depths: channels and blocks of the encoder's stages.
        dim: channels of the map; ``heads`` divides it into parts of a multiple of 4.
        layers: of the transformer.
        head_hidden: inner width of a covisibility head.
        window, radius: of the readout, in cells of the map.
    """

    name: str
    image_size: tuple[int, int]
    widths: tuple[int, int]
    depths: tuple[int, int]
    dim: int
    heads: int
    layers: int
    head_hidden: int
    window: int = 2
    radius: float = 1.0

    @property
    def grid(self) -> tuple[int, int]:
        """Tokens of the map: (rows, columns)."""
        width, height = self.image_size
        return height // STRIDE, width // STRIDE


FLEXGLUE = FlexGlueConfig(
    name="flexglue",
    image_size=(512, 512),
    widths=(128, 256),
    depths=(3, 6),
    dim=256,
    heads=4,
    layers=9,
    head_hidden=128,
)
# For tests of everything around the network: as many layers, so that stops are comparable; the map is not square.
FLEXGLUE_TINY = FlexGlueConfig(
    name="flexglue-tiny",
    image_size=(192, 160),
    widths=(32, 64),
    depths=(1, 1),
    dim=64,
    heads=2,
    layers=9,
    head_hidden=64,
)


@dataclass(frozen=True)
class Matching:
    """Of two images.

    Args:
        matches0: (M,) int64, index of the keypoint of image 1 or -1.
        mscores0: (M,) f32 in [0, 1], 0 without a match.
        covisibility_score: in [0, 1]: of the last layer that ran.
        stopped_after_layer: the last that ran; 0: all did.
        layer_scores: covisibility after each layer that ran.
    """

    matches0: torch.Tensor
    mscores0: torch.Tensor
    covisibility_score: float
    stopped_after_layer: int
    layer_scores: tuple[float, ...]


class Matcher(nn.Module):
    """Two maps and the keypoints of both images -> matches, their scores, and a covisibility score after each layer."""

    def __init__(self, config: FlexGlueConfig):
        super().__init__()
        c = self.config = config
        self.layers = nn.ModuleList(Layer(c.dim, c.heads) for _ in range(c.layers))
        self.heads = nn.ModuleList(CovisibilityHead(c.dim, c.head_hidden) for _ in range(c.layers))
        self.readout = Readout(c.dim, c.grid, c.window, c.radius)
        with torch.device("cpu"):  # where the network is made without values, this has some
            turn = rotation(*c.grid, c.dim // c.heads)
        for name, value in zip(("cos", "sin"), turn):
            self.register_buffer(name, value, persistent=False)

    def forward(self, keypoints0, keypoints1, descriptors0, descriptors1, image_size0, image_size1, min_covisibility):
        """All layers; matches (M,) int64, their scores (M,) f32, covisibility (), and that after each earlier layer.

        Where the last score is below ``min_covisibility`` () there is no match.
        """
        x, scores = self.tokens(descriptors0, descriptors1), []
        for i in range(self.config.layers):
            x, score = self.layer(i, x)
            scores.append(score)
        points = in_image(keypoints0, image_size0), in_image(keypoints1, image_size1)
        matches, match_scores = self.readout(x, *points)
        rejected = scores[-1] < min_covisibility
        matches, match_scores = torch.where(rejected, -1, matches), torch.where(rejected, 0.0, match_scores)
        return matches, match_scores, scores[-1], *scores[:-1]

    def tokens(self, descriptors0: torch.Tensor, descriptors1: torch.Tensor) -> torch.Tensor:
        """(2, T, dim) of two maps (dim, h, w)."""
        return torch.stack((descriptors0, descriptors1)).flatten(2).transpose(1, 2)

    def layer(self, i: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens after layer ``i``, from 0, and their covisibility score ()."""
        x = self.layers[i](x, (self.cos, self.sin))
        return x, self.heads[i](x)


class FlexGlue(nn.Module):
    """Encoder and matcher. Raises DataError for maps or images of other sizes than those of the configuration."""

    def __init__(self, config: FlexGlueConfig):
        super().__init__()
        self.config = config
        self.encoder = Encoder(config.widths, config.depths, config.dim)
        self.matcher = Matcher(config)

    def describe(self, image: torch.Tensor) -> torch.Tensor:
        """Image (1, 3, H, W) f32, RGB, ImageNet-normalised -> map (dim, H / 8, W / 8) f32."""
        width, height = self.config.image_size
        self._expect("image", image, (1, 3, height, width))
        with torch.inference_mode():
            return self.encoder(image)

    def match(
        self,
        keypoints0: torch.Tensor,
        keypoints1: torch.Tensor,
        descriptors0: torch.Tensor,
        descriptors1: torch.Tensor,
        image_size0: torch.Tensor,
        image_size1: torch.Tensor,
        min_covisibility: float = 0.0,
        early_stop_decay: float = 1.0,
        layers: Sequence[int] = (2, 4, 6, 8),
    ) -> Matching:
        """What the exported graphs compute; after a stop no further layer runs.

        After each layer k of ``layers``, from 1, the pair is rejected when its score is below
        ``min_covisibility * (1 - early_stop_decay) ** (L - k)``. A score of NaN ends the run there too, with a
        covisibility of NaN, which callers take for a fault. Limits are float32, as in the graph.

        Args:
            keypoints0, keypoints1: (M, 2), (N, 2) f32, pixels of images of ``image_size0``, ``image_size1`` (2,) f32.
            descriptors0, descriptors1: maps (dim, h, w) f32.
        Raises:
            DataError: a map of another size. ConfigError: a layer that there is not, or the last.
        """
        matcher, count = self.matcher, self.config.layers
        if not set(layers) <= set(range(1, count)):
            raise ConfigError(f"layers to check are {list(layers)}, expected some of 1 to {count - 1}")
        for name, value in (("descriptors0", descriptors0), ("descriptors1", descriptors1)):
            self._expect(name, value, (self.config.dim, *self.config.grid))
        least, decay = (torch.tensor(v, dtype=torch.float32) for v in (min_covisibility, early_stop_decay))
        scores: list[torch.Tensor] = []
        with torch.inference_mode():
            x = matcher.tokens(descriptors0, descriptors1)
            for k in range(1, count + 1):
                x, score = matcher.layer(k - 1, x)
                scores.append(score)
                if k in layers and not score >= least * (1 - decay) ** (count - k):  # NaN is not enough either
                    return self._rejected(len(keypoints0), scores, k)
            if scores[-1] < least:
                return self._rejected(len(keypoints0), scores, 0)
            points = in_image(keypoints0, image_size0), in_image(keypoints1, image_size1)
            return _matching(*matcher.readout(x, *points), scores, 0)

    def _rejected(self, count: int, scores: list[torch.Tensor], layer: int) -> Matching:
        return _matching(torch.full((count,), -1), torch.zeros(count), scores, layer)

    def _expect(self, name: str, value: torch.Tensor, shape: tuple[int, ...]) -> None:
        if tuple(value.shape) != shape:
            raise DataError(f"{name} has shape {tuple(value.shape)}, {self.config.name} takes {shape}")


def in_image(keypoints: torch.Tensor, image_size: torch.Tensor) -> torch.Tensor:
    """Keypoints (N, 2) in pixels as parts of the image's width and height; pixel (0, 0) is the centre of the first."""
    return (keypoints + 0.5) / image_size


def _matching(matches: torch.Tensor, match_scores: torch.Tensor, scores: list[torch.Tensor], layer: int) -> Matching:
    found = tuple(float(score) for score in scores)
    return Matching(matches, match_scores, found[-1], layer, found)
