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
    """Augments a batch: first each case by `piece`, and then the whole batch on the device by `change`.

    `change` receives one seed per case, and may modify the batch in place. The result for a case must not depend on the
    other cases of the batch.
    """

    piece: Draw | None
    change: Callable[[Case, Sequence[int]], Case]


class DrawnCases(Dataset):
    """The augmented training cases of one epoch. Each case has a seed, so the number of workers changes no result.

    A case's seed is derived from its index, or from its name if `names` are given. With names, adding or removing a
    case does not change another case's seed.
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

    def batch(self, places: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Return a batch to which `change` was not applied yet, and the seed of each case.

        Args:
            places: The indices of the cases.
        """
        inputs, targets = default_collate([self._case(place) for place in places])
        return inputs, targets, torch.tensor([self._seed(place) for place in places])

    def changed(self, inputs: Tensor, targets: Tensor, seeds: Tensor) -> Case:
        """Apply `change` to a batch that the method `batch` returned, and return the augmented batch."""
        assert self.change is not None
        changed, moved = self.change((inputs, targets), seeds.tolist())
        return changed, know_marks(moved, targets)

    def _case(self, index: int) -> Case:
        case: Case = self.cases[index]
        return self.draw(case, self._seed(index)) if self.draw else case

    def _seed(self, index: int) -> int:
        return seed_for(self.seed, self.names[index] if self.names else index)


class ChangedBatches(Dataset):
    """A data set of augmented batches. The index of a batch is the list of its cases' indices.

    If `later` is true, a batch includes the cases' seeds, and the caller must apply `change`.
    """

    def __init__(self, drawn: DrawnCases, later: bool) -> None:
        self.drawn, self.later = drawn, later

    def __getitem__(self, places: list[int]) -> tuple[Tensor, ...]:
        batch = self.drawn.batch(places)
        return batch if self.later else self.drawn.changed(*batch)


def drawn_cases(
    cases: Dataset, draw: Draw | DrawBatch | None, seed: int, names: Sequence[str] | None = None
) -> Dataset:
    """Return a data set that augments cases by `draw`, or `cases` itself if `draw` is None."""
    return DrawnCases(cases, draw, seed, names) if draw else cases
