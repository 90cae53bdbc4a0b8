"""Augment training cases at random for one epoch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from medsilo.learning.compute import Case, know_marks
from medsilo.learning.seeds import seed_for

Draw = Callable[[Case, int], Case]  # (case, seed) -> augmented case


@dataclass(frozen=True)
class DrawBatch:
    """Augments first each single case with the function `piece`, and then the whole batch on the device with the
    function `change`.

    The function `change` receives one seed per case, and may modify the batch in place. The augmentation of a case must
    not depend on other cases in the batch.
    """

    piece: Draw | None
    change: Callable[[Case, Sequence[int]], Case]


class DrawnCases(Dataset):
    """The augmented training cases of one epoch; each case has its own seed, so that the number of workers changes no
    result.

    A seed is derived from the name of its case, or, if cases have no names, from the index of its case. Seeds that are
    derived from names do not change when a case is added or removed.
    """

    def __init__(self, cases: Dataset, draw: Draw | DrawBatch, seed: int, names: Sequence[str] | None = None) -> None:
        self.cases, self.seed, self.names = cases, seed, names
        self.draw = draw.piece if isinstance(draw, DrawBatch) else draw
        self.change = draw.change if isinstance(draw, DrawBatch) else None

    def __len__(self) -> int:
        return len(self.cases)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Case:
        if not self.change:
            return self._case(index)
        inputs, targets = self.changed(*self.batch([index]))
        return inputs[0], targets[0]

    def batch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        inputs, targets = default_collate([self._case(place) for place in indices])
        return inputs, targets, torch.tensor([self._seed(place) for place in indices])

    def changed(self, inputs: Tensor, targets: Tensor, seeds: Tensor) -> Case:
        assert self.change is not None
        changed, moved = self.change((inputs, targets), seeds.tolist())
        return changed, know_marks(moved, targets)

    def _case(self, index: int) -> Case:
        case: Case = self.cases[index]
        return self.draw(case, self._seed(index)) if self.draw else case

    def _seed(self, index: int) -> int:
        return seed_for(self.seed, self.names[index] if self.names else index)


class ChangedBatches(Dataset):
    """A data set whose items are augmented batches; the key of a batch is the list of its cases' indices.

    A batch may contain the seeds of the batch's cases, so that the caller can augment the batch on the device.
    """

    def __init__(self, drawn: DrawnCases, later: bool) -> None:
        self.drawn, self.later = drawn, later

    def __getitem__(self, indices: list[int]) -> tuple[Tensor, ...]:
        batch = self.drawn.batch(indices)
        return batch if self.later else self.drawn.changed(*batch)


def drawn_cases(
    cases: Dataset, draw: Draw | DrawBatch | None, seed: int, names: Sequence[str] | None = None
) -> Dataset:
    return DrawnCases(cases, draw, seed, names) if draw else cases
