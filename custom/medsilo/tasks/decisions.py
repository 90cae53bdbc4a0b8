"""A classification's counts, of a site or of several added up: whether cases can have them, and what follows.

That is calibration, areas under curves, and the decisions at a threshold.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from medsilo.core.errors import Refused
from medsilo.tasks.measuring import decided, places_of
from medsilo.tasks.metrics import BINS, BROAD, CHANCES, CONFUSION, RELIABILITY, Counts

# What follows from `chances` and is not told by itself:
PLACED = "placed"  # the cases of each place, where their probabilities' sums are told, too
DECIDED = "decided"  # true negatives, false positives, false negatives, true positives


@dataclass(frozen=True)
class ClassCounts:
    """What a site may tell of its test cases where each has one of so many classes, and what follows from it."""

    classes: int

    def check(self, counts: Mapping[str, list[float]], most: int) -> None:
        """Raise Refused unless these are counts that so many test cases can have."""
        for name in {CONFUSION, CHANCES} & counts.keys():
            values = counts[name]
            each = len(values) // (self.classes if name == CHANCES else 1)  # of all cases, for every class
            whole = all(value >= 0 and value == math.floor(value) for value in values)
            if not whole or any(sum(values[start : start + each]) != most for start in range(0, len(values), each)):
                raise Refused(f"its counts of {name} are not those of {most} test cases")
        if RELIABILITY in counts:
            _check_reliability(counts, self.classes)

    def check_threshold(self, threshold: float, counts: Mapping[str, list[float]]) -> None:
        """Refuse a threshold without counts, or between two of their bins."""
        if CHANCES not in counts:
            raise Refused("unexpected field: threshold, whose counts are missing")
        if not on_a_place(threshold):
            raise Refused(f"its threshold {threshold:g} is not a whole number of 1/{BINS}")

    def with_derived(self, counts: Counts, threshold: float | None) -> Counts:
        """Return a site's counts with what follows from them, as far as it tells; before those of sites are added."""
        derived: Counts = {}
        if RELIABILITY in counts:
            derived[PLACED] = places_of(counts[CHANCES], self.classes).flatten().tolist()
        if threshold is not None and CHANCES in counts:
            derived[DECIDED] = decided(counts[CHANCES], threshold)
        return {**counts, **derived}

    def decisions(self, counts: Counts, threshold: float | None) -> dict[str, Any]:
        """Return what counts say of a classification's decisions and probabilities, as the summary has it."""
        table = [int(count) for count in counts[CONFUSION]]
        cut = [int(count) for count in counts[DECIDED]] if DECIDED in counts else None
        return {
            "confusion": [table[row * self.classes : (row + 1) * self.classes] for row in range(self.classes)],
            "threshold": threshold,
            "decided": cut,
            "reliability": _reliability_in(counts) if PLACED in counts else None,
        }


def _check_reliability(counts: Mapping[str, list[float]], classes: int) -> None:
    """Raise Refused unless these are sums of as many probabilities as there are cases in each place."""
    if CHANCES not in counts:
        raise Refused(f"its counts have {RELIABILITY} and not {CHANCES}")
    cases = places_of(counts[CHANCES], classes).sum(1).flatten().tolist()
    for number, (total, count) in enumerate(zip(counts[RELIABILITY], cases, strict=True)):
        low, high = (count * (number % BROAD + end) / BROAD for end in (0, 1))
        if not low - 1e-3 <= total <= high + 1e-3:
            raise Refused(
                f"its sum of probabilities, {total:g}, is not one of {count:g} from {low:g} to {high:g} in all"
            )


def _reliability_in(counts: Counts) -> list[list[tuple[int, int, float]]]:
    """Return, per class and bin, the cases, the positives among them, and the sum of the probability."""
    sums = [counts[RELIABILITY][start : start + BROAD] for start in range(0, len(counts[RELIABILITY]), BROAD)]
    cases = [counts[PLACED][start : start + BROAD] for start in range(0, len(counts[PLACED]), BROAD)]
    return [
        [(int(other + one), int(one), total) for other, one, total in zip(others, own, totals, strict=True)]
        for others, own, totals in zip(cases[::2], cases[1::2], sums, strict=True)
    ]


def on_a_place(threshold: float) -> bool:
    """Return whether a threshold lies between two places of the histograms."""
    return 0 < round(threshold * BINS) < BINS and abs(threshold * BINS - round(threshold * BINS)) < 1e-6


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
