"""Cases that are read when they are asked for, and the memory that a site may fill with them."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from medsilo.learning.compute import Case
from medsilo.tasks.sources import DataSource


class Memory:
    """The memory that a site may fill. Those that come first take their share first."""

    def __init__(self, source: DataSource) -> None:
        self.left = source.cache_memory << 20  # bytes

    def takes(self, *tensors: Tensor) -> bool:
        """Return whether these have a place, which is theirs then."""
        size = sum(tensor.nbytes for tensor in tensors)
        keeps = size <= self.left
        self.left -= size if keeps else 0
        return keeps


class LazyCases(Dataset):
    """Files with their classes, read when they are asked for: for sets that may be too large for the memory."""

    def __init__(self, items: Sequence[tuple[Path, int]], patients: Sequence[str], read: Callable[..., Case]) -> None:
        self.items, self.patients, self.read = tuple(items), tuple(patients), read
        self.kept: list[Case] = []  # the first cases

    def keep(self, memory: Memory) -> None:
        """Reads as many of the cases as have a place in memory, once for all passes."""
        while memory.left and len(self.kept) < len(self):
            case = self.read(self.items[len(self.kept)])
            if not memory.takes(*case):
                break
            self.kept.append(case)

    @property
    def labels(self) -> Tensor:
        """The class of every case, [cases]."""
        return torch.tensor([label for _, label in self.items])

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Case:
        return self.kept[index] if index < len(self.kept) else self.read(self.items[index])
