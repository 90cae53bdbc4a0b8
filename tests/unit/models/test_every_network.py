"""Each network passes all tests of NetworkTester."""

import pytest
import torch
from torch import Tensor, nn

from medsilo_lab.testing import NetworkTester

PROSTATE = {"name": "synthetic-prostate", "patients": 8, "slices": 3, "size": 48}
HISTOLOGY = {"name": "synthetic-histology", "patients": 8, "patches": 2, "size": 48}


class TestActivityCnn(NetworkTester):
    network = {"name": "activity-cnn"}


class TestUnet(NetworkTester):
    network, task = {"name": "unet", "features": [4, 8]}, PROSTATE


class TestBasicUnet(NetworkTester):
    network, task = {"name": "basic-unet", "features": [4, 4, 8, 8, 8]}, {**PROSTATE, "size": 32}


class TestSmallCnn(NetworkTester):
    network, task = {"name": "small-cnn"}, HISTOLOGY


@pytest.mark.slow
class TestDensenet(NetworkTester):
    network, task = {"name": "densenet121"}, HISTOLOGY


@pytest.mark.slow
class TestVit(NetworkTester):
    network, task = {"name": "vit"}, {**HISTOLOGY, "size": 64}
    unused = ["cross_attn"]  # blocks of MONAI have cross-attention layers even if cross attention is off


class Aside(nn.Module):
    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.layer, self.aside = nn.Linear(channels, classes), torch.rand(classes)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs.mean(2)) + self.aside


def test_a_weight_aside_is_found() -> None:
    class Wrong(TestActivityCnn):
        def module(self) -> nn.Module:
            return Aside(9, 6)

    with pytest.raises(AssertionError, match="lacks a tensor that affects the output"):
        Wrong().test_its_tensors_travel()
