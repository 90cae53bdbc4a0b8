"""A network of fully connected layers, for tables."""

from typing import Annotated, Literal

from pydantic import Field
from torch import nn

from medsilo.models.blocks import Norm, norm_layer
from medsilo.models.network import NORM, Network

Features = Annotated[int, Field(ge=1, le=4096)]


class Mlp(Network):
    """Fully connected layers, each with norm and ReLU, and the head: [B, channels] to [B, classes]."""

    name: Literal["mlp"] = "mlp"
    hidden: tuple[Features, ...] = Field(
        default=(64, 64), min_length=1, max_length=8, description="features of each layer before the head"
    )
    norm: Norm = Field("batch", description=NORM)

    def build(self, channels: int, classes: int) -> nn.Module:
        layers: list[nn.Module] = []
        for before, after in zip((channels, *self.hidden), self.hidden, strict=False):
            layers += [nn.Linear(before, after), *norm_layer(1, after, self.norm), nn.ReLU(inplace=True)]
        return nn.Sequential(*layers, nn.Linear(self.hidden[-1], classes))
