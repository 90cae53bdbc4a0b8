"""The base class of objectives: loss, metric, measures of test cases, and the counts that may leave a hospital."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.data import Dataset

from medsilo.tasks.metrics import BY_PATIENT, Counts, Figures, Measures, by_patient, means

if TYPE_CHECKING:  # not at run time, because only classifications need it
    from medsilo.tasks.decisions import ClassCounts


class Objective(ABC):
    """The objective of training and tests: the loss and metric for a network's outputs and targets.

    An objective is independent of the source of cases and of the use of predictions.

    >>> from medsilo.extend import Classification
    >>> Classification(("well", "ill")).output_of((3, 64, 64))
    (2,)
    """

    metric: str  # name of the metric that `case_scores` computes; higher is better
    metric_range: tuple[float, float] = (0.0, 1.0)
    classes: int = 0  # number of labels, with the background; 0 if targets are no labels
    outputs: int  # number of outputs for a case, or for each pixel or voxel of it
    label_names: tuple[str, ...] = ()  # names of the labels 0, 1, ...
    structures: Mapping[str, tuple[int, ...]] = {}  # for masks: the labels of each structure
    overlaps: bool = False  # True if structures may overlap
    by_case: bool = True  # True if a case's loss and score do not depend on other cases
    # Reason why the effect of one case on a batch's gradient is unbounded; empty if it is bounded.
    unbounded: str = ""
    cross_entropy: float = 0.0  # weight of the cross entropy over labels in the loss

    def output_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the required shape of the network's output for one input of this shape."""
        return (self.outputs,)

    @abstractmethod
    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean loss of a batch, which training minimises."""

    def case_losses(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the loss of every case of a batch, [batch]."""
        from medsilo.learning.compute import part_of

        singly = [slice(case, case + 1) for case in range(len(output))]
        return torch.stack([self.loss(output[case], part_of(target, case)) for case in singly])

    @abstractmethod
    def case_scores(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the metric of every case of a batch: [batch], float32."""

    def score(self, scores: Tensor) -> float:
        """Return the metric over several cases, given each case's score."""
        return float(scores.mean())

    def parts(self, measures: Measures, cases: Tensor) -> Tensor:
        """Return numbers whose mean is the score over a selection of cases. `cases` holds their indices."""
        return measures[self.metric][cases]

    def answers(self, output: Tensor, name: str) -> list[dict[str, float | str]]:
        """Return the predictions for each case, by column of predictions.csv. `name` is the name of a
        predicted number.
        """
        raise TypeError(f"{type(self).__name__} has no answers in words")

    def name_of(self, name: str, structure: str) -> str:
        """Return the name of a measure for one structure."""
        return f"{name}_{structure}" if len(self.structures) > 1 else name

    # ------------------------------------------------------------------ the test
    def measures(self, output: Tensor, target: Tensor) -> Measures:
        """Return all measures of every test case, [batch] each, including the metric; all measures stay at the site."""
        return {self.metric: self.case_scores(output, target)}

    def measuring(self, cases: Dataset) -> Callable[[Tensor, Tensor], Measures]:
        """Return a function that computes the measures of these test cases. The function is called with outputs and
        targets of these cases in order.
        """
        return self.measures

    def counts(self, measures: Measures, patients: Sequence[str], least: int) -> Counts:
        """Return the counts that a site discloses about its test cases, which can be added over sites.

        Each count covers at least `least` cases. A measure that `layout` does not name stays at the site.
        """
        counts = means({name: values for name, values in measures.items() if name in self.layout}, least)
        if self.metric in counts:
            counts |= means({self.metric + BY_PATIENT: by_patient(measures[self.metric], patients)}, 0)
        return counts

    @property
    def classifies(self) -> "ClassCounts | None":
        """The rules for counts by class if every case has one class, else None."""
        return None

    @property
    def decides(self) -> bool:
        """True if there are two classes, so that decisions use a threshold."""
        return self.classifies is not None and self.classes == 2

    @property
    def layout(self) -> dict[str, int]:
        """The number of values in each count, by name."""
        return {self.metric: 2, self.metric + BY_PATIENT: 2}

    def range_of(self, name: str) -> tuple[float, float]:
        """Return the smallest and largest contribution of one case to a count."""
        return self.metric_range

    def told_range(self, name: str) -> tuple[float, float]:
        """Return the range to which a measure of one patient is clipped before its mean is rounded and disclosed."""
        return self.range_of(name)

    def sway(self, data: Dataset, patients: Sequence[str]) -> float | None:
        """Return by how much one patient can change the score over these cases. None means the patient's share of the
        cases.
        """
        return None

    def figures(self, counts: Counts) -> Figures:
        """Return the reported metrics, from counts of one site or counts added over sites."""
        pairs = {name: counts[name] for name, length in self.layout.items() if length == 2 and name in counts}
        return {name: total / number if number else None for name, (total, number) in pairs.items()}


def judged_by(goal: Objective, absent: Mapping[str, Collection[str]]) -> dict[str, list[str]]:
    """Return for each structure's score the sites that annotated the structure.

    The result is empty if all sites annotated all structures. `absent` holds the names of labels without annotations,
    by site; if structures overlap, these are names of structures.
    """
    found = {}
    for name, labels in goal.structures.items():
        part = {name} if goal.overlaps else {goal.label_names[label] for label in labels}
        found[goal.name_of(goal.metric, name)] = [site for site, lacks in absent.items() if part.isdisjoint(lacks)]
    return found if any(len(sites) < len(absent) for sites in found.values()) else {}


def says_of(goal: Objective, absent: Mapping[str, Collection[str]]) -> dict[str, float]:
    """Return the weight of each site's score in the mean that selects a round, so that all structures count equally.

    The weights are needed because a site sends only one score, over all structures that it annotated.
    """
    judged = judged_by(goal, absent)
    each = {site: sum(1 / len(own) for own in judged.values() if site in own) for site in absent}
    return each if judged else dict.fromkeys(absent, 1.0)
