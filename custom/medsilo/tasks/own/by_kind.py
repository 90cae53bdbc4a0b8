"""Tasks whose kind stands in the plan: they learn and are scored as the task of that kind."""

from abc import abstractmethod
from collections.abc import Sequence

from torch import Tensor

from medsilo.tasks.metrics import Counts, Figures, Measures
from medsilo.tasks.task import Task


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

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return self._family.loss(output, target)

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
