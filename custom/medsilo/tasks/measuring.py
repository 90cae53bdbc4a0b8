"""Count a classifier's decisions and predicted probabilities over a site's cases, and choose a decision threshold.

If there are two classes, the second class is the positive class.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from medsilo.tasks.metrics import BINS, BROAD

WIDE = BINS // BROAD


def judged(classes: int) -> range:
    """Return the classes whose probabilities are counted: all, or only the second of two, because the first follows
    from it.
    """
    return range(1, 2) if classes == 2 else range(classes)


def places_of(histograms: Sequence[float], classes: int) -> Tensor:
    """For each counted class and broad bin, return the numbers of negative and of positive cases, [classes, 2,
    BROAD].
    """
    counts = torch.tensor(histograms, dtype=torch.float64).reshape(classes, 2, BROAD, WIDE).sum(-1)
    return counts[list(judged(classes))]


def confusion(labels: Tensor, predicted: Tensor, classes: int, weights: Tensor | None = None) -> list[float]:
    """Return the confusion matrix as a flat list, with rows of true classes and columns of predicted classes."""
    return torch.bincount(labels * classes + predicted, weights, minlength=classes**2).double().tolist()


def chances(labels: Tensor, probabilities: Tensor, weights: Tensor | None = None) -> list[float]:
    """Return two histograms of each class's predicted probability, [classes, 2, BINS].

    A class's first histogram counts the cases of other classes, and its second histogram counts the cases of the class.
    """
    classes = probabilities.shape[1]
    own = torch.nn.functional.one_hot(labels, classes)
    bins = (probabilities * BINS).long().clamp(0, BINS - 1)
    places = (torch.arange(classes) * 2 + own) * BINS + bins
    each = None if weights is None else weights.repeat_interleave(classes)
    return torch.bincount(places.flatten(), each, minlength=classes * 2 * BINS).double().tolist()


def reliability(probabilities: Tensor, weights: Tensor | float = 1.0) -> list[float]:
    """For each counted class and broad bin, return the sum of the predicted probabilities."""
    totals = []
    for label in judged(probabilities.shape[1]):
        values = probabilities[:, label].double()
        places = (values * BINS).long().clamp(0, BINS - 1) // WIDE
        totals += torch.zeros(BROAD, dtype=torch.float64).index_add_(0, places, values * weights).tolist()
    return totals


def decided(histograms: Sequence[float], threshold: float) -> list[float]:
    """Return the numbers of true negatives, false positives, false negatives and true positives.

    Args:
        histograms: The histograms that the function `chances` returns for two classes.
        threshold: The least probability of the second class for which a case counts as positive.
    """
    others, own = torch.tensor(histograms, dtype=torch.float64).reshape(2, 2, BINS)[1]
    cut = round(threshold * BINS)
    return [float(part.sum()) for part in (others[:cut], others[cut:], own[:cut], own[cut:])]


def rates_of(counts: Sequence[float]) -> tuple[float, float] | None:
    right_without, wrong_without, wrong_with, right_with = counts
    without, having = right_without + wrong_without, wrong_with + right_with
    return (right_with / having, right_without / without) if without and having else None


def threshold_of(histograms: Sequence[float], digits: int) -> float | None:
    """Choose a threshold on the second class's probability, as a multiple of 1/places.

    The threshold maximises sensitivity + specificity (Youden's index). Of equally good thresholds, the function chooses
    the one that is nearest to 0.5. It returns None if a class has no case.

    Args:
        histograms: The histograms that the function `chances` returns for the validation cases.
    """
    cuts = [number / digits for number in range(1, digits)]
    rates = [rates_of(decided(histograms, cut)) for cut in cuts]
    known = [(cut, *both) for cut, both in zip(cuts, rates, strict=True) if both]
    if not known:
        return None
    return max(known, key=lambda one: (one[1] + one[2], -abs(one[0] - 0.5), -one[0]))[0]
