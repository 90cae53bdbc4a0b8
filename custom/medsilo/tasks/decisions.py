"""Validate the counts of a classification's test cases, and derive test results from the counts.

From counts, this module computes calibration errors, areas under curves, and decisions at a threshold.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from medsilo.core.errors import Refused
from medsilo.tasks.measuring import decided, places_of
from medsilo.tasks.metrics import BINS, BROAD, CHANCES, CONFUSION, RELIABILITY, Counts

# Names of counts that the server derives from the histograms of probabilities.
PLACED = "placed"  # number of cases in each broad bin, as needed for calibration
DECIDED = "decided"  # numbers of true negatives, false positives, false negatives and true positives


@dataclass(frozen=True)
class ClassCounts:
    classes: int

    def check(self, counts: Mapping[str, list[float]], most: int) -> None:
        """Raise Refused unless the counts of a classification agree with the number of test cases."""
        for name in {CONFUSION, CHANCES} & counts.keys():
            values = counts[name]
            # every case occurs once in the confusion matrix, and once in each class's two histograms
            each = len(values) // (self.classes if name == CHANCES else 1)
            whole = all(value >= 0 and value == math.floor(value) for value in values)
            if not whole or any(sum(values[start : start + each]) != most for start in range(0, len(values), each)):
                raise Refused(f"the site's counts of {name} are not whole numbers that add up to {most} test cases")
        if RELIABILITY in counts:
            _check_reliability(counts, self.classes)

    def check_threshold(self, threshold: float, counts: Mapping[str, list[float]]) -> None:
        """Raise Refused if the counts contain no histograms, or if the threshold lies within a histogram bin."""
        if CHANCES not in counts:
            raise Refused("unexpected field: threshold; the site's counts contain no histograms")
        if not on_a_place(threshold):
            raise Refused(f"the site's threshold {threshold:g} is not a multiple of 1/{BINS}")

    def with_derived(self, counts: Counts, threshold: float | None) -> Counts:
        """Add the counts that the server derives to the counts that a site disclosed."""
        derived: Counts = {}
        if RELIABILITY in counts:
            derived[PLACED] = places_of(counts[CHANCES], self.classes).flatten().tolist()
        if threshold is not None and CHANCES in counts:
            derived[DECIDED] = decided(counts[CHANCES], threshold)
        return {**counts, **derived}

    def decisions(self, counts: Counts, threshold: float | None) -> dict[str, Any]:
        """Return the confusion matrix, the decisions at the threshold, and the calibration of a classification, for
        summary.json.
        """
        table = [int(count) for count in counts[CONFUSION]]
        cut = [int(count) for count in counts[DECIDED]] if DECIDED in counts else None
        return {
            "confusion": [table[row * self.classes : (row + 1) * self.classes] for row in range(self.classes)],
            "threshold": threshold,
            "decided": cut,
            "reliability": _reliability_in(counts) if PLACED in counts else None,
        }


def _check_reliability(counts: Mapping[str, list[float]], classes: int) -> None:
    """Raise Refused if a histogram bin's sum of probabilities is impossible for the number of cases in the bin."""
    if CHANCES not in counts:
        raise Refused(f"the site's counts contain {RELIABILITY}, but not {CHANCES}")
    cases = places_of(counts[CHANCES], classes).sum(1).flatten().tolist()
    for number, (total, count) in enumerate(zip(counts[RELIABILITY], cases, strict=True)):
        low, high = (count * (number % BROAD + end) / BROAD for end in (0, 1))
        if not low - 1e-3 <= total <= high + 1e-3:
            raise Refused(
                f"the site's sum of probabilities is {total:g}, but {count:g} cases in this bin have a sum from "
                f"{low:g} to {high:g}"
            )


def _reliability_in(counts: Counts) -> list[list[tuple[int, int, float]]]:
    """For each class and bin, return the number of cases, the number of cases of the class, and the sum of
    probabilities.
    """
    sums = [counts[RELIABILITY][start : start + BROAD] for start in range(0, len(counts[RELIABILITY]), BROAD)]
    cases = [counts[PLACED][start : start + BROAD] for start in range(0, len(counts[PLACED]), BROAD)]
    return [
        [(int(other + one), int(one), total) for other, one, total in zip(others, own, totals, strict=True)]
        for others, own, totals in zip(cases[::2], cases[1::2], sums, strict=True)
    ]


