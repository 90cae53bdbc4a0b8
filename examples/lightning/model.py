"""A Lightning module, and synthetic table rows whose scale differs from site to site."""

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))

    def forward(self, rows: Tensor) -> Tensor:
        return self.layers(rows)

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
        rows, labels = batch
        return nn.functional.cross_entropy(self(rows), labels)


def data_of(site: str) -> tuple[TensorDataset, TensorDataset]:
    number = int(site.rpartition("-")[2])
    draw = torch.Generator().manual_seed(number)
    rows = torch.randn(300, 6, generator=draw)
    labels = (rows[:, 0] + rows[:, 1] * rows[:, 2] > 0).long()
    rows = rows * (1 + number) + number
    return TensorDataset(rows[:200], labels[:200]), TensorDataset(rows[200:], labels[200:])
