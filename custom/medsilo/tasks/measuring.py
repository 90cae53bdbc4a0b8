"""Measure a site's cases: confusion matrix and probabilities, exact or rounded before they leave, and a threshold.

Of two classes, the second is the one that is looked for.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from medsilo.core.rounding import Resolution
from medsilo.tasks.metrics import BINS, BROAD

WIDE = BINS // BROAD


def judged(classes: int) -> range:
    """Return the classes whose probabilities are judged: of two the second alone, as the first is one minus it."""
    return range(1, 2) if classes == 2 else range(classes)


def places_of(histograms: Sequence[float], classes: int) -> Tensor:
    """Return, per class, how many negatives and positives fall in each bin: [judged, 2, BROAD]."""
    counts = torch.tensor(histograms, dtype=torch.float64).reshape(classes, 2, BROAD, WIDE).sum(-1)
    return counts[list(judged(classes))]


def confusion(labels: Tensor, found: Tensor, classes: int) -> list[float]:
    """Return how often each class (rows) was found to be each class (columns), row by row."""
    return torch.bincount(labels * classes + found, minlength=classes**2).double().tolist()


def chances(labels: Tensor, probabilities: Tensor) -> list[float]:
    """For each class, histograms of its probability over cases that are not of it and that are: [classes, 2, BINS]."""
    classes = probabilities.shape[1]
    own = torch.nn.functional.one_hot(labels, classes)
    bins = (probabilities * BINS).long().clamp(0, BINS - 1)
    places = (torch.arange(classes) * 2 + own) * BINS + bins
    return torch.bincount(places.flatten(), minlength=classes * 2 * BINS).double().tolist()


def coarse_chances(histograms: Sequence[float], classes: int, resolution: Resolution) -> list[float]:
    """Histograms as they are told of patients: of BROAD places each, in units that make up every class's whole."""
    wide = BINS // BROAD
    counts = torch.tensor(histograms, dtype=torch.float64).reshape(classes, 2, BROAD, wide).sum(-1)
    told = torch.zeros(classes, 2, BROAD, wide, dtype=torch.float64)
    for label in range(classes):
        units = resolution.shared_out(counts[label].flatten().tolist())
        told[label, :, :, wide // 2] = torch.tensor(units, dtype=torch.float64).reshape(2, BROAD)
    return told.flatten().tolist()


def reliability(probabilities: Tensor) -> list[float]:
    """Return the sums of each judged class's probability over the cases of each of BROAD places: [judged, BROAD]."""
    totals = []
    for label in judged(probabilities.shape[1]):
        values = probabilities[:, label].double()
        places = (values * BINS).long().clamp(0, BINS - 1) // WIDE
        totals += torch.zeros(BROAD, dtype=torch.float64).index_add_(0, places, values).tolist()
    return totals


def coarse_reliability(
    sums: Sequence[float], histograms: Sequence[float], told: Sequence[float], classes: int, resolution: Resolution
) -> list[float]:
    """Return the sums as they are told of patients: for each place the told number of cases, times a coarse mean.

    histograms: as they are; told: as they are told. Where one patient would move a place's mean by as much as the place
    is wide, its middle stands for it.
    """
    cases, shown = (places_of(one, classes).sum(1).flatten().tolist() for one in (histograms, told))
    everyone = sum(cases) / len(judged(classes))
    found = []
    for number, (total, count, told_count) in enumerate(zip(sums, cases, shown, strict=True)):
        low, high = number % BROAD / BROAD, (number % BROAD + 1) / BROAD
        mean = (low + high) / 2
        if told_count and count:
            here = resolution.among(count / everyone)
            if here.step(low, high) < high - low:
                mean = min(max(here.mean(total / count, low, high), low), high)
        found.append(told_count * mean)
    return found


def decided(histograms: Sequence[float], threshold: float) -> list[float]:
    """Return true negatives, false positives, false negatives and true positives from `chances` of two classes."""
    others, own = torch.tensor(histograms, dtype=torch.float64).reshape(2, 2, BINS)[1]
    cut = round(threshold * BINS)
    return [float(part.sum()) for part in (others[:cut], others[cut:], own[:cut], own[cut:])]


def rates_of(counts: Sequence[float]) -> tuple[float, float] | None:
    """Return sensitivity and specificity; None where a class has no case."""
    right_without, wrong_without, wrong_with, right_with = counts
    without, having = right_without + wrong_without, wrong_with + right_with
    return (right_with / having, right_without / without) if without and having else None


def threshold_of(histograms: Sequence[float], places: int) -> float | None:
    """Return from where on the second class's probability counts as found; a whole number of 1/places.

    histograms: `chances` of validation cases. It is the threshold with the greatest sensitivity + specificity
    (Youden's), of equal ones the nearest to the middle. Returns None where a class is missing.
    """
    cuts = [number / places for number in range(1, places)]
    rates = [rates_of(decided(histograms, cut)) for cut in cuts]
    known = [(cut, *both) for cut, both in zip(cuts, rates, strict=True) if both]
    if not known:
        return None
    return max(known, key=lambda one: (one[1] + one[2], -abs(one[0] - 0.5), -one[0]))[0]
