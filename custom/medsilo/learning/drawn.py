"""Cases as one epoch sees them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from medsilo.learning.compute import Case, know_marks
from medsilo.learning.seeds import seed_for

Draw = Callable[[Case, int], Case]  # what is made of a case, by a seed


@dataclass(frozen=True)
class DrawBatch:
    """What is made of a batch: of each case by `piece`, then of all at once on the device, by a seed of each.

    `change` may write into the batch; a case must become the same in every batch.
    """

    piece: Draw | None
    change: Callable[[Case, Sequence[int]], Case]


class DrawnCases(Dataset):
    """Training cases as one epoch sees them: each drawn from its seed, so that workers change nothing.

    A case's seed follows from its place; or, where `names` are given, from its name: then no case changes another's.
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
        """Return cases in memory of their own, not yet changed as a batch, and their seeds."""
        inputs, targets = default_collate([self._case(place) for place in places])
        return inputs, targets, torch.tensor([self._seed(place) for place in places])

    def changed(self, inputs: Tensor, targets: Tensor, seeds: Tensor) -> Case:
        """Return such a batch as training sees it."""
        assert self.change is not None
        changed, moved = self.change((inputs, targets), seeds.tolist())
        return changed, know_marks(moved, targets)

    def _case(self, index: int) -> Case:
        case: Case = self.cases[index]
        return self.draw(case, self._seed(index)) if self.draw else case

    def _seed(self, index: int) -> int:
        return seed_for(self.seed, self.names[index] if self.names else index)


class ChangedBatches(Dataset):
    """Batches of drawn cases, by their places. `later`: they are changed by who gets them, and have their seeds."""

    def __init__(self, drawn: DrawnCases, later: bool) -> None:
        self.drawn, self.later = drawn, later

    def __getitem__(self, places: list[int]) -> tuple[Tensor, ...]:
        batch = self.drawn.batch(places)
        return batch if self.later else self.drawn.changed(*batch)


def drawn_cases(
    cases: Dataset, draw: Draw | DrawBatch | None, seed: int, names: Sequence[str] | None = None
) -> Dataset:
    """Return cases as a task draws each of them, or as they are."""
    return DrawnCases(cases, draw, seed, names) if draw else cases
