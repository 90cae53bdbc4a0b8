"""A U-Net of volumes as Çiçek et al. (2016) draw it, with linear interpolation in place of transposed convolutions."""

from itertools import pairwise
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from medsilo.extend import NORM, Dimensions, Network, blocks

LINEAR = {2: "bilinear", 3: "trilinear"}


class PooledUNet(Network):
    """Two convolutions per level, pooling down, interpolation up: [B, channels, D, H, W] to logits of the same places.

    A level's first convolution has half its features, its second all. D, H and W are multiples of 2 ** (levels - 1).
    With features 16, 32 and 64 it is the network of FLamby's Fed-IXI (246 164 weights). On a GPU the gradients of
    pooling and interpolation are summed in any order, so that runs there differ in their last digits.
    """

    name: Literal["pooled-unet"] = "pooled-unet"
    features: tuple[Annotated[int, Field(ge=2, le=1024)], ...] = Field(
        default=(16, 32, 64), min_length=2, max_length=7, description="features of each level, the finest first"
    )
    dimensions: Dimensions = 3
    norm: blocks.Norm = Field("batch", description=NORM)

    def build(self, channels: int, classes: int) -> nn.Module:
        return _Levels(self, channels, classes)


class _Levels(nn.Module):
    def __init__(self, own: PooledUNet, channels: int, classes: int) -> None:
        super().__init__()
        levels = (channels, *own.features)
        self.down = nn.ModuleList(_two(own, before, here // 2, here) for before, here in pairwise(levels))
        coarse_first = tuple(pairwise(own.features[::-1]))
        self.up = nn.ModuleList(_two(own, below + here, here, here) for below, here in coarse_first)
        self.pool = blocks.POOLS[own.dimensions](2)
        self.enlarge = nn.Upsample(scale_factor=2, mode=LINEAR[own.dimensions], align_corners=False)
        self.head = blocks.CONVOLUTIONS[own.dimensions](own.features[0], classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        kept: list[Tensor] = []
        for level in self.down:
            images = level(self.pool(images) if kept else images)
            kept.append(images)
        images = kept.pop()
        for level in self.up:
            images = level(torch.cat([kept.pop(), self.enlarge(images)], 1))
        return self.head(images)


def _two(own: PooledUNet, channels: int, first: int, second: int) -> nn.Sequential:
    """Return two convolutions, each with its norm and a ReLU whose slope below 0 is learned."""
    layers: list[nn.Module] = []
    for before, here in ((channels, first), (first, second)):
        norms = blocks.norm_layer(own.dimensions, here, own.norm)
        layers += [blocks.CONVOLUTIONS[own.dimensions](before, here, 3, padding=1, bias=not norms), *norms, nn.PReLU()]
    return nn.Sequential(*layers)