def on_a_place(threshold: float) -> bool:
    """Return True if the threshold lies on the edge between two histogram bins."""
    return 0 < round(threshold * BINS) < BINS and abs(threshold * BINS - round(threshold * BINS)) < 1e-6


def balanced_accuracy(table: Sequence[float], classes: int) -> float | None:
    """Return the mean sensitivity over the classes that have cases, or None if fewer than two classes have cases."""
    counts = torch.tensor(table, dtype=torch.float64).reshape(classes, classes)
    totals = counts.sum(1)
    occurs = totals > 0
    return float((counts.diagonal()[occurs] / totals[occurs]).mean()) if occurs.sum() > 1 else None


def areas_under_curve(histograms: Sequence[float], classes: int) -> list[float | None]:
    """For each class, return the area under the ROC curve that separates the class from all other classes.

    A pair of cases in the same histogram bin counts half. A class without cases, or with all cases, has the result
    None.
    """
    counts = torch.tensor(histograms, dtype=torch.float64).reshape(classes, 2, BINS)
    others, own = counts[:, 0], counts[:, 1]
    pairs = others.sum(1) * own.sum(1)
    below = others.cumsum(1) - others / 2
    each = ((own * below).sum(1) / pairs).tolist()
    return [area if known else None for area, known in zip(each, (pairs > 0).tolist(), strict=True)]


def area_under_curve(histograms: Sequence[float], classes: int) -> float | None:
    """Return the mean of the defined areas under the ROC curves of the classes, or None if no area is defined."""
    known = [area for area in areas_under_curve(histograms, classes) if area is not None]
    return sum(known) / len(known) if known else None


def average_precisions(histograms: Sequence[float], classes: int) -> list[float | None]:
    """For each class, return the area under the precision-recall curve (average precision), or None if no case belongs
    to the class.

    The curve has one point for each histogram bin.
    """
    precision, recall = [], []
    for others, own in _from_above(histograms, classes):
        precision.append(own / (own + others).clamp(min=1e-9))
        recall.append(own / own[-1])
    areas = [float((p * torch.diff(r, prepend=torch.zeros(1))).sum()) for p, r in zip(precision, recall, strict=True)]
    return [None if math.isnan(area) else area for area in areas]


def best_beside(histograms: Sequence[float], classes: int, least: float) -> list[tuple[float, float] | None]:
    """For each class, return the highest sensitivity at a specificity of at least `least`, and the highest specificity
    at a sensitivity of at least `least`. None if none or all of the cases belong to the class.

    Both rates are optimistic, because the tested cases themselves determine the threshold.
    """
    found: list[tuple[float, float] | None] = []
    for others, own in _from_above(histograms, classes):
        if not own[-1] or not others[-1]:
            found.append(None)
            continue
        zero = torch.zeros(1, dtype=own.dtype)
        sensitivity, specificity = torch.cat([zero, own / own[-1]]), 1 - torch.cat([zero, others / others[-1]])
        enough = least - 1e-9
        found.append((float(sensitivity[specificity >= enough].max()), float(specificity[sensitivity >= enough].max())))
    return found


def _from_above(histograms: Sequence[float], classes: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For each class, count the cases whose probability is at least a threshold, for all thresholds in descending
    order. Cases of the class and of other classes are counted separately.
    """
    counts = torch.tensor(histograms, dtype=torch.float64).reshape(classes, 2, BINS).flip(2).cumsum(2)
    return [(others, own) for others, own in counts]


def calibration_error(sums: Sequence[float], placed: Sequence[float]) -> float | None:
    """Return the expected calibration error over BROAD bins of equal width; None without cases.

    For each class, this is the mean over bins of |fraction of the class - mean probability|, weighted by the number of
    cases. For more than two classes, return the mean over classes.
    """
    counts = torch.tensor(placed, dtype=torch.float64).reshape(-1, 2, BROAD)
    cases = float(counts[0].sum())
    if not cases:
        return None
    apart = (counts[:, 1] - torch.tensor(sums, dtype=torch.float64).reshape(len(counts), BROAD)).abs()
    return float(apart.sum(1).mean()) / cases
