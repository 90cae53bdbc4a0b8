"""Folds: patients take turns in the test part, so that each is tested once."""

from collections.abc import Sequence

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from medsilo.core.errors import DataError
from medsilo.core.section import Section
from medsilo.learning.seeds import seed_for


class Fold(Section):
    """One of several equal parts of a site's patients, which is tested. The next part validates."""

    number: int = Field(ge=1, le=100, description="which of them is tested")
    of: int = Field(ge=3, le=100, description="how many there are: each patient is tested in one of them")

    @model_validator(mode="after")
    def _is_one_of_them(self) -> "Fold":
        if self.number > self.of:
            raise ValueError(f"fold {self.number} of {self.of}: there are only {self.of}")
        return self

    def parts(self, patients: Sequence[str], split: int) -> list[list[int]]:
        """Return the places of the cases in training, validation and test.

        A site's patients are dealt in turn, in an order that follows from their names and the site's own number alone:
        neither the study's seed nor another site moves anybody.
        """
        names = sorted(set(patients), key=lambda patient: (seed_for(split, "fold", patient), patient))
        if len(names) < self.of:
            raise DataError(f"{self.of} folds need a patient each, and this site has {len(names)}; ask for fewer folds")
        fold = {name: place % self.of for place, name in enumerate(names)}
        part = {(self.number - 1) % self.of: 2, self.number % self.of: 1}
        dealt: list[list[int]] = [[], [], []]
        for place, patient in enumerate(patients):
            dealt[part.get(fold[patient], 0)].append(place)
        return dealt


class Dealt(Subset):
    """Some of the cases of several data sets."""

    def __init__(self, whole: Dataset, places: Sequence[int], patients: Sequence[str], labels: Tensor | None) -> None:
        super().__init__(whole, places)
        self.patients = tuple(patients[place] for place in places)
        self.labels = None if labels is None else labels[torch.tensor(places, dtype=torch.long)]


def together(parts: Sequence[TensorDataset]) -> tuple[Tensor, ...]:
    """Return the tensors of data sets in memory as those of one."""
    return tuple(torch.cat(columns) for columns in zip(*(part.tensors for part in parts), strict=True))
