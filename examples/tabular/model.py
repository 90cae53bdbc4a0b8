"""Read the table of patients of IMPACT's studies of brain injury; each study is a site."""

import csv
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

LEVELS = {
    "motor_score": ("1/2", "3", "4", "5/6"),
    "pupil": ("Both", "one", "None"),
    "ct": ("I/II", "III", "IV/V"),
}
FLAGS = ("hypox", "hypots", "tsah", "edh")
INPUTS = 1 + sum(map(len, LEVELS.values())) + len(FLAGS)


class Net(nn.Module):
    """A network with one hidden layer. AdaFed compares sites by the statistics of the network's batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(INPUTS, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layers(rows)


def studies(table: Path) -> list[str]:
    with table.open(newline="") as file:
        return sorted({row["name"] for row in csv.DictReader(file)})


def patients_of(table: Path, study: str) -> list[TensorDataset]:
    """Return a study's patients: three fifths for training, a fifth for validation, and a fifth for test."""
    with table.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["name"] == study]
    inputs = [
        [float(row["age"]) / 50 - 1]
        + [float(row[column] == level) for column, levels in LEVELS.items() for level in levels]
        + [float(row[column] == "1") for column in FLAGS]
        for row in rows
    ]
    values, deaths = torch.tensor(inputs), torch.tensor([int(row["mort"]) for row in rows])
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    values, deaths, fifth = values[order], deaths[order], len(rows) // 5
    parts = (slice(2 * fifth, None), slice(fifth, 2 * fifth), slice(fifth))
    return [TensorDataset(values[part], deaths[part]) for part in parts]
