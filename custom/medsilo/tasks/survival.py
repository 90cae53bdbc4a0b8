"""Tasks that rank cases by their risk: Cox's proportional hazards and Harrell's concordance."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.data import Dataset

from medsilo.tasks.metrics import Counts, Measures, means
from medsilo.tasks.objective import Objective

AT_ONCE = 2**24  # pairs of cases that are compared together
RIGHT, COMPARED = "pairs_right", "pairs"  # of the pairs in which a case is the one with the earlier event
EVENTS = ("censored", "event")  # 0 and 1
RISK = "log_risk"  # what predictions call it
COIN = 0.5  # concordance where no two cases can be compared


class Survival(Objective):
    """Cox's partial likelihood within a batch; Harrell's concordance index within a hospital's part.

    The network's output is the logarithm of a case's relative risk. A target is [time, event]: 1 where the event came
    at that time, 0 where the case was still without it when it was last seen (censored).
    """

    metric = "concordance"
    outputs = 1
    by_case = False
    unbounded = (
        "Cox's loss compares the cases of a batch, so no bound holds for one; learn whether the event comes by a "
        "fixed time (task.kind=classification)"
    )

    def case_losses(self, output: Tensor, target: Tensor) -> Tensor:
        """Return Breslow's terms: of an event log Σ exp(risk) over all that are seen as long, less its own risk."""
        risks, (times, events) = output[:, 0], target.to(output.dtype).unbind(1)
        order = times.argsort(descending=True, stable=True)
        sums = risks[order].logcumsumexp(0)
        # Of equal times all are at risk: the sum up to the last of them.
        last = torch.searchsorted(-times[order], -times[order], right=True) - 1
        terms = (sums[last] - risks[order]) * events[order]
        return torch.empty_like(terms).index_copy(0, order, terms)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return self.case_losses(output, target).mean()

    def case_scores(self, output: Tensor, target: Tensor) -> Tensor:
        """Return what each case adds to the concordance of these cases, which is the mean."""
        right, compared = concordant_pairs(output[:, 0], target)
        whole = compared.sum()
        return right * len(right) / whole if whole else torch.full_like(right, COIN)

    def score(self, scores: Tensor) -> float:
        return min(1.0, super().score(scores))  # a sum of shares may be above their whole by its last digit

    def answers(self, output: Tensor, name: str) -> list[dict[str, float | str]]:
        return [{RISK: value} for value in output[:, 0].double().tolist()]

    def measures(self, output: Tensor, target: Tensor) -> Measures:
        """Beside the metric: the pairs in which a case has the earlier event, time, event and risk."""
        right, compared = concordant_pairs(output[:, 0], target)
        own = {RIGHT: right, COMPARED: compared, "time": target[:, 0], "event": target[:, 1], "risk": output[:, 0]}
        return {**super().measures(output, target), **own}

    def counts(self, measures: Measures, patients: Sequence[str], least: int) -> Counts:
        """Concordance times the number of cases, so that sums over hospitals give their mean, weighted by cases."""
        compared = float(measures[COMPARED].sum())
        known = float(measures[RIGHT].sum()) / compared if compared else COIN
        return means({self.metric: torch.full((len(patients),), known, dtype=torch.float64)}, least)

    @property
    def layout(self) -> dict[str, int]:
        return {self.metric: 2}

    def sway(self, data: Dataset, patients: Sequence[str]) -> float | None:
        """Return the largest share of the pairs that one patient is in; 1 where there is no pair."""
        target = getattr(data, "targets", None)
        if not isinstance(target, Tensor) or not len(target):
            return None
        number = {patient: place for place, patient in enumerate(dict.fromkeys(patients))}
        places = torch.tensor([number[patient] for patient in patients])
        first = concordant_pairs(torch.zeros(len(target)), target)[1]
        times, censored = target[:, 0].contiguous(), target[:, 1] == 0
        events = times[~censored].sort().values
        # A case is the second of a pair with each event before it; a censored one also with those at its own time.
        second = torch.searchsorted(events, times, right=True).where(censored, torch.searchsorted(events, times))
        own = torch.zeros(len(number), dtype=torch.float64).index_add_(0, places, first + second)
        whole = float(first.sum())
        return min(1.0, float(own.max()) / whole) if whole else 1.0


def concordant_pairs(risks: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Of the pairs that each case begins: how many are in the right order, ties half, and how many there are.

    A case with an event begins a pair with every case that was seen longer, or as long and had none. It is right when
    the first has the higher risk (Harrell 1982). Both: [cases] float64.
    """
    right = torch.zeros(len(risks), dtype=torch.float64, device=risks.device)
    compared = torch.zeros_like(right)
    times, censored = target[:, 0], target[:, 1] == 0
    for first in (~censored).nonzero()[:, 0].split(max(1, AT_ONCE // max(1, len(target)))):
        own = times[first, None]
        later = (times > own) | ((times == own) & censored)
        better = (risks[first, None] > risks).double() + (risks[first, None] == risks).double() / 2
        right[first], compared[first] = (better * later).sum(1), later.double().sum(1)
    return right, compared
