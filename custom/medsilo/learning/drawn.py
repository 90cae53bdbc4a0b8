"""Cases as one epoch sees them."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from medsilo.learning.compute import Case
from medsilo.learning.partial_labels import know_marks
from medsilo.learning.seeds import seed_for

Draw = Callable[[Case, int], Case]  # what is made of a case, by a seed
BatchDraw = Callable[[Case, Sequence[int]], Case]  # of a batch, in its own memory, by a seed of each case


class DrawnCases(Dataset):
    """Training cases as one epoch sees them: each drawn from its seed, so that workers change nothing.

    A case's seed follows from its place; or, where `names` are given, from its name: then no case changes another's.
    """

    def __init__(
        self,
        cases: Dataset,
        draw: Draw | None,
        seed: int,
        names: Sequence[str] | None = None,
        batch_draw: BatchDraw | None = None,
    ) -> None:
        self.cases, self.draw, self.seed, self.names, self.batch_draw = cases, draw, seed, names, batch_draw

    def __len__(self) -> int:
        return len(self.cases)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Case:
        if not self.batch_draw:
            return self._case(index)
        inputs, targets = self.changed(*self.batch([index]))
        return inputs[0], targets[0]

    def batch(self, places: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Return cases in memory of their own, not yet changed as a batch, and their seeds."""
        inputs, targets = default_collate([self._case(place) for place in places])
        return inputs, targets, torch.tensor([self._seed(place) for place in places])

    def changed(self, inputs: Tensor, targets: Tensor, seeds: Tensor) -> Case:
        """Return such a batch as training sees it."""
        assert self.batch_draw is not None
        changed, moved = self.batch_draw((inputs, targets), seeds.tolist())
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
