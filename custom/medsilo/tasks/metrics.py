"""Measure test cases. Measures of single cases stay at the site; counts leave it and add up over sites."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

Measures = dict[str, Tensor]  # of every case, [cases] float64; NaN where a case has none
Counts = dict[str, list[float]]  # of one site, or of several added up
Figures = dict[str, float | None]  # None where there is nothing to measure

BY_PATIENT = "_by_patient"
# Of a classification; the last: the sums of probabilities, by place, whose cases are in `chances`
OF_CLASSES = CONFUSION, CHANCES, RELIABILITY = "confusion", "chances", "reliability"
BROAD = 10  # places of the histograms that are told of patients
BINS = 200  # of the classes' probabilities: the area under the curve is then right to about 1/200


def means(measures: Measures, least: int) -> Counts:
    """The sum and number of each measure; what has a value in fewer cases than `least` (and in some) is left out."""
    counts = {}
    for name, values in measures.items():
        known = values[~values.isnan()]
        if len(known) == 0 or len(known) >= least:
            counts[name] = [float(known.sum()), float(len(known))]
    return counts


def by_patient(values: Tensor, patients: Sequence[str]) -> Tensor:
    """The mean of each patient's cases, [patients]; NaN where none has a value."""
    numbers = {patient: number for number, patient in enumerate(dict.fromkeys(patients))}
    place = torch.tensor([numbers[patient] for patient in patients])
    known = ~values.isnan()
    totals = torch.zeros(len(numbers), dtype=values.dtype).index_add_(0, place[known], values[known])
    return totals / torch.bincount(place[known], minlength=len(numbers))


def balanced_accuracy(table: Sequence[float], classes: int) -> float | None:
    """The mean over classes that occur of the share that is found; None when fewer than two occur."""
    counts = torch.tensor(table, dtype=torch.float64).reshape(classes, classes)
    totals = counts.sum(1)
    occurs = totals > 0
    return float((counts.diagonal()[occurs] / totals[occurs]).mean()) if occurs.sum() > 1 else None


def areas_under_curve(histograms: Sequence[float], classes: int) -> list[float | None]:
    """Of each class P(a case of it gets a higher probability of it than another), ties half; None where the class has
    no case, or every case."""
    counts = torch.tensor(histograms, dtype=torch.float64).reshape(classes, 2, BINS)
    others, own = counts[:, 0], counts[:, 1]
    pairs = others.sum(1) * own.sum(1)
    below = others.cumsum(1) - others / 2
    each = ((own * below).sum(1) / pairs).tolist()
    return [area if known else None for area, known in zip(each, (pairs > 0).tolist(), strict=True)]


def area_under_curve(histograms: Sequence[float], classes: int) -> float | None:
    """The mean over the classes that have an area."""
    known = [area for area in areas_under_curve(histograms, classes) if area is not None]
    return sum(known) / len(known) if known else None


def added(several: Iterable[Counts]) -> Counts:
    """Sites' counts together; what a site left out is that of the others."""
    total: Counts = {}
    for counts in several:
        for name, values in counts.items():
            total[name] = [a + b for a, b in zip(total[name], values, strict=True)] if name in total else values
    return total
