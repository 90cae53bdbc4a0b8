"""MONAI's DenseNet-121 for images."""

from typing import Any, Literal

from pydantic import Field
from torch import nn

from medsilo.models.blocks import use_batch_statistics
from medsilo.models.network import NORM, Dimensions, Network


class DenseNet121(Network):
    """Growth 32, blocks of 6, 12, 24, 16 layers, untrained: [B, channels, (D,) H, W] to [B, classes]; sizes >= 32.

    norm: "batch", or "batch-statistics" as in HarmoFL's released code (which also pads by two pixels after the first
    block; that is left out).
    """

    name: Literal["densenet121"] = "densenet121"
    dimensions: Dimensions = 2
    norm: Literal["batch", "batch-statistics"] = Field("batch", description=NORM)

    def build(self, channels: int, classes: int) -> nn.Module:
        from monai.networks.nets import DenseNet121 as MonaiDenseNet121  # here, because importing MONAI takes seconds

        network = MonaiDenseNet121(**self._arguments(channels, classes))
        # Not by MONAI's `norm`: its initialisation fails on norms without weights.
        return use_batch_statistics(network) if self.norm == "batch-statistics" else network

    def monai(self, channels: int, classes: int) -> dict[str, Any] | None:
        if self.norm == "batch-statistics":
            return None
        return {"_target_": "monai.networks.nets.DenseNet121", **self._arguments(channels, classes)}

    def _arguments(self, channels: int, classes: int) -> dict[str, Any]:
        return {"spatial_dims": self.dimensions, "in_channels": channels, "out_channels": classes}
