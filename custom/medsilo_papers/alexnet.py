"""AlexNet with batch norm, the network of the AdaFed paper for chest X-rays."""

from typing import Literal

from pydantic import Field
from torch import nn

from medsilo.extend import NORM, Network, blocks

# Features, kernel, stride, padding of each convolution, and whether pooling follows.
CONVOLUTIONS = ((64, 11, 4, 2, True), (192, 5, 1, 2, True), (384, 3, 1, 1, False), (256, 3, 1, 1, False))
LAST = (256, 3, 1, 1, True)


class AlexNet(Network):
    """Five convolutions with norm, three fully connected layers with norm after the first two.

    [B, channels, size, size] to [B, classes]. With size 224 the torchvision network's layers, norms added, without
    dropout and without its adaptive pooling (which changes nothing at 224 and whose gradient is not deterministic on
    a GPU).
    """

    name: Literal["alexnet"] = "alexnet"
    size: int = Field(default=224, ge=63, le=1024, description="height and width of the images")
    width: int = Field(default=4096, ge=1, le=8192, description="features of the two fully connected layers")
    norm: blocks.Norm = Field(
        "batch",
        description=NORM,
    )

    def build(self, channels: int, classes: int) -> nn.Module:
        layers: list[nn.Module] = []
        side = self.size
        for features, kernel, stride, padding, pooled in (*CONVOLUTIONS, LAST):
            layers.append(nn.Conv2d(channels, features, kernel, stride, padding))
            layers += [*blocks.norm_layer(2, features, self.norm), nn.ReLU(inplace=True)]
            side = (side + 2 * padding - kernel) // stride + 1
            if pooled:
                layers.append(nn.MaxPool2d(3, 2))
                side = (side - 3) // 2 + 1
            channels = features
        layers.append(nn.Flatten())
        width = channels * side * side
        for _ in range(2):
            layers.append(nn.Linear(width, self.width))
            layers += [*blocks.norm_layer(1, self.width, self.norm), nn.ReLU(inplace=True)]
            width = self.width
        return nn.Sequential(*layers, nn.Linear(width, classes))
