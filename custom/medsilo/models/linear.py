"""One linear layer: logistic, linear or Cox regression, by the task's loss."""

from typing import Literal

from torch import nn

from medsilo.models.network import Network


class Linear(Network):
    """A weighted sum of a case's inputs for every output: [B, channels] to [B, classes]."""

    name: Literal["linear"] = "linear"

    def build(self, channels: int, classes: int) -> nn.Module:
        return nn.Sequential(nn.Linear(channels, classes))
