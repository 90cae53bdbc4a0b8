"""Read Fed-Heart-Disease: four hospitals of the UCI Heart Disease data, split and scaled as FLamby does."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from sklearn.model_selection import train_test_split
from torch import Tensor
from torch.utils.data import TensorDataset

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
# number of columns to read, index of the disease's column, and indices of columns that become dummy variables
USED, LABEL, DUMMIES = 10, 13, (2, 6)
TRAIN, SPLIT = 0.66, 43
# indices of columns; at UCI's last two hospitals, a cholesterol of 0 is a true value
PRESSURE, CHOLESTEROL, HEART_RATE = 3, 4, 7
NEVER = dict.fromkeys(HOSPITALS, (PRESSURE, HEART_RATE)) | {"hungarian": (PRESSURE, CHOLESTEROL, HEART_RATE)}


@dataclass(frozen=True)
class Hospital:
    """A hospital's training and test cases: inputs [cases, 13] and labels [cases], where the label 1 means the
    disease.
    """

    train: TensorDataset
    test: TensorDataset


def read(folder: Path) -> dict[str, Hospital]:
    rows = {name: _rows(folder / f"processed.{name}.data", NEVER[name]) for name in HOSPITALS}
    numbers = np.concatenate(list(rows.values()))
    levels = {column: np.unique(numbers[:, column])[1:] for column in DUMMIES}
    return {name: _hospital(own, levels) for name, own in rows.items()}


def _rows(path: Path, never: Sequence[int]) -> np.ndarray:
    """Return the first ten columns and the label of disease, for all lines without missing values in these columns.

    Args:
        never: Columns whose true values are never 0; some copies of the file have 0 instead of UCI's question marks.
    """
    with path.open(encoding="utf-8", newline="") as file:
        lines = [line for line in csv.reader(file) if line]
    lines = [line for line in lines if "?" not in line[:USED]]
    known = [line for line in lines if all(float(line[column]) for column in never)]
    return np.array([[*map(float, line[:USED]), float(float(line[LABEL]) > 0)] for line in known])


def _hospital(rows: np.ndarray, levels: dict[int, np.ndarray]) -> Hospital:
    plain = [column for column in range(USED) if column not in levels]
    dummies = [(rows[:, column, None] == own).astype(float) for column, own in levels.items()]
    features, labels = np.concatenate([rows[:, plain], *dummies], 1), rows[:, -1]
    train, test = divided(labels, TRAIN, SPLIT)
    mean, deviation = features[train].mean(0), features[train].std(0, ddof=1)
    scaled = (features - mean) / np.where(deviation > 0, deviation, 1)
    return Hospital(*(_cases(scaled[own], labels[own]) for own in (train, test)))


def divided(labels: np.ndarray, share: float, seed: int) -> Sequence[np.ndarray]:
    """Divide the cases' indices at random into two sets; the first set has the fraction `share` of all cases."""
    counts = [int((labels == level).sum()) for level in np.unique(labels)]
    strata = labels if len(counts) > 1 and min(counts) > 2 else None
    return train_test_split(
        np.arange(len(labels)), train_size=share, test_size=1 - share, random_state=seed, shuffle=True, stratify=strata
    )


def validation(hospital: Hospital, seed: int, share: float = 0.75) -> Hospital:
    """Return a hospital for choosing settings: its test cases are some of the real hospital's training cases, so the
    real test cases are not used.
    """
    inputs, labels = hospital.train.tensors
    fit, kept = divided(labels.numpy(), share, seed)
    return Hospital(*(TensorDataset(inputs[own], labels[own]) for own in (fit, kept)))


def _cases(features: np.ndarray, labels: np.ndarray) -> TensorDataset:
    return TensorDataset(torch.tensor(features, dtype=torch.float32), torch.tensor(labels, dtype=torch.float32))


def accuracy(scores: Tensor, labels: Tensor) -> float:
    """Return the fraction of cases that a threshold of one half classifies correctly."""
    return float(((scores > 0) == (labels > 0.5)).double().mean())
