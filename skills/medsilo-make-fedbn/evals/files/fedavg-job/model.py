"""A small network with batch norm, and images whose scanners differ from site to site."""

import torch
from torch import nn
from torch.utils.data import TensorDataset


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        self.head = nn.Linear(8, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(images).flatten(1))


def data_of(site: str) -> tuple[TensorDataset, TensorDataset]:
    """Return a site's training and test images: half show a bright square, and each site has its own scanner."""
    number = int(site.rpartition("-")[2])
    draw = torch.Generator().manual_seed(number)
    labels = torch.randint(0, 2, (400,), generator=draw)
    images = torch.randn(400, 1, 16, 16, generator=draw)
    images[labels == 1, :, 4:9, 4:9] += 1.5
    images = images * (1 + number) + 2 * number  # contrast and brightness of the scanner
    return TensorDataset(images[:300], labels[:300]), TensorDataset(images[300:], labels[300:])
