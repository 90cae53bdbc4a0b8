"""A small convolutional network for image patches."""

from typing import Literal

from pydantic import Field
from torch import nn

from medsilo.models.blocks import MEANS, Norm, block
from medsilo.models.network import Dimensions, Network


class SmallCnn(Network):
    """Three convolutions with pooling, the mean over the image, one linear layer (the head).

    [B, channels, (D,) H, W] to [B, classes]; D, H and W are at least 8 and otherwise free.
    """

    name: Literal["small-cnn"] = "small-cnn"
    width: int = Field(default=16, ge=1, le=512, description="features of the first convolution; doubled by each next")
    dimensions: Dimensions = 2
    norm: Norm = "batch"

    def build(self, channels: int, classes: int) -> nn.Module:
        return nn.Sequential(
            block(self.dimensions, channels, self.width, 3, self.norm),
            block(self.dimensions, self.width, 2 * self.width, 3, self.norm),
            block(self.dimensions, 2 * self.width, 4 * self.width, 3, self.norm),
            MEANS[self.dimensions](1),
            nn.Flatten(),
            nn.Linear(4 * self.width, classes),
        )
