"""Define the objective of survival analysis, with Cox's partial likelihood and Harrell's concordance index."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.utils.data import Dataset

from medsilo.tasks.metrics import Counts, Measures, means
from medsilo.tasks.objective import Objective

AT_ONCE = 2**24  # limit on the number of pairs of cases that are compared at once
# measures of each case with an event: its numbers of concordant and of comparable pairs
RIGHT, COMPARED = "pairs_right", "pairs"
EVENTS = ("censored", "event")  # names of the event indicator's values 0 and 1
COIN = 0.5  # concordance index of a model that assigns equal risks to all cases
RISK = "log_risk"  # name of the column in predictions.csv that contains the risk


class Survival(Objective):
    """Survival analysis with Cox's negative log partial likelihood as loss, and Harrell's concordance index as metric.

    The network's output is a case's log relative risk. A target is [time, event]. The event is 1 if it occurred at this
    time, and 0 if the case was last observed then without an event (censored).
    """

    metric = "concordance"
    outputs = 1
    by_case = False
    unbounded = (
        "Cox's loss compares the cases of a batch, so no bound holds for one; learn whether the event comes by a "
        "fixed time (task.kind=classification)"
    )

    def case_losses(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the terms of Cox's loss, one for each case, with Breslow's treatment of equal times.

        The term of a case with an event is log Σ exp(risk) over all cases at risk, minus the risk of the case. The term
        of a censored case is 0.
        """
        risks, (times, events) = output[:, 0], target.to(output.dtype).unbind(1)
        order = times.argsort(descending=True, stable=True)
        sums = risks[order].logcumsumexp(0)
        # cases with equal times are at risk together, so the sum for each includes all of them
        last = torch.searchsorted(-times[order], -times[order], right=True) - 1
        terms = (sums[last] - risks[order]) * events[order]
        return torch.empty_like(terms).index_copy(0, order, terms)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return self.case_losses(output, target).mean()

    def case_scores(self, output: Tensor, target: Tensor) -> Tensor:
        """Return a number for each case, so that the mean of these numbers is the concordance index.

        If no two cases can be compared, the concordance index is undefined, and the numbers are NaN.
        """
        right, compared = concordant_pairs(output[:, 0], target)
        whole = compared.sum()
        return right * len(right) / whole if whole else torch.full_like(right, math.nan)

    def score(self, scores: Tensor) -> float:
        return min(super().score(scores), 1.0)  # because of rounding errors, the score could exceed 1

    def parts(self, measures: Measures, cases: Tensor) -> Tensor:
        """Return a number for each selected case, so that the mean of these numbers is the concordance index.

        The numbers are jackknife pseudo-values: a case's number shows how much the index changes without the case.
        Therefore, their variance is the jackknife estimate of the index's variance.
        """
        time, event, risk = (measures[name][cases] for name in ("time", "event", "risk"))
        first = concordant_pairs(risk, torch.stack([time, event], 1))
        second = concordant_pairs_as_second(risk, torch.stack([time, event], 1))
        right, compared = (a + b for a, b in zip(first, second, strict=True))
        whole = float(compared.sum()) / 2
        if not whole:
            return torch.full_like(right, math.nan)
        mean, left = float(right.sum()) / 2 / whole, whole - compared
        moved = torch.where(left > 0, (right - mean * compared) / left.clamp(min=1), mean - COIN)
        return mean + (len(right) - 1) * (moved - moved.mean())

    def answers(self, output: Tensor, name: str) -> list[dict[str, float | str]]:
        return [{RISK: value} for value in output[:, 0].double().tolist()]

    def measures(self, output: Tensor, target: Tensor) -> Measures:
        right, compared = concordant_pairs(output[:, 0], target)
        own = {RIGHT: right, COMPARED: compared, "time": target[:, 0], "event": target[:, 1], "risk": output[:, 0]}
        return {**super().measures(output, target), **own}

    def counts(self, measures: Measures, patients: Sequence[str], least: int) -> Counts:
        """Return two numbers that can be added over hospitals: concordance index times number of cases, and number of
        cases.

        The quotient of the two sums is the mean concordance index over hospitals, weighted by numbers of cases.
        """
        compared = float(measures[COMPARED].sum())
        known = float(measures[RIGHT].sum()) / compared if compared else math.nan
        return means({self.metric: torch.full((len(patients),), known, dtype=torch.float64)}, least)

    @property
    def layout(self) -> dict[str, int]:
        return {self.metric: 2}

    def sway(self, data: Dataset, patients: Sequence[str], least: int = 0) -> float | None:
        """Return the largest fraction of comparable pairs that contain one patient; infinity if no pairs are
        comparable.
        """
        target = getattr(data, "targets", None)
        if not isinstance(target, Tensor) or not len(target):
            return None
        number = {patient: place for place, patient in enumerate(dict.fromkeys(patients))}
        places = torch.tensor([number[patient] for patient in patients])
        first = concordant_pairs(torch.zeros(len(target)), target)[1]
        times, censored = target[:, 0].contiguous(), target[:, 1] == 0
        events = times[~censored].sort().values
        # The case that was observed longer is paired with each earlier event, and, if it is censored, also with each
        # event at the same time
        second = torch.searchsorted(events, times, right=True).where(censored, torch.searchsorted(events, times))
        own = torch.zeros(len(number), dtype=torch.float64).index_add_(0, places, first + second)
        whole = float(first.sum())
        return min(1.0, float(own.max()) / whole) if whole else math.inf


def concordant_pairs(risks: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """For each case with an event, count the concordant and the comparable pairs, [cases] in float64.

    A case with an event can be compared with every case that was observed longer, or equally long without an event. The
    pair is concordant if the case with the event has the higher risk; equal risks count half (Harrell 1982).
    """
    right, compared = torch.zeros(2, len(risks), dtype=torch.float64, device=risks.device)
    for first, better, later in _pairs(risks, target):
        right[first], compared[first] = better.sum(1), later.sum(1)
    return right, compared


def concordant_pairs_as_second(risks: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """For each case, count the concordant and the comparable pairs in which it is the case that was observed longer."""
    right, compared = torch.zeros(2, len(risks), dtype=torch.float64, device=risks.device)
    for _, better, later in _pairs(risks, target):
        right, compared = right + better.sum(0), compared + later.sum(0)
    return right, compared


def _pairs(risks: Tensor, target: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Pair each case that has an event with every case.

    Yield the indices of some cases with events, and two tensors [events, cases]. The first is 1 for concordant pairs,
    0.5 for comparable pairs with equal risks, and 0 otherwise. The second is 1 for comparable pairs, and 0 otherwise.
    """
    times, censored = target[:, 0], target[:, 1] == 0
    for first in (~censored).nonzero()[:, 0].split(max(1, AT_ONCE // max(1, len(target)))):
        own = times[first, None]
        later = ((times > own) | ((times == own) & censored)).double()
        better = (risks[first, None] > risks).double() + (risks[first, None] == risks).double() / 2
        yield first, better * later, later
