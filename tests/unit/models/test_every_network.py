"""Each network passes all tests of NetworkTester."""

import pytest
import torch
from torch import Tensor, nn

from medsilo.registry import NETWORKS
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


class TestLeNet5(NetworkTester):
    network, task = {"name": "lenet5", "size": 32}, {**HISTOLOGY, "size": 32}


class TestAlexNet(NetworkTester):
    network, task = {"name": "alexnet", "size": 64, "width": 16}, {**HISTOLOGY, "size": 64}


class TestTimmVit(NetworkTester):
    network = {"name": "timm-vit", "size": 32, "patch": 8, "width": 16, "depth": 2, "heads": 2}
    task = {**HISTOLOGY, "size": 32}


@pytest.mark.slow
class TestSwinUnetr(NetworkTester):
    network, task = {"name": "swin-unetr", "features": 12, "dimensions": 2}, {**PROSTATE, "size": 64}


@pytest.mark.slow
class TestVit(NetworkTester):
    network, task = {"name": "vit"}, {**HISTOLOGY, "size": 64}
    unused = ["cross_attn"]  # blocks of MONAI have cross-attention layers even if cross attention is off


TESTERS = {tester.network["name"]: tester for tester in NetworkTester.__subclasses__()}
# Networks that no synthetic task suits: these networks read tables, wrap other networks, or are too large.
WITHOUT = {"linear", "mlp", "frozen", "tuned", "script", "nnunet", "vgg11"}


def test_each_network_has_a_tester() -> None:
    assert {*NETWORKS} - {*TESTERS} == WITHOUT


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
