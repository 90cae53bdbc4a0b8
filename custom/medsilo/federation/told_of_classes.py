"""A site's counts of a classification: checked, and as the summary has them."""

import math
from collections.abc import Mapping

from medsilo.core.errors import Refused
from medsilo.runs.schema import Decisions
from medsilo.tasks.decisions import DECIDED, PLACED, on_a_place, places_of
from medsilo.tasks.metrics import BINS, BROAD, CHANCES, CONFUSION, RELIABILITY, Counts


def check(counts: Mapping[str, list[float]], classes: int, most: int) -> None:
    """Raise Refused unless these are counts that so many test cases can have."""
    for name in {CONFUSION, CHANCES} & counts.keys():
        values = counts[name]
        each = len(values) // (classes if name == CHANCES else 1)  # of all cases, for every class
        whole = all(value >= 0 and value == math.floor(value) for value in values)
        if not whole or any(sum(values[start : start + each]) != most for start in range(0, len(values), each)):
            raise Refused(f"its counts of {name} are not those of {most} test cases")
    if RELIABILITY in counts:
        check_reliability(counts, classes)


def check_reliability(counts: Mapping[str, list[float]], classes: int) -> None:
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


def check_threshold(threshold: float, counts: Mapping[str, list[float]]) -> None:
    """Refuse a threshold without counts, or between two of their bins."""
    if CHANCES not in counts:
        raise Refused("unexpected field: threshold, whose counts are missing")
    if not on_a_place(threshold):
        raise Refused(f"its threshold {threshold:g} is not a whole number of 1/{BINS}")


def decisions_in(counts: Counts, classes: int, threshold: float | None) -> Decisions:
    """Return what counts say of a classification's decisions and probabilities, as the summary has it."""
    table = [int(count) for count in counts[CONFUSION]]
    cut = [int(count) for count in counts[DECIDED]] if DECIDED in counts else None
    return Decisions(
        confusion=[table[row * classes : (row + 1) * classes] for row in range(classes)],
        threshold=threshold,
        decided=cut,
        reliability=reliability_in(counts) if PLACED in counts else None,
    )


def reliability_in(counts: Counts) -> list[list[tuple[int, int, float]]]:
    """Return, per class and bin, the cases, the positives among them, and the sum of the probability."""
    sums = [counts[RELIABILITY][start : start + BROAD] for start in range(0, len(counts[RELIABILITY]), BROAD)]
    cases = [counts[PLACED][start : start + BROAD] for start in range(0, len(counts[PLACED]), BROAD)]
    return [
        [(int(other + one), int(one), total) for other, one, total in zip(others, own, totals, strict=True)]
        for others, own, totals in zip(cases[::2], cases[1::2], sums, strict=True)
    ]
