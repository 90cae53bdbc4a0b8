"""The networks: linear model, MLP, small CNN, activity CNN, VGG-11, U-Net and DenseNet-121."""

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
    """Max pooling by two that leaves an axis of length one unchanged, so that the network accepts small images, too."""

    def forward(self, inputs: Tensor) -> Tensor:
        axes = inputs.shape[2:]
        return POOLS[len(axes)](inputs, [min(2, size) for size in axes])


def block(dimensions: int, channels: int, features: int, kernel: int, norm: Norm) -> nn.Sequential:
    convolution = CONVOLUTIONS[dimensions](channels, features, kernel, padding=kernel // 2)
    norms = Network.norm_layer(dimensions, features, norm)
    return nn.Sequential(convolution, *norms, nn.ReLU(inplace=True), Halving())


def use_batch_statistics(module: nn.Module) -> nn.Module:
    """Replace every batch norm in place with a batch norm that has no weights and always uses the batch's
    statistics.
    """
    for name, layer in module.named_children():
        if isinstance(layer, _BatchNorm):
            setattr(module, name, type(layer)(layer.num_features, affine=False, track_running_stats=False))
        else:
            use_batch_statistics(layer)
    return module


Features = Annotated[int, Field(ge=1, le=4096)]
# Configuration A of Simonyan and Zisserman 2015: the number of features of each convolution, by stages; each stage ends
# with pooling.
STAGES = ((64,), (128,), (256, 256), (512, 512), (512, 512))
WIDTH = 4096


class Linear(Network):
    """A linear layer from a case's inputs [B, channels] to its outputs [B, classes].

    Together with the task's loss function, the linear layer is a logistic, linear or Cox regression.
    """

    name: Literal["linear"] = "linear"

    def build(self, channels: int, classes: int) -> nn.Module:
        return nn.Sequential(nn.Linear(channels, classes))


class Mlp(Network):
    """An MLP of fully connected layers with norm and ReLU, and a linear head, from [B, channels] to [B, classes]."""

    name: Literal["mlp"] = "mlp"
    hidden: tuple[Features, ...] = Field(
        default=(64, 64), min_length=1, max_length=8, description="number of features of each layer before the head"
    )
    norm: Norm = "batch"

    def build(self, channels: int, classes: int) -> nn.Module:
        layers: list[nn.Module] = []
        for before, after in zip((channels, *self.hidden), self.hidden, strict=False):
            layers += [nn.Linear(before, after), *self.norm_layer(1, after, self.norm), nn.ReLU(inplace=True)]
        return nn.Sequential(*layers, nn.Linear(self.hidden[-1], classes))


class SmallCnn(Network):
    """A CNN of three convolutions with pooling, the mean over the image and a linear head, from [B, channels, (D,) H,
    W] to [B, classes].
    """

    name: Literal["small-cnn"] = "small-cnn"
    width: int = Field(
        default=16,
        ge=1,
        le=512,
        description="number of features of the first convolution; each further convolution doubles this number",
    )
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
    """A CNN of two temporal convolutions with norm and pooling, and two linear layers, from [B, C, T] to [B, classes].

    The AdaFed paper uses a temporal CNN with kernel 9 to recognise activities from wearable sensors (PAMAP2). The
    AdaFed paper's network flattens all time steps before the first linear layer, which requires a fixed T. In medsilo,
    a mean over time replaces flattening, and the convolutions are padded, so that every T is possible. Adaptive pooling
    to several time steps is not used, because its gradients are not deterministic on a GPU.
    """

    name: Literal["activity-cnn"] = "activity-cnn"
    hidden: int = Field(
        default=64, ge=1, le=4096, description="number of features of the fully connected layer before the head"
    )
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
    """VGG-11 without norm, with two linear layers of 4096 features and dropout, from [B, channels, H, W] to [B,
    classes]; 129 M weights.

    The FedSM paper uses VGG-11 as selector. For images of 224 pixels, the pooling to 7 x 7 does nothing; for other
    sizes, the gradient of this pooling is not deterministic on a GPU.
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
    """MONAI's `UNet`, from [B, channels, (D,) H, W] to logits [B, classes, (D,) H, W].

    Each level of the U-Net halves the image, so D, H and W must be multiples of 2 ** (levels - 1). The head of the
    U-Net is the last convolution.
    """

    name: Literal["unet"] = "unet"
    features: tuple[Annotated[int, Field(ge=1, le=1024)], ...] = Field(
        default=(16, 32, 64),
        min_length=2,
        max_length=7,
        description="number of features at each level, from the finest to the coarsest",
    )
    dimensions: Dimensions = 2
    residual_units: int = Field(
        default=0,
        ge=0,
        le=4,
        description="number of residual convolutions per level; 0: each level has one plain convolution",
    )
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
    """An untrained DenseNet-121 with growth 32, from [B, channels, (D,) H, W] to [B, classes], where images have at
    least 32 pixels per axis.

    HarmoFL's released code uses the norm "batch-statistics". Unlike this DenseNet-121, HarmoFL's released code pads by
    two pixels after the first block.
    """

    name: Literal["densenet121"] = "densenet121"
    dimensions: Dimensions = 2
    norm: Literal["batch", "batch-statistics"] = Field("batch", description=Network.NORM)

    def build(self, channels: int, classes: int) -> nn.Module:
        if self.norm == "batch":
            return super().build(channels, classes)
        # MONAI's argument `norm` is not used, because MONAI's initialisation fails for norms without weights.
        return use_batch_statistics(self.model_copy(update={"norm": "batch"}).build(channels, classes))

    def monai(self, channels: int, classes: int) -> dict[str, Any] | None:
        sizes = {"spatial_dims": self.dimensions, "in_channels": channels, "out_channels": classes}
        return {"_target_": "monai.networks.nets.DenseNet121", **sizes} if self.norm == "batch" else None
