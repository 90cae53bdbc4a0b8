"""LeNet5 with batch norm, the network of the AdaFed paper for the small MedMNIST images."""

from typing import Literal

from pydantic import Field
from torch import nn

from medsilo.extend import NORM, Network, blocks


class LeNet5(Network):
    """Two 5x5 convolutions (6, 16) with norm and pooling, layers of 120 and 84, the head.

    [B, channels, size, size] to [B, classes].
    """

    name: Literal["lenet5"] = "lenet5"
    size: int = Field(default=28, ge=16, le=1024, description="height and width of the images")
    norm: blocks.Norm = Field(
        "batch",
        description=NORM,
    )

    def build(self, channels: int, classes: int) -> nn.Module:
        side = ((self.size - 4) // 2 - 4) // 2
        layers: list[nn.Module] = []
        for before, after in ((channels, 6), (6, 16)):
            layers += [nn.Conv2d(before, after, 5), *blocks.norm_layer(2, after, self.norm), nn.ReLU(inplace=True)]
            layers.append(nn.MaxPool2d(2))
        return nn.Sequential(
            *layers,
            nn.Flatten(),
            nn.Linear(16 * side * side, 120),
            nn.ReLU(inplace=True),
            nn.Linear(120, 84),
            nn.ReLU(inplace=True),
            nn.Linear(84, classes),
        )
