"""Define classifications whose metric is not a mean over cases: AUROC and balanced accuracy. The plan's key
`task.score` chooses between these metrics and the accuracy.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import Final, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.utils.data import Dataset

from medsilo.tasks.classification import Classification
from medsilo.tasks.measuring import judged
from medsilo.tasks.metrics import BY_PATIENT, Counts, Figures, Measures, by_patient, means
from medsilo.tasks.task import Task

ACCURACY: Final = "accuracy"
BALANCED: Final = "balanced_accuracy"
AUROC: Final = "auroc"
COIN = 0.5  # AUROC of a model that assigns equal probabilities to all cases
IN_WORDS = {ACCURACY: "accuracy", BALANCED: "balanced accuracy", AUROC: "AUROC"}
Deciding = Literal["accuracy", "balanced_accuracy", "auroc"]


class ScoredTogether(Classification):
    """Classification whose metric gives all classes the same weight, so that a frequent class does not hide a rare one.

    The metric compares cases with each other, so it is computed for all test cases at once.

    >>> ScoredTogether(("alive", "dead"), metric="auroc").metric
    'auroc'
    """

    by_case = False
    unbounded = "one case can change the scores of all other cases without a bound; set task.score=accuracy"

    def __init__(self, classes: int | Sequence[str], outputs: int | None = None, metric: str = AUROC) -> None:
        super().__init__(classes, outputs)
        self.metric = metric

    def case_scores(self, output: Tensor, target: Tensor) -> Tensor:
        return contributions(self.metric, target.long(), self.scores(output).softmax(1))

    def scored(self, output: Tensor, target: Tensor) -> Measures:
        return {"label": target, **self.probabilities(output)}

    def over_all(self, measures: Measures) -> Measures:
        return {self.metric: self.parts(measures, torch.arange(len(measures["label"]))), **measures}

    def score(self, scores: Tensor) -> float:
        return min(max(super().score(scores), 0.0), 1.0)  # because of rounding errors, the score could exceed 1

    def parts(self, measures: Measures, cases: Tensor) -> Tensor:
        chances = torch.stack([measures[f"p{label}"][cases] for label in range(self.classes)], 1)
        return contributions(self.metric, measures["label"][cases].long(), chances)

    def measures(self, output: Tensor, target: Tensor) -> Measures:
        return {**super().measures(output, target), ACCURACY: super().case_scores(output, target)}

    def counts(self, measures: Measures, patients: Sequence[str], least: int) -> Counts:
        """Return counts in which each case has the metric of all cases, because single cases have none. For single
        patients, the counts contain the accuracy instead.
        """
        score = self.score(self.over_all(measures)[self.metric])
        counts = super().counts(
            {**measures, self.metric: torch.full((len(patients),), score).double()}, patients, least
        )
        counts.pop(self.metric + BY_PATIENT, None)
        if ACCURACY in counts:
            counts |= means({ACCURACY + BY_PATIENT: by_patient(measures[ACCURACY], patients)}, 0)
        return counts

    @property
    def layout(self) -> dict[str, int]:
        own = {self.metric: 2, ACCURACY: 2, ACCURACY + BY_PATIENT: 2}
        return {name: length for name, length in super().layout.items() if length > 2} | own

    def figures(self, counts: Counts) -> Figures:
        total, number = counts.get(self.metric, (0.0, 0.0))
        return super().figures(counts) | {self.metric: total / number if number else None}

    def sway(self, data: Dataset, patients: Sequence[str], least: int = 0) -> float | None:
        """Return the largest fraction of the score that one patient's cases determine; for the AUROC, the largest
        fraction of pairs that contain one patient. Infinity if all cases have one class.

        A class with fewer than `least` patients, even with none, counts as if it had one patient. Otherwise, the result
        would reveal whether a patient has this rare class.
        """
        from medsilo.tasks.site_data import labels_of

        labels = labels_of(data)
        if labels is None:
            return 1.0
        if not len(labels):
            return None
        number = {patient: place for place, patient in enumerate(dict.fromkeys(patients))}
        places = torch.tensor([number[patient] for patient in patients])
        table = torch.zeros(len(number), self.classes, dtype=torch.float64)
        table.index_put_((places, labels.long()), torch.ones(len(labels), dtype=torch.float64), accumulate=True)
        sizes = (table > 0).sum(0)
        if (sizes > 0).sum() < 2:
            return math.inf
        share = table / table.sum(0)  # for each class, the fraction of its cases that each patient has
        share[:, sizes < least] = 1.0
        if self.metric == AUROC:
            rest = (table.sum(1, keepdim=True) - table) / (len(labels) - table.sum(0))
            share = share + rest - share * rest
        return min(1.0, float(share[:, (sizes > 0) | (sizes < least)].mean(1).max()))


class Classifying(Task):
    """Base class of tasks with classes. Their key `score` names the metric by which rounds and models are chosen.

    The objective of such a task is `classification(labels, self.score)`. If a plan selects another objective of the
    task, it must leave out `score`.

    >>> from typing import ClassVar
    >>> class Gait(Classifying):
    ...     channels: ClassVar = 3
    ...     @property
    ...     def goal(self): return classification(("steady", "unsteady"), self.score)
    ...     def default_network(self): ...
    ...     def load(self, site, sites, seed, folder): ...
    >>> Gait(name="gait").goal.metric, Gait(name="gait", score="auroc").goal.metric
    ('accuracy', 'auroc')
    """

    score: Deciding = Field(
        ACCURACY,
        exclude_if=lambda score: score == ACCURACY,
        description="for a classification: the metric that selects the round, decides comparisons, and appears on all "
        "pages. Choose `auroc` for two classes, or `balanced_accuracy` for more, as `medsilo init` does, "
        "because a model that always predicts a frequent class has a high `accuracy`. Hospitals round "
        "`auroc` and `balanced_accuracy` more coarsely",
    )

    @model_validator(mode="after")
    def _scores_classes(self) -> Self:
        if self.score not in (ACCURACY, self.goal.metric):
            raise ValueError(
                f"score {self.score!r}: the score of this task is {self.goal.metric}; leave out task.score"
            )
        return self


@cache
def classification(labels: tuple[str, ...], score: Deciding = ACCURACY, outputs: int | None = None) -> Classification:
    """Return the classification with a given metric; equal arguments give the same object.

    >>> classification(("well", "ill"), "auroc").metric
    'auroc'

    Args:
        labels: the names of the classes
        score: the metric: "accuracy", "auroc" or "balanced_accuracy"
        outputs: the number of logits, which is 1 if a single logit distinguishes two classes; by default, the number of
            classes
    """
    return Classification(labels, outputs) if score == ACCURACY else ScoredTogether(labels, outputs, score)


def usual_score(labels: Sequence[str]) -> Deciding:
    """Return the score that `medsilo init` chooses, because it does not hide a rare class: the AUROC for two classes,
    the balanced accuracy for more.
    """
    return AUROC if len(labels) == 2 else BALANCED


def contributions(metric: str, labels: Tensor, chances: Tensor) -> Tensor:
    """Return one number for each case, so that the mean of these numbers is the metric over all cases, [cases] in
    float64.

    The numbers are jackknife pseudo-values: a case's number shows how much the metric changes without the case.
    Therefore, their variance is the jackknife estimate of the metric's variance. For the AUROC, the changes follow from
    DeLong's placement values (1988). DeLong's own estimate would be too small for a class of few cases, because it
    divides by the size of the class. The AUROC of several classes is the mean over classes, each compared with all
    others.

    The numbers are NaN if all cases have one class, because both metrics are then undefined.

    Args:
        labels: the class of each case, [cases]
        chances: the probability of each class, [cases, classes]
    """
    number = len(labels)
    if not chances.isfinite().all() or len(labels.unique()) < 2:
        return torch.full((number,), torch.nan, dtype=torch.float64)
    parts = _parts(metric, labels, chances)
    moved = torch.zeros(number, dtype=torch.float64)
    for several, value in parts:
        for side in several:
            moved[side] += (value[side] - value[side].mean()) / max(int(side.sum()) - 1, 1) / len(parts)
    score, places = _mean(metric, parts, chances), torch.arange(number)
    sizes = labels.bincount(minlength=chances.shape[1])
    for place in places[sizes[labels] == 1].tolist():  # without its only case, a class has no metric
        rest = places != place
        moved[place] = score - _mean(metric, _parts(metric, labels[rest], chances[rest]), chances)
    return score + (number - 1) * (moved - moved.mean())


def _parts(metric: str, labels: Tensor, chances: Tensor) -> list[tuple[list[Tensor], Tensor]]:
    """For each class, return masks of the cases that affect the class's metric, and a value of each case. The class's
    metric is the mean value of the cases in the first mask.
    """
    if len(labels.unique()) < 2:
        return []
    right = (chances.argmax(1) == labels).double()
    found = []
    for label in judged(chances.shape[1]) if metric == AUROC else range(chances.shape[1]):
        own = labels == label
        if metric == BALANCED and own.any():
            found.append(([own], right))
        elif metric == AUROC and own.any() and not own.all():
            found.append(([own, ~own], _placements(chances[:, label].double(), own)))
    return found


def _mean(metric: str, parts: Sequence[tuple[list[Tensor], Tensor]], chances: Tensor) -> Tensor:
    """Return the metric; if all cases have one class, return the metric of random guesses."""
    if not parts:
        return torch.tensor(COIN if metric == AUROC else 1 / chances.shape[1], dtype=torch.float64)
    return torch.stack([value[several[0]].mean() for several, value in parts]).mean()


def _placements(chances: Tensor, members: Tensor) -> Tensor:
    """Return each case's placement value. For a case of the class, this is the fraction of other cases with a lower
    probability. For another case, it is the fraction of the class's cases with a higher probability. Equal
    probabilities count half.
    """
    found = torch.empty_like(chances)
    for side, sign in ((members, 1), (~members, -1)):
        others, values = (sign * chances[~side]).sort().values, sign * chances[side]
        below = torch.searchsorted(others, values), torch.searchsorted(others, values, right=True)
        found[side] = (below[0] + below[1]).double() / 2 / len(others)
    return found
