"""Tasks whose kind stands in the plan: they learn and are scored as the task of that kind."""

from abc import abstractmethod
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import ClassVar, Literal

from torch import Tensor
from torch.utils.data import Dataset

from medsilo.models.network import Network
from medsilo.tasks.classification import Classification
from medsilo.tasks.metrics import Counts, Figures, Measures
from medsilo.tasks.regression import Regression
from medsilo.tasks.survival import Survival
from medsilo.tasks.task import SiteData, Task

Kind = Literal["classification", "regression", "survival"]


class ByKind(Task):
    """A task that leaves its loss and its scores to another one."""

    @property
    @abstractmethod
    def _family(self) -> Task:
        """Return the task of the plan's kind."""

    @property
    def metric(self) -> str:  # type: ignore[override]
        """The kind's."""
        return self._family.metric

    @property
    def by_case(self) -> bool:  # type: ignore[override]
        """The kind's."""
        return self._family.by_case

    @property
    def unbounded(self) -> str:
        return self._family.unbounded

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return self._family.loss(output, target)

    def case_losses(self, output: Tensor, target: Tensor) -> Tensor:
        return self._family.case_losses(output, target)

    def score(self, scores: Tensor) -> float:
        return self._family.score(scores)

    def sway(self, data: Dataset, patients: Sequence[str]) -> float | None:
        return self._family.sway(data, patients)

    def case_scores(self, output: Tensor, target: Tensor) -> Tensor:
        return self._family.case_scores(output, target)

    def measures(self, output: Tensor, target: Tensor) -> Measures:
        return self._family.measures(output, target)

    def counts(self, measures: Measures, patients: Sequence[str], least: int) -> Counts:
        return self._family.counts(measures, patients, least)

    @property
    def layout(self) -> dict[str, int]:
        return self._family.layout

    def range_of(self, name: str) -> tuple[float, float]:
        return self._family.range_of(name)

    def told_range(self, name: str) -> tuple[float, float]:
        return self._family.told_range(name)

    def figures(self, counts: Counts) -> Figures:
        return self._family.figures(counts)


# ------------------------------------------------------------------------------------------------ of numbers
class _Judge(Task):
    title: ClassVar[str] = "of another task"

    def default_network(self) -> Network:
        raise TypeError("this measures and has no network")

    def load(self, site: str, sites: Sequence[str], seed: int, folder: Path | None) -> SiteData:
        raise TypeError("this measures and has no data")


class _Classes(_Judge, Classification):
    names: tuple[str, ...]

    @property
    def classes(self) -> int:  # type: ignore[override]
        return len(self.names)


class _Values(_Judge, Regression):
    range: tuple[float, float]

    @property
    def limits(self) -> tuple[float, float]:
        return self.range


class _Risks(_Judge, Survival):
    pass


@cache
def family_of(kind: Kind, labels: tuple[str, ...], limits: tuple[float, float]) -> Task:
    """Return what measures a task of this kind with these classes, or numbers between these limits."""
    if kind == "classification":
        return _Classes(names=labels)
    return _Values(range=limits) if kind == "regression" else _Risks()
