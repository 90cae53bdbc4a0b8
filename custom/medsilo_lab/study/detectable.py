"""Differences that a comparison could have found, and the patients or seeds that would find one."""

import math
import statistics
from bisect import bisect_left
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Literal

import numpy as np
import scipy  # which loads its parts when they are used

from medsilo_lab.study.evidence import GUARD, LEVEL, TAIL, Difference, Variance, critical
from medsilo_lab.study.verdict_file import DetectableGain

POWER = 0.8  # share of studies in which the difference would be found
MOST_SEEDS, MOST_PATIENTS = 30, 1000  # that are named
WORTH = 0.8  # more seeds are proposed if they bring the difference down to this share of what it is at least
STEPS = 2000  # of the differences that are tried, up to 1
SPREADS = 40  # draws of what the true variances may be


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


def detectable(one: Difference, seeds: int, error: float) -> float:
    """Return the least difference that four of five studies find, if the variances are those of `one`."""
    steps = range(1, STEPS + 1)
    place = bisect_left(steps, True, key=lambda step: detects(one, step / STEPS, one.people, seeds, error))
    return min(place + 1, STEPS) / STEPS


def _supposed(one: Difference, seeds: int, error: float) -> list[float]:
    """Return what would be found with the variances that the true ones may be."""
    random, drawn = np.random.default_rng(0), []
    for _ in range(SPREADS):
        patients, luck = (
            part._replace(
                variance=part.variance * part.degrees / random.chisquare(part.degrees) if part.degrees else 0.0
            )
            for part in (one.patients, one.luck)
        )
        drawn.append(detectable(replace(one, patients=patients, between=luck, cells=0.0), seeds, error))
    return drawn


def sensitivity(found: Collection[Difference]) -> DetectableGain | None:
    """Return what a study with these differences could have found; None with one seed, or where no spread is known."""
    known = [one for one in found if one.seeds > 1 and one.people > 1 and one.patients.variance > 0]
    if not known:
        return None
    seeds, error = max(one.seeds for one in known), (1 - LEVEL) / len(found)
    each = sorted((detectable(one, seeds, error), place) for place, one in enumerate(known))
    gain, place = each[(len(each) - 1) // 2]
    people = known[place].people

    def of_seeds(number: int) -> float:
        return statistics.median_low([detectable(one, number, error) for one in known])

    most = max(MOST_SEEDS, 2 * seeds)
    numbers = range(seeds + 1, most)
    more = (*numbers, most)[bisect_left(numbers, True, key=lambda number: of_seeds(number) <= gain / 2)]
    smaller = of_seeds(more)
    low, high = (float(end) for end in np.quantile(_supposed(known[place], seeds, error), [TAIL, 1 - TAIL]))
    told, fewer, least, at_most = (_points(value) for value in (gain, smaller, low, high))
    words = (
        f"With {people} test patients, {seeds} seeds and this spread, a difference of {told} points would have been "
        f"found in {POWER:.0%} of such studies (the spread is an estimate: {least} to {at_most} points)"
    ).replace("%", " %")
    more_words = "more seeds would hardly help, as the test patients are too few"
    words += f"; {more_words if smaller > WORTH * gain else f'{more} seeds would find {fewer} points'}."
    return DetectableGain(seeds=seeds, gain=gain, low=low, high=high, words=words)


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


def _points(value: float) -> str:
    points = 100 * value
    return f"{points:.0f}" if points >= 10 else f"{points:.2g}"
