"""Measure test cases. Measures of single cases stay at the site; counts leave it and add up over sites."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

Measures = dict[str, Tensor]  # of every case, [cases] float64; NaN where a case has none
Counts = dict[str, list[float]]  # of one site, or of several added up
Figures = dict[str, float | None]  # None where there is nothing to measure

BY_PATIENT = "_by_patient"
WEIGHT = "weight"  # a measure that says for how much each case counts among classes; without it, for one
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


def added(several: Iterable[Counts]) -> Counts:
    """Sites' counts together; what a site left out is that of the others."""
    total: Counts = {}
    for counts in several:
        for name, values in counts.items():
            total[name] = [a + b for a, b in zip(total[name], values, strict=True)] if name in total else values
    return total
