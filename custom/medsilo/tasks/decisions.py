"""Judge probabilities and decisions: calibration, and a threshold with its sensitivity and specificity.

All of it follows from counts of cases that add up over sites. Of two classes, the second is the one that is looked for.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from medsilo.tasks.metrics import BINS, BROAD, CHANCES, RELIABILITY, Counts

# What follows from `chances` and is not told by itself:
PLACED = "placed"  # the cases of each place, where their probabilities' sums are told, too
DECIDED = "decided"  # true negatives, false positives, false negatives, true positives
WIDE = BINS // BROAD


def judged(classes: int) -> range:
    """Return the classes whose probabilities are judged: of two the second alone, as the first is one minus it."""
    return range(1, 2) if classes == 2 else range(classes)


# ---------------------------------------------------------------------------------------------------- calibration
def places_of(histograms: Sequence[float], classes: int) -> Tensor:
    """Return, per class, how many negatives and positives fall in each bin: [judged, 2, BROAD]."""
    counts = torch.tensor(histograms, dtype=torch.float64).reshape(classes, 2, BROAD, WIDE).sum(-1)
    return counts[list(judged(classes))]


def calibration_error(sums: Sequence[float], placed: Sequence[float]) -> float | None:
    """Return the expected calibration error in BROAD equal places; of several classes the mean of one against the rest.

    It is the mean over cases of |share of the class in the case's place − mean probability there|. None without cases.
    """
    counts = torch.tensor(placed, dtype=torch.float64).reshape(-1, 2, BROAD)
    cases = float(counts[0].sum())
    if not cases:
        return None
    apart = (counts[:, 1] - torch.tensor(sums, dtype=torch.float64).reshape(len(counts), BROAD)).abs()
    return float(apart.sum(1).mean()) / cases


# ---------------------------------------------------------------------------------------------------- a threshold
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


def with_derived(counts: Counts, classes: int, threshold: float | None) -> Counts:
    """Return a site's counts with what follows from them, as far as it tells; before those of sites are added."""
    derived: Counts = {}
    if RELIABILITY in counts:
        derived[PLACED] = places_of(counts[CHANCES], classes).flatten().tolist()
    if threshold is not None and CHANCES in counts:
        derived[DECIDED] = decided(counts[CHANCES], threshold)
    return {**counts, **derived}


def on_a_place(threshold: float) -> bool:
    """Return whether a threshold lies between two places of the histograms."""
    return 0 < round(threshold * BINS) < BINS and abs(threshold * BINS - round(threshold * BINS)) < 1e-6
