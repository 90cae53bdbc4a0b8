"""Define the base class of objectives. An objective defines a loss, a metric, and the counts that may leave a
hospital.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.data import Dataset

from medsilo.tasks.metrics import BY_PATIENT, Counts, Figures, Measures, by_patient, means

if TYPE_CHECKING:  # imported only for type checking, because only classifications need the module
    from medsilo.tasks.decisions import ClassCounts


class Objective(ABC):
    """Computes losses and scores from a network's outputs and the targets.

    An objective does not know how cases are read, or how predictions are used.

    >>> from medsilo.extend import Classification
    >>> Classification(("well", "ill")).output_of((3, 64, 64))
    (2,)
    """

    metric: str  # name of the metric; higher values of the metric are better
    metric_range: tuple[float, float] = (0.0, 1.0)
    classes: int = 0  # number of labels including the label of the background; 0 if targets are not labels
    outputs: int  # number of network outputs for each case, or, in a segmentation, for each pixel or voxel
    label_names: tuple[str, ...] = ()  # names of the labels 0, 1, ..., in ascending order
    structures: Mapping[str, tuple[int, ...]] = {}  # labels of each structure of a segmentation
    overlaps: bool = False
    by_case: bool = True  # True if a case's loss and score do not depend on other cases
    # Why one case can change a batch's gradient without bound, which rules out differential privacy; "": it can't
    unbounded: str = ""
    # factor of the cross entropy of labels in the loss; 0: none
    cross_entropy: float = 0.0

    def output_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape that the network's output must have for one input of the given shape."""
        return (self.outputs,)

    @abstractmethod
    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean loss of a batch, which training minimises.

        Args:
            output: the network's output for a batch
            target: the batch's targets
        """

    def case_losses(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the loss of every case in a batch, [batch].

        Args:
            output, target: as for `loss`
        """
        from medsilo.learning.compute import part_of

        singly = [slice(case, case + 1) for case in range(len(output))]
        return torch.stack([self.loss(output[case], part_of(target, case)) for case in singly])

    @abstractmethod
    def case_scores(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the metric of every case in a batch, [batch], as float32.

        Args:
            output, target: as for `loss`
        """

    def score(self, scores: Tensor) -> float:
        return float(scores.mean())

    def scored(self, output: Tensor, target: Tensor) -> Measures:
        """For every case in a batch, return the measures from which `over_all` computes the metric.

        Args:
            output, target: as for `loss`
        """
        return {self.metric: self.case_scores(output, target)}

    def over_all(self, measures: Measures) -> Measures:
        """Add the metric to the measures of all cases of a data set, for metrics that a single batch does not
        determine.
        """
        return measures

    def parts(self, measures: Measures, cases: Tensor) -> Tensor:
        """Return one number for each selected case, so that their mean is the score over the selected cases.

        Args:
            measures: the measures of all test cases
            cases: the indices of the selected cases
        """
        return measures[self.metric][cases]

    def answers(self, output: Tensor, name: str) -> list[dict[str, float | str]]:
        """For each case, return a mapping from column names of predictions.csv to predicted values.

        Args:
            output: the network's output for some cases
            name: the column name of a regression's predicted value
        """
        raise TypeError(f"{type(self).__name__} does not convert outputs to predictions")

    def name_of(self, name: str, structure: str) -> str:
        """Return the name of a measure of one structure; without the structure's name if there is only one structure.

        Args:
            name: the measure's name
            structure: the structure's name
        """
        return f"{name}_{structure}" if len(self.structures) > 1 else name

    # ------------------------------------------------------------------ the test
    def measures(self, output: Tensor, target: Tensor) -> Measures:
        """Return the metric and all other measures of every test case, each as a tensor [batch]. These values stay at
        the site.

        Args:
            output, target: as for `loss`
        """
        return self.scored(output, target)

    def measuring(self, cases: Dataset) -> Callable[[Tensor, Tensor], Measures]:
        """Return a function that computes measures from outputs and targets.

        The returned function gets one batch of test cases after another, in the order of the data set.
        """
        return self.measures

    def counts(self, measures: Measures, patients: Sequence[str], least: int) -> Counts:
        """Return the counts that a site discloses about its test cases; the server can add these counts over sites.

        Measures that `layout` does not declare, or that too few cases have, are left out.

        Args:
            measures: the measures of all test cases
            patients: the patient of each test case
            least: smallest number of cases for a disclosed measure
        """
        counts = means({name: values for name, values in measures.items() if name in self.layout}, least)
        if self.metric in counts:
            counts |= means({self.metric + BY_PATIENT: by_patient(measures[self.metric], patients)}, 0)
        return counts

    @property
    def classifies(self) -> "ClassCounts | None":
        """An object that validates the counts of classes; None if the task is not a classification."""
        return None

    @property
    def decides(self) -> bool:
        """True if the task has two classes, so that a threshold on the probability decides between them."""
        return self.classifies is not None and self.classes == 2

    @property
    def layout(self) -> dict[str, int]:
        """Maps the name of each count to its number of values."""
        return {self.metric: 2, self.metric + BY_PATIENT: 2}

    def range_of(self, name: str) -> tuple[float, float]:
        """Return the smallest and the largest value that one case can add to a count."""
        return self.metric_range

    def told_range(self, name: str) -> tuple[float, float]:
        """Return the range to which a patient's measure is clipped before it is disclosed."""
        return self.range_of(name)

    def sway(self, data: Dataset, patients: Sequence[str], least: int = 0) -> float | None:
        """Return the largest change of a data set's score that one patient can cause.

        By default, return None: the largest change is then a patient's share of the cases. Return infinity if the score
        is undefined for every model, as the AUROC is if all cases have one class.

        Args:
            data: the data set
            patients: the patient of each case
            least: the minimum number of patients of a class about which the hospital discloses numbers
        """
        return None

    def figures(self, counts: Counts) -> Figures:
        pairs = {name: counts[name] for name, length in self.layout.items() if length == 2 and name in counts}
        return {name: total / number if number else None for name, (total, number) in pairs.items()}


def judged_by(objective: Objective, absent: Mapping[str, Collection[str]]) -> dict[str, list[str]]:
    """Map the name of each structure's score to the sites that annotated this structure.

    The function returns an empty dictionary if all sites annotated all structures.

    Args:
        absent: for each site, the names of labels that the site did not annotate, or the names of structures if
            structures may overlap
    """
    found = {}
    for name, labels in objective.structures.items():
        part = {name} if objective.overlaps else {objective.label_names[label] for label in labels}
        found[objective.name_of(objective.metric, name)] = [
            site for site, lacks in absent.items() if part.isdisjoint(lacks)
        ]
    return found if any(len(sites) < len(absent) for sites in found.values()) else {}


def says_of(objective: Objective, absent: Mapping[str, Collection[str]]) -> dict[str, float]:
    """Return the weight of each site's score in the mean that selects the best round.

    A site sends only one score, the mean over the structures that it annotated. The weights let all structures count
    equally, although some are annotated at fewer sites.
    """
    judged = judged_by(objective, absent)
    each = {site: sum(1 / len(own) for own in judged.values() if site in own) for site in absent}
    return each if judged else dict.fromkeys(absent, 1.0)
