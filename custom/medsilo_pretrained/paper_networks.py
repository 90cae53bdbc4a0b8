"""The papers' networks: LeNet5 and AlexNet with normalisation layers (AdaFed), and MONAI's classical
U-Net (HarmoFL).
"""

from typing import Annotated, Any, Literal

from pydantic import Field
from torch import nn

from medsilo.extend import Network

Norm = Annotated[Literal["batch", "batch-statistics", "group", "none"], Field(description=Network.NORM)]


class LeNet5(Network):
    """AdaFed's network for small images: 5x5 convolutions with 6 and 16 features, and linear layers with 120 and 84
    features. Normalisation and pooling follow each convolution.

    The network maps [B, channels, size, size] to [B, classes].
    """

    name: Literal["lenet5"] = "lenet5"
    size: int = Field(default=28, ge=16, le=1024, description="height and width of the images")
    norm: Norm = "batch"

    def build(self, channels: int, classes: int) -> nn.Module:
        side = ((self.size - 4) // 2 - 4) // 2
        layers: list[nn.Module] = []
        for before, after in ((channels, 6), (6, 16)):
            norms = self.norm_layer(2, after, self.norm)
            layers += [nn.Conv2d(before, after, 5), *norms, nn.ReLU(inplace=True), nn.MaxPool2d(2)]
        return nn.Sequential(
            *layers,
            nn.Flatten(),
            nn.Linear(16 * side * side, 120),
            nn.ReLU(inplace=True),
            nn.Linear(120, 84),
            nn.ReLU(inplace=True),
            nn.Linear(84, classes),
        )


# for each convolution: number of features, kernel size, stride, padding, and True if pooling follows
CONVOLUTIONS = ((64, 11, 4, 2, True), (192, 5, 1, 2, True), (384, 3, 1, 1, False), (256, 3, 1, 1, False))
LAST = (256, 3, 1, 1, True)


class AlexNet(Network):
    """AdaFed's network for chest X-rays: five convolutions and three linear layers, with normalisation after all but
    the last layer.

    The network maps [B, channels, size, size] to [B, classes]. With size 224, the layers are those of torchvision's
    AlexNet plus normalisation layers, without dropout and adaptive pooling. Adaptive pooling would have no effect at
    size 224, and the gradient of this pooling is not deterministic on a GPU.
    """

    name: Literal["alexnet"] = "alexnet"
    size: int = Field(default=224, ge=63, le=1024, description="height and width of the images")
    width: int = Field(default=4096, ge=1, le=8192, description="number of features of the two fully connected layers")
    norm: Norm = "batch"

    def build(self, channels: int, classes: int) -> nn.Module:
        layers: list[nn.Module] = []
        side = self.size
        for features, kernel, stride, padding, pooled in (*CONVOLUTIONS, LAST):
            layers.append(nn.Conv2d(channels, features, kernel, stride, padding))
            layers += [*self.norm_layer(2, features, self.norm), nn.ReLU(inplace=True)]
            side = (side + 2 * padding - kernel) // stride + 1
            if pooled:
                layers.append(nn.MaxPool2d(3, 2))
                side = (side - 3) // 2 + 1
            channels = features
        layers.append(nn.Flatten())
        width = channels * side * side
        for _ in range(2):
            layers.append(nn.Linear(width, self.width))
            layers += [*self.norm_layer(1, self.width, self.norm), nn.ReLU(inplace=True)]
            width = self.width
        return nn.Sequential(*layers, nn.Linear(width, classes))


class BasicUNet(Network):
    """MONAI's U-Net with two convolutions per level, pooling in the encoder and transposed convolutions in the decoder.

    The network maps [B, channels, (D,) H, W] to logits [B, classes, (D,) H, W]; D, H and W must be multiples of 16.
    With its default numbers of features (32 to 512), the network is the U-Net of HarmoFL's two segmentation tasks.
    """

    name: Literal["basic-unet"] = "basic-unet"
    features: tuple[Annotated[int, Field(ge=1, le=1024)], ...] = Field(
        default=(32, 64, 128, 256, 512),
        min_length=5,
        max_length=5,
        description="number of features at each level, from the finest to the coarsest",
    )
    dimensions: Literal[2, 3] = Field(2, description="2 for 2D images and slices, 3 for volumes")
    norm: Literal["batch", "batch-statistics", "instance"] = Field("batch", description=Network.NORM)
    activation: Literal["relu", "leaky-relu", "prelu"] = Field(
        "relu",
        description="activation after each convolution; `leaky-relu` has slope 0.1 and is MONAI's default",
        exclude_if=lambda name: name == "relu",
    )

    def monai(self, channels: int, classes: int) -> dict[str, Any]:
        return {
            "_target_": "monai.networks.nets.BasicUNet",
            "spatial_dims": self.dimensions,
            "in_channels": channels,
            "out_channels": classes,
            "features": (*self.features, self.features[0]),
            "act": self.MONAI_ACTIVATIONS[self.activation],
            "norm": self.MONAI_NORMS[self.norm],
        }
