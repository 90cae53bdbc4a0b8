"""The base of what a task learns: its loss, its measures, and counts of them that may leave a hospital; a number."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.data import Dataset

from medsilo.core import optional
from medsilo.tasks.metrics import BY_PATIENT, Counts, Figures, Measures, by_patient, means

if TYPE_CHECKING:  # only a task of classes has these
    from medsilo.tasks.decisions import ClassCounts


class Objective(ABC):
    """A question that a network's outputs answer. It knows neither where cases come from nor what becomes of answers.

    >>> from medsilo.extend import Classification
    >>> Classification(("well", "ill")).output_of((3, 64, 64))
    (2,)
    """

    metric: str  # the name of what `case_scores` measures; higher is better
    metric_range: tuple[float, float] = (0.0, 1.0)
    classes: int = 0  # that labels may be; 0: targets are no labels
    outputs: int  # the numbers that a network gives for a case, or for a place of it
    label_names: tuple[str, ...] = ()  # of the labels 0, 1, ...
    structures: Mapping[str, tuple[int, ...]] = {}  # where targets are masks: the labels of each
    overlaps: bool = False  # whether structures may lie in each other, so that outputs are no choice between them
    by_case: bool = True  # whether a case's loss and score are its own; else the cases beside it matter
    unbounded: str = ""  # why no bound holds for what one case does to a batch's gradient; nothing where one holds
    cross_entropy: float = 0.0  # how much the cross entropy of labels counts in the loss

    def output_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape that the network's output must have for an input of this shape."""
        return (self.outputs,)

    @abstractmethod
    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the scalar that training minimises: a mean over the batch."""

    def case_losses(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the loss of every case of a batch, [batch]."""
        singly = [slice(case, case + 1) for case in range(len(output))]
        return torch.stack([self.loss(output[case], optional.part_of(target, case)) for case in singly])

    @abstractmethod
    def case_scores(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the metric of every case of a batch: [batch], float32."""

    def score(self, scores: Tensor) -> float:
        """Return the metric of several cases from those of each."""
        return float(scores.mean())

    def answers(self, output: Tensor, name: str) -> list[dict[str, float | str]]:
        """Return what outputs say of each case, by columns of predictions.csv. name: of a number that is learned."""
        raise TypeError(f"{type(self).__name__} has no answers in words")

    def name_of(self, name: str, structure: str) -> str:
        """Return what a structure's measure is called."""
        return f"{name}_{structure}" if len(self.structures) > 1 else name

    # ------------------------------------------------------------------ the test
    def measures(self, output: Tensor, target: Tensor) -> Measures:
        """Return what is kept of every test case at its site, [batch] each; the metric is among it."""
        return {self.metric: self.case_scores(output, target)}

    def measuring(self, cases: Dataset) -> Callable[[Tensor, Tensor], Measures]:
        """Return what measures these cases of the test, whose outputs and targets come in order."""
        return self.measures

    def counts(self, measures: Measures, patients: Sequence[str], least: int) -> Counts:
        """Return what a site tells of its test cases: counts that add up, none over fewer cases than `least`.

        A measure that `layout` does not name stays at the site.
        """
        counts = means({name: values for name, values in measures.items() if name in self.layout}, least)
        if self.metric in counts:
            counts |= means({self.metric + BY_PATIENT: by_patient(measures[self.metric], patients)}, 0)
        return counts

    @property
    def classifies(self) -> "ClassCounts | None":
        """Return what counts of classes are, where every case has one class; None where none has."""
        return None

    @property
    def decides(self) -> bool:
        """Return whether cases are of two classes, so that a threshold decides."""
        return self.classifies is not None and self.classes == 2

    @property
    def layout(self) -> dict[str, int]:
        """The names of all counts and how many numbers each has."""
        return {self.metric: 2, self.metric + BY_PATIENT: 2}

    def range_of(self, name: str) -> tuple[float, float]:
        """Return the least and greatest value that one case can have in a count that is a sum over cases."""
        return self.metric_range

    def told_range(self, name: str) -> tuple[float, float]:
        """Return the range to which a measure of one patient's case is cut before its coarse mean is told."""
        return self.range_of(name)

    def sway(self, data: Dataset, patients: Sequence[str]) -> float | None:
        """Return the share of a score over these cases that one patient can move; None: that of the patient's cases."""
        return None

    def figures(self, counts: Counts) -> Figures:
        """Return what is reported, from one site's counts or from those of several added up."""
        pairs = {name: counts[name] for name, length in self.layout.items() if length == 2 and name in counts}
        return {name: total / number if number else None for name, (total, number) in pairs.items()}


def judged_by(goal: Objective, absent: Mapping[str, Collection[str]]) -> dict[str, list[str]]:
    """Return the sites that can judge each structure, by the name of its score; nothing where all can judge all.

    absent: by site, the names of labels that nobody drew there; of structures where these overlap.
    """
    found = {}
    for name, labels in goal.structures.items():
        part = {name} if goal.overlaps else {goal.label_names[label] for label in labels}
        found[goal.name_of(goal.metric, name)] = [site for site, lacks in absent.items() if part.isdisjoint(lacks)]
    return found if any(len(sites) < len(absent) for sites in found.values()) else {}


def says_of(goal: Objective, absent: Mapping[str, Collection[str]]) -> dict[str, float]:
    """Return what each site's score counts in the mean that chooses a round, so that all structures count alike.

    Sites tell one score of all that they drew, and none of a structure.
    """
    judged = judged_by(goal, absent)
    each = {site: sum(1 / len(own) for own in judged.values() if site in own) for site in absent}
    return each if judged else dict.fromkeys(absent, 1.0)
