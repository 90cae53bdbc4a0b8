"""MONAI's U-Net of the classical form: two convolutions per level, pooling down, transposed convolutions up."""

from typing import Annotated, Any, Literal

from pydantic import Field
from torch import nn

from medsilo.extend import MONAI_NORMS, NORM, Dimensions, Network


class BasicUNet(Network):
    """[B, channels, (D,) H, W] to logits [B, classes, (D,) H, W]; D, H and W are multiples of 16.

    With features 32 to 512, as by default, it is the U-Net of HarmoFL's two segmentation tasks.
    """

    name: Literal["basic-unet"] = "basic-unet"
    features: tuple[Annotated[int, Field(ge=1, le=1024)], ...] = Field(
        default=(32, 64, 128, 256, 512), min_length=5, max_length=5, description="features of each level, finest first"
    )
    dimensions: Dimensions = 2
    norm: Literal["batch", "batch-statistics", "instance"] = Field(
        "batch",
        description=NORM,
    )

    def build(self, channels: int, classes: int) -> nn.Module:
        from monai.networks.nets import BasicUNet as MonaiBasicUNet  # here, because importing MONAI takes seconds

        return MonaiBasicUNet(**self._arguments(channels, classes))

    def monai(self, channels: int, classes: int) -> dict[str, Any]:
        return {"_target_": "monai.networks.nets.BasicUNet", **self._arguments(channels, classes)}

    def _arguments(self, channels: int, classes: int) -> dict[str, Any]:
        return {
            "spatial_dims": self.dimensions,
            "in_channels": channels,
            "out_channels": classes,
            "features": (*self.features, self.features[0]),
            "act": ("RELU", {"inplace": True}),
            "norm": MONAI_NORMS[self.norm],
        }
