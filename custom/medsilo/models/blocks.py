"""The block that the small convolutional networks are made of."""

import math
from typing import Literal

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

Norm = Literal["batch", "batch-statistics", "group", "none"]

CONVOLUTIONS: dict[int, type[nn.Module]] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
BATCH_NORMS: dict[int, type[nn.Module]] = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
POOLS: dict[int, type[nn.Module]] = {1: nn.MaxPool1d, 2: nn.MaxPool2d, 3: nn.MaxPool3d}
MEANS: dict[int, type[nn.Module]] = {2: nn.AdaptiveAvgPool2d, 3: nn.AdaptiveAvgPool3d}
MOST_GROUPS = 8


def block(dimensions: int, channels: int, features: int, kernel: int, norm: Norm) -> nn.Sequential:
    """Convolution, norm, ReLU and pooling: [B, channels, ...] to [B, features, ... / 2]."""
    convolution = CONVOLUTIONS[dimensions](channels, features, kernel, padding=kernel // 2)
    norms = norm_layer(dimensions, features, norm)
    return nn.Sequential(convolution, *norms, nn.ReLU(inplace=True), POOLS[dimensions](2))


def norm_layer(dimensions: int, features: int, norm: Norm) -> list[nn.Module]:
    """The norm after a layer with so many features, or nothing."""
    if norm == "batch":
        return [BATCH_NORMS[dimensions](features)]
    if norm == "batch-statistics":  # of HarmoFL's released code: no weights, and the batch's statistics at all times
        return [BATCH_NORMS[dimensions](features, affine=False, track_running_stats=False)]
    return [nn.GroupNorm(math.gcd(MOST_GROUPS, features), features)] if norm == "group" else []


def use_batch_statistics(module: nn.Module) -> nn.Module:
    """Replaces every batch norm, in place, by one without weights that takes each batch's own statistics."""
    for name, layer in module.named_children():
        if isinstance(layer, _BatchNorm):
            setattr(module, name, type(layer)(layer.num_features, affine=False, track_running_stats=False))
        else:
            use_batch_statistics(layer)
    return module
