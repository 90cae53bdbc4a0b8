"""The patients or seeds that a comparison has too few of to find a difference."""

import math
from bisect import bisect_left
from collections.abc import Callable
from typing import Literal

import scipy  # which loads its parts when they are used

from medsilo_lab.study.evidence import GUARD, Difference, Variance, critical

POWER = 0.8  # share of studies in which the difference would be found
MOST_SEEDS, MOST_PATIENTS = 30, 1000  # that are named


def detects(one: Difference, gain: float, people: int, seeds: int, error: float) -> bool:
    """Return whether four of five studies with so many patients and seeds find this difference (Lachin 1981).

    That is so where the estimate that one of five studies stays below leaves zero out of the interval that `compare`
    gives, with the variances of `one`.
    """
    degrees = one.patients.degrees * (people - 1) / (one.people - 1)
    patients = Variance(one.patients.variance * one.people / people, degrees)
    luck = Variance(one.luck.variance / seeds, one.luck.degrees / max(one.seeds - 1, 1) * (seeds - 1))
    parts = [part for part in (patients, luck) if part.variance]
    spread = math.sqrt(sum(part.variance for part in parts))
    least = gain - critical(2 * (1 - POWER), parts) * spread if parts else gain
    if least <= 0 or (parts and critical(error, parts) * spread > least):
        return False
    tail = GUARD * error / 2
    reach = -float(scipy.special.stdtrit(luck.degrees, tail)) * math.sqrt(luck.variance) if luck.variance else 0.0
    if reach >= least:
        return False
    return _below(least - math.sqrt(least**2 - reach**2), least, people, patients.variance * people) <= tail


def _below(value: float, mean: float, people: int, variance: float) -> float:
    """Return how often patients who are drawn anew, with a further one as `compare` has it, have a mean below this
    value. Their weighted sum is about a shifted gamma (Pearson's third type), the further one's exponential."""
    gap = mean - value
    square, cube = people * (variance + gap**2), 2 * people * gap * (3 * variance + gap**2)
    shape, scale = 4 * square**3 / cube**2, cube / 2 / square
    start = shape * scale - people * gap  # the gamma's value where the sum is nothing
    plain = float(scipy.special.gammainc(shape, max(start, 0.0) / scale))

    def tilted(depth: float, share: Callable[[float, float], float]) -> float:
        rate = 1 + scale / depth
        beyond = float(share(shape, max(start, 0.0) * rate / scale))
        return math.exp(min(start / depth - shape * math.log(rate), 0.0)) * beyond

    failing = plain + tilted(value + 1, scipy.special.gammaincc)
    saved = plain - tilted(value - 1, scipy.special.gammainc) if scale < 1 - value else 0.0
    return 0.75 * failing + 0.25 * max(saved, 0.0)


def needed(one: Difference, gain: float, error: float) -> tuple[Literal["test patients", "seeds"], int | None]:
    """Return what a study has too little of to find this difference with probability `POWER`, and how many would do.

    Patients, with the seeds that there are; seeds, where no number of patients is enough. None: more than
    `MOST_PATIENTS`, or nobody knows how patients differ.
    """
    if one.people < 2 or not one.patients.variance:
        return "test patients", None

    def fewest(holds: Callable[[int], bool], first: int, last: int) -> int | None:
        found = first + bisect_left(range(first, last + 1), True, key=holds)
        return found if found <= last else None

    if people := fewest(lambda number: detects(one, gain, number, one.seeds, error), 2, MOST_PATIENTS):
        return "test patients", max(people, one.people + 1)
    if seeds := fewest(lambda number: detects(one, gain, one.people, number, error), one.seeds + 1, MOST_SEEDS):
        return "seeds", seeds
    return "test patients", None
