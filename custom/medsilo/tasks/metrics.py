"""Types and sums of test results. Values of single cases stay at the site; counts leave it and are added over sites."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

Measures = dict[str, Tensor]  # a value for every case, [cases] float64; NaN for a case without a value
Counts = dict[str, list[float]]  # counts of one site, or added over sites
Figures = dict[str, float | None]  # metrics of a whole test set; None if undefined

BY_PATIENT = "_by_patient"
WEIGHT = "weight"  # name of the measure that weights cases in counts by class; without this measure, each weight is 1
# Names of a classification's counts: confusion matrix, histograms of probabilities, sums of probabilities by bin.
OF_CLASSES = CONFUSION, CHANCES, RELIABILITY = "confusion", "chances", "reliability"
BROAD = 10  # number of bins of histograms that protect patients
BINS = 200  # number of bins of other histograms; the area under the ROC curve is exact to about 1/200


def means(measures: Measures, least: int) -> Counts:
    """Return the sum and number of values of each measure. Measures with fewer than `least` values are left out."""
    counts = {}
    for name, values in measures.items():
        known = values[~values.isnan()]
        if len(known) == 0 or len(known) >= least:
            counts[name] = [float(known.sum()), float(len(known))]
    return counts


def by_patient(values: Tensor, patients: Sequence[str]) -> Tensor:
    """Return the mean over each patient's cases, [patients]; NaN without a value."""
    numbers = {patient: number for number, patient in enumerate(dict.fromkeys(patients))}
    place = torch.tensor([numbers[patient] for patient in patients])
    known = ~values.isnan()
    totals = torch.zeros(len(numbers), dtype=values.dtype).index_add_(0, place[known], values[known])
    return totals / torch.bincount(place[known], minlength=len(numbers))


def added(several: Iterable[Counts]) -> Counts:
    """Add counts over sites. A count that some sites left out is the sum over the other sites."""
    total: Counts = {}
    for counts in several:
        for name, values in counts.items():
            total[name] = [a + b for a, b in zip(total[name], values, strict=True)] if name in total else values
    return total
