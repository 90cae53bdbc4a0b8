"""Cases as one epoch sees them."""

from collections.abc import Callable, Sequence

from torch.utils.data import Dataset

from medsilo.learning.compute import Case
from medsilo.learning.seeds import seed_for

Draw = Callable[[Case, int], Case]  # what is made of a case, by a seed


class DrawnCases(Dataset):
    """Training cases as one epoch sees them: each drawn from its seed, so that workers change nothing.

    A case's seed follows from its place; or, where `names` are given, from its name: then no case changes another's.
    """

    def __init__(self, cases: Dataset, draw: Draw, seed: int, names: Sequence[str] | None = None) -> None:
        self.cases, self.draw, self.seed, self.names = cases, draw, seed, names

    def __len__(self) -> int:
        return len(self.cases)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Case:
        return self.draw(self.cases[index], seed_for(self.seed, self.names[index] if self.names else index))
