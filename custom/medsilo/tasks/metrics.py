"""Define types of test results: measures of single cases, which stay at the site, and counts, which the server adds
over sites.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

# maps each measure's name to its values, [cases] in float64; NaN for a case without a value
Measures = dict[str, Tensor]
Counts = dict[str, list[float]]  # counts of one site, or of several sites together
Figures = dict[str, float | None]  # metrics of a whole test set; None: the metric is undefined

BY_PATIENT = "_by_patient"
# The measure with each case's weight in the counts of classes; without it, every weight is 1
WEIGHT = "weight"
# Counts of a classification: confusion matrix, histograms of probabilities, and sums of probabilities in each broad bin
OF_CLASSES = CONFUSION, CHANCES, RELIABILITY = "confusion", "chances", "reliability"
BROAD = 10  # number of broad bins, which protect patients because many cases share a bin
BINS = 200  # number of fine bins, with which areas under ROC curves are exact to about 1/200


def means(measures: Measures, least: int) -> Counts:
    """Return the sum and the number of values of each measure, except of measures with a few values, but fewer than
    `least`.
    """
    counts = {}
    for name, values in measures.items():
        known = values[~values.isnan()]
        if len(known) == 0 or len(known) >= least:
            counts[name] = [float(known.sum()), float(len(known))]
    return counts


def by_patient(values: Tensor, patients: Sequence[str]) -> Tensor:
    """Return the mean value over each patient's cases, [patients], or NaN if no case of the patient has a value."""
    numbers = {patient: number for number, patient in enumerate(dict.fromkeys(patients))}
    place = torch.tensor([numbers[patient] for patient in patients])
    known = ~values.isnan()
    totals = torch.zeros(len(numbers), dtype=values.dtype).index_add_(0, place[known], values[known])
    return totals / torch.bincount(place[known], minlength=len(numbers))


def added(several: Iterable[Counts]) -> Counts:
    """Add counts over sites. The sum of a count covers only the sites that sent it."""
    total: Counts = {}
    for counts in several:
        for name, values in counts.items():
            total[name] = [a + b for a, b in zip(total[name], values, strict=True)] if name in total else values
    return total
