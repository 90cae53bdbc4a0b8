"""The networks: layers in a row, for tables, patches of images, signals and FedSM's selector; U-Net; DenseNet-121."""

from typing import Annotated, Any, Literal

from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from medsilo.models.network import Activation, Dimensions, Network

Norm = Annotated[Literal["batch", "batch-statistics", "group", "none"], Field(description=Network.NORM)]

CONVOLUTIONS: dict[int, type[nn.Module]] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
POOLS = {1: functional.max_pool1d, 2: functional.max_pool2d, 3: functional.max_pool3d}
MEANS: dict[int, type[nn.Module]] = {2: nn.AdaptiveAvgPool2d, 3: nn.AdaptiveAvgPool3d}


class Halving(nn.Module):
    """Max pooling of two; an axis of one stays as it is, so that small images pass, too."""

    def forward(self, inputs: Tensor) -> Tensor:
        axes = inputs.shape[2:]
        return POOLS[len(axes)](inputs, [min(2, size) for size in axes])


def block(dimensions: int, channels: int, features: int, kernel: int, norm: Norm) -> nn.Sequential:
    """Convolution, norm, ReLU and pooling: [B, channels, ...] to [B, features, ... / 2]."""
    convolution = CONVOLUTIONS[dimensions](channels, features, kernel, padding=kernel // 2)
    norms = Network.norm_layer(dimensions, features, norm)
    return nn.Sequential(convolution, *norms, nn.ReLU(inplace=True), Halving())


def use_batch_statistics(module: nn.Module) -> nn.Module:
    """Replaces every batch norm, in place, by one without weights that takes each batch's own statistics."""
    for name, layer in module.named_children():
        if isinstance(layer, _BatchNorm):
            setattr(module, name, type(layer)(layer.num_features, affine=False, track_running_stats=False))
        else:
            use_batch_statistics(layer)
    return module


Features = Annotated[int, Field(ge=1, le=4096)]
# Configuration A of Simonyan and Zisserman 2015: stages that end in pooling, and the features of their convolutions.
STAGES = ((64,), (128,), (256, 256), (512, 512), (512, 512))
WIDTH = 4096


class Linear(Network):
    """A weighted sum of a case's inputs for every output: [B, channels] to [B, classes].

    Logistic, linear or Cox regression, by the task's loss.
    """

    name: Literal["linear"] = "linear"

    def build(self, channels: int, classes: int) -> nn.Module:
        return nn.Sequential(nn.Linear(channels, classes))


class Mlp(Network):
    """Fully connected layers, each with norm and ReLU, and the head: [B, channels] to [B, classes]."""

    name: Literal["mlp"] = "mlp"
    hidden: tuple[Features, ...] = Field(
        default=(64, 64), min_length=1, max_length=8, description="features of each layer before the head"
    )
    norm: Norm = "batch"

    def build(self, channels: int, classes: int) -> nn.Module:
        layers: list[nn.Module] = []
        for before, after in zip((channels, *self.hidden), self.hidden, strict=False):
            layers += [nn.Linear(before, after), *self.norm_layer(1, after, self.norm), nn.ReLU(inplace=True)]
        return nn.Sequential(*layers, nn.Linear(self.hidden[-1], classes))


class SmallCnn(Network):
    """Three convolutions with pooling, the mean over the image, one linear layer (the head).

    [B, channels, (D,) H, W] to [B, classes]; D, H and W are free.
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


class ActivityCnn(Network):
    """Two temporal convolutions (kernel 9) with norm and pooling, a layer of 64, the head: [B, C, T] to [B, classes].

    It is the AdaFed paper's for activities from wearable sensors (PAMAP2). The paper flattens all time steps before the
    layer of 64, which fixes T. Here the mean over time comes before it and the convolutions are padded, so that every T
    works. (A mean, because gradients of adaptive pooling to several steps are not deterministic on a GPU.)
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


class Vgg11(Network):
    """No norm, two layers of 4096 with dropout: [B, channels, H, W] to [B, classes]; 129 M weights.

    It is the selector of the FedSM paper. Its pooling to 7 x 7 changes nothing at 224 pixels; at other sizes its
    gradient is not deterministic on a GPU.
    """

    name: Literal["vgg11"] = "vgg11"

    def build(self, channels: int, classes: int) -> nn.Module:
        layers: list[nn.Module] = []
        for stage in STAGES:
            for features in stage:
                layers += [nn.Conv2d(channels, features, 3, padding=1), nn.ReLU(inplace=True)]
                channels = features
            layers.append(Halving())
        layers += [nn.AdaptiveAvgPool2d(7), nn.Flatten()]
        for before in (channels * 7 * 7, WIDTH):
            layers += [nn.Linear(before, WIDTH), nn.ReLU(inplace=True), nn.Dropout()]
        return nn.Sequential(*layers, nn.Linear(WIDTH, classes))


class UNet(Network):
    """MONAI's `UNet`: [B, channels, H, W] to logits [B, classes, H, W]; of volumes [B, channels, D, H, W] alike.

    Each level halves the image, so D, H and W are multiples of 2 ** (levels - 1). The head is the last convolution.
    """

    name: Literal["unet"] = "unet"
    features: tuple[Annotated[int, Field(ge=1, le=1024)], ...] = Field(
        default=(16, 32, 64), min_length=2, max_length=7, description="features of each level, the finest first"
    )
    dimensions: Dimensions = 2
    residual_units: int = Field(default=0, ge=0, le=4, description="residual convolutions per level; 0: one plain one")
    norm: Literal["batch", "batch-statistics", "instance", "instance-statistics", "none"] = Field(
        "batch", description=Network.NORM + "; `instance-statistics` is instance norm without weights, MONAI's default"
    )
    activation: Activation = "relu"

    def monai(self, channels: int, classes: int) -> dict[str, Any]:
        return {
            "_target_": "monai.networks.nets.UNet",
            "spatial_dims": self.dimensions,
            "in_channels": channels,
            "out_channels": classes,
            "channels": self.features,
            "strides": (2,) * (len(self.features) - 1),
            "num_res_units": self.residual_units,
            "act": self.MONAI_ACTIVATIONS[self.activation],
            "norm": self.MONAI_NORMS[self.norm],
        }


class DenseNet121(Network):
    """Growth 32, blocks of 6, 12, 24, 16 layers, untrained: [B, channels, (D,) H, W] to [B, classes]; sizes >= 32.

    norm: "batch", or "batch-statistics" as in HarmoFL's released code (which also pads by two pixels after the first
    block; that is left out).
    """

    name: Literal["densenet121"] = "densenet121"
    dimensions: Dimensions = 2
    norm: Literal["batch", "batch-statistics"] = Field("batch", description=Network.NORM)

    def build(self, channels: int, classes: int) -> nn.Module:
        if self.norm == "batch":
            return super().build(channels, classes)
        # Not by MONAI's `norm`: its initialisation fails on norms without weights.
        return use_batch_statistics(self.model_copy(update={"norm": "batch"}).build(channels, classes))

    def monai(self, channels: int, classes: int) -> dict[str, Any] | None:
        sizes = {"spatial_dims": self.dimensions, "in_channels": channels, "out_channels": classes}
        return {"_target_": "monai.networks.nets.DenseNet121", **sizes} if self.norm == "batch" else None
