"""The network of the AdaFed paper for activities from wearable sensors (its PAMAP2 experiment)."""

from typing import Literal

from pydantic import Field
from torch import nn

from medsilo.models.blocks import Norm, block
from medsilo.models.network import Network


class ActivityCnn(Network):
    """Two temporal convolutions (kernel 9) with norm and pooling, a layer of 64, the head: [B, C, T] to [B, classes].

    The paper flattens all time steps before the layer of 64, which fixes T. Here the mean over time comes before it
    and the convolutions are padded, so that every T from 4 on works. (A mean, because gradients of adaptive pooling to
    several steps are not deterministic on a GPU.)
    """

    name: Literal["activity-cnn"] = "activity-cnn"
    hidden: int = Field(default=64, ge=1, le=4096, description="features of the fully connected layer before the head")
    norm: Norm = "batch"

    def build(self, channels: int, classes: int) -> nn.Module:
        return nn.Sequential(
            block(1, channels, 16, 9, self.norm),
            block(1, 16, 32, 9, self.norm),
            nn.AdaptiveAvgPool1d(1),
            nn.Flatten(),
            nn.Linear(32, self.hidden),
            nn.ReLU(inplace=True),
            nn.Linear(self.hidden, classes),
        )
