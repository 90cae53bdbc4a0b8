"""VGG-11, the selector of the FedSM paper."""

from typing import Literal

from torch import nn

from medsilo.models.network import Network

# Configuration A of Simonyan and Zisserman 2015: stages that end in pooling, and the features of their convolutions.
STAGES = ((64,), (128,), (256, 256), (512, 512), (512, 512))
WIDTH = 4096


class Vgg11(Network):
    """No norm, two layers of 4096 with dropout: [B, channels, H, W] to [B, classes], H, W >= 32; 129 M weights.

    Its pooling to 7 x 7 changes nothing at 224 pixels; at other sizes its gradient is not deterministic on a GPU.
    """

    name: Literal["vgg11"] = "vgg11"

    def build(self, channels: int, classes: int) -> nn.Module:
        layers: list[nn.Module] = []
        for stage in STAGES:
            for features in stage:
                layers += [nn.Conv2d(channels, features, 3, padding=1), nn.ReLU(inplace=True)]
                channels = features
            layers.append(nn.MaxPool2d(2))
        layers += [nn.AdaptiveAvgPool2d(7), nn.Flatten()]
        for before in (channels * 7 * 7, WIDTH):
            layers += [nn.Linear(before, WIDTH), nn.ReLU(inplace=True), nn.Dropout()]
        return nn.Sequential(*layers, nn.Linear(WIDTH, classes))
