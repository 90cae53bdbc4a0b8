"""The objective of survival analysis: Cox's proportional hazards and Harrell's concordance index."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.utils.data import Dataset

from medsilo.tasks.metrics import Counts, Measures, means
from medsilo.tasks.objective import Objective

AT_ONCE = 2**24  # limit on pairs of cases that are compared at a time
# Names of measures: concordant pairs and comparable pairs of each case with an event
RIGHT, COMPARED = "pairs_right", "pairs"
EVENTS = ("censored", "event")  # names of the event indicator's values 0 and 1
RISK = "log_risk"  # name of the risk in predictions
COIN = 0.5  # concordance if no two cases can be compared


class Survival(Objective):
    """Survival analysis with Cox's partial likelihood of a batch as loss, and Harrell's concordance index as metric.

    The network's output is a case's log relative risk. A target is [time, event].

    The event is 1 if it occurred at this time, and 0 if the case was censored: last seen at this time without an event.
    """

    metric = "concordance"
    outputs = 1
    by_case = False
    unbounded = (
        "Cox's loss compares the cases of a batch, so no bound holds for one; learn whether the event comes by a "
        "fixed time (task.kind=classification)"
    )

    def case_losses(self, output: Tensor, target: Tensor) -> Tensor:
        """Return Breslow's terms: for an event, log Σ exp(risk) over all cases at risk, minus the case's risk."""
        risks, (times, events) = output[:, 0], target.to(output.dtype).unbind(1)
        order = times.argsort(descending=True, stable=True)
        sums = risks[order].logcumsumexp(0)
        # All cases with the same time are at risk, so the sum ends at the last of them.
        last = torch.searchsorted(-times[order], -times[order], right=True) - 1
        terms = (sums[last] - risks[order]) * events[order]
        return torch.empty_like(terms).index_copy(0, order, terms)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return self.case_losses(output, target).mean()

    def case_scores(self, output: Tensor, target: Tensor) -> Tensor:
        """Return each case's contribution to the concordance index, which is the mean of all contributions."""
        right, compared = concordant_pairs(output[:, 0], target)
        whole = compared.sum()
        return right * len(right) / whole if whole else torch.full_like(right, COIN)

    def score(self, scores: Tensor) -> float:
        return min(1.0, super().score(scores))  # rounding errors may make the mean exceed 1

    def parts(self, measures: Measures, cases: Tensor) -> Tensor:
        """Return each selected case's contribution to their concordance index, from all of its pairs."""
        time, event, risk = (measures[name][cases] for name in ("time", "event", "risk"))
        first = concordant_pairs(risk, torch.stack([time, event], 1))
        second = concordant_pairs_as_second(risk, torch.stack([time, event], 1))
        right, compared = (a + b for a, b in zip(first, second, strict=True))
        whole = float(compared.sum()) / 2
        if not whole:
            return torch.full_like(right, math.nan)
        mean = float(right.sum()) / 2 / whole
        return mean + len(right) * (right - mean * compared) / whole

    def answers(self, output: Tensor, name: str) -> list[dict[str, float | str]]:
        return [{RISK: value} for value in output[:, 0].double().tolist()]

    def measures(self, output: Tensor, target: Tensor) -> Measures:
        """Return the metric, the concordant and comparable pairs of each case with an event, its time,
        event and risk.
        """
        right, compared = concordant_pairs(output[:, 0], target)
        own = {RIGHT: right, COMPARED: compared, "time": target[:, 0], "event": target[:, 1], "risk": output[:, 0]}
        return {**super().measures(output, target), **own}

    def counts(self, measures: Measures, patients: Sequence[str], least: int) -> Counts:
        """Return the concordance index times the number of cases, so that sums over hospitals give the mean weighted by
        cases.
        """
        compared = float(measures[COMPARED].sum())
        known = float(measures[RIGHT].sum()) / compared if compared else COIN
        return means({self.metric: torch.full((len(patients),), known, dtype=torch.float64)}, least)

    @property
    def layout(self) -> dict[str, int]:
        return {self.metric: 2}

    def sway(self, data: Dataset, patients: Sequence[str]) -> float | None:
        """Return the largest share of comparable pairs that involve one patient; 1 without pairs."""
        target = getattr(data, "targets", None)
        if not isinstance(target, Tensor) or not len(target):
            return None
        number = {patient: place for place, patient in enumerate(dict.fromkeys(patients))}
        places = torch.tensor([number[patient] for patient in patients])
        first = concordant_pairs(torch.zeros(len(target)), target)[1]
        times, censored = target[:, 0].contiguous(), target[:, 1] == 0
        events = times[~censored].sort().values
        # A case is the second of a pair with each earlier event, and if it is censored, also with each event at the
        # same time.
        second = torch.searchsorted(events, times, right=True).where(censored, torch.searchsorted(events, times))
        own = torch.zeros(len(number), dtype=torch.float64).index_add_(0, places, first + second)
        whole = float(first.sum())
        return min(1.0, float(own.max()) / whole) if whole else 1.0


def concordant_pairs(risks: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each case with an event the number of concordant pairs (ties count half) and of comparable pairs.

    A case with an event is compared with every case that was observed longer, or equally long without an event.

    A pair is concordant if the case with the event has the higher risk (Harrell 1982). The results are two tensors
    [cases] in float64.
    """
    right, compared = torch.zeros(2, len(risks), dtype=torch.float64, device=risks.device)
    for first, better, later in _pairs(risks, target):
        right[first], compared[first] = better.sum(1), later.sum(1)
    return right, compared


def concordant_pairs_as_second(risks: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the numbers of concordant and comparable pairs in which each case is the second case."""
    right, compared = torch.zeros(2, len(risks), dtype=torch.float64, device=risks.device)
    for _, better, later in _pairs(risks, target):
        right, compared = right + better.sum(0), compared + later.sum(0)
    return right, compared


def _pairs(risks: Tensor, target: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield cases with events, and their concordant and comparable pairs, [events, cases], in portions."""
    times, censored = target[:, 0], target[:, 1] == 0
    for first in (~censored).nonzero()[:, 0].split(max(1, AT_ONCE // max(1, len(target)))):
        own = times[first, None]
        later = ((times > own) | ((times == own) & censored)).double()
        better = (risks[first, None] > risks).double() + (risks[first, None] == risks).double() / 2
        yield first, better * later, later
