"""Define types of test results: measures of single cases, which stay at the site, and counts, which are added over
sites.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

# Maps the name of each measure to the measure's values, [cases] in float64; the value is NaN if a case has none.
Measures = dict[str, Tensor]
Counts = dict[str, list[float]]  # maps names to the counts of one site, or to counts added over sites
Figures = dict[str, float | None]  # maps names to metrics of a whole test set; None means that a metric is undefined

BY_PATIENT = "_by_patient"
# The measure with this name states how much each case weighs in the counts of classes. Without it, each case weighs 1.
WEIGHT = "weight"
# Names of a classification's counts: confusion matrix, histograms of probabilities, sums of probabilities in each bin.
OF_CLASSES = CONFUSION, CHANCES, RELIABILITY = "confusion", "chances", "reliability"
BROAD = 10  # number of bins in coarse histograms; coarse histograms protect patients
BINS = 200  # number of bins in fine histograms, from which areas under ROC curves are exact to about 1/200


def means(measures: Measures, least: int) -> Counts:
    """For each measure that has enough values, return the sum and the count of the measure's values."""
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
    """Add counts over sites; a sum covers only the sites that sent the count."""
    total: Counts = {}
    for counts in several:
        for name, values in counts.items():
            total[name] = [a + b for a, b in zip(total[name], values, strict=True)] if name in total else values
    return total
