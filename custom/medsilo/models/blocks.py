"""The block that the small convolutional networks are made of."""

import math
from typing import Literal

from torch import nn

Norm = Literal["batch", "batch-statistics", "group", "none"]

CONVOLUTIONS: dict[int, type[nn.Module]] = {1: nn.Conv1d, 2: nn.Conv2d}
BATCH_NORMS: dict[int, type[nn.Module]] = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d}
POOLS: dict[int, type[nn.Module]] = {1: nn.MaxPool1d, 2: nn.MaxPool2d}
MOST_GROUPS = 8


def block(dimensions: int, channels: int, features: int, kernel: int, norm: Norm) -> nn.Sequential:
    """Convolution, norm, ReLU and pooling: [B, channels, ...] to [B, features, ... / 2]."""
    layers = [CONVOLUTIONS[dimensions](channels, features, kernel, padding=kernel // 2)]
    if norm == "batch":
        layers.append(BATCH_NORMS[dimensions](features))
    elif norm == "batch-statistics":  # of HarmoFL's released code: no weights, and the batch's statistics at all times
        layers.append(BATCH_NORMS[dimensions](features, affine=False, track_running_stats=False))
    elif norm == "group":
        layers.append(nn.GroupNorm(math.gcd(MOST_GROUPS, features), features))
    return nn.Sequential(*layers, nn.ReLU(inplace=True), POOLS[dimensions](2))
