"""MONAI's transformers: a ViT for classification, and SwinUNETR for segmentation."""

from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from medsilo.extend import Network
from medsilo.extend.networks import Dimensions


class ViT(Network):
    """A vision transformer with a class token and random initial weights, which maps [B, channels, (D,) H, W] to [B,
    classes].
    """

    name: Literal["vit"] = "vit"
    dimensions: Dimensions = 2
    size: int = Field(64, ge=8, le=1024, description="height and width of the images")
    patch: int = Field(8, ge=2, le=64, description="height and width of a patch; must divide `size`")
    width: int = Field(96, ge=8, le=4096, description="number of features of a token; must be a multiple of `heads`")
    depth: int = Field(4, ge=1, le=48, description="number of transformer blocks")
    heads: int = Field(4, ge=1, le=64, description="number of attention heads in each block")

    def build(self, channels: int, classes: int) -> nn.Module:
        # MONAI is imported only when a network is built, because its import takes seconds
        from monai.networks.nets import ViT as MonaiViT

        class Scores(MonaiViT):
            """MONAI's ViT, changed so that it returns only the class scores, and not the outputs of the blocks."""

            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x)[0]

        axes = self.dimensions
        return Scores(
            in_channels=channels,
            img_size=(self.size,) * axes,
            patch_size=(self.patch,) * axes,
            hidden_size=self.width,
            mlp_dim=4 * self.width,
            num_layers=self.depth,
            num_heads=self.heads,
            proj_type="conv",
            classification=True,
            num_classes=classes,
            post_activation="",
            qkv_bias=True,
            spatial_dims=axes,
        )


class SwinUnetr(Network):
    """MONAI's SwinUNETR, which maps [B, channels, (D,) H, W] to [B, classes, (D,) H, W]. D, H and W must be multiples
    of 32.
    """

    name: Literal["swin-unetr"] = "swin-unetr"
    dimensions: Dimensions = 3
    features: int = Field(24, ge=12, le=192, multiple_of=12, description="number of features at the finest level")

    def build(self, channels: int, classes: int) -> nn.Module:
        place = torch.get_default_device()
        # MONAI reads tensor values while it builds the network, so the network cannot be built on the meta device.
        with torch.device("cpu" if place.type == "meta" else place):
            return super().build(channels, classes).to(place)

    def monai(self, channels: int, classes: int) -> dict[str, Any]:
        sizes = {"in_channels": channels, "out_channels": classes, "feature_size": self.features}
        return {"_target_": "monai.networks.nets.SwinUNETR", **sizes, "spatial_dims": self.dimensions}
