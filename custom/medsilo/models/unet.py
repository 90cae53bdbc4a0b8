"""MONAI's U-Net for slices and volumes."""

from typing import Annotated, Any, Literal

from pydantic import Field
from torch import nn

from medsilo.models.network import Dimensions, Network

# MONAI's instance norm has no weights by default; with them it can be compared with batch norm.
MONAI_NORMS: dict[str, Any] = {
    "batch": "BATCH",
    "batch-statistics": ("BATCH", {"affine": False, "track_running_stats": False}),
    "instance": ("INSTANCE", {"affine": True}),
    "none": None,
}


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
    norm: Literal["batch", "batch-statistics", "instance", "none"] = "batch"

    def build(self, channels: int, classes: int) -> nn.Module:
        from monai.networks.nets import UNet as MonaiUNet  # here, because importing MONAI takes seconds

        return MonaiUNet(**self._arguments(channels, classes))

    def monai(self, channels: int, classes: int) -> dict[str, Any]:
        return {"_target_": "monai.networks.nets.UNet", **self._arguments(channels, classes)}

    def _arguments(self, channels: int, classes: int) -> dict[str, Any]:
        return {
            "spatial_dims": self.dimensions,
            "in_channels": channels,
            "out_channels": classes,
            "channels": self.features,
            "strides": (2,) * (len(self.features) - 1),
            "num_res_units": self.residual_units,
            "act": ("RELU", {"inplace": True}),
            "norm": MONAI_NORMS[self.norm],
        }
